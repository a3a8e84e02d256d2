"""Time a function: in this process, or on workers."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypedDict, TypeGuard, Unpack, cast, get_args

from raybench.api.sweeps import DeviceChoice
from raybench.errors import StepError, UsageError, brief, how_to_install
from raybench.job.problems import quote

if TYPE_CHECKING:
    import pandas as pd

    from raybench.job.model import Job
    from raybench.results.point_row import PointRow
    from raybench.workloads.functions import StepFunctions

# Limit of the whole measurement, as a multiple of the timed seconds. With a limit of 10 s, a step
# of more than a third of a second gets fewer than 30 samples.
_LIMIT_FACTOR = 10.0


class MeasureOptions(TypedDict, total=False):
    """Further options of `raybench.measure`."""

    # auto: the GPU if set-up or step use it; with workers, GPUs if the cluster has any.
    device: DeviceChoice
    # With workers: auto, local or HOST:PORT of a Ray cluster.
    address: str


def measure(
    step: Callable[..., object],
    *,
    items: float | None = None,
    setup: Callable[..., object] | None = None,
    workers: int | None = None,
    seconds: float = 1.0,
    flush_l2: bool = False,
    **options: Unpack[MeasureOptions],
) -> StepTiming:
    """Time a function, in this process or on workers, and return its samples and their median.

    >>> import raybench
    >>> timing = raybench.measure(sum, setup=lambda: range(1000), seconds=0.6, device="cpu")
    >>> timing.name, timing.median_ms > 0
    ('sum', True)

    The step is warmed up and then timed, with CUDA events on a GPU and with the host's clock on a
    CPU. The step should not synchronize with the device, unless this is to be timed. Collective:
    if torch.distributed is initialised, all its ranks must call this function.

    Args:
        step: one iteration; with a `setup`, its argument is the result of `setup`.
        items: number of items, such as samples, that a step finishes on one rank.
        setup: runs once in each process; gets a `raybench.Context` if it has a parameter.
        workers: number of workers of a cluster on which the step is timed, with torch.distributed
            as under torchrun; the functions are pickled. None: time in this process, without Ray.
        seconds: timed seconds; warm-up and slow steps may take ten times as long in all.
        flush_l2: empty the L2 cache of the GPU before each sample; only in this process.
        options: device and address; see `MeasureOptions`.

    Raises:
        UsageError: an argument is wrong, or the functions cannot be pickled.
        StepError: the functions failed on a worker.
        ClusterError: there is no suitable cluster.
        KeyboardInterrupt: the step was interrupted.
    """
    from raybench.workloads.functions import StepFunctions

    _check_arguments(step, setup, items, workers, seconds)
    for name in options:
        if name not in MeasureOptions.__annotations__:
            raise TypeError(f"measure() got an unexpected keyword argument {name!r}")
    device = options.get("device", "auto")
    if device not in get_args(DeviceChoice):
        raise UsageError(f"device: must be auto, cuda or cpu, given {quote(device)}")
    functions = StepFunctions(step=step, setup=setup)
    job = _make_job(items, workers or 1, seconds)
    if workers is None:
        if "address" in options:
            raise UsageError("address: goes with workers=N; this process needs no cluster")
        return _time_here(functions, job, device, flush_l2=flush_l2)
    if flush_l2:
        raise UsageError("flush_l2: goes without workers; leave out workers, or the flush")
    return _time_on_workers(functions, job, device, options.get("address", "auto"))


@dataclass(frozen=True, kw_only=True, repr=False)
class StepTiming:
    """How long a step takes."""

    # Name of the function.
    name: str
    # A row for each timed sample and rank: rank, iteration, step_ms.
    samples: pd.DataFrame
    # Median step time; if ranks differ by more than 1 %, the median of the slowest rank.
    median_ms: float
    # 95 % interval of the median in this process; None for fewer than 6 samples. Another process
    # may differ by more.
    interval_ms: tuple[float, float] | None
    # Timed duration divided by the number of steps.
    mean_ms: float
    # Sum over all ranks, from `mean_ms`; None without `items`.
    items_per_s: float | None
    # Reasons to doubt the numbers, as clauses.
    doubts: tuple[str, ...]
    # How the step was timed, in a sentence.
    method: str

    def __repr__(self) -> str:
        """Return the median with its interval, the method, and the doubts."""
        return "\n".join([f"<StepTiming of {self.name}: {self._result}>", *self._notes])

    def _repr_html_(self) -> str:
        """Return the text of `__repr__` for a notebook."""
        from raybench.report.notebook import format_lines

        return format_lines([f"{self.name}: {self._result}"], self._notes)

    @property
    def _result(self) -> str:
        from raybench.report import formatting

        text = formatting.duration(self.median_ms)
        if self.interval_ms is not None:
            low, high = map(formatting.duration, self.interval_ms)
            text += f" (95 % interval {low} to {high})"
        if self.items_per_s is not None:
            text += f", {formatting.number(self.items_per_s)} items/s"
        return text

    @property
    def _notes(self) -> list[str]:
        from raybench.report.formatting import sentence

        return [self.method, *(f"Doubt: {sentence(doubt)}" for doubt in self.doubts)]


def _check_arguments(
    step: object, setup: object, items: object, workers: Any, seconds: Any
) -> None:
    """Raise UsageError for a wrong argument of `measure`."""
    if not callable(step):
        raise UsageError(f"step: must be a function, given {quote(step)}")
    if setup is not None and not callable(setup):
        raise UsageError(f"setup: must be a function, given {quote(setup)}")
    if items is not None and not (_is_number(items) and items > 0):
        raise UsageError(f"items: must be a number above 0, given {quote(items)}")
    if not (_is_number(seconds) and 0 < seconds <= 100_000):
        raise UsageError(f"seconds: must be from above 0 to 100,000, given {quote(seconds)}")
    if workers is not None and (type(workers) is not int or workers < 1):
        raise UsageError(f"workers: must be a count from 1, given {quote(workers)}")


def _is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _name_of(function: Callable[..., object]) -> str:
    """Return the name of a function, or of its class."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _make_job(items: float | None, workers: int, seconds: float) -> Job:
    """Return a job with one point, whose workload calls functions."""
    from raybench.api.jobs import read_job

    workload: dict[str, Any] = {"kind": "function"}
    if items is not None:
        workload["items_per_step"] = float(items)
    job, _ = read_job(
        {
            "name": "function",
            "workload": workload,
            "matrix": {"world_size": [workers]},
            "baseline": {},
            "measure": {"seconds": float(seconds), "max_seconds": _LIMIT_FACTOR * seconds},
        }
    )
    return job


