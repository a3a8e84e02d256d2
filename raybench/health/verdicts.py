"""What readings say of each subject: healthy, suspect, bad, not tested, or not known. Pure.

A subject is held against those alike in the same passes (`raybench.stats.fleet`). Where fewer than
four are alike there is no spread: against 1.5 times the fastest of them, its own past, and what its
model reaches elsewhere. Peers do not see what makes all of them slow: for that all together are
held against what their model reaches, as earlier checks and hardware/expected.yaml know it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from statistics import median
from typing import Any

import numpy as np
from ruamel.yaml import YAML

from raybench.hardware.peaks import dense_peak_tflops, memory_peak_gb_s
from raybench.health.actions import advise
from raybench.health.device_facts import ACTIONS
from raybench.health.groups import Group, devices_by_uuid, group_readings
from raybench.health.root_cause import name_culprits
from raybench.records import Device
from raybench.records.health import (
    NOT_READ,
    Action,
    Finding,
    HealthTest,
    PastValue,
    Reading,
    Subject,
    Verdict,
    figure,
)
from raybench.stats.fleet import (
    LEAST_ALIKE,
    Bools,
    Floats,
    Peers,
    compare_few,
    compare_peers,
    find_slow,
)

# Of another day or another machine, devices alike differ by more than beside each other: by this
# share, and by so many floors of the test. What a link to the host carries is up to the host: two
# H200s copied both ways at 78 GB/s, and six minutes later on the same host at 91 and 96. Too slow
# is there only who would be bad among those alike.
_ELSEWHERE_SHARE, _ELSEWHERE_FLOORS = 0.1, 5
_LEAST_PAST = 3
# Tests with such a floor share their device with whatever else the host does, as CPU workers do: a
# busy hour makes all of them slow, memory by 6 times on two cores with loads of 6 to 15.
_SHARED_FLOOR, _SHARED_RATIO = 0.1, 10.0
EXPECTED_TEST = "expected values"
_NOTHING = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """What a value was elsewhere, and how that is known."""

    low: float
    high: float
    source: str

    def excess(self, value: float, group: Group) -> float | None:
        """Divide a value's time by that of the worst here; None where it is no worse than that.

        Two machines, and two days, differ by more than devices beside each other.
        """
        is_time = group.test.is_time
        ratio = value / self.high if is_time else self.low / max(value, _NOTHING)
        return ratio if ratio > limit_elsewhere(group.test) else None

    def words(self, unit: str) -> str:
        """Write the range."""
        low, high = figure(self.low), figure(self.high)
        return f"{low if low == high else f'{low} to {high}'} {unit} ({self.source})"


def limit_elsewhere(test: HealthTest) -> float:
    """Return how many times as long as elsewhere, or on another day, is too long."""
    if test.floor >= _SHARED_FLOOR:
        return _SHARED_RATIO
    if test.stage == "host-links":
        return test.bad_ratio
    return 1 + max(_ELSEWHERE_SHARE, _ELSEWHERE_FLOORS * test.floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """A group beside its peers. typical: the median of each subject's passes."""

    group: Group
    typical: Floats
    ratios: Floats
    is_slow: Bools
    peers: Peers | None


def judge(
    readings: Iterable[Reading], devices: Sequence[Device], past: Sequence[PastValue] = ()
) -> tuple[Finding, ...]:
    """Say of each subject in each test what holds, and who is to blame for what is slow.

    devices: those that were checked. past: what earlier checks read of healthy subjects.
    """
    known = devices_by_uuid(devices)
    groups = group_readings(readings, known)
    elsewhere = _Elsewhere(past)
    judged = _compare([group for group in groups if group.is_compared])
    findings: list[Finding] = []
    for group in groups:
        one = judged.get(id(group))
        findings += _compared(one, elsewhere) if one else _checked(group)
    findings += _unknown_models(judged.values(), elsewhere)
    findings = name_culprits(findings, groups, known)
    return tuple(_with_action(finding, known) for finding in findings)


