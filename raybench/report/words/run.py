"""A run in words: its machine, what ran, how it went."""

from __future__ import annotations

from collections.abc import Iterable

from raybench.analysis.rows import is_column, varying
from raybench.analysis.run_data import RunData
from raybench.conversion import MS_PER_S
from raybench.job.answer import Answer
from raybench.records.metrics import Metric
from raybench.records.record import TrialKey, status_by_point
from raybench.records.status import Status
from raybench.report import formatting
from raybench.report.documents import records
from raybench.report.formatting import counted, span
from raybench.report.messages import marks
from raybench.report.point_settings import settings_words
from raybench.report.words.doubts import MARKS, mark_words
from raybench.workloads.base import builtin_class

# Describes a run that did not measure what the other sections of its job say.
CPU_SECTION = "with the section cpu: of the job"
# Numbers of items, computed from rates over several rounds, are equal within this difference.
_SAME_COUNT = 0.05


def machine_of_run(data: RunData) -> str:
    """Return `4 x NVIDIA H200 on 1 node; NCCL transport P2P/CUMEM`; `run.cluster` if unknown."""
    if data.devices.empty:
        return data.run.cluster
    nodes = data.node_counts
    text = formatting.machine(records(data.devices), nodes.of_run)
    if 0 < nodes.of_largest_point < nodes.of_run:
        text += f", at most {counted(nodes.of_largest_point, 'node')} in a point"
    if data.run.only_devices:
        text += ", only those that --devices named"
    transports = {transport for row in data.rows for transport in row.transports or ()}
    return f"{text}; NCCL transport {formatting.some(sorted(transports))}" if transports else text


def declared_meaning(data: RunData, metric: Metric) -> str:
    """Return the meaning of a metric that a built-in workload declares; "" for other metrics."""
    if is_column(metric):
        return ""
    # The tables hold the text of the version that measured; the class has the present text.
    for workload in dict.fromkeys(row.workload for row in data.rows):
        built_in = builtin_class(workload)
        declared_metrics = built_in.metrics if built_in else ()
        for declared in declared_metrics:
            if declared.name == metric.name:
                return declared.meaning or declared.description
    return ""


def model(data: RunData) -> tuple[str, ...]:
    """Return known facts of the models: ("MLP of 8 layers", "134 M parameters", "adam")."""
    descriptions: dict[str, None] = {}  # in order, each once
    parameter_counts, optimizers = set(), set()
    for row in data.rows:
        params = row.params
        # A row without parameters is described by the name of its workload.
        built_in = builtin_class(row.workload) if params else None
        description = built_in.describe(params) if built_in else ""
        descriptions[description or row.workload] = None
        if built_in and (count := built_in.parameter_count(params)):
            parameter_counts.add(count)
        if params.get("mode") != "inference" and "optimizer" in params:
            optimizers.add(params["optimizer"])
    size = ""
    if parameter_counts:
        least, most = min(parameter_counts), max(parameter_counts)
        size = f"{span(formatting.amount(least), formatting.amount(most))} parameters"
    return tuple(filter(None, (", ".join(descriptions), size, ", ".join(sorted(optimizers)))))


def common_settings(data: RunData) -> str:
    """Return the main settings of all points: `fp32, batch 64 per device, 2 GPUs`.

    A batch that varies is named without its value.
    """
    if not data.rows:
        return ""
    first, varying_names = data.rows[0], varying(data.rows)
    words = {}  # setting -> text
    for name in ("precision", "batch", "world_size"):
        words[name] = "" if name in varying_names else settings_words(first, [name], data.ranks)
    if "batch" in varying_names:
        words["batch"] = "batch"
    if "dtype" in first.params:  # the workload computes nothing in the precision
        words["precision"] = ""
    elif words["precision"] and data.is_precision_unknown:
        words["precision"] = "precision set by the script"
    if words["batch"] and first.scaling and "scaling" not in varying_names:
        words["batch"] += " per device" if first.scaling == "weak" else " over all devices"
    return ", ".join(filter(None, words.values()))


def in_all_points(data: RunData) -> str:
    """Return all settings that all points share; "" for none."""
    return "; ".join(filter(None, (common_settings(data), formatting.settings(data.shared))))


def counts(data: RunData) -> str:
    """Return how the points ended: `33 of 36 points ok, 3 out of memory; 3 rounds`."""
    phrases = [_endings(data)]
    rounds = [row.rounds for row in data.rows if row.rounds]
    if rounds and max(rounds) > 1:
        phrases.append(f"{span(str(min(rounds)), str(max(rounds)))} rounds")
    if capped := sum("power_cap" in (row.throttle_reasons or ()) for row in data.rows):
        phrases.append(f"the power cap limited {counted(capped, 'point')}")
    return "; ".join(phrases)


