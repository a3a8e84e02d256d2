"""What made a subject slow: other programs, limited clocks, its link, or what all devices share.

A cause is returned as a `Diagnosis`: evidence in kinds and numbers, and what to do. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from raybench.health.readings import Reading, link_of
from raybench.health.suite import HealthTest
from raybench.records.device import Device
from raybench.records.devices import Action, Subject
from raybench.records.judgement import Command, CommandKind, Reason, ReasonKind
from raybench.records.other_program import OtherProgram

MOST_PROGRAMS = 3
# NVML's reasons for limited clocks.
_HEAT = frozenset({"thermal_sw", "thermal_hw"})
_SUPPLY = frozenset({"power_brake", "hw_slowdown"})
_HARMLESS = frozenset({"idle", "sync_boost", "display_clocks"})
# Usual under load, unless the power limit is below its default.
_POWER_CAP = "power_cap"
# A power limit counts as lower only if it is this share below the default: the driver rounds it.
_MIN_POWER_SHARE = 0.01
# Stages whose figures do not depend on the clocks of the multiprocessors.
_CLOCKLESS = ("facts", "host-links", "pairs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What made a subject slow, as evidence, and what to do about it."""

    evidence: tuple[Reason, ...]
    # None: the evidence does not change what to do.
    action: Action | None = None
    commands: tuple[Command, ...] = ()


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class Circumstances:
    """What happened beside the tests of a check."""

    readings: Sequence[Reading]
    # Devices, as `devices_by_uuid` returns them.
    by_uuid: Mapping[str, Device]

    @cached_property
    def _throttled_readings(self) -> dict[str, list[Reading]]:
        """Uuid of a device -> readings with limited clocks."""
        throttled: dict[str, list[Reading]] = {}
        for reading in self.readings:
            if reading.throttle_reasons:
                throttled.setdefault(reading.subject.uuids[0], []).append(reading)
        return throttled

    @cached_property
    def _routes(self) -> dict[tuple[str, tuple[str, ...]], tuple[str, ...]]:
        """(name of a test, uuids of a pair) -> routes from both ends."""
        routes = {}
        for reading in self.readings:
            if any(reading.routes):
                routes[reading.test.name, reading.subject.uuids] = reading.routes
        return routes

    @cached_property
    def _programs(self) -> dict[tuple[str, str], list[OtherProgram]]:
        """(host, uuid of a GPU or "" for cores) -> programs, most frequent first."""
        # (identity of a program, uuid of a GPU) -> its state when it was busiest.
        busiest: dict[object, OtherProgram] = {}
        counts = Counter[object]()
        # All readings of a point have the same programs.
        programs_of_points = {}
        for reading in self.readings:
            if reading.programs:
                programs_of_points[reading.point_id, reading.pass_number] = reading.programs
        for programs in programs_of_points.values():
            for program in programs:
                key = program.key, program.device_uuid
                counts[key] += 1
                earlier = busiest.get(key)
                if earlier is None or (program.busy_cores or 0) > (earlier.busy_cores or 0):
                    busiest[key] = program
        by_place: dict[tuple[str, str], list[OtherProgram]] = {}
        for identity, _ in counts.most_common():
            program = busiest[identity]
            by_place.setdefault((program.host, program.device_uuid), []).append(program)
        return by_place

    def programs_on(self, devices: Iterable[Device]) -> tuple[OtherProgram, ...]:
        """Return the busiest programs on these GPUs, or on the hosts of these CPU workers."""
        programs: dict[object, OtherProgram] = {}
        for device in devices:
            uuid = device.uuid if device.kind == "cuda" else ""
            for program in self._programs.get((device.host, uuid), ()):
                programs.setdefault(program.key, program)
        # A stable sort: programs on GPUs, whose load is unknown, stay ordered by frequency.
        busiest = sorted(
            programs.values(), key=lambda program: program.busy_cores or 0.0, reverse=True
        )
        return tuple(busiest[:MOST_PROGRAMS])

    def limits_of(self, uuid: str, test: HealthTest) -> frozenset[str]:
        """Return why the clocks of a device were limited in a test."""
        reasons: set[str] = set()
        for reading in self._throttled_readings.get(uuid, ()):
            if reading.test.name == test.name:
                reasons.update(reading.throttle_reasons)
        return frozenset(reasons - _HARMLESS)

    def first_pass(self, uuid: str, reasons: frozenset[str]) -> int:
        """Return the first pass with clocks limited by one of these reasons; 0: before any work."""
        device = self.by_uuid.get(uuid)
        if device is not None and reasons & set(device.throttle_reasons):
            return 0
        passes = []
        for reading in self._throttled_readings.get(uuid, ()):
            if reasons & set(reading.throttle_reasons):
                passes.append(reading.pass_number)
        return min(passes, default=0)

    def hottest_c(self, uuid: str) -> float | None:
        """Return the highest known temperature of a device in the check."""
        device = self.by_uuid.get(uuid)
        temperatures = [] if device is None else [device.temperature_c]
        for reading in self._throttled_readings.get(uuid, ()):
            temperatures.append(reading.temperature_c)
        return max((known_c for known_c in temperatures if known_c is not None), default=None)

    def routes_of(self, uuids: tuple[str, ...], test: HealthTest) -> tuple[str, ...]:
        """Return what carried the data from each end of a pair, as NCCL names it."""
        return self._routes.get((test.name, uuids), ())


