"""The stage `environment`: whether the devices, nodes and software are fit to be measured. Pure.

A check of one figure is a row of `_RULES`; other checks are functions below. An unknown fact is no
fault. What is bad spoils measurements; a note may disturb them, and no device is at fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from raybench.conversion import GIB
from raybench.health.suite import ENVIRONMENT, HealthTest, device_subjects
from raybench.health.variables import COSTLY_VARIABLES, CostlyVariable
from raybench.health.verdicts import Judgement
from raybench.records.conditions import Condition, FactValue
from raybench.records.device import Device
from raybench.records.devices import (
    Action,
    DeviceFacts,
    HostFacts,
    Subject,
    Verdict,
    read_topology,
)
from raybench.records.judgement import Command, CommandKind, Reason, ReasonKind
from raybench.report.words import health as words

# Room for compiled kernels and logs.
_LEAST_DISK_GIB = 1.0
# The default of Docker is 64 MiB, in which NCCL fails with more than a few ranks.
_LEAST_SHM_GIB = 0.5
# RDMA pins the buffers of NCCL, 4 MiB for each channel and peer.
_LEAST_MEMLOCK_GIB = 1.0
# Data-centre GPUs slow down at about 85 to 90 degrees; before any work they should be far below.
_WARM_C = 75.0
# The driver rounds caps.
_POWER_ROUNDING_W = 1.0
# Reasons by which the hardware itself limits clocks: a slowdown, heat, or its power supply.
_BY_HARDWARE = {"hw_slowdown", "thermal_hw", "power_brake"}
_VERSIONS = ("raybench", "python", "torch", "ray", "cuda", "nccl", "driver")
# Versions that pip installs.
_PACKAGES = ("torch", "ray")
# raybench sets this variable itself for each node.
_SET_BY_RAYBENCH = frozenset({"GLOO_SOCKET_IFNAME"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFacts:
    """What workers and nodes report before any test."""

    # By rank, at least one.
    devices: tuple[Device, ...]
    # Number of devices of the cluster without a worker.
    missing: int = 0
    # That share the devices, in words.
    other_sweeps: tuple[str, ...] = ()
    # Of the devices; empty if they were not read.
    states: tuple[DeviceFacts, ...] = ()

    @property
    def is_cuda(self) -> bool:
        """Whether a worker owns a GPU."""
        return any(device.kind == "cuda" for device in self.devices)

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """The devices as subjects, by rank."""
        return device_subjects(self.devices)

    @property
    def nodes(self) -> dict[str, list[int]]:
        """Node id -> ranks of its devices."""
        ranks: dict[str, list[int]] = {}
        for rank, device in enumerate(self.devices):
            ranks.setdefault(device.node_id, []).append(rank)
        return ranks

    @property
    def hosts(self) -> dict[str, HostFacts]:
        """Node id -> state of its host, if it was read."""
        return {one.device.node_id: one.host for one in self.states if one.host is not None}

    @property
    def cluster(self) -> Subject:
        """All devices as one subject."""
        return Subject(
            kind="cluster",
            uuids=tuple(subject.uuids[0] for subject in self.subjects),
            name=words.devices_name(len(self.devices), self.devices[0].kind),
            model="",
        )

    @property
    def host_names(self) -> tuple[str, ...]:
        """Names of the hosts, without repeats."""
        return tuple(dict.fromkeys(device.host for device in self.devices))

    def node(self, node_id: str) -> Subject:
        """Return a node as a subject."""
        ranks = self.nodes[node_id]
        return Subject(
            kind="node",
            uuids=tuple(self.subjects[rank].uuids[0] for rank in ranks),
            name=self.devices[ranks[0]].host,
            model="",
        )


def environment_test(name: str, unit: str = "") -> HealthTest:
    """Return the test of one fact of the environment; without a unit its value is on or off."""
    return HealthTest(name=name, stage=ENVIRONMENT, unit=unit, floor=0.0, is_compared=False)


def fact(
    test: HealthTest,
    subject: Subject,
    value: float | None,
    *,
    fault: Reason | None = None,
    verdict: Verdict = Verdict.NOTE,
    facts: Sequence[FactValue] = (),
    commands: Sequence[Command] = (),
) -> Judgement:
    """Return the judgement of a fact: healthy without a fault, and unknown without a value.

    Args:
        verdict: used if there is a fault.
        commands: proposed if there is a fault.
    """
    evidence = (Reason(kind=ReasonKind.FACTS, facts=tuple(facts)),) if facts else ()
    reason = fault
    if fault is None:
        verdict = Verdict.HEALTHY
        if value is None:
            verdict, reason = Verdict.UNKNOWN, Reason(kind=ReasonKind.NOT_REPORTED)
    return Judgement(
        test=test,
        subject=subject,
        passes=1,
        value=value,
        verdict=verdict,
        reason=reason,
        evidence=evidence,
        action=Action.SETTING if fault else None,
        commands=tuple(commands) if fault else (),
    )


def fault_of(
    condition: Condition,
    value: float | None = None,
    limit: float | None = None,
    names: Sequence[str] = (),
) -> Reason:
    """Return the reason that states a condition."""
    return Reason(
        kind=ReasonKind.CONDITION,
        condition=condition,
        value=value,
        limit=limit,
        names=tuple(names),
    )


def judge_environment(facts: EnvironmentFacts) -> list[Judgement]:
    """Return the judgements that need no work of the devices.

    Facts of GPUs are left out on CPU workers. A variable has a judgement of its own if its value
    costs time; on CPU workers also if only GPUs would use it.
    """
    judged = list(_cluster_facts(facts))
    for rule in _RULES:
        if facts.is_cuda or not rule.is_of_gpus:
            judged += _apply(rule, facts)
    for variable in COSTLY_VARIABLES:
        judged += _costly(variable, facts)
    return judged


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A device, or a node with its devices, to which a rule applies."""

    subject: Subject
    # The device, or the first device of the node.
    device: Device
    # All devices of the node, or the device alone.
    devices: tuple[Device, ...]
    host: HostFacts | None