def _endings(data: RunData) -> str:
    """Return how many points ended in each way: `33 of 36 points ok, 3 out of memory`."""
    run = data.run
    trials = {TrialKey(row.point_id, row.round or 1): str(row.status) for row in data.attempts}
    # A point with a failed round has failed.
    statuses = list(status_by_point(trials).values())
    phrases = [f"{statuses.count(Status.OK)} of {counted(run.points_total, 'point')} ok"]
    for status in Status:
        if status is not Status.OK and (count := statuses.count(status)):
            phrases.append(f"{count} {status.label}")
    without_rows = run.points_total - len(statuses)
    # The run counts the points that ended, even if the tables have lost their rows.
    ended_in_tables = sum(status != Status.CANCELLED for status in statuses)
    ended_in_run = run.points_ok + run.points_failed + run.points_skipped
    ended_without_rows = max(0, min(without_rows, ended_in_run - ended_in_tables))
    if ended_without_rows:
        phrases.append(f"{ended_without_rows} ended without rows")
    if without_rows > ended_without_rows:
        phrases.append(f"{without_rows - ended_without_rows} not run")
    return ", ".join(phrases)


def course_of_run(data: RunData) -> str:
    """Return start and duration: `2026-11-26 01:16 UTC, 2 min 3 s`."""
    return f"{formatting.when(data.run.started_at)}, {formatting.took(data.run)}"


def has_steps_of_one_item(data: RunData) -> bool:
    """Return whether each point with the parameter `scope` computes one item in a step.

    Depending on its scope, a step runs one block, a forward pass, or several forward passes.
    """
    items_per_step = []
    for row in data.ok_rows:
        if "scope" in row.params and row.throughput:
            items_per_step.append(row.throughput * (row.step_ms_mean or 0.0) / MS_PER_S)
    if not items_per_step:
        return False
    return all(abs(items - 1) < _SAME_COUNT for items in items_per_step)


def plus_minus(data: RunData) -> str:
    """Return the meaning of ±, without a full stop; "" if no point has an interval."""
    rounds = [row.rounds for row in data.rows if row.step_ms_low is not None]
    if not rounds:
        return ""
    counts = span(str(min(rounds)), str(max(rounds)))
    return f"± is half of the 95 % interval over the {counts} rounds"


def step_meaning(data: RunData) -> str:
    """Return the meaning of the step time of a point, without a full stop."""
    meaning = "median time of one step"
    if any(row.world_size > 1 for row in data.rows):
        meaning += ". If the ranks differ by more than 1 %, the slowest rank counts"
    return meaning


def marks_meaning(data: RunData) -> str:
    """Return the meanings of the marks that points of the run have."""
    return meaning_of_marks(letter for row in data.rows for letter in marks(row))


def meaning_of_marks(letters: Iterable[str]) -> str:
    """Return `marks: w = wide: …; b = …`, without a full stop; "" for no letters."""
    present = set(letters)
    meanings = [f"{mark} = {mark_words(mark)}" for mark in MARKS if mark in present]
    return f"marks: {'; '.join(meanings)}" if meanings else ""


def placeholder_texts(data: RunData, asked: Answer) -> dict[str, str]:
    """Return a text for each placeholder in the meanings of metrics, such as `{baseline}`."""
    baseline = formatting.words_of_settings(data.run.baseline, data.ranks)
    of_rounds = "; computed in each round, then averaged"
    has_other_settings = bool(set(data.settings) - set(data.run.baseline or ()))
    return {
        "ranks": data.ranks,  # GPUs or workers
        "baseline": baseline,
        "items": asked.items,
        "alike": ", with the other settings alike" if has_other_settings else "",
        "of_rounds": of_rounds if any(row.rounds > 1 for row in data.rows) else "",
    }


def facts_of_first_screen(data: RunData) -> str:
    """Return one line: `4 x NVIDIA H200, 3 rounds, 2026-11-22, 5 min, 36 of 36 points ok`."""
    round_counts = [row.rounds for row in data.ok_rows] or [1]
    least, most = min(round_counts), max(round_counts)
    rounds = counted(most, "round")
    if least != most:
        rounds = f"{least} to {rounds}"
    devices = data.run.cluster
    if not data.devices.empty:
        rows, nodes = records(data.devices), data.node_counts.of_run
        # Only the GPUs of one node need no further words.
        is_gpu_node = data.ranks == "GPUs" and nodes == 1
        devices = formatting.models(rows) if is_gpu_node else formatting.machine(rows, nodes)
    parts = (
        devices,
        rounds,
        f"{data.run.started_at:%Y-%m-%d}",
        formatting.course(data.run),
        _endings(data),
    )
    return ", ".join(parts)