def of_programs(programs: Sequence[OtherProgram]) -> Diagnosis | None:
    """Return that other programs used the devices; None without programs."""
    if not programs:
        return None
    by_host: dict[str, list[int]] = {}
    for program in programs:
        by_host.setdefault(program.host, []).append(program.process_id)
    commands = tuple(
        Command(kind=CommandKind.SHOW_PROGRAMS, hosts=(host,), numbers=tuple(numbers))
        for host, numbers in by_host.items()
    )
    evidence = Reason(kind=ReasonKind.PROGRAMS, programs=tuple(programs))
    return Diagnosis(evidence=(evidence,), action=Action.WAIT, commands=commands)


def of_device(test: HealthTest, uuid: str, beside: Circumstances) -> Diagnosis | None:
    """Return why one device was slow in a test; None if unknown."""
    device = beside.by_uuid.get(uuid)
    if device is None:
        return None
    if diagnosis := of_programs(beside.programs_on([device])):
        return diagnosis
    if device.kind == "cuda" and test.blames_host:
        show = Command(kind=CommandKind.SHOW_CPU_LOAD, hosts=(device.host,))
        evidence = (Reason(kind=ReasonKind.PACED_BY_HOST),)
        return Diagnosis(evidence=evidence, action=Action.WATCH, commands=(show,))
    if device.kind == "cpu" or test.stage in _CLOCKLESS:
        return None
    limits = beside.limits_of(uuid, test)
    if diagnosis := _of_limits(limits, uuid, beside):
        return diagnosis
    cap, default = device.power_cap_w, device.power_cap_default_w
    other_caps_w = []
    for other in beside.by_uuid.values():
        if other.name == device.name and other != device:
            other_caps_w.append(other.power_cap_w or 0.0)
    usual = max(other_caps_w, default=default or 0.0)
    # A limit that the other devices have too does not explain why this device is slower.
    if not _is_capped(device) or cap is None or default is None or cap >= min(usual, default):
        return None
    reasons = [Reason(kind=ReasonKind.POWER_LIMIT, value=cap, limit=default)]
    if _POWER_CAP in limits:
        reasons.insert(0, _throttled(frozenset({_POWER_CAP}), uuid, beside))
    kind = CommandKind.SET_POWER_LIMIT
    command = Command(kind=kind, uuid=device.uuid, hosts=(device.host,), value=default)
    return Diagnosis(evidence=tuple(reasons), action=Action.SETTING, commands=(command,))


def _of_limits(limits: frozenset[str], uuid: str, beside: Circumstances) -> Diagnosis | None:
    """Return that heat or the power supply limited the clocks of a device."""
    device = beside.by_uuid[uuid]
    if supply := limits & _SUPPLY:
        kind = CommandKind.SHOW_POWER
        show = Command(kind=kind, uuid=device.uuid, hosts=(device.host,))
        evidence = (_throttled(supply, uuid, beside),)
        return Diagnosis(evidence=evidence, action=Action.SUPPLY, commands=(show,))
    if heat := limits & _HEAT:
        reasons = [_throttled(heat, uuid, beside)]
        hottest_c = beside.hottest_c(uuid)
        if hottest_c is not None:
            reasons.append(Reason(kind=ReasonKind.TEMPERATURE, value=hottest_c))
        kind = CommandKind.SHOW_TEMPERATURE
        show = Command(kind=kind, uuid=device.uuid, hosts=(device.host,))
        return Diagnosis(evidence=tuple(reasons), action=Action.COOL, commands=(show,))
    return None


def _throttled(reasons: frozenset[str], uuid: str, beside: Circumstances) -> Reason:
    return Reason(
        kind=ReasonKind.THROTTLED,
        names=tuple(sorted(reasons)),
        value=beside.first_pass(uuid, reasons),
    )


def _is_capped(device: Device) -> bool:
    """Return whether the power limit is below the default."""
    cap, default = device.power_cap_w, device.power_cap_default_w
    return cap is not None and default is not None and cap < (1 - _MIN_POWER_SHARE) * default