# None if the figure is unknown.
_Figure = Callable[[_Place], float | None]


def _no_names(_: _Place) -> tuple[str, ...]:
    return ()


def _no_facts(_: _Place) -> list[FactValue]:
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """A check of one figure of each device or node, against a limit."""

    test: str
    # "" for a switch.
    unit: str
    value: _Figure
    # A smaller figure is a fault. A function gets the place.
    least: float | _Figure | None = None
    # How far below `least` a figure may be.
    tolerance: float = 0.0
    # A larger figure is a fault.
    most: float | _Figure | None = None
    # The largest figure of the places of the same model is `least`.
    is_like_others: bool = False
    condition: Condition
    command: CommandKind
    # Names in the reason.
    names: Callable[[_Place], tuple[str, ...]] = _no_names
    # Evidence.
    shows: Callable[[_Place], list[FactValue]] = _no_facts
    # A fault of such a place is bad, not a note.
    is_grave: Callable[[_Place], bool] = lambda _: False
    of: Literal["device", "node"] = "device"
    is_of_gpus: bool = True


def _gib(size_bytes: float | None) -> float | None:
    return None if size_bytes is None else size_bytes / GIB


def _switch(is_on: bool | None) -> float | None:
    return None if is_on is None else float(is_on)


def _limits(place: _Place) -> tuple[str, ...]:
    """Return why the clocks of a device are limited; being idle is no such reason."""
    return tuple(reason for reason in place.device.throttle_reasons if reason != "idle")


def _limit_count(place: _Place) -> float | None:
    # Without a clock NVML has reported nothing, and then no reason means nothing.
    limits = _limits(place)
    return float(len(limits)) if limits or place.device.sm_clock_mhz is not None else None


def _memlock_gib(place: _Place) -> float | None:
    return None if place.host is None else place.host.memlock_bytes / GIB


def _least_memlock_gib(place: _Place) -> float | None:
    """Return what RDMA needs; None if the host has no adapter for RDMA."""
    return _LEAST_MEMLOCK_GIB if place.host is not None and place.host.rdma_adapters else None


def _load(place: _Place) -> float | None:
    return None if place.host is None else place.host.load


def _cores(place: _Place) -> float | None:
    return None if place.host is None else float(place.host.cores)


