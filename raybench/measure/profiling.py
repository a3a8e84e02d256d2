"""What `--profile` adds for chosen points: a trace of each rank and times by module.

A process in which torch.profiler has used CUPTI launches more slowly from then on
(pytorch#144455): it is not fit for measuring any more.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, schedule

from raybench.measure.breakdown import hook_setter
from raybench.measure.module_times import module_times
from raybench.measure.timing import align_ranks
from raybench.records import Profile
from raybench.workloads.base import Context, Workload

_WARMUP_STEPS = 2


def profile(workload: Workload, context: Context, steps: int) -> Profile:
    """Run `steps` steps with timed modules, if the workload has a `model`, and then as many under
    the profiler, with the communication that the workload has by itself.
    """
    set_hook = hook_setter(workload, context) if context.world_size > 1 else ""
    if not isinstance(set_hook, str):
        set_hook(None)
    for _ in range(_WARMUP_STEPS):
        workload.step()
    align_ranks(context.device)
    model = getattr(workload, "model", None)
    if isinstance(model, DistributedDataParallel):
        model = model.module  # whose modules have the same names on one rank and on many
    modules = module_times(model, workload.step, context.device, steps) if model is not None else ()
    align_ranks(context.device)
    return Profile(trace=_trace(workload, context, steps), modules=modules)


def _trace(workload: Workload, context: Context, steps: int) -> bytes:
    """Record the Chrome trace, compressed by gzip, of `steps` steps after one that is not in it."""
    activities = [ProfilerActivity.CPU]
    if context.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        with torch.profiler.profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        ) as profiler:
            for _ in range(1 + steps):
                workload.step()
                profiler.step()
        return path.read_bytes()