def of_link(test: HealthTest, uuids: tuple[str, ...], beside: Circumstances) -> Diagnosis:
    """Return what carries the data of a slow pair, or of a path between two nodes.

    Args:
        uuids: of the devices at both ends.
    """
    devices = [beside.by_uuid[uuid] for uuid in uuids if uuid in beside.by_uuid]
    hosts = tuple(dict.fromkeys(device.host for device in devices))
    if len(hosts) < 2:
        subject = Subject(kind="pair", uuids=uuids, name="", model="")
        link = link_of(subject, test.stage, beside.by_uuid)
        if link.nvlinks:
            return Diagnosis(evidence=(Reason(kind=ReasonKind.ON_NVLINK, value=link.nvlinks),))
        if link.pcie:
            reason = Reason(kind=ReasonKind.ON_PCIE, names=(link.pcie, link.level))
            return Diagnosis(evidence=(reason,))
        return Diagnosis(evidence=())
    routes = beside.routes_of(uuids, test)
    if all(routes) and len(routes) == 2 and len(devices) == 2:
        ends = [f"{route} of {device.host}" for route, device in zip(routes, devices, strict=True)]
        return Diagnosis(evidence=(Reason(kind=ReasonKind.ON_NETWORK, names=tuple(ends)),))
    return of_network(devices)


def of_network(devices: Sequence[Device]) -> Diagnosis:
    """Return the network interfaces of the hosts of these devices."""
    interfaces = {device.host: device.interface for device in devices if device.interface}
    if not interfaces or len(interfaces) < len({device.host for device in devices}):
        return Diagnosis(evidence=())
    ends = [f"{interface} of {host}" for host, interface in interfaces.items()]
    kind = CommandKind.SHOW_INTERFACE
    return Diagnosis(
        evidence=(Reason(kind=ReasonKind.ON_NETWORK, names=tuple(ends)),),
        action=Action.WATCH,
        commands=tuple(
            Command(kind=kind, hosts=(host,), names=(interface,))
            for host, interface in interfaces.items()
        ),
    )


def of_all(
    test: HealthTest,
    devices: Sequence[Device],
    variables: Sequence[str],
    drivers: Sequence[str],
    beside: Circumstances,
) -> Diagnosis:
    """Return what all devices share that may make them slow alike.

    Args:
        variables: variables that are set and slow such a test down.
        drivers: driver versions of the reference values; empty if unknown.
    """
    diagnoses = []
    if diagnosis := of_programs(beside.programs_on(devices)):
        diagnoses.append(diagnosis)
    if variables:
        diagnoses.append(
            Diagnosis(
                evidence=(Reason(kind=ReasonKind.VARIABLES, names=tuple(variables)),),
                action=Action.SETTING,
                commands=(Command(kind=CommandKind.UNSET, names=tuple(variables)),),
            )
        )
    if test.stage not in _CLOCKLESS and not test.blames_host:
        diagnoses += _shared_limits(test, devices, beside)
    installed = tuple(sorted({device.driver_version or "" for device in devices} - {""}))
    if installed and drivers and not set(installed) & set(drivers):
        driver = Reason(kind=ReasonKind.DRIVER, names=installed, others=tuple(drivers))
        diagnoses.append(Diagnosis(evidence=(driver,)))
    if not diagnoses:
        return Diagnosis(evidence=(Reason(kind=ReasonKind.CANNOT_TELL),))
    evidence: tuple[Reason, ...] = ()
    for diagnosis in diagnoses:
        evidence += diagnosis.evidence
    first = next((diagnosis for diagnosis in diagnoses if diagnosis.action), diagnoses[0])
    return Diagnosis(evidence=evidence, action=first.action, commands=first.commands)


def _shared_limits(
    test: HealthTest, devices: Sequence[Device], beside: Circumstances
) -> list[Diagnosis]:
    """Return the power limit, and the reasons for limited clocks, that most devices share."""
    diagnoses = []
    capped = [device for device in devices if _is_capped(device)]
    if 2 * len(capped) > len(devices):
        lowest = min(capped, key=lambda device: device.power_cap_w or 0.0)
        limit = Reason(
            kind=ReasonKind.POWER_LIMIT, value=lowest.power_cap_w, limit=lowest.power_cap_default_w
        )
        hosts = dict.fromkeys(device.host for device in capped)
        kind, watts = CommandKind.SET_POWER_LIMITS, lowest.power_cap_default_w or 0.0
        commands = tuple(Command(kind=kind, hosts=(host,), value=watts) for host in hosts)
        diagnoses.append(Diagnosis(evidence=(limit,), action=Action.SETTING, commands=commands))
    subject_uuids = {device.uuid: uuid for uuid, device in beside.by_uuid.items()}
    limited: list[Diagnosis] = []
    for device in devices:
        if device.kind == "cuda":
            uuid = subject_uuids[device.uuid]
            diagnosis = _of_limits(beside.limits_of(uuid, test), uuid, beside)
            limited += [diagnosis] if diagnosis else []
    if 2 * len(limited) > len(devices):
        diagnoses.append(limited[0])
    return diagnoses