def _interface_speed(place: _Place) -> float | None:
    """Return the Gbit/s of the fastest network interface; None if unknown."""
    speeds = () if place.host is None else place.host.interfaces.values()
    return max(speeds, default=0.0) or None


def _interfaces(place: _Place) -> list[FactValue]:
    speeds = {} if place.host is None else place.host.interfaces
    return [
        FactValue(name=name, value=f"{speed:g} Gbit/s" if speed else "")
        for name, speed in speeds.items()
    ]


def _nvlinks(place: _Place) -> float | None:
    links = read_topology(place.device).nvlinks
    return None if links is None else float(links)


_RULES = (
    _Rule(
        test="devices per node",
        unit="devices",
        value=lambda place: float(len(place.devices)),
        is_like_others=True,
        condition=Condition.FEW_DEVICES,
        command=CommandKind.SHOW_KERNEL_LOG,
        of="node",
        is_of_gpus=False,
    ),
    _Rule(
        test="load",
        unit="load average",
        value=_load,
        most=_cores,
        condition=Condition.LOAD,
        command=CommandKind.SHOW_ALL_CPU_LOAD,
        of="node",
        is_of_gpus=False,
    ),
    _Rule(
        test="threads",
        unit="threads",
        value=lambda place: float(sum(one.omp_num_threads for one in place.devices)),
        most=lambda place: float(min(one.cpu_count for one in place.devices)),
        condition=Condition.MANY_THREADS,
        command=CommandKind.LIMIT_THREADS,
        of="node",
        is_of_gpus=False,
    ),
    _Rule(
        test="niceness",
        unit="niceness",
        value=lambda place: float(place.device.niceness),
        most=0.0,
        condition=Condition.NICENESS,
        command=CommandKind.RESTART_RAY,
        is_of_gpus=False,
    ),
    _Rule(
        test="disk",
        unit="GiB free",
        value=lambda place: _gib(place.device.disk_free_bytes),
        least=_LEAST_DISK_GIB,
        condition=Condition.LITTLE_DISK,
        command=CommandKind.SHOW_DISK,
        of="node",
        is_of_gpus=False,
    ),
    _Rule(
        test="/dev/shm",
        unit="GiB free",
        value=lambda place: _gib(place.device.shm_free_bytes),
        least=_LEAST_SHM_GIB,
        condition=Condition.LITTLE_SHM,
        command=CommandKind.ENLARGE_SHM,
        of="node",
        is_of_gpus=False,
    ),
    _Rule(
        test="memlock",
        unit="GiB",
        value=_memlock_gib,
        least=_least_memlock_gib,
        condition=Condition.LITTLE_MEMLOCK,
        command=CommandKind.RAISE_MEMLOCK,
        of="node",
    ),
    _Rule(
        test="network",
        unit="Gbit/s",
        value=_interface_speed,
        shows=_interfaces,
        is_like_others=True,
        condition=Condition.SLOW_INTERFACE,
        command=CommandKind.SHOW_INTERFACES,
        of="node",
        is_of_gpus=False,
    ),
    _Rule(
        test="clocks",
        unit="MHz at most",
        value=lambda place: place.device.sm_clock_max_mhz,
        is_like_others=True,
        condition=Condition.LOW_CLOCKS,
        command=CommandKind.RESET_CLOCKS,
    ),
    _Rule(
        test="throttling",
        unit="reasons",
        value=_limit_count,
        most=0.0,
        condition=Condition.THROTTLED,
        command=CommandKind.SHOW_THROTTLING,
        names=_limits,
        is_grave=lambda place: not _BY_HARDWARE.isdisjoint(place.device.throttle_reasons),
    ),
    _Rule(
        test="power cap",
        unit="W",
        value=lambda place: place.device.power_cap_w,
        least=lambda place: place.device.power_cap_default_w,
        tolerance=_POWER_ROUNDING_W,
        condition=Condition.POWER_CAP,
        command=CommandKind.SET_POWER_LIMIT,
    ),
    _Rule(
        test="temperature",
        unit="°C",
        value=lambda place: place.device.temperature_c,
        most=_WARM_C,
        condition=Condition.WARM,
        command=CommandKind.SHOW_TEMPERATURE,
    ),
    _Rule(
        test="MIG",
        unit="",
        value=lambda place: _switch(place.device.mig_mode),
        most=0.0,
        condition=Condition.MIG_ON,
        command=CommandKind.TURN_MIG_OFF,
    ),
    _Rule(
        test="persistence",
        unit="",
        value=lambda place: _switch(place.device.persistence_mode),
        least=1.0,
        condition=Condition.PERSISTENCE_OFF,
        command=CommandKind.TURN_PERSISTENCE_ON,
    ),
    _Rule(
        test="ECC",
        unit="",
        value=lambda place: _switch(place.device.ecc_mode),
        least=1.0,
        condition=Condition.ECC_OFF,
        command=CommandKind.TURN_ECC_ON,
    ),
    _Rule(
        test="NVLink",
        unit="active links",
        value=_nvlinks,
        is_like_others=True,
        condition=Condition.FEW_NVLINKS,
        command=CommandKind.SHOW_NVLINKS,
    ),
    _Rule(
        test="other processes",
        unit="processes",
        value=lambda place: place.device.other_processes,
        most=0.0,
        condition=Condition.OTHER_PROCESSES,
        command=CommandKind.SHOW_GPU_PROCESSES,
    ),
)


