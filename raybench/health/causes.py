"""What made a subject slow: other programs, limited clocks, its link, or what all devices share.

Each cause is evidence in kinds and numbers, and what to do about it. Pure.
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
# Reasons of NVML -> what to do. A power cap is normal unless it is below the default.
_HEAT = frozenset({"thermal_sw", "thermal_hw"})
_SUPPLY = frozenset({"power_brake", "hw_slowdown"})
# Reasons at the start that slow no work down.
_HARMLESS = frozenset({"idle", "sync_boost", "display_clocks"})
_POWER_CAP = "power_cap"
# A limit this far below the default matters; the driver rounds limits.
_MIN_POWER_SHARE = 0.01
# Stages whose figures do not depend on the clocks of the multiprocessors.
_CLOCKLESS = ("facts", "host-links", "pairs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Evidence for a cause, and what to do about it."""

    evidence: tuple[Reason, ...]
    # None: the evidence does not change what to do.
    action: Action | None = None
    commands: tuple[Command, ...] = ()


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class Circumstances:
    """What happened beside the tests of a check."""

    readings: Sequence[Reading]
    # Uuid as of `device_subjects` -> device.
    known: Mapping[str, Device]

    @cached_property
    def _of_devices(self) -> dict[str, list[Reading]]:
        """Uuid -> readings of a single device whose clocks were limited."""
        found: dict[str, list[Reading]] = {}
        for one in self.readings:
            if one.throttle_reasons:
                found.setdefault(one.subject.uuids[0], []).append(one)
        return found

    @cached_property
    def _routes(self) -> dict[tuple[str, tuple[str, ...]], tuple[str, ...]]:
        routes = {}
        for one in self.readings:
            if any(one.routes):
                routes[one.test.name, one.subject.uuids] = one.routes
        return routes

    @cached_property
    def _programs(self) -> dict[tuple[str, str], list[OtherProgram]]:
        """(host, uuid of a GPU or "" for cores) -> programs, most often seen first."""
        seen: dict[object, OtherProgram] = {}
        counts = Counter[object]()
        points = {
            (one.point_id, one.pass_number): one.programs for one in self.readings if one.programs
        }
        for programs in points.values():
            for program in programs:
                key = program.key, program.device_uuid
                counts[key] += 1
                earlier = seen.get(key)
                if earlier is None or (program.busy_cores or 0) > (earlier.busy_cores or 0):
                    seen[key] = program
        found: dict[tuple[str, str], list[OtherProgram]] = {}
        for identity, _ in counts.most_common():
            program = seen[identity]
            found.setdefault((program.host, program.device_uuid), []).append(program)
        return found

    def programs_on(self, devices: Iterable[Device]) -> tuple[OtherProgram, ...]:
        """Return the programs that used these devices; of a CPU worker those of its host."""
        found: dict[object, OtherProgram] = {}
        for device in devices:
            uuid = device.uuid if device.kind == "cuda" else ""
            for program in self._programs.get((device.host, uuid), ()):
                found.setdefault(program.key, program)
        # Stable: programs on GPUs, of which no load is known, stay in order of their points.
        busiest = sorted(found.values(), key=lambda one: one.busy_cores or 0.0, reverse=True)
        return tuple(busiest[:MOST_PROGRAMS])

    def limits_of(self, uuid: str, test: HealthTest) -> frozenset[str]:
        """Return why the clocks of a device were limited in a test."""
        reasons: set[str] = set()
        for one in self._of_devices.get(uuid, ()):
            if one.test.name == test.name:
                reasons.update(one.throttle_reasons)
        return frozenset(reasons - _HARMLESS)

    def first_pass(self, uuid: str, reasons: frozenset[str]) -> int:
        """Return the first pass with one of these limits; 0 if it was there before any work."""
        device = self.known.get(uuid)
        if device is not None and reasons & set(device.throttle_reasons):
            return 0
        passes = [
            one.pass_number
            for one in self._of_devices.get(uuid, ())
            if reasons & set(one.throttle_reasons)
        ]
        return min(passes, default=0)

    def hottest_c(self, uuid: str) -> float | None:
        """Return the highest known temperature of a device in the check."""
        device = self.known.get(uuid)
        known = [device.temperature_c] if device is not None else []
        known += [one.temperature_c for one in self._of_devices.get(uuid, ())]
        return max((one for one in known if one is not None), default=None)

    def routes_of(self, uuids: tuple[str, ...], test: HealthTest) -> tuple[str, ...]:
        """Return what carried the data from each end of a pair, as NCCL names it."""
        return self._routes.get((test.name, uuids), ())


def of_programs(programs: Sequence[OtherProgram]) -> Cause | None:
    """Return the cause that other programs used the devices."""
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
    return Cause(evidence=(evidence,), action=Action.WAIT, commands=commands)


def of_device(test: HealthTest, uuid: str, beside: Circumstances) -> Cause | None:
    """Return why one device was slow in a test: other programs, heat, its supply, its power limit.

    None if nothing is known.
    """
    device = beside.known.get(uuid)
    if device is None:
        return None
    if cause := of_programs(beside.programs_on([device])):
        return cause
    if device.kind == "cpu" or test.stage in _CLOCKLESS:
        return None
    limits = beside.limits_of(uuid, test)
    if cause := _of_limits(limits, uuid, beside):
        return cause
    cap, default = device.power_cap_w, device.power_cap_default_w
    alike = [one for one in beside.known.values() if one.name == device.name and one != device]
    usual = max((one.power_cap_w or 0.0 for one in alike), default=default or 0.0)
    # A limit that the other devices have too does not explain why this device is slower.
    if not _is_capped(device) or cap is None or default is None or cap >= min(usual, default):
        return None
    evidence = [Reason(kind=ReasonKind.POWER_LIMIT, value=cap, limit=default)]
    if _POWER_CAP in limits:
        evidence.insert(0, _throttled(frozenset({_POWER_CAP}), uuid, beside))
    kind = CommandKind.SET_POWER_LIMIT
    command = Command(kind=kind, uuid=device.uuid, hosts=(device.host,), value=default)
    return Cause(evidence=tuple(evidence), action=Action.SETTING, commands=(command,))


