"""The stage `environment`: whether the devices, nodes and software are fit to be measured. Pure.

An unknown fact is no fault. A bad fact spoils measurements; a fact with a note may disturb them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from raybench.health.environment_facts import (
    EnvironmentFacts,
    Fault,
    environment_test,
    fault,
    judge_fact,
)
from raybench.health.environment_rules import RULES, apply_rule
from raybench.health.suite import HealthTest
from raybench.health.variables import COSTLY_VARIABLES, CostlyVariable
from raybench.health.verdicts import Judgement
from raybench.records.conditions import Condition, FactValue
from raybench.records.device import Device
from raybench.records.devices import Subject, Verdict, read_topology
from raybench.records.judgement import Command, CommandKind

_VERSIONS = ("raybench", "python", "torch", "ray")
_VERSIONS_OF_GPUS = ("cuda", "nccl", "driver")
# Versions that pip installs.
_PACKAGES = ("raybench", "torch", "ray")
# raybench sets these variables itself, for each node and for each process.
_SET_BY_RAYBENCH = frozenset({"GLOO_SOCKET_IFNAME", "NCCL_RAS_ADDR"})

# Name -> text on each device, by rank; None if the device does not report it.
_Texts = Mapping[str, Sequence[str | None]]


def judge_environment(facts: EnvironmentFacts) -> list[Judgement]:
    """Return the judgements that need no work of the devices; facts of GPUs only on GPUs."""
    judged = [*_counts(facts), _versions(facts), _libraries(facts), _variables(facts)]
    for rule in RULES:
        if facts.is_cuda or not rule.is_of_gpus:
            judged += apply_rule(rule, facts)
    for variable in COSTLY_VARIABLES:
        judged += _costly(variable, facts)
    return judged


def _counts(facts: EnvironmentFacts) -> Iterator[Judgement]:
    """Yield the judgements of models, missing devices and other sweeps."""
    models = Counter(device.name for device in facts.devices)
    shown = [FactValue(name=name, value=f"x {count}") for name, count in models.most_common()]
    several = fault(Condition.SEVERAL_MODELS, value=len(models)) if len(models) > 1 else None
    yield judge_fact(
        environment_test("models", "models"), facts.cluster, len(models), several, shown
    )
    missing = fault(
        Condition.MISSING_DEVICES,
        Command(kind=CommandKind.SHOW_RAY),
        value=facts.missing,
        verdict=Verdict.BAD,
    )
    yield judge_fact(
        environment_test("missing devices", "devices"),
        facts.cluster,
        facts.missing,
        missing if facts.missing else None,
    )
    sweeps = fault(Condition.OTHER_SWEEPS, Command(kind=CommandKind.WAIT), names=facts.other_sweeps)
    yield judge_fact(
        environment_test("other sweeps", "sweeps"),
        facts.cluster,
        len(facts.other_sweeps),
        sweeps if facts.other_sweeps else None,
    )


def _versions(facts: EnvironmentFacts) -> Judgement:
    """Return the judgement of software; it is bad where workers have different versions."""
    texts: dict[str, list[str | None]] = {}
    for name in (*_VERSIONS, *(_VERSIONS_OF_GPUS if facts.is_cuda else ())):
        is_driver = name == "driver"
        texts[name] = [
            device.driver_version if is_driver else device.versions.get(name)
            for device in facts.devices
        ]
    differing = _differing(texts)
    wanted = []
    for name in differing:
        if name in _PACKAGES:
            [(usual, _)] = Counter(texts[name]).most_common(1)
            wanted.append(f"{name}=={usual}")
    kind = CommandKind.INSTALL if wanted else CommandKind.SHOW_VERSIONS
    command = Command(kind=kind, names=tuple(wanted), hosts=facts.host_names)
    mismatch = fault(Condition.VERSIONS_DIFFER, command, names=differing, verdict=Verdict.BAD)
    return _judge_texts(
        environment_test("versions", "versions"), facts, texts, mismatch if differing else None
    )


def _libraries(facts: EnvironmentFacts) -> Judgement:
    """Return the judgement of the files of CUDA libraries."""
    names = {name for device in facts.devices for name in device.libraries}
    texts: dict[str, list[str | None]] = {}
    for name in sorted(names):
        texts[name] = [device.libraries.get(name) for device in facts.devices]
    differing = _differing(texts)
    command = Command(kind=CommandKind.RESTART_RAY, hosts=facts.host_names)
    mismatch = fault(Condition.LIBRARIES_DIFFER, command, names=differing) if differing else None
    return _judge_texts(environment_test("libraries", "files"), facts, texts, mismatch)


def _variables(facts: EnvironmentFacts) -> Judgement:
    """Return the judgement of variables; a variable may be missing on some workers."""
    names = {name for device in facts.devices for name in device.environment}
    texts: dict[str, list[str | None]] = {}
    for name in sorted(names - _SET_BY_RAYBENCH):
        texts[name] = [device.environment.get(name) for device in facts.devices]
    differing = [name for name, values in texts.items() if len(set(values)) > 1]
    command = Command(kind=CommandKind.RESTART_RAY, hosts=facts.host_names)
    mismatch = fault(Condition.VARIABLES_DIFFER, command, names=differing) if differing else None
    test = environment_test("variables", "variables")
    return _judge_texts(test, facts, texts, mismatch, shows_missing=True)


def _differing(texts: _Texts) -> list[str]:
    """Return the names whose texts differ; unknown texts do not count."""
    return [name for name, values in texts.items() if len({*values} - {None}) > 1]


def _judge_texts(
    test: HealthTest,
    facts: EnvironmentFacts,
    texts: _Texts,
    mismatch: Fault | None,
    *,
    shows_missing: bool = False,
) -> Judgement:
    """Return the judgement of texts of all devices; texts that differ are shown with owners."""
    shown = []
    for name, values in texts.items():
        owners: dict[str | None, list[str]] = {}
        for value, subject in zip(values, facts.subjects, strict=True):
            if value is not None or shows_missing:
                owners.setdefault(value, []).append(subject.name)
        for value, subjects in owners.items():
            named = tuple(subjects) if len(owners) > 1 else ()
            shown.append(FactValue(name=name, value=value, subjects=named))
    return judge_fact(test, facts.cluster, len(texts), mismatch, shown)


def _costly(variable: CostlyVariable, facts: EnvironmentFacts) -> Iterator[Judgement]:
    """Yield a judgement if a worker has a costly value of the variable."""
    owners: list[Subject] = []
    values: dict[str, None] = {}
    for device, subject in zip(facts.devices, facts.subjects, strict=True):
        value = device.environment.get(variable.name, "").strip()
        if value and variable.is_costly(value):
            owners.append(subject)
            values[value] = None
    if not owners or (variable.is_between_nodes and len(facts.nodes) < 2):
        return
    is_used = facts.is_cuda or not variable.is_of_gpus
    is_needed = variable.needs_nvlink and not any(map(_has_nvlink, facts.devices))
    mismatch = fault(
        Condition.COSTLY_VARIABLE,
        Command(kind=CommandKind.UNSET, names=(variable.name,)),
        limit=float(is_used),
        names=(variable.name, *values),
        verdict=variable.verdict if is_used and not is_needed else Verdict.NOTE,
    )
    shown = []
    if len(owners) < len(facts.devices):
        names = tuple(subject.name for subject in owners)
        shown.append(FactValue(name=variable.name, subjects=names))
    test = environment_test(variable.name, "devices")
    yield judge_fact(test, facts.cluster, len(owners), mismatch, shown)


def _has_nvlink(device: Device) -> bool:
    return bool(read_topology(device).nvlinks)