def _places(rule: _Rule, facts: EnvironmentFacts) -> Iterator[_Place]:
    hosts = facts.hosts
    if rule.of == "node":
        for node_id, ranks in facts.nodes.items():
            devices = tuple(facts.devices[rank] for rank in ranks)
            subject = facts.node(node_id)
            host = hosts.get(node_id)
            yield _Place(subject=subject, device=devices[0], devices=devices, host=host)
        return
    for device, subject in zip(facts.devices, facts.subjects, strict=True):
        host = hosts.get(device.node_id)
        yield _Place(subject=subject, device=device, devices=(device,), host=host)


def _apply(rule: _Rule, facts: EnvironmentFacts) -> Iterator[Judgement]:
    """Yield the judgement of each place by one rule."""
    test = environment_test(rule.test, rule.unit)
    places = list(_places(rule, facts))
    largest: dict[str, float] = {}
    for place in places:
        model, figure = place.device.name, rule.value(place) or 0.0
        largest[model] = max(largest.get(model, 0.0), figure)
    for place in places:
        value = rule.value(place)
        least = largest[place.device.name] if rule.is_like_others else _bound(rule.least, place)
        most, fault, limit = _bound(rule.most, place), None, None
        if value is not None and least is not None and value < least - rule.tolerance:
            limit = least
        elif value is not None and most is not None and value > most:
            limit = most
        if limit is not None:
            fault = fault_of(rule.condition, value, limit, rule.names(place))
        hosts, uuid = (place.device.host,), place.device.uuid
        yield fact(
            test,
            place.subject,
            value,
            fault=fault,
            verdict=Verdict.BAD if rule.is_grave(place) else Verdict.NOTE,
            facts=rule.shows(place),
            commands=(Command(kind=rule.command, hosts=hosts, uuid=uuid, value=limit or 0.0),),
        )


def _bound(bound: float | _Figure | None, place: _Place) -> float | None:
    return bound(place) if callable(bound) else bound