def _compare(groups: Sequence[Group]) -> dict[int, _Judged]:
    """Hold subjects against those alike, over all tests together."""
    many: dict[int, Peers] = {}
    for group in groups:
        if (~np.isnan(group.values)).any(axis=0).sum() >= LEAST_ALIKE:
            test = group.test
            many[id(group)] = compare_peers(group.values, is_time=test.is_time, floor=test.floor)
    slow = dict(zip(many, find_slow(list(many.values())), strict=True))
    found = {}
    for group in groups:
        test, peers = group.test, many.get(id(group))
        if peers:
            ratios, is_slow = peers.ratios, slow[id(group)]
        else:
            ratios, is_slow = compare_few(
                group.values, is_time=test.is_time, floor=test.floor, bad_ratio=test.bad_ratio
            )
        found[id(group)] = _Judged(
            group=group,
            typical=_medians(group.values),
            ratios=ratios,
            is_slow=is_slow,
            peers=peers,
        )
    return found


def _medians(values: Floats) -> Floats:
    known = ~np.isnan(values).all(axis=0)
    found = np.full(values.shape[1], np.nan)
    found[known] = np.nanmedian(values[:, known], axis=0)
    return found


def _healthy(group: Group, typical: Floats) -> Iterator[Finding]:
    """Yield the findings of the subjects of a group as if nothing was wrong with them."""
    passes = (~np.isnan(group.values)).sum(axis=0).tolist()
    for subject, count, value in zip(group.subjects, passes, typical.tolist(), strict=True):
        yield Finding(
            test=group.test.name,
            stage=group.test.stage,
            subject=subject,
            passes=count,
            value=None if value != value else value,
            unit=group.test.unit,
            expected="",
            ratio=None,
            verdict=Verdict.HEALTHY,
        )


def _compared(one: _Judged, elsewhere: _Elsewhere) -> Iterator[Finding]:
    """Yield the findings of a test of which the values are compared."""
    group = one.group
    ratios = one.ratios.tolist()
    measure = _measure_of(one)
    is_alone = len(group.subjects) == 1
    alike = _slow_alike(one, elsewhere)
    for column, finding in enumerate(_healthy(group, one.typical)):
        is_compared = not is_alone and finding.value is not None
        ratio = ratios[column] if is_compared else None
        finding = replace(finding, expected=measure, ratio=ratio)
        if column in group.problems or finding.value is None:
            yield replace(finding, ratio=None, **_problem(group, column, finding.value))
        elif one.is_slow[column]:
            yield replace(finding, **_slow(finding, one))
        elif one.peers is None and alike is None:
            yield replace(finding, **_against_elsewhere(finding, group, elsewhere))
        else:
            yield finding
    if alike is not None:
        yield alike


def _measure_of(one: _Judged) -> str:
    """Say what the subjects of a group are held against, in words."""
    unit, typical = one.group.test.unit, one.typical
    count = int((~np.isnan(typical)).sum())
    if count < 2:
        return ""
    if one.peers is None:
        best = np.nanmin(typical) if one.group.test.is_time else np.nanmax(typical)
        return f"{figure(float(best))} {unit}, the best of {count} alike"
    among = one.peers.is_reference & ~np.isnan(typical)
    middle = figure(float(np.median(typical[among])))
    if one.peers.is_divided:
        return f"{middle} {unit}, the median of the {int(among.sum())} fastest of {count} alike"
    return f"{middle} {unit}, the median of {count} alike"


def _slow(finding: Finding, one: _Judged) -> dict[str, Any]:
    ratio = finding.ratio or 0.0
    passes = finding.passes
    evidence = f"in each of {passes} passes" if passes > 1 else ""
    if one.peers is not None:
        among = f"the others spread by {one.peers.sigma:.1%}"
        evidence = "; ".join(filter(None, (evidence, among)))
        if one.peers.is_divided:
            count = int(one.is_slow.sum())
            group = f"one of {count} that are slower than the other {len(one.is_slow) - count}"
            evidence = f"{evidence}; {group}"
    return {
        "verdict": Verdict.BAD if ratio > one.group.test.bad_ratio else Verdict.SUSPECT,
        "reason": f"takes {times(ratio)} as long as those alike",
        "evidence": evidence,
    }