def _time_here(
    functions: StepFunctions, job: Job, device: DeviceChoice, *, flush_l2: bool
) -> StepTiming:
    """Time the functions in this process."""
    try:
        from raybench.measure.local import time_here
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "pynvml"):
            raise
        raise UsageError(
            f"raybench.measure needs {error.name}, which is not installed; {how_to_install('run')}"
        ) from None
    from raybench.analysis.frames import timed_samples
    from raybench.job.plan import make_plan
    from raybench.results.record_rows import point_row, sample_columns
    from raybench.sweep.point_record import RunningAttempt, make_record
    from raybench.sweep.rounds import Attempt

    (point,) = make_plan(job).points
    started_at = datetime.now(UTC)
    items = cast("float | None", job.workload.parameters.get("items_per_step"))
    outcome, devices = time_here(functions, items, job.measure, device, flush_l2=flush_l2)
    # All ranks of torch.distributed take part, one on each device.
    attempt = Attempt(index=0, point=replace(point, world_size=len(devices)), number=1)
    running = RunningAttempt(attempt=attempt, devices=devices, started_at=started_at)
    running.outcome = outcome
    record = make_record(running)
    if not record.measurements:
        raise StepError(f"{_name_of(functions.step)}: {record.error_message}")
    # The measurement is no run, so its rows have no run_id.
    row = point_row("", record, job.measure)
    samples = timed_samples(sample_columns("", record))
    return _make_timing(functions, row, samples, flush_l2=flush_l2)


