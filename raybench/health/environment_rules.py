"""The rules of the stage `environment`: a figure of each device or node, and its limit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from raybench.conversion import GIB
from raybench.health.environment_facts import (
    EnvironmentFacts,
    environment_test,
    fault,
    judge_fact,
)
from raybench.health.verdicts import Judgement
from raybench.records.conditions import Condition, FactValue
from raybench.records.device import Device
from raybench.records.devices import HostFacts, Subject, Verdict, read_topology
from raybench.records.judgement import Command, CommandKind

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A device, or a node with its devices, to which a rule applies."""

    subject: Subject
    # The device, or the first device of the node.
    device: Device
    # All devices of the node, or the device alone.
    devices: tuple[Device, ...]
    # None if the host was not read.
    host: HostFacts | None


# None if the figure is unknown.
_Figure = Callable[[_Place], float | None]


def _no_names(_: _Place) -> tuple[str, ...]:
    return ()


def _no_facts(_: _Place) -> list[FactValue]:
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
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
    # What the reason of a fault says.
    condition: Condition
    command: CommandKind
    # Instead of `command`, where there is no cluster of `ray start`.
    private_command: CommandKind | None = None
    # Names for the words of the reason.
    names: Callable[[_Place], tuple[str, ...]] = _no_names
    # Facts for the report.
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


RULES: tuple[Rule, ...] = (
    Rule(
        test="devices per node",
        unit="devices",
        value=lambda place: float(len(place.devices)),
        is_like_others=True,
        condition=Condition.FEW_DEVICES,
        command=CommandKind.SHOW_KERNEL_LOG,
        of="node",
        is_of_gpus=False,
    ),
    Rule(
        test="load",
        unit="load average",
        value=_load,
        most=_cores,
        condition=Condition.LOAD,
        command=CommandKind.SHOW_ALL_CPU_LOAD,
        of="node",
        is_of_gpus=False,
    ),
    Rule(
        test="threads",
        unit="threads",
        value=lambda place: float(sum(one.omp_num_threads for one in place.devices)),
        most=lambda place: float(min(one.cpu_count for one in place.devices)),
        condition=Condition.MANY_THREADS,
        command=CommandKind.LIMIT_THREADS,
        of="node",
        is_of_gpus=False,
    ),
    Rule(
        test="niceness",
        unit="niceness",
        value=lambda place: float(place.device.niceness),
        most=0.0,
        condition=Condition.NICENESS,
        command=CommandKind.RESTART_RAY,
        private_command=CommandKind.START_WITHOUT_NICE,
        is_of_gpus=False,
    ),
    Rule(
        test="disk",
        unit="GiB free",
        value=lambda place: _gib(place.device.disk_free_bytes),
        least=_LEAST_DISK_GIB,
        condition=Condition.LITTLE_DISK,
        command=CommandKind.SHOW_DISK,
        of="node",
        is_of_gpus=False,
    ),
    Rule(
        test="/dev/shm",
        unit="GiB free",
        value=lambda place: _gib(place.device.shm_free_bytes),
        least=_LEAST_SHM_GIB,
        condition=Condition.LITTLE_SHM,
        command=CommandKind.ENLARGE_SHM,
        of="node",
        is_of_gpus=False,
    ),
    Rule(
        test="memlock",
        unit="GiB",
        value=_memlock_gib,
        least=_least_memlock_gib,
        condition=Condition.LITTLE_MEMLOCK,
        command=CommandKind.RAISE_MEMLOCK,
        of="node",
    ),
    Rule(
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
    Rule(
        test="clocks",
        unit="MHz at most",
        value=lambda place: place.device.sm_clock_max_mhz,
        is_like_others=True,
        condition=Condition.LOW_CLOCKS,
        command=CommandKind.RESET_CLOCKS,
    ),
    Rule(
        test="throttling",
        unit="reasons",
        value=_limit_count,
        most=0.0,
        condition=Condition.THROTTLED,
        command=CommandKind.SHOW_THROTTLING,
        names=_limits,
        is_grave=lambda place: not _BY_HARDWARE.isdisjoint(place.device.throttle_reasons),
    ),
    Rule(
        test="power cap",
        unit="W",
        value=lambda place: place.device.power_cap_w,
        least=lambda place: place.device.power_cap_default_w,
        tolerance=_POWER_ROUNDING_W,
        condition=Condition.POWER_CAP,
        command=CommandKind.SET_POWER_LIMIT,
    ),
    Rule(
        test="temperature",
        unit="°C",
        value=lambda place: place.device.temperature_c,
        most=_WARM_C,
        condition=Condition.WARM,
        command=CommandKind.SHOW_TEMPERATURE,
    ),
    Rule(
        test="MIG",
        unit="",
        value=lambda place: _switch(place.device.mig_mode),
        most=0.0,
        condition=Condition.MIG_ON,
        command=CommandKind.TURN_MIG_OFF,
    ),
    Rule(
        test="persistence",
        unit="",
        value=lambda place: _switch(place.device.persistence_mode),
        least=1.0,
        condition=Condition.PERSISTENCE_OFF,
        command=CommandKind.TURN_PERSISTENCE_ON,
    ),
    Rule(
        test="ECC",
        unit="",
        value=lambda place: _switch(place.device.ecc_mode),
        least=1.0,
        condition=Condition.ECC_OFF,
        command=CommandKind.TURN_ECC_ON,
    ),
    Rule(
        test="NVLink",
        unit="active links",
        value=_nvlinks,
        is_like_others=True,
        condition=Condition.FEW_NVLINKS,
        command=CommandKind.SHOW_NVLINKS,
    ),
    Rule(
        test="other processes",
        unit="processes",
        value=lambda place: place.device.other_processes,
        most=0.0,
        condition=Condition.OTHER_PROCESSES,
        command=CommandKind.SHOW_GPU_PROCESSES,
    ),
)


def _places(rule: Rule, facts: EnvironmentFacts) -> Iterator[_Place]:
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


def apply_rule(rule: Rule, facts: EnvironmentFacts) -> Iterator[Judgement]:
    """Yield the judgement of each place by one rule."""
    test = environment_test(rule.test, rule.unit)
    places = list(_places(rule, facts))
    kind = rule.command
    if facts.is_private and rule.private_command is not None:
        kind = rule.private_command
    largest: dict[str, float] = {}
    for place in places:
        model, figure = place.device.name, rule.value(place) or 0.0
        largest[model] = max(largest.get(model, 0.0), figure)
    for place in places:
        value = rule.value(place)
        least = largest[place.device.name] if rule.is_like_others else _bound(rule.least, place)
        most = _bound(rule.most, place)
        # The limit that the figure violates.
        limit = None
        if value is not None and least is not None and value < least - rule.tolerance:
            limit = least
        elif value is not None and most is not None and value > most:
            limit = most
        violation = None
        if limit is not None:
            device = place.device
            violation = fault(
                rule.condition,
                Command(kind=kind, hosts=(device.host,), uuid=device.uuid, value=limit),
                value=value,
                limit=limit,
                names=rule.names(place),
                verdict=Verdict.BAD if rule.is_grave(place) else Verdict.NOTE,
            )
        yield judge_fact(test, place.subject, value, violation, rule.shows(place))


def _bound(bound: float | _Figure | None, place: _Place) -> float | None:
    return bound(place) if callable(bound) else bound
