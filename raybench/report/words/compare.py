"""What comparisons and histories of runs say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raybench.analysis.compare import (
    FASTER,
    LEAST_RUNS,
    SAME,
    SLOWER,
    UNCLEAR,
    Change,
    Fact,
    FactKind,
    NotDecided,
    PointChange,
    Undecided,
)
from raybench.report import formatting
from raybench.report.formatting import counted, cut_end, plain

QUESTION = "Is NEW slower than BASE?"
# The sentence if the environments of two runs do not differ.
SAME_AROUND = "No difference in devices, driver, versions, variables or commit is recorded."
NO_CAVEAT = f"Caveat: none. {SAME_AROUND}"
NO_CAUSE = "no difference is recorded"
OTHER_MACHINE = "The changes show the difference of the machines, not of the software."
NOT_ON_BOTH_SIDES = "No verdict: no point was measured on both sides."
# Verdicts as reports print them; JSON and --fail-on keep `unclear`.
VERDICT_WORDS = {name: name for name in (SLOWER, FASTER, SAME)} | {UNCLEAR: "undecided"}
_PREDICATES = VERDICT_WORDS | {SAME: "the same"}

# Runs that cannot detect a slowdown of this share differ too much.
_LARGEST_USEFUL = 0.5
# Longer values of facts, in characters, are shown only in full reports.
_SHORT_VALUE = 20
# Kinds of facts, sorted by their likely effect on step times.
_KIND_ORDER = (
    *(FactKind.DEVICE, FactKind.VERSION, FactKind.VARIABLE),
    *(FactKind.RUN, FactKind.CODE),
)
# Facts in a sentence, and runs of a side in an example of a command.
_MOST_NAMED = 3
# Characters that differences take of two lines of a terminal.
_MOST_OF_DIFFERENCES = 100

_RUN_FACTS = {
    "job_sha256": "job file",
    "git_commit": "git commit",
    "raybench_sha256": "code of raybench",
}
_DEVICE_FACTS = {
    "name": "devices",
    "node_id": "nodes of the run",
    "host": "hosts",
    "uuid": "device UUIDs",
    "driver_version": "driver",
    "nccl_path": "NCCL file",
    "power_cap_w": "power cap W",
    "sm_clock_max_mhz": "highest SM clock MHz",
    "memory_clock_mhz": "memory clock MHz",
    "topology": "topology",
    "pcie_link_max": "PCIe link",
    "mig_mode": "MIG",
    "persistence_mode": "persistence mode",
    "memory_bytes": "memory bytes",
    "cpu_count": "CPU cores",
    "omp_num_threads": "OMP threads",
    "niceness": "niceness",
}
_POINT_COLUMNS: Mapping[str, str] = {
    "compute_ms": "compute",
    "optimizer_ms": "update",
    "comm_exposed_ms": "exposed communication",
    "unexplained_ms": "unexplained",
    "straggler_ms": "slow rank",
    "data_ms": "data",
    "host_gap_ms": "host gap",
    "throttled": "throttled",
    "host_bound": "host-bound",
    "sm_clock_mhz_p50": "SM clock",
}


def percent_words(share: float, *, has_sign: bool = False) -> str:
    """Return a share for prose, `2.8 %`; with a sign `+2.8 %`."""
    text = f"{share:+z.1%}" if has_sign else f"{share:z.1%}"
    return text.replace("%", " %")


def verdict_count(verdicts: Mapping[str, int], points: int) -> str:
    """Return the first sentence of an answer about several points: how many are slower.

    Args:
        verdicts: verdict -> number of points.
        points: number of all points.
    """
    for verdict, count in verdicts.items():
        if count == points:
            return f"All {points} points are {_PREDICATES[verdict]}."
    slower = verdicts[SLOWER]
    return f"{slower} of {points} points {'is' if slower == 1 else 'are'} slower."


def worst_point(name: str, slowdown: float, unit: str) -> str:
    """Return the sentence about the point that lost the largest share `slowdown` of its rate."""
    return f"The worst is {name}: {percent_words(slowdown)} fewer {unit}."


def single_point(verdict: str, change: float, unit: str) -> str:
    """Return the answer for one compared point, whose rate changed by a share `change`."""
    if verdict == UNCLEAR:
        return f"The point is {undecided(change)}."
    if verdict == SAME:
        return "The point is the same."
    more = "fewer" if change < 0 else "more"
    return f"The point is {verdict}: {percent_words(abs(change))} {more} {unit}."


def undecided(change: float) -> str:
    """Return the verdict of an undecided point with its change: `undecided, +2.8 %`."""
    return f"{VERDICT_WORDS[UNCLEAR]}, {percent_words(change, has_sign=True)}"


def other_verdicts(verdicts: Mapping[str, int], points: int) -> str:
    """Return `1 is faster and 3 are undecided.`, the sentence on points that are not slower.

    Empty if all points have the same verdict.

    Args:
        verdicts: verdict -> number of points.
        points: number of all points.
    """
    phrases = []
    for verdict in (FASTER, SAME, UNCLEAR):
        count = verdicts[verdict]
        if 0 < count < points:
            phrases.append(f"{count} {'is' if count == 1 else 'are'} {_PREDICATES[verdict]}")
    if not phrases:
        return ""
    *others, last = phrases
    return f"{', '.join(others)} and {last}." if others else f"{last}."


def median_change(change: float, unit: str = "") -> str:
    """Return the sentence about the median change of the rates."""
    of_unit = f" of {unit}" if unit else ""
    return f"The median change{of_unit} is {percent_words(change, has_sign=True)}."


def more_failures(points: int) -> str:
    """Return how many points fail in a larger share of their rounds in NEW than in BASE."""
    return f"{counted(points, 'point')} {'fails' if points == 1 else 'fail'} more often in NEW."


def one_run(sides: Sequence[str]) -> tuple[str, str]:
    """Return two sentences on why there is no verdict; `sides` are the sides with one run."""
    where = f"one run of {sides[0]}" if len(sides) == 1 else "one run on each side"
    return (
        f"No verdict: {where}.",
        "Certainty: unknown, because rounds of one run do not show how runs differ.",
    )


def detectable(slowdowns: Sequence[float], unit: str) -> str:
    """Return the least and largest slowdown that the runs detect at a point."""
    least, most = min(slowdowns), max(slowdowns)
    if least > _LARGEST_USEFUL:
        share = percent_words(_LARGEST_USEFUL).replace(".0", "")
        return f"Certainty: runs differ too much to detect {share} fewer {unit} at a point."
    shares = f"{formatting.span(f'{100 * least:.1f}', f'{100 * most:.1f}')} %"
    return f"Certainty: in 95 % of cases, such runs detect {shares} fewer {unit} at one point."


def not_excluded(slowdown: float, has_slower: bool) -> str:
    """Return that a point may be slower by a share `slowdown`.

    Args:
        slowdown: largest share that the runs do not exclude.
        has_slower: whether another point is called slower.
    """
    point = "another point" if has_slower else "a point"
    return f"These runs do not exclude that {point} is up to {percent_words(slowdown)} slower."


def not_judged(points: int) -> str:
    """Return how many points of BASE have too few results for a verdict."""
    verb = "has" if points == 1 else "have"
    return (
        f"{counted(points, 'point')} of BASE {verb} no verdict: "
        f"a side has fewer than {LEAST_RUNS} ok runs."
    )


def more_runs(runs: int, tags: tuple[str, str] | None) -> list[str]:
    """Return sentences on the runs that decide undecided points.

    Args:
        runs: number of runs that each side should have.
        tags: the tags of BASE and NEW; None if a side has no tag.
    """
    first = f"To decide: measure BASE, NEW, BASE, NEW and so on, until each side has {runs} runs."
    if tags is not None:
        base, new = tags
        return [first, f"Use --tag {base} and --tag {new}, then repeat this command."]
    placeholder = "RUN,RUN,RUN"
    example = formatting.command("compare", placeholder, placeholder)
    return [first, f"Then name all runs: {example}"]


def environment(differences: Sequence[Change]) -> str:
    """Return a sentence of at most two lines on differences between the newest runs."""
    if not differences:
        return NO_CAVEAT
    phrases: list[str] = []
    for change in sorted(differences, key=lambda change: _KIND_ORDER.index(change.kind)):
        is_short = max(len(change.base), len(change.new)) <= _SHORT_VALUE
        values = f" {before_and_now(change, _SHORT_VALUE)}" if is_short else ""
        phrases.append(f"{plain(fact_name(change.fact))}{values}")
    shown = [cut_end(phrases[0], _MOST_OF_DIFFERENCES)]
    for phrase in phrases[1:]:
        if len(", ".join([*shown, phrase])) > _MOST_OF_DIFFERENCES:
            break
        shown.append(phrase)
    hidden = len(phrases) - len(shown)
    more = f" and {hidden} more" if hidden else ""
    return f"Caveat: the environments differ in {', '.join(shown)}{more}."


def impossible(point: str, why: str, others: int) -> str:
    """Return the first value that cannot be true, and how many others there are."""
    more = f" {counted(others, 'more value')} cannot be true; --full has all." if others else ""
    return f"Impossible value at {point}: {why}.{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PointCounts:
    """How many points are compared, and where the other points are."""

    compared: int
    only_base: int
    only_new: int
    # Points of both sides that have no rate on one side.
    failed: int


def missing_points(counts: PointCounts, settings: Sequence[str]) -> list[str]:
    """Return sentences on the points that are not compared; [] if all points are compared.

    Args:
        counts: numbers of points.
        settings: settings whose values differ between points only in BASE and only in NEW.
    """
    count_by_place = {
        "in BASE only": counts.only_base,
        "in NEW only": counts.only_new,
        "without a result on one side": counts.failed,
    }
    phrases = []
    for place, count in count_by_place.items():
        number = str(count) if counts.compared else counted(count, "point")
        if count:
            phrases.append(f"{number} {'is' if count == 1 else 'are'} {place}")
    if not phrases:
        return []
    *others, last = phrases
    sentence = f"{', '.join(others)} and {last}." if others else f"{last}."
    if counts.compared:
        total = counts.compared + sum(count_by_place.values())
        sentence = f"{counts.compared} of {counted(total, 'point')} can be compared. {sentence}"
    if not settings:
        return [sentence]
    without_partner = counted(counts.only_base + counts.only_new, "point")
    differ = "differs" if len(settings) == 1 else "differ"
    why = f"because their {' and '.join(settings)} {differ}"
    return [sentence, f"{without_partner} have no partner, {why}."]


def left_out(run_id: str, facts: Sequence[Fact]) -> str:
    """Return why a run with the tag of a side is not compared."""
    names = formatting.some(list(map(fact_name, facts)), _MOST_NAMED)
    return f"{run_id} is left out because it differs in {names}."


def not_decided(why: NotDecided) -> str:
    """Return why a point has no verdict, as `BASE has 1 run, and a verdict needs 2`."""
    match why.kind:
        case Undecided.OTHER_DEVICE | Undecided.OTHER_NODE_COUNT:
            is_device = why.kind is Undecided.OTHER_DEVICE
            what = "different devices" if is_device else "different numbers of nodes"
            names = ("none" if value is None else str(value) for value in why.values)
            return f"the runs used {what}: {', '.join(names)}"
        case Undecided.FEW_RUNS:
            return f"{why.side.upper()} has {why.runs} run, and a verdict needs {LEAST_RUNS}"
        case Undecided.CHANCE:
            return "runs of one side differ so much that the change may be chance"
        case Undecided.WIDE:
            return "the change is below the threshold, but its interval is not"


def fact_name(fact: Fact) -> str:
    """Return the name of a fact of a run: `driver`, `code net.py`, `variable NCCL_ALGO`."""
    match fact.kind:
        case FactKind.RUN:
            return _RUN_FACTS[fact.name]
        case FactKind.DEVICE:
            return _DEVICE_FACTS[fact.name]
        case FactKind.VERSION:
            return fact.name
        case FactKind.CODE:
            return f"code {fact.name}"
        case FactKind.VARIABLE:
            return f"variable {fact.name}"


def before_and_now(change: Change, most: int) -> str:
    """Return `before -> now`; long values are cut to `most` characters that show the difference.

    Args:
        change: the change of a fact.
        most: at least 4.
    """
    before, now = plain(change.base), plain(change.new)
    if before == now:
        # The values differ only in blanks and control characters: write these out.
        before, now = (repr(value)[1:-1].replace(" ", "␣") for value in (change.base, change.new))
    cut_before, cut_now = cut_end(before, most), cut_end(now, most)
    if cut_before == cut_now:
        # The values differ only behind the cut: begin shortly before the difference.
        start = max(0, _count_alike(before, now) - most // 3)
        cut_before, cut_now = (cut_end(f"…{value[start:]}", most) for value in (before, now))
    return f"{cut_before} -> {cut_now}"


def _count_alike(first: str, second: str) -> int:
    """Return the number of characters with which both texts begin."""
    for index, (letter, other_letter) in enumerate(zip(first, second, strict=False)):
        if letter != other_letter:
            return index
    return min(len(first), len(second))


def point_change(change: PointChange) -> str:
    """Return a change of a point: `compute 3.1 -> 3.4 ms`, `NEW was throttled, BASE was not`."""
    name = _POINT_COLUMNS[change.column]
    if isinstance(change.base, bool):
        affected, other = ("NEW", "BASE") if change.new else ("BASE", "NEW")
        return f"{affected} was {name}, {other} was not"
    before, now = (formatting.number(value, 3) for value in (change.base, change.new))
    return f"{name} {before} -> {now} {change.unit}"


def history_answer(points: int, runs: int, changes: int) -> str:
    """Return a sentence on the number of lasting changes of step times over several runs."""
    where = f"{counted(points, 'point')} in {counted(runs, 'run')}"
    if not changes:
        return f"{where}: no lasting change of a step time."
    return f"{where}: {counted(changes, 'lasting change')} of a step time."