def _cluster_facts(facts: EnvironmentFacts) -> Iterator[Judgement]:
    """Yield the judgements about all devices together."""
    cluster, hosts = facts.cluster, facts.host_names
    models = Counter(device.name for device in facts.devices)
    yield fact(
        environment_test("models", "models"),
        cluster,
        float(len(models)),
        fault=fault_of(Condition.SEVERAL_MODELS, float(len(models))) if len(models) > 1 else None,
        facts=[FactValue(name=name, value=f"x {count}") for name, count in models.most_common()],
    )
    yield fact(
        environment_test("missing devices", "devices"),
        cluster,
        float(facts.missing),
        fault=fault_of(Condition.MISSING_DEVICES, float(facts.missing)) if facts.missing else None,
        verdict=Verdict.BAD,
        commands=(Command(kind=CommandKind.SHOW_RAY),),
    )
    others = facts.other_sweeps
    yield fact(
        environment_test("other sweeps", "sweeps"),
        cluster,
        float(len(others)),
        fault=fault_of(Condition.OTHER_SWEEPS, names=others) if others else None,
        commands=(Command(kind=CommandKind.WAIT),),
    )
    versions = {
        name: [
            one.driver_version if name == "driver" else one.versions.get(name)
            for one in facts.devices
        ]
        for name in _VERSIONS[: None if facts.is_cuda else -3]
    }
    wanted = [
        f"{name}=={newest}"
        for name in _PACKAGES
        if (newest := max((one or "" for one in versions[name]), default=""))
    ]
    yield _alike(
        environment_test("versions", "versions"),
        facts,
        versions,
        Condition.VERSIONS_DIFFER,
        Command(kind=CommandKind.INSTALL, names=tuple(wanted), hosts=hosts),
    )
    names = sorted({name for device in facts.devices for name in device.libraries})
    yield _alike(
        environment_test("libraries", "files"),
        facts,
        {name: [device.libraries.get(name) for device in facts.devices] for name in names},
        Condition.LIBRARIES_DIFFER,
        Command(kind=CommandKind.RESTART_RAY, hosts=hosts),
    )
    variables = {name for device in facts.devices for name in device.environment}
    yield _alike(
        environment_test("variables", "variables"),
        facts,
        {
            name: [device.environment.get(name) for device in facts.devices]
            for name in sorted(variables - _SET_BY_RAYBENCH)
        },
        Condition.VARIABLES_DIFFER,
        Command(kind=CommandKind.RESTART_RAY, hosts=hosts),
    )


def _alike(
    test: HealthTest,
    facts: EnvironmentFacts,
    values: Mapping[str, Sequence[str | None]],
    condition: Condition,
    command: Command,
) -> Judgement:
    """Return the judgement of texts that should be equal on all devices.

    Different versions are bad. Only a variable may be missing: other texts are unknown then.

    Args:
        values: name -> text of each device.
    """
    differing, shown = [], []
    for name, texts in values.items():
        owners: dict[str | None, list[str]] = {}
        for text, subject in zip(texts, facts.subjects, strict=True):
            if text is not None or condition is Condition.VARIABLES_DIFFER:
                owners.setdefault(text, []).append(subject.name)
        if len(owners) > 1:
            differing.append(name)
        for text, subjects in owners.items():
            named = tuple(subjects) if len(owners) > 1 else ()
            shown.append(FactValue(name=name, value=text, subjects=named))
    is_grave = condition is Condition.VERSIONS_DIFFER
    return fact(
        test,
        facts.cluster,
        float(len(values)),
        fault=fault_of(condition, names=differing) if differing else None,
        verdict=Verdict.BAD if is_grave else Verdict.NOTE,
        facts=shown,
        commands=(command,),
    )


def _costly(variable: CostlyVariable, facts: EnvironmentFacts) -> Iterator[Judgement]:
    """Yield a judgement if a worker has a costly value of the variable."""
    given = [device.environment.get(variable.name, "").strip() for device in facts.devices]
    costly = [bool(value) and variable.is_costly(value) for value in given]
    if not any(costly) or (variable.is_between_nodes and len(facts.nodes) < 2):
        return
    has_nvlink = any(read_topology(device).nvlinks for device in facts.devices)
    is_used = facts.is_cuda or not variable.is_of_gpus
    is_needed = variable.needs_nvlink and not has_nvlink
    values = dict.fromkeys(value for value, is_one in zip(given, costly, strict=True) if is_one)
    owners = [one.name for one, is_one in zip(facts.subjects, costly, strict=True) if is_one]
    shown = [] if all(costly) else [FactValue(name=variable.name, subjects=tuple(owners))]
    yield fact(
        environment_test(variable.name, "devices"),
        facts.cluster,
        float(len(owners)),
        fault=fault_of(
            Condition.COSTLY_VARIABLE, limit=float(is_used), names=(variable.name, *values)
        ),
        verdict=variable.verdict if is_used and not is_needed else Verdict.NOTE,
        facts=shown,
        commands=(Command(kind=CommandKind.UNSET, names=(variable.name,)),),
    )