def _time_on_workers(
    functions: StepFunctions, job: Job, device: DeviceChoice, address: str
) -> StepTiming:
    """Time the functions in a sweep of one point; its tables are temporary."""
    from raybench.analysis.frames import timed_samples
    from raybench.analysis.rows import point_rows
    from raybench.api.progress_line import listener_here
    from raybench.api.sweeps import carry_out, target
    from raybench.cluster import pickle_for_workers
    from raybench.job.plan import make_plan
    from raybench.report.words.failures import failure_of_row
    from raybench.results import reader
    from raybench.sweep.run_state import start_run

    name = _name_of(functions.step)
    try:
        pickled = pickle_for_workers(functions)
    except Exception as error:
        raise UsageError(
            f"{name}: cannot be sent to workers: {brief(error)}; make what it needs in setup"
        ) from error
    with tempfile.TemporaryDirectory(prefix="raybench-measure-") as folder:
        run_target = target(folder, device, address, options={})
        run_state = start_run(
            job,
            make_plan(job),
            argv=["raybench.measure", name],
            tags={},
            resume_command=lambda _: "raybench.measure",
        )
        assert run_state.code is not None
        run_state = replace(run_state, code=replace(run_state.code, functions=pickled))
        run = carry_out(job, run_state, run_target, listener_here())
        rows = point_rows(reader.load_table(folder, "points", run.run_id))
        samples = reader.load_table(folder, "samples", run.run_id)
    # The last attempt at the only point; no row if an interrupt came first.
    row = rows[-1] if rows else None
    if row is None or row.status == "cancelled":
        raise KeyboardInterrupt
    if row.status != "ok":
        detail = f"\n{row.error_detail}" if row.error_detail else ""
        raise StepError(f"{name}: {failure_of_row(row)}{detail}")
    return _make_timing(functions, row, timed_samples(samples), flush_l2=False)


def _make_timing(
    functions: StepFunctions, row: PointRow, samples: pd.DataFrame, *, flush_l2: bool
) -> StepTiming:
    """Return the result from the row and the samples of the measured point."""
    from raybench.report.words.doubts import doubt_words

    low, high = row.step_ms_ci_low, row.step_ms_ci_high
    return StepTiming(
        name=_name_of(functions.step),
        samples=samples,
        median_ms=row.step_ms_p50 or 0.0,
        interval_ms=None if low is None or high is None else (low, high),
        mean_ms=row.step_ms_mean or 0.0,
        items_per_s=row.throughput,
        doubts=tuple(doubt_words(doubt, row) for doubt in row.doubts or ()),
        method=method_words(row, flush_l2=flush_l2),
    )


def method_words(row: PointRow, *, flush_l2: bool) -> str:
    """Return how a step was timed, in a sentence."""
    from raybench.report.formatting import counted

    steps_per_sample, sample_count = row.inner_iterations or 1, row.iterations or 0
    steps = "a step" if steps_per_sample == 1 else f"{steps_per_sample} steps"
    ranks = f"{counted(row.world_size, 'rank')} of {row.device_name}"
    if row.device_type == "cuda":
        clock = "CUDA events"
        cache = "flushed before each step" if flush_l2 else "not flushed"
        end = f"; the L2 cache was {cache}"
    else:
        clock, end = "time.perf_counter_ns", ""
    samples = f"{sample_count:,} samples of {steps} by {clock} on {ranks}"
    return f"{samples}, after {counted(row.warmup_iterations or 0, 'step')} of warm-up{end}."