def _of_limits(limits: frozenset[str], uuid: str, beside: Circumstances) -> Cause | None:
    """Return the cause that the supply or heat limits the clocks of a device."""
    device = beside.known[uuid]
    if supply := limits & _SUPPLY:
        kind = CommandKind.SHOW_POWER
        show = Command(kind=kind, uuid=device.uuid, hosts=(device.host,))
        evidence = (_throttled(supply, uuid, beside),)
        return Cause(evidence=evidence, action=Action.SUPPLY, commands=(show,))
    if heat := limits & _HEAT:
        reasons = [_throttled(heat, uuid, beside)]
        hottest_c = beside.hottest_c(uuid)
        if hottest_c is not None:
            reasons.append(Reason(kind=ReasonKind.TEMPERATURE, value=hottest_c))
        kind = CommandKind.SHOW_TEMPERATURE
        show = Command(kind=kind, uuid=device.uuid, hosts=(device.host,))
        return Cause(evidence=tuple(reasons), action=Action.COOL, commands=(show,))
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


def of_link(test: HealthTest, uuids: tuple[str, ...], beside: Circumstances) -> Cause:
    """Return what carries the data of a slow pair, or of a path between two nodes.

    Args:
        uuids: of the devices at both ends.
    """
    devices = [beside.known[uuid] for uuid in uuids if uuid in beside.known]
    hosts = tuple(dict.fromkeys(device.host for device in devices))
    if len(hosts) < 2:
        subject = Subject(kind="pair", uuids=uuids, name="", model="")
        link = link_of(subject, test.stage, beside.known)
        if link.nvlinks:
            return Cause(evidence=(Reason(kind=ReasonKind.ON_NVLINK, value=link.nvlinks),))
        if link.pcie:
            reason = Reason(kind=ReasonKind.ON_PCIE, names=(link.pcie, link.level))
            return Cause(evidence=(reason,))
        return Cause(evidence=())
    routes = beside.routes_of(uuids, test)
    if all(routes) and len(routes) == 2 and len(devices) == 2:
        ends = [f"{route} of {device.host}" for route, device in zip(routes, devices, strict=True)]
        return Cause(evidence=(Reason(kind=ReasonKind.ON_NETWORK, names=tuple(ends)),))
    return of_network(devices)


def of_network(devices: Sequence[Device]) -> Cause:
    """Return the network interfaces of the hosts of these devices."""
    interfaces = {device.host: device.interface for device in devices if device.interface}
    if not interfaces or len(interfaces) < len({device.host for device in devices}):
        return Cause(evidence=())
    ends = [f"{interface} of {host}" for host, interface in interfaces.items()]
    kind = CommandKind.SHOW_INTERFACE
    return Cause(
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
) -> Cause:
    """Return what all devices share that may make them slow alike.

    Args:
        variables: those that are set and slow such a test down.
        drivers: driver versions of the reference values; empty if unknown.
    """
    causes = []
    if cause := of_programs(beside.programs_on(devices)):
        causes.append(cause)
    if variables:
        causes.append(
            Cause(
                evidence=(Reason(kind=ReasonKind.VARIABLES, names=tuple(variables)),),
                action=Action.SETTING,
                commands=(Command(kind=CommandKind.UNSET, names=tuple(variables)),),
            )
        )
    if test.stage not in _CLOCKLESS:
        causes += _shared_limits(test, devices, beside)
    here = tuple(sorted({device.driver_version or "" for device in devices} - {""}))
    if here and drivers and not set(here) & set(drivers):
        driver = Reason(kind=ReasonKind.DRIVER, names=here, others=tuple(drivers))
        causes.append(Cause(evidence=(driver,)))
    if not causes:
        return Cause(evidence=(Reason(kind=ReasonKind.CANNOT_TELL),))
    evidence: tuple[Reason, ...] = ()
    for cause in causes:
        evidence += cause.evidence
    first = next((cause for cause in causes if cause.action), causes[0])
    return Cause(evidence=evidence, action=first.action, commands=first.commands)


def _shared_limits(
    test: HealthTest, devices: Sequence[Device], beside: Circumstances
) -> list[Cause]:
    """Return the power limit or the limits of the clocks that most of the devices share."""
    causes = []
    capped = [device for device in devices if _is_capped(device)]
    if 2 * len(capped) > len(devices):
        lowest = min(capped, key=lambda device: device.power_cap_w or 0.0)
        limit = Reason(
            kind=ReasonKind.POWER_LIMIT, value=lowest.power_cap_w, limit=lowest.power_cap_default_w
        )
        hosts = dict.fromkeys(device.host for device in capped)
        kind, watts = CommandKind.SET_POWER_LIMITS, lowest.power_cap_default_w or 0.0
        commands = tuple(Command(kind=kind, hosts=(host,), value=watts) for host in hosts)
        causes.append(Cause(evidence=(limit,), action=Action.SETTING, commands=commands))
    by_uuid = {device.uuid: uuid for uuid, device in beside.known.items()}
    limited = []
    for device in devices:
        uuid = by_uuid.get(device.uuid, "")
        if cause := device.kind == "cuda" and _of_limits(
            beside.limits_of(uuid, test), uuid, beside
        ):
            limited.append(cause)
    if 2 * len(limited) > len(devices):
        causes.append(limited[0])
    return causes