def _problem(group: Group, column: int, value: float | None) -> dict[str, Any]:
    """Wrong bits, grown errors, or what did not run: never healthy, whatever the value."""
    problems = group.problems.get(column, ())
    own = [text for text in problems if not text.startswith(NOT_READ)]
    reason = "; ".join(own or problems) or "it was not read"
    failures = group.failures.get(column, ())
    if own and value is not None and set(own) <= set(failures):
        # It ran in the others: that happens to good devices too.
        count = f"{len(failures)} of {group.pass_count} passes"
        return {"verdict": Verdict.SUSPECT, "reason": f"{reason} (in {count})"}
    own_problems = [
        any(not text.startswith(NOT_READ) for text in found) for found in group.problems.values()
    ]
    if own and (value is not None or sum(own_problems) < len(group.subjects)):
        return {"verdict": Verdict.BAD, "reason": reason}
    if value is not None and not own:
        # Another one made a pass fail; the others say enough.
        return {"evidence": reason}
    return {"verdict": Verdict.UNTESTED, "reason": reason}


def _checked(group: Group) -> Iterator[Finding]:
    """Yield the findings of facts and of checks, which are wrong by themselves or not."""
    for column, finding in enumerate(_healthy(group, _medians(group.values))):
        if column in group.problems:
            given = _problem(group, column, finding.value)
            if ACTIONS.get(group.test.name) in (Action.WATCH, Action.SETTING):
                given = {**given, "verdict": Verdict.SUSPECT}
            yield replace(finding, **given)
        elif finding.value is None:
            yield replace(finding, verdict=Verdict.UNKNOWN, reason="nothing here tells it")
        else:
            yield finding


def _against_elsewhere(finding: Finding, group: Group, elsewhere: _Elsewhere) -> dict[str, Any]:
    """Hold one of few against its own past, and against its model elsewhere."""
    value = finding.value or 0.0
    own = elsewhere.of_subject(finding.subject, group)
    others = elsewhere.of_model(group)
    for found in filter(None, (own, others)):
        if ratio := found.excess(value, group):
            return {
                "verdict": Verdict.BAD if ratio > group.test.bad_ratio else Verdict.SUSPECT,
                "expected": found.words(group.test.unit),
                "reason": f"takes {times(ratio)} as long as it should",
                "ratio": ratio if finding.subject.kind == "device" else finding.ratio,
            }
    words = [one.words(group.test.unit) for one in (own or others,) if one]
    expected = "; ".join(filter(None, (finding.expected, *words)))
    if not expected:
        peak = datasheet(group.model, group.test.name)
        note = f"; its datasheet says {figure(peak)} {group.test.unit}" if peak else ""
        where = "" if group.where == "device" else f", {group.where},"
        return {
            "verdict": Verdict.UNKNOWN,
            "reason": f"nothing is known of what {group.model}{where} reaches{note}",
        }
    return {"expected": expected}


def _slow_alike(one: _Judged, elsewhere: _Elsewhere) -> Finding | None:
    """Hold all that are alike against their model elsewhere; None where they are as they should."""
    group = one.group
    sound = one.typical[~np.isnan(one.typical) & ~one.is_slow]
    found = elsewhere.of_model(group)
    if len(group.subjects) < 2 or found is None or not len(sound):
        return None
    best = float(sound.min() if group.test.is_time else sound.max())
    middle = float(np.median(sound))
    ratio = found.excess(best if one.peers is None else middle, group)
    if ratio is None:
        return None
    count = len(group.subjects)
    noun = "pairs of " if group.test.kind == "pair" else ""
    uuids = tuple(dict.fromkeys(uuid for subject in group.subjects for uuid in subject.uuids))
    return Finding(
        test=group.test.name,
        stage=group.test.stage,
        subject=Subject(
            kind="cluster",
            uuids=uuids,
            name=f"{'both' if count == 2 else f'all {count}'} {noun}{group.model}",
            model=group.model,
        ),
        passes=group.values.shape[0],
        value=middle,
        unit=group.test.unit,
        expected=found.words(group.test.unit),
        ratio=None,
        verdict=Verdict.SUSPECT,
        reason=f"all are slow alike: {times(ratio)} as long as this model takes elsewhere",
        evidence="no device stands out, so a setting is likelier than a fault",
    )


