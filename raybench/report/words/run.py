"""A run in words: its machine, what ran, how it went."""

from __future__ import annotations

from collections.abc import Iterable

from raybench.analysis.rows import is_column, varying
from raybench.analysis.run_data import RunData
from raybench.conversion import MS_PER_S
from raybench.job.answer import Answer
from raybench.records.metrics import Metric
from raybench.records.record import TrialKey, by_point
from raybench.records.status import Status
from raybench.report import formatting
from raybench.report.documents import records
from raybench.report.formatting import counted, span
from raybench.report.messages import marks
from raybench.report.point_settings import settings_words
from raybench.report.words.doubts import MARKS, mark_words
from raybench.workloads.base import builtin_class

# Counts of items, computed from rates over several rounds, are equal within this difference.
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
    ways = {way for row in data.rows for way in row.transports or ()}
    return f"{text}; NCCL transport {formatting.some(sorted(ways))}" if ways else text


def declared_meaning(data: RunData, metric: Metric) -> str:
    """Return what a built-in workload says of its own metric today; "" for other metrics.

    The tables hold the text of the version that measured.
    """
    if is_column(metric):
        return ""
    for workload in dict.fromkeys(row.workload for row in data.rows):
        built_in = builtin_class(workload)
        for declared in built_in.metrics if built_in else ():
            if declared.name == metric.name:
                return declared.meaning or declared.description
    return ""


def model(data: RunData) -> tuple[str, ...]:
    """Return what the points run, the parameters of their models, and the optimizers.

    As in ("MLP of 8 layers, 4,096 wide", "134 M parameters", "adam"); unknown ones left out.
    """
    names, counts, optimizers = {}, set(), set()
    for workload, params in ((row.workload, row.params) for row in data.rows):
        built_in = builtin_class(workload) if params else None
        names[(built_in.describe(params) if built_in else "") or workload] = True
        counts.add((built_in and built_in.parameter_count(params)) or 0)
        if params.get("mode") != "inference" and "optimizer" in params:
            optimizers.add(params["optimizer"])
    sizes = sorted(counts - {0})
    size = span(*(formatting.amount(count) for count in sizes[:: len(sizes) - 1 or 1]))
    size += " parameters" if size else ""
    return tuple(filter(None, (", ".join(names), size, ", ".join(sorted(optimizers)))))


def alike(data: RunData) -> str:
    """Return the main settings that all points share: `fp32, batch 64 per device, 2 GPUs`.

    A batch that varies is named without its value; "" for no points.
    """
    if not data.rows:
        return ""
    first, apart = data.rows[0], varying(data.rows)
    names = ("precision", "batch", "world_size")
    words = {name: settings_words(first, [name], data.ranks) for name in names}
    words |= {name: "batch" if name == "batch" else "" for name in names if name in apart}
    if "dtype" in first.params:  # it computes nothing in the precision
        words["precision"] = ""
    elif words["precision"] and data.is_precision_unknown:
        words["precision"] = "precision set by the script"
    if words["batch"] and first.scaling and "scaling" not in apart:
        words["batch"] += " per device" if first.scaling == "weak" else " over all devices"
    return ", ".join(filter(None, words.values()))


def in_all_points(data: RunData) -> str:
    """Return all settings that the points share; "" for none."""
    return "; ".join(filter(None, (alike(data), formatting.settings(data.shared))))


def counts(data: RunData) -> str:
    """Return how the points ended: `33 of 36 points ok, 3 out of memory; 3 rounds`."""
    phrases = [_endings(data)]
    rounds = sorted(row.rounds for row in data.rows if row.rounds)
    if rounds and rounds[-1] > 1:
        phrases.append(f"{span(str(rounds[0]), str(rounds[-1]))} rounds")
    if capped := sum("power_cap" in (row.throttle_reasons or ()) for row in data.rows):
        phrases.append(f"the power cap limited {counted(capped, 'point')}")
    return "; ".join(phrases)


