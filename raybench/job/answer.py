"""What a run answers: which metric, compared over which settings, and in whose words.

A job file may say it (`question`, `answer`, `items`), its workload may declare it in its class, and
otherwise a run answers how its speed-up grows with the devices.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from raybench.errors import JobError, UsageError
from raybench.job import registry
from raybench.job.sections import AnswerSection, Items, Question
from raybench.job.source import parse_source

Best = Literal["max", "min"]

# The columns of a point's row that an answer can be, and which value is the best.
ANSWER_METRICS: Mapping[str, Best] = {
    "speed_up": "max",
    "efficiency": "max",
    "throughput": "max",
    "step_ms_p50": "min",
    "step_ms_p99": "min",
    "first_step_ms": "min",
    "compiled_step_ms": "min",
    "compute_ms": "min",
    "comm_exposed_ms": "min",
    "straggler_ms": "min",
    "wall_unsynced_share": "min",
    "data_ms": "min",
    "optimizer_ms": "min",
    "host_gap_ms": "min",
    "peak_mem_allocated_bytes": "min",
    "batch_size": "max",
    "achieved_tflops_per_device": "max",
    "mfu_pct": "max",
    "mfu_6n_pct": "max",
    "gemm_share_pct": "max",
    "algbw_gb_s": "max",
    "busbw_gb_s": "max",
    "memory_gb_s": "max",
    "energy_j": "min",
    "samples_per_joule": "max",
}
# Less is better of a workload's own metric in one of these units.
_UNITS_OF_COSTS = ("s", "ms", "us", "ns", "bytes", "J")
SAMPLES = "samples"
# What of a job file says what it asks.
_ASKS = ("question", "answer", "items")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a run answers.

    metric: a column of the table `points` or `scaling`, or a metric of the workload's own.
    over: the settings whose values are compared; empty for all that vary.
    best: whether the largest or the smallest value is the best.
    items: what a step finishes, in the plural, as in tokens.
    question: in the words of the job; empty where it asks none.
    """

    metric: str
    over: tuple[str, ...] = ()
    best: Best = "max"
    items: str = SAMPLES
    question: str = ""


def answer_of_run(job_text: str, overrides: Sequence[str], varying: Sequence[str]) -> Answer:
    """Return what a stored run answers: by its job file, else by its workload, else the speed-up.

    job_text, overrides: the job file as the run keeps it, and the values of its `--set`.
    varying: the settings that differ between the points of the run; `over` has only these, in
    their order. A text or a workload that cannot be read any more counts as one that says nothing.
    """
    try:
        data = parse_source("job", job_text, overrides).data
    except JobError:
        data = {}
    kind = _kind(data)
    built_in = _built_in_job(str(data.get("name")))
    if kind == _kind(built_in):
        # A run of an older file of a job that comes with raybench asks what that asks today.
        asked_today = {name: built_in[name] for name in _ASKS if name in built_in}
        data = asked_today | data
    try:
        workload_class = registry.load(kind)
    except (KeyError, UsageError):
        workload_class = object
    asked = _valid(AnswerSection, data.get("answer"))
    if asked is None:
        answer = _declared(workload_class, varying) or Answer(
            metric="speed_up", over=("world_size",)
        )
    else:
        best = asked.best or best_of(asked.metric, workload_class)
        answer = Answer(metric=asked.metric, over=asked.over, best=best)
    return replace(
        answer,
        over=tuple(name for name in varying if not answer.over or name in answer.over),
        items=_valid(Items, data.get("items")) or getattr(workload_class, "items", SAMPLES),
        question=_valid(Question, data.get("question")) or "",
    )


def _kind(data: Mapping[str, Any]) -> str:
    workload = data.get("workload")
    return str(workload.get("kind", "")) if isinstance(workload, dict) else ""


def _built_in_job(name: str) -> Mapping[str, Any]:
    """Return the content of the job that comes with raybench under this name; empty for none."""
    if not re.fullmatch(r"[a-z0-9_]+", name):
        return {}
    file = files("raybench").joinpath("jobs", f"{name}.yaml")
    return parse_source(name, file.read_text(encoding="utf-8")).data if file.is_file() else {}


def best_of(metric: str, workload_class: type) -> Best:
    """Return whether the largest or the smallest value of a metric is the best.

    Of a workload's own metric by its unit; "max" for one that is not known.
    """
    units = {one.name: one.unit for one in getattr(workload_class, "metrics", ())}
    if metric in units:
        return "min" if units[metric] in _UNITS_OF_COSTS else "max"
    return ANSWER_METRICS.get(metric, "max")


def metric_names(workload_class: type) -> list[str]:
    """Return the metrics that a job of this workload can ask for, its own first."""
    return [*(one.name for one in getattr(workload_class, "metrics", ())), *ANSWER_METRICS]


def _valid(kind: Any, value: object) -> Any:
    """Return a value of the job file; None where it is not given or not valid."""
    try:
        return None if value is None else TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return None


def _declared(workload_class: type, varying: Collection[str]) -> Answer | None:
    """Return the first answer that the class declares over any of the settings that vary."""
    declared: Sequence[Answer] = getattr(workload_class, "answers", ())
    return next(
        (one for one in declared if not one.over or not set(one.over).isdisjoint(varying)), None
    )
