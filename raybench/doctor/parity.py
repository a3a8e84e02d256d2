"""The same step by bare torchrun and by raybench, on the same devices, one after the other.

Every start of either side is in fresh processes; the order turns round from pair to pair, so
that a drift of the devices does not favour one side.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from raybench.cluster import Cluster
from raybench.cluster.failures import cause_of
from raybench.doctor.facts import Check, Verdict, count_noun
from raybench.doctor.torchrun import BareAnswer, BareStep, TorchrunError, run_bare
from raybench.job.model import Measure, Span
from raybench.job.point import Point, Precision, Scalar
from raybench.records import Device, Measurement, Task
from raybench.records.environment import variables_that_matter
from raybench.stats import summary
from raybench.stats.equivalence import Agreement, Ratio, agreement, ratio

_WARMUP = 20
_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step to compare. margin: by how much the ratio may leave 1 and still be equal."""

    name: str
    workload: str = "mlp"
    params: Mapping[str, Scalar]
    batch_size: int | None
    iterations: int
    margin: float


# fp32 on 4096 x 4096 takes about 20 ms on an H200, nearly all of it in matrix products.
_GPU_BOUND = Step(
    name="parity, GPU-bound",
    params={"hidden": 4096, "layers": 8},
    batch_size=1024,
    iterations=100,
    margin=0.01,
)
_CPU_BOUND = Step(
    name="parity, compute-bound",
    params={"hidden": 512, "layers": 4},
    batch_size=64,
    iterations=100,
    margin=0.01,
)
# Seconds of it: Python gets slower by tens of percent for a quarter of a second at a time.
_PYTHON_BOUND = Step(
    name="parity, Python-bound",
    params={"hidden": 64, "layers": 24},
    batch_size=64,
    iterations=1000,
    margin=0.05,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was measured of one step. Step times in ms, one for each start.

    differing: variables that were not the same on both sides, as (torchrun's, raybench's).
    error: why the comparison could not be made.
    """

    step: Step
    torchrun_ms: tuple[float, ...] = ()
    raybench_ms: tuple[float, ...] = ()
    differing: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)
    error: str = ""


class SideError(Exception):
    """One side gave no number; the text says which, and why."""


def steps(is_cuda: bool) -> tuple[Step, Step]:
    """Return a step that waits for the device, and one that waits for Python."""
    return (_GPU_BOUND if is_cuda else _CPU_BOUND, _PYTHON_BOUND)


def local_worker_ids(devices: Sequence[Device], host: str) -> tuple[int, ...]:
    """Find the workers of the node that torchrun reaches from here, of several the first."""
    here = [device.node_id for device in devices if device.host == host]
    return tuple(
        worker_id for worker_id, device in enumerate(devices) if here and device.node_id == here[0]
    )


def order(starts: int) -> Iterator[str]:
    """Which side starts when: torchrun, raybench, raybench, torchrun, torchrun, ..."""
    for pair in range(starts):
        sides = ("torchrun", "raybench")
        yield from sides if pair % 2 == 0 else reversed(sides)


def compare(
    cluster: Cluster,
    worker_ids: Sequence[int],
    step: Step,
    starts: int,
    tell: Callable[[str], None],
) -> Parity:
    """Run both sides `starts` times. tell: is given one line for each finished start."""
    times_ms: dict[str, list[float]] = {"torchrun": [], "raybench": []}
    differing: dict[str, tuple[str | None, str | None]] = {}
    try:
        for side in order(starts):
            if side == "torchrun":
                answer = by_torchrun(cluster, worker_ids, step)
                differing |= _differing(answer, cluster.devices[worker_ids[0]])
                times_ms[side].append(answer.step_ms_p50)
            else:
                times_ms[side].append(time_by_raybench(cluster, worker_ids, step))
            done = f"{len(times_ms[side])} of {starts}"
            tell(f"{step.name}: {side} {done}: {times_ms[side][-1]:.3f} ms")
    except SideError as error:
        return Parity(step=step, error=str(error))
    return Parity(
        step=step,
        torchrun_ms=tuple(times_ms["torchrun"]),
        raybench_ms=tuple(times_ms["raybench"]),
        differing=differing,
    )


def by_torchrun(cluster: Cluster, worker_ids: Sequence[int], step: Step) -> BareAnswer:
    """One start in the environment that the workers have. Raises SideError."""
    devices = [cluster.devices[worker_id] for worker_id in worker_ids]
    bare = BareStep(
        device=devices[0].kind,
        indexes=tuple(device.index for device in devices),
        workload=step.workload,
        params=step.params,
        precision=Precision.FP32.value,
        batch_size=step.batch_size or 1,
        warmup=_WARMUP,
        iterations=step.iterations,
    )
    ours = variables_that_matter()
    rest = {name: value for name, value in os.environ.items() if name not in ours}
    try:
        answer = run_bare(bare, {**rest, **devices[0].environment})
    except TorchrunError as error:
        raise SideError(f"torchrun: {error}") from None
    uuids = [device.uuid for device in devices if device.kind == "cuda"]
    if uuids and list(answer.devices) != uuids:
        raise SideError("torchrun ran on other devices than raybench")
    return answer


def task_of(step: Step, world_size: int, *, fresh: bool = True) -> Task:
    """Time the step as a point of raybench, in fresh processes unless told otherwise."""
    batch = step.batch_size
    point = Point(
        workload=step.workload,
        params=step.params,
        world_size=world_size,
        precision=Precision.FP32,
        batch_size=batch,
        global_batch_size=None if batch is None else batch * world_size,
        scaling=None if batch is None else "weak",
    )
    return Task(point=point, settings=_settings(step, fresh=fresh))


def time_by_raybench(
    cluster: Cluster, worker_ids: Sequence[int], step: Step, *, fresh: bool = True
) -> float:
    """Time the step in ms as a point of the cluster. Raises SideError."""
    answers = cluster.run(task_of(step, len(worker_ids), fresh=fresh), worker_ids)
    if cause := cause_of(answers):
        raise SideError(f"raybench: rank {cause.rank}: {cause.error_type}: {cause.message}")
    ranks_ns = [answer.step_ns for answer in answers if isinstance(answer, Measurement)]
    return summary.step_time(ranks_ns) / _NS_PER_MS


def _settings(step: Step, *, fresh: bool) -> Measure:
    return Measure(
        warmup=Span(min=_WARMUP, max=_WARMUP),
        iterations=Span(min=step.iterations, max=step.iterations),
        max_seconds=200.0,
        timeout_s=300.0,
        breakdown=False,
        fresh_workers=fresh,
    )


def _differing(answer: BareAnswer, device: Device) -> dict[str, tuple[str | None, str | None]]:
    bare = {**answer.environment, "niceness": str(answer.niceness)}
    ours = {**device.environment, "niceness": str(device.niceness)}
    return {
        name: (bare.get(name), ours.get(name))
        for name in sorted(bare.keys() | ours.keys())
        if bare.get(name) != ours.get(name)
    }


def judge(parity: Parity, *, is_cuda: bool) -> Check:
    """Whether the sides agree. CPU workers never fail: the noise of a CPU is above the margin."""
    name, margin = parity.step.name, parity.step.margin
    if parity.error:
        advice = "nothing could be compared: mend this first"
        return Check(name=name, verdict=Verdict.FAIL, found=parity.error, advice=advice)
    found = ratio(parity.raybench_ms, parity.torchrun_ms)
    agreed = agreement(found, margin)
    return Check(
        name=name,
        verdict=_verdict(agreed, is_cuda),
        found=f"{agreed}: raybench / torchrun = {_describe(found)}, equal within {margin:.0%}; "
        f"{count_noun(len(parity.raybench_ms), 'start')} each",
        advice=_advice(agreed, is_cuda),
        details=_details(parity, found, agreed),
    )


def _verdict(agreed: Agreement, is_cuda: bool) -> Verdict:
    if agreed is Agreement.EQUAL:
        return Verdict.OK
    return Verdict.FAIL if agreed is Agreement.DIFFERS and is_cuda else Verdict.WARN


def _advice(agreed: Agreement, is_cuda: bool) -> str:
    if agreed is Agreement.EQUAL:
        return ""
    if not is_cuda:
        return "CPU workers share cores with everything else, so they show this only roughly"
    if agreed is Agreement.UNDECIDED:
        return "the interval crosses the margin: more --starts make it narrower"
    return "numbers of steps like this one are not those of torchrun: see `differing` in --json"


def _describe(found: Ratio) -> str:
    return f"{found.value:.4f} ({found.interval.low:.4f} to {found.interval.high:.4f})"


def _details(parity: Parity, found: Ratio, agreed: Agreement) -> dict[str, object]:
    return {
        "workload": parity.step.workload,
        "params": dict(parity.step.params),
        "batch_size": parity.step.batch_size,
        "precision": Precision.FP32.value,
        "margin": parity.step.margin,
        "torchrun_ms": list(parity.torchrun_ms),
        "raybench_ms": list(parity.raybench_ms),
        "ratio": found.value,
        "ratio_interval": asdict(found.interval),
        "interval_method": "Welch t on log medians of the starts, 95 %",
        "agreement": agreed.value,
        "differing": {name: list(values) for name, values in parity.differing.items()},
    }