def _unknown_models(judged: Iterable[_Judged], elsewhere: _Elsewhere) -> Iterator[Finding]:
    """Yield a finding for each model of which nothing is known: slow alike would not be seen."""
    groups: dict[str, list[Group]] = {}
    for one in judged:
        groups.setdefault(one.group.model, []).append(one.group)
    for model, own in groups.items():
        if any(elsewhere.of_model(group) for group in own):
            continue
        yield Finding(
            test=EXPECTED_TEST,
            stage=own[0].test.stage,
            subject=Subject(kind="cluster", uuids=(), name=f"all {model}", model=model),
            passes=0,
            value=None,
            unit="",
            expected="",
            ratio=None,
            verdict=Verdict.UNKNOWN,
            reason=f"no figures of {model} are known here: that all are slow would not be seen",
        )


def _with_action(finding: Finding, known: Mapping[str, Device]) -> Finding:
    if finding.verdict in (Verdict.HEALTHY, Verdict.UNKNOWN) or finding.culprit or finding.action:
        return finding
    action, commands = advise(finding, known)
    return replace(finding, action=action, command="\n".join(commands))


class _Elsewhere:
    """What subjects were in earlier checks, and their models in committed runs."""

    def __init__(self, past: Sequence[PastValue]) -> None:
        self._own: dict[tuple[str, tuple[str, ...]], list[PastValue]] = {}
        self._models: dict[tuple[str, str, str, int], list[PastValue]] = {}
        for one in past:
            subject = one.subject
            self._own.setdefault((one.test, subject.uuids), []).append(one)
            key = (one.test, subject.kind, subject.model, len(subject.uuids))
            self._models.setdefault(key, []).append(one)

    def of_subject(self, subject: Subject, group: Group) -> _Range | None:
        """Its own range in earlier checks."""
        return _past_range(
            self._own.get((group.test.name, subject.uuids), ()), "its earlier checks"
        )

    def of_model(self, group: Group) -> _Range | None:
        """Return the range of its model: of runs that are shipped, else of earlier checks."""
        found = find_expected(group.model, group.test.name, group.where, group.topology)
        if found is not None:
            return _Range(low=found.low, high=found.high, source=found.source.split(";")[0])
        first = group.subjects[0]
        key = (group.test.name, first.kind, group.model, len(first.uuids))
        return _past_range(self._models.get(key, ()), "earlier checks of this model")


def _past_range(past: Sequence[PastValue], source: str) -> _Range | None:
    """Take the median: an earlier check may have had a bad day; None of too few checks."""
    checks = len({one.run_id for one in past})
    if checks < _LEAST_PAST:
        return None
    middle = median(one.value for one in past)
    return _Range(low=middle, high=middle, source=f"{source}, {checks} of them")


def times(ratio: float) -> str:
    """Write a ratio of times."""
    return f"{ratio:.2f} times" if ratio < 100 else "over 100 times"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The range of one test in runs of devices of a model. Fields as in expected.yaml."""

    model: str
    where: str
    test: str
    unit: str
    low: float
    high: float
    source: str
    links: str = ""


def find_expected(model: str, test: str, where: str, topology: str = "") -> Expected | None:
    """Find the range of a test as runs have seen it; None where none has.

    where: how many devices work together and how, as in expected.yaml. topology: of one of them.
    """
    known = _table().get((model, test, where), ())
    return next((one for one in known if topology.startswith(one.links)), None)


def datasheet(model: str, test: str) -> float | None:
    """Find the peak of a test in the unit of the test; None where no datasheet has one."""
    kind, *words = test.split()
    if kind == "gemm":
        return dense_peak_tflops(model, words[0])
    return memory_peak_gb_s(model) if kind == "memory" else None


@cache
def _table() -> dict[tuple[str, str, str], list[Expected]]:
    text = resources.files("raybench.hardware").joinpath("expected.yaml").read_text("utf-8")
    found: dict[tuple[str, str, str], list[Expected]] = {}
    for row in YAML(typ="safe", pure=True).load(text):
        one = Expected(**row)
        found.setdefault((one.model, one.test, one.where), []).append(one)
    return found