def _endings(data: RunData) -> str:
    """Return how many points ended in each way: `33 of 36 points ok, 3 out of memory`.

    A point with a failed round counts as failed. Points without rows are counted too.
    """
    run = data.run
    ended = {TrialKey(row.point_id, row.round or 1): str(row.status) for row in data.attempts}
    statuses = list(by_point(ended).values())
    phrases = [f"{statuses.count(Status.OK)} of {counted(run.points_total, 'point')} ok"]
    for status in Status:
        if status is not Status.OK and (count := statuses.count(status)):
            phrases.append(f"{count} {status.label}")
    in_tables = [status for status in statuses if status != Status.CANCELLED]
    missing = run.points_total - len(statuses)
    with_end = run.points_ok + run.points_failed + run.points_skipped
    without_rows = max(0, min(missing, with_end - len(in_tables)))
    if without_rows:
        phrases.append(f"{without_rows} ended without rows")
    if missing > without_rows:
        phrases.append(f"{missing - without_rows} not run")
    return ", ".join(phrases)


def course_of_run(data: RunData) -> str:
    """Return start and duration: `2026-11-26 01:16 UTC, 2 min 3 s`."""
    return f"{formatting.when(data.run.started_at)}, {formatting.took(data.run)}"


def has_steps_of_one_item(data: RunData) -> bool:
    """Return whether a step of any scope counts as one item, be it a block or a whole loop."""
    rows = [row for row in data.ok_rows if "scope" in row.params and row.throughput]
    items = [(row.throughput or 0.0) * (row.step_ms_mean or 0.0) / MS_PER_S for row in rows]
    return bool(items) and all(abs(count - 1) < _SAME_COUNT for count in items)


def plus_minus(data: RunData) -> str:
    """Return over which rounds ± is computed, no full stop; "" if no point has an interval."""
    rounds = [row.rounds for row in data.rows if row.step_ms_low is not None]
    counts = span(*(str(choose(rounds)) for choose in (min, max) if rounds))
    return counts and f"± is half of the 95 % interval over the {counts} rounds"


def step_meaning(data: RunData) -> str:
    """Return what the step time of a point is, no full stop."""
    meaning = "median time of one step"
    if any(row.world_size > 1 for row in data.rows):
        meaning += ". If the ranks differ by more than 1 %, the slowest rank counts"
    return meaning


def marks_meaning(data: RunData) -> str:
    """Return the meanings of the marks that any point has; "" for no marks."""
    return meaning_of_marks(letter for row in data.rows for letter in marks(row))


def meaning_of_marks(letters: Iterable[str]) -> str:
    """Return `doubtful numbers: w = wide, …; b = …`, no full stop; "" for no letters."""
    given = set(letters)
    meanings = [f"{mark} = {mark_words(mark)}" for mark in MARKS if mark in given]
    return f"marks: {'; '.join(meanings)}" if meanings else ""


def of_columns(data: RunData, asked: Answer) -> dict[str, str]:
    """Return what `metric_column` puts into meanings; baseline is "" without one."""
    baseline = formatting.words_of_settings(data.run.baseline, data.ranks)
    of_rounds = "; computed in each round, then averaged"
    has_others = bool(set(data.settings) - set(data.run.baseline or ()))
    return {
        "ranks": data.ranks,
        "baseline": baseline,
        "items": asked.items,
        "alike": ", with the other settings alike" if has_others else "",
        "of_rounds": of_rounds if any(row.rounds > 1 for row in data.rows) else "",
    }


def facts_of_first_screen(data: RunData) -> str:
    """Return one line: `4 x NVIDIA H200, 3 rounds, 2026-11-22, 36 of 36 points ok`."""
    counts = [row.rounds for row in data.ok_rows] or [1]
    most = counted(max(counts), "round")
    rounds = most if min(counts) == max(counts) else f"{min(counts)} to {most}"
    devices = data.run.cluster
    if not data.devices.empty:
        rows, nodes = records(data.devices), data.node_counts.of_run
        is_one_node = data.ranks == "GPUs" and nodes == 1
        devices = formatting.models(rows) if is_one_node else formatting.machine(rows, nodes)
    parts = (
        devices,
        rounds,
        f"{data.run.started_at:%Y-%m-%d}",
        formatting.course(data.run),
        _endings(data),
    )
    return ", ".join(parts)
