"""The checks of `raybench doctor` that need no work of the devices: each a line with its advice.

A check of one fact of each GPU is a row of `_GPU_RULES`; other checks are functions below it. A
fact that nobody tells is shown as unknown, and is no reason for a warning. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

from ruamel.yaml import YAML

from raybench.health.readings import FREE_MEMORY, MEMORY_ERRORS, PCIE_LANES, facts_readings
from raybench.records import Device
from raybench.records.devices import DeviceFacts
from raybench.report.formatting import some
from raybench.report.plain_text import counted

_UNKNOWN = "unknown"
_GIB = 2**30
# Room for compiled kernels and logs.
_LEAST_DISK_BYTES = _GIB
# The default of Docker is 64 MiB, in which NCCL fails with more than a few ranks.
_LEAST_SHM_BYTES = _GIB // 2
# Data-centre GPUs slow down at about 85 to 90 degrees; before any work they should be far below.
_WARM_C = 75.0
# The driver rounds caps.
_POWER_ROUNDING_W = 1.0
_VERSIONS = ("raybench", "python", "torch", "ray", "cuda", "nccl", "driver")
_VARIABLE_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "CUDA_", "GLOO_", "NVIDIA_")
# raybench sets these itself, for each node or worker to what is right there.
_SET_BY_RAYBENCH = frozenset({"GLOO_SOCKET_IFNAME"})

# Returns a count or a size of a device; None where it is unknown.
_Count = Callable[[Device], int | None]


class Verdict(StrEnum):
    """The result of a check: ok as far as is known; warn: numbers may suffer; fail: they do."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of doctor's answer.

    found: in words. advice: what to do; empty where the verdict is ok.
    details: for programs; a name ends in the unit of its figure.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the checks look at.

    devices: those with a worker, by node and then by index; one at least. versions: of this
    process. refusal: why raybench would measure nothing on these devices; empty where it would.
    others: other sweeps that have the devices, in words. states: of the devices, by NVML and the
    kernel's log.
    """

    devices: tuple[Device, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    others: tuple[str, ...] = ()
    states: tuple[DeviceFacts, ...] = ()

    @property
    def is_cuda(self) -> bool:
        """Return whether any worker owns a GPU."""
        return any(device.kind == "cuda" for device in self.devices)

    @property
    def nodes(self) -> dict[str, list[Device]]:
        """Return the devices of each node, by its id."""
        nodes: dict[str, list[Device]] = {}
        for device in self.devices:
            nodes.setdefault(device.node_id, []).append(device)
        return nodes


def check_facts(facts: Facts) -> list[Check]:
    """Return the checks that need no work of the devices, in the order of the output.

    The checks of GPUs are left out where no worker owns one; each variable that costs something
    adds a check.
    """
    checks = [
        _models_and_counts(facts),
        _identity(facts),
        _versions(facts),
        _other_sweeps(facts),
        _niceness(facts),
        _threads(facts),
        _room(
            facts,
            "disk",
            lambda device: device.disk_free_bytes,
            _LEAST_DISK_BYTES,
            "little room for temporary files (compiled kernels, Ray's logs): free some, or set "
            "TMPDIR",
        ),
        _room(
            facts,
            "/dev/shm",
            lambda device: device.shm_free_bytes,
            _LEAST_SHM_BYTES,
            "NCCL and Ray share memory there and fail when it is full: start the container with "
            "--shm-size=8g (or --ipc=host)",
        ),
    ]
    if facts.is_cuda:
        checks += [rule.check(facts) for rule in _GPU_RULES]
        checks += [_throttling(facts), _temperature(facts), _memory(facts), _errors(facts)]
    return [*checks, _all_variables(facts), _differing_variables(facts), *_costly_checks(facts)]


def label(device: Device) -> str:
    """Return `alpha cuda:3`, or of a CPU worker `alpha process 4711`."""
    number = f"cuda:{device.index}" if device.kind == "cuda" else f"process {device.process_id}"
    return f"{device.host} {number}"


def _labels_by_value(
    devices: Sequence[Device], values: Iterable[str | None]
) -> dict[str, list[str]]:
    """Return the labels of the devices by their value; "unknown" where that is None or empty."""
    groups: dict[str, list[str]] = {}
    for device, value in zip(devices, values, strict=True):
        groups.setdefault(value or _UNKNOWN, []).append(label(device))
    return groups


def _describe(devices: Sequence[Device], fact: Callable[[Device], str | None]) -> str:
    """Return a fact of the devices: once where all agree, else with the devices that have it.

    The commonest first, as `on on 3 devices; off on alpha cuda:2`. fact: returns it in words;
    None where it is unknown.
    """
    groups = _labels_by_value(devices, map(fact, devices))
    (most, owners), *others = sorted(groups.items(), key=lambda group: -len(group[1]))
    if not others:
        return most
    parts = [f"{text} on {some(names)}" for text, names in others]
    return "; ".join([f"{most} on {counted(len(owners), 'device')}", *parts])


def _judge(
    name: str, found: str, bad: Sequence[Device], advice: str, verdict: Verdict = Verdict.WARN
) -> Check:
    """Return a check that is ok where no device is bad, else has `verdict` and `advice`.

    found: what is shown in any case. bad: the devices that fail, named in `details`.
    """
    if not bad:
        return Check(name=name, verdict=Verdict.OK, found=found)
    names = [label(device) for device in bad]
    return Check(name=name, verdict=verdict, found=found, advice=advice, details={"devices": names})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """A check of one fact of each GPU.

    fact: in words; None where it is unknown. is_bad: whether a device fails, given all devices; it
    must be False where the fact is unknown. verdict and advice: where any device fails.
    """

    name: str
    fact: Callable[[Device], str | None]
    is_bad: Callable[[Device, Sequence[Device]], bool]
    advice: str
    verdict: Verdict = Verdict.WARN

    def check(self, facts: Facts) -> Check:
        """Return the check of all devices."""
        bad = [device for device in facts.devices if self.is_bad(device, facts.devices)]
        found = _describe(facts.devices, self.fact)
        return _judge(self.name, found, bad, self.advice, self.verdict)


def active_nvlinks(device: Device) -> int | None:
    """Return the number of active NVLinks of a device; None where it is not known."""
    found = re.match(r"NVLink x(\d+)", device.topology or "")
    return int(found[1]) if found else None


def _nvlink_words(device: Device) -> str | None:
    links = active_nvlinks(device)
    return f"{links} active links" if links else device.topology


def _power_cap(device: Device) -> str | None:
    """Return the power cap and its default in words; None where the cap is unknown."""
    if device.power_cap_w is None:
        return None
    default = device.power_cap_default_w
    of = "default unknown" if default is None else f"default {default:.0f} W"
    return f"{device.power_cap_w:.0f} W, {of}"


def _is_capped(device: Device) -> bool:
    cap, default = device.power_cap_w, device.power_cap_default_w
    return cap is not None and default is not None and cap < default - _POWER_ROUNDING_W


def _on_or_off(is_on: bool | None) -> str | None:
    return None if is_on is None else ("on" if is_on else "off")


def _has_few_lanes(device: Device) -> bool:
    """Return whether fewer PCIe lanes are in use than the device has; False where unknown."""
    links = (device.pcie_link or "", device.pcie_link_max or "")
    now, most = (re.search(r"x(\d+)", link) for link in links)
    return bool(now and most and int(now[1]) < int(most[1]))


def _pcie_words(device: Device) -> str | None:
    """Return `gen5 x16`, or `gen1 x16 of gen5 x16` with a reason; None where it is unknown."""
    if device.pcie_link is None or device.pcie_link_max in (None, device.pcie_link):
        return device.pcie_link
    idle = "" if _has_few_lanes(device) else " (idle links lower their speed)"
    return f"{device.pcie_link} of {device.pcie_link_max}{idle}"


def _others_words(device: Device) -> str | None:
    count = device.other_processes
    return None if count is None else f"{count or 'no'} other process{'es' * (count != 1)}"


def _is_below_best(device: Device, all_devices: Sequence[Device], fact: _Count) -> bool:
    """Return whether a device has less than the best of all devices; False where unknown.

    fact: returns the count that is compared.
    """
    own = fact(device)
    return own is not None and own < max(fact(one) or 0 for one in all_devices)


_GPU_RULES = (
    _Rule(
        name="clocks",
        fact=lambda d: f"SM up to {d.sm_clock_max_mhz} MHz" if d.sm_clock_max_mhz else None,
        is_bad=lambda device, every: _is_below_best(device, every, lambda d: d.sm_clock_max_mhz),
        advice="lower than on the other devices: undo locked clocks with `nvidia-smi -rgc`",
    ),
    _Rule(
        name="power cap",
        fact=_power_cap,
        is_bad=lambda device, _: _is_capped(device),
        advice="below the default: heavy steps run at lower clocks; if that is not wanted, set it "
        "with `nvidia-smi -pl WATTS`",
    ),
    _Rule(
        name="ECC",
        fact=lambda d: None if d.ecc_errors is None else f"{d.ecc_errors} uncorrected errors",
        is_bad=lambda device, _: bool(device.ecc_errors),
        advice="memory errors since the driver was loaded: drain the node, reset the GPU, and have "
        "it replaced if they come back (nvidia-smi -q -d ECC,ROW_REMAPPER)",
        verdict=Verdict.FAIL,
    ),
    _Rule(
        name="MIG",
        fact=lambda device: _on_or_off(device.mig_mode),
        is_bad=lambda device, _: bool(device.mig_mode),
        advice="a slice of a GPU is measured, NCCL cannot join slices, and clocks and power are "
        "shared with the other slices: switch it off with `nvidia-smi -mig 0`",
    ),
    _Rule(
        name="persistence",
        fact=lambda device: _on_or_off(device.persistence_mode),
        is_bad=lambda device, _: device.persistence_mode is False,
        advice="the driver unloads when idle: starts take seconds longer and clock settings are "
        "lost; switch it on with `nvidia-smi -pm 1`",
    ),
    _Rule(
        name="PCIe",
        fact=_pcie_words,
        is_bad=lambda device, _: _has_few_lanes(device),
        advice="fewer lanes than the device has: a slot or riser that carries less, or a bad "
        "contact; transfers between host and device are slower by as much",
    ),
    _Rule(
        name="NVLink",
        fact=_nvlink_words,
        is_bad=lambda device, every: _is_below_best(device, every, active_nvlinks),
        advice="fewer links than the others have, so every collective waits for it: see "
        "`nvidia-smi nvlink --status`, the fabric manager and dmesg",
    ),
    _Rule(
        name="other use",
        fact=_others_words,
        is_bad=lambda device, _: bool(device.other_processes),
        advice="others share the device, and its time: find them with `nvidia-smi`, end them or "
        "wait",
    ),
)


def _models_and_counts(facts: Facts) -> Check:
    """Return the check of models and counts; a warning where devices or nodes differ in them."""
    models = Counter(device.name for device in facts.devices)
    per_node = [f"{owned[0].host} {len(owned)}" for owned in facts.nodes.values()]
    kinds = ", ".join(f"{count} x {name}" for name, count in models.most_common())
    advice = []
    if len(models) > 1:
        advice.append(
            "different models: every step waits for the slowest; measure each on its own, or read "
            "world sizes that mix them with that in mind"
        )
    if len({len(owned) for owned in facts.nodes.values()}) > 1:
        advice.append(
            "nodes differ in their count: if one should have more, look for a GPU that fell off "
            "the bus (dmesg | grep Xid) and at what Ray was told (ray status)"
        )
    return Check(
        name="devices",
        verdict=Verdict.WARN if advice else Verdict.OK,
        found=f"{kinds} on {counted(len(per_node), 'node')} ({some(per_node)})",
        advice="; ".join(advice),
    )


def _identity(facts: Facts) -> Check:
    """Return the check that each worker has a device of its own; it fails where two share one."""
    owners = Counter(device.uuid for device in facts.devices)
    shared = [device for device in facts.devices if owners[device.uuid] > 1]
    workers = counted(len(facts.devices), "worker")
    found = f"{counted(len(owners), 'distinct UUID')} for {workers}"
    if shared:
        found += f"; shared by {some([label(device) for device in shared])}"
    advice = (
        "workers on one device measure each other: give Ray one GPU resource for each real GPU "
        "(ray start --num-gpus), and CUDA_VISIBLE_DEVICES without repeats"
    )
    return _judge("identity", found, shared, advice, Verdict.FAIL)


def _versions(facts: Facts) -> Check:
    """Return the check of software; it fails where workers or this process have other versions.

    Without GPUs, CUDA, NCCL and the driver are left out.
    """
    found: list[str] = []
    differing: list[str] = []
    for name in _VERSIONS:
        if not facts.is_cuda and name in ("cuda", "nccl", "driver"):
            continue
        found_versions = [
            device.driver_version if name == "driver" else device.versions.get(name)
            for device in facts.devices
        ]
        owners = _labels_by_value(facts.devices, found_versions)
        if name in facts.versions:
            owners.setdefault(facts.versions[name], []).append("this process")
        if len(owners) == 1:
            found.append(f"{name} {next(iter(owners))}")
        else:
            differing.append(name)
            each = (f"{version} on {some(names)}" for version, names in owners.items())
            found.append(f"{name}: {', '.join(each)}")
    if not differing:
        return Check(name="versions", verdict=Verdict.OK, found=", ".join(found))
    return Check(
        name="versions",
        verdict=Verdict.FAIL,
        found="; ".join(found),
        advice=f"install the same {' and '.join(differing)} on every node",
        details={"differing": differing},
    )


def _other_sweeps(facts: Facts) -> Check:
    """Return the check of other sweeps, of any user; a warning where one has the devices."""
    if not facts.others:
        return Check(name="other sweeps", verdict=Verdict.OK, found="none on these devices")
    return Check(
        name="other sweeps",
        verdict=Verdict.WARN,
        found=some(facts.others),
        advice="both share the devices and their time: wait for its end, or measure on others; a "
        "sweep started now is refused without --wait SECONDS or --shared",
    )


def _niceness(facts: Facts) -> Check:
    """Return the check of priorities; a warning where a worker has a lower one than usual."""
    return _judge(
        "niceness",
        _describe(facts.devices, lambda device: str(device.niceness)),
        [device for device in facts.devices if device.niceness > 0],
        "other programs get the CPU before these workers, and steps that wait for Python get "
        "slower: start Ray without `nice`",
    )


def _room(facts: Facts, name: str, free: _Count, least_bytes: int, advice: str) -> Check:
    """Return the check of free bytes; a warning where a node is known to have too few.

    free: returns the free bytes that the worker of a device sees. advice: where there are fewer
    than `least_bytes`. The first device of each node is asked.
    """
    first = [owned[0] for owned in facts.nodes.values()]
    sizes = [free(device) for device in first]
    known = [(d, size) for d, size in zip(first, sizes, strict=True) if size is not None]
    words = {device.uuid: f"{size / _GIB:.1f} GiB free" for device, size in known}
    return _judge(
        name,
        _describe(first, lambda device: words.get(device.uuid)),
        [device for device, size in known if size < least_bytes],
        advice,
    )


def _threads(facts: Facts) -> Check:
    """Return the check of threads; a warning where those of a node's workers exceed its cores."""
    crowded: list[Device] = []
    lines = []
    for owned in facts.nodes.values():
        wanted, cores = sum(d.omp_num_threads for d in owned), min(d.cpu_count for d in owned)
        has = f"{counted(wanted, 'thread')} in {counted(len(owned), 'worker')}"
        lines.append(f"{has} for {counted(cores, 'core')} on {owned[0].host}")
        if wanted > cores:
            crowded += owned
    advice = (
        "more threads than cores: they take turns, and times scatter; set OMP_NUM_THREADS lower, "
        "give the workers more cores, or use fewer workers"
    )
    return _judge("threads", some(lines), crowded, advice)


def _throttling(facts: Facts) -> Check:
    """Return the check of clocks before any work; a warning where they are limited.

    It fails where the hardware itself limits them: by a slowdown, heat or its power supply.
    """

    def limits(device: Device) -> list[str]:
        return [reason for reason in device.throttle_reasons if reason != "idle"]

    def words(device: Device) -> str | None:
        """Return what limits the clocks of a device; None where nobody tells."""
        # Without a clock NVML has told nothing, and then no reason means nothing.
        idle = device.sm_clock_mhz and f"none; SM now {device.sm_clock_mhz} MHz"
        return ", ".join(limits(device)) or idle or None

    limited = [device for device in facts.devices if limits(device)]
    hardware = {"hw_slowdown", "thermal_hw", "power_brake"}
    by_hardware = any(hardware.intersection(limits(device)) for device in limited)
    advice = (
        "clocks are limited before any work: look at cooling, power supply, caps and set clocks "
        "(nvidia-smi -q -d PERFORMANCE)"
    )
    verdict = Verdict.FAIL if by_hardware else Verdict.WARN
    return _judge("throttling", _describe(facts.devices, words), limited, advice, verdict)


def _temperature(facts: Facts) -> Check:
    """Return the check of temperatures; a warning where a device is above 75 °C before any work."""
    known = [d.temperature_c for d in facts.devices if d.temperature_c is not None]
    warm = [device for device in facts.devices if (device.temperature_c or 0.0) > _WARM_C]
    found = f"{min(known):.0f} to {max(known):.0f} °C" if known else _UNKNOWN
    if 0 < len(known) < len(facts.devices):
        found += f" on {len(known)} of {len(facts.devices)} devices, unknown on the others"
    if warm:
        found += (
            f"; above {_WARM_C:.0f} °C: {_describe(warm, lambda d: f'{d.temperature_c:.0f} °C')}"
        )
    advice = "warm before any work: look at fans and airflow, and at who else uses the device"
    return _judge("temperature", found, warm, advice)


def _memory(facts: Facts) -> Check:
    """Return the check that shows free memory and compute capability; never a warning."""
    states = {state.device.uuid: state for state in facts.states}

    def words(device: Device) -> str | None:
        """Return memory and compute capability of a device; None where its memory is unknown."""
        state = states.get(device.uuid)
        if state is None or state.memory_total_bytes is None or state.memory_free_bytes is None:
            return None
        total, free = state.memory_total_bytes / _GIB, state.memory_free_bytes / _GIB
        capability = state.compute_capability or _UNKNOWN
        return f"{total:.0f} GiB, {free:.0f} free; compute capability {capability}"

    return Check(name="memory", verdict=Verdict.OK, found=_describe(facts.devices, words))


def _errors(facts: Facts) -> Check:
    """Return the check of faults of the hardware: bad memory, links that are down, Xids.

    It fails where `raybench health` would find one. Uncorrected errors and PCIe lanes have checks
    of their own.
    """
    others = (FREE_MEMORY, MEMORY_ERRORS, PCIE_LANES)
    known = [
        reading
        for reading in facts_readings(facts.states, facts.states)
        if reading.value is not None and reading.test.name not in others
    ]
    problems = [(reading.subject, reading.problem.text) for reading in known if reading.problem]
    bad = {subject.uuids[0] for subject, _ in problems}
    lines = [f"{subject.name}: {text}" for subject, text in problems]
    return _judge(
        "errors",
        "; ".join(lines) if lines else ("none" if known else _UNKNOWN),
        [device for device in facts.devices if device.uuid in bad],
        "the hardware may be at fault: reset the GPU or restart its node, then see what "
        "`raybench health` says of it (nvidia-smi -q -d ROW_REMAPPER; dmesg | grep Xid)",
        Verdict.FAIL,
    )


def _all_variables(facts: Facts) -> Check:
    """Return the check that shows the variables of NCCL, CUDA and torch; never a warning."""
    found = {
        f"{name}={value}": None
        for device in facts.devices
        for name, value in device.environment.items()
        if name.startswith(_VARIABLE_PREFIXES)
    }
    return Check(name="variables", verdict=Verdict.OK, found=", ".join(found) or "none set")


def _differing_variables(facts: Facts) -> Check:
    """Return the check of variables; a warning where workers have other values, or lack some.

    Without those that raybench sets itself for each node.
    """
    names = {name for device in facts.devices for name in device.environment} - _SET_BY_RAYBENCH
    differing: dict[str, str] = {}
    for name in sorted(names):
        values = [one.environment.get(name, "not set") or "empty" for one in facts.devices]
        owners = _labels_by_value(facts.devices, values)
        if len(owners) > 1:
            each = (f"{value} on {some(on)}" for value, on in owners.items())
            differing[name] = f"{name} is {', '.join(each)}"
    if not differing:
        return Check(name="variables alike", verdict=Verdict.OK, found="the same for all workers")
    return Check(
        name="variables alike",
        verdict=Verdict.WARN,
        found="; ".join(differing.values()),
        advice="ranks work in different ways: give `ray start` the same variables on every node, "
        "or set them for the command",
        details={"differing": list(differing)},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CostlyVariable:
    """A row of variables.yaml, which says what its fields mean."""

    name: str
    hurts: str | Sequence[str]
    cost: str
    verdict: str = "warn"
    between_nodes: bool = False

    def is_costly(self, value: str) -> bool:
        """Return whether this value of the variable costs something; an empty one never does."""
        if self.hurts == "enabled":
            return value.lower() not in ("", "0", "false", "no", "n", "f")
        if self.hurts == "unsorted":
            entries = [entry.strip() for entry in value.split(",")]
            numbers = [int(entry) for entry in entries if entry.isdigit()]
            return len(set(entries)) < len(entries) or numbers != sorted(numbers)
        return bool(value) and (self.hurts == "set" or value.upper() in self.hurts)

    def verdict_on(self, facts: Facts) -> Verdict:
        """Return the verdict of the row; a warning where it matters less on these devices.

        CPU workers use neither CUDA nor NCCL; some machines without NVLink need peer-to-peer off.
        """
        has_nvlink = any(map(active_nvlinks, facts.devices))
        is_needed = self.name.startswith("NCCL_P2P") and not has_nvlink
        is_used = facts.is_cuda or self.name.startswith("TORCH_DISTRIBUTED")
        return Verdict(self.verdict) if is_used and not is_needed else Verdict.WARN


@cache
def _costly_variables() -> tuple[_CostlyVariable, ...]:
    """Return the rows of variables.yaml; it is read once."""
    text = resources.files("raybench.doctor").joinpath("variables.yaml").read_text("utf-8")
    return tuple(_CostlyVariable(**row) for row in YAML(typ="safe", pure=True).load(text))


def _costly_checks(facts: Facts) -> Iterator[Check]:
    """Yield a check for each variable whose value costs something on any worker.

    One that costs something between nodes alone is left out where there is one node.
    """
    for one in _costly_variables():
        owners = {
            label(device): device.environment[one.name]
            for device in facts.devices
            if one.is_costly(device.environment.get(one.name, "").strip())
        }
        if not owners or (one.between_nodes and len(facts.nodes) < 2):
            continue
        values = ", ".join(dict.fromkeys(owners.values()))
        where = "" if len(owners) == len(facts.devices) else f" on {some(list(owners))}"
        yield Check(
            name=one.name,
            verdict=one.verdict_on(facts),
            found=f"{values}{where}: {one.cost}{'' if facts.is_cuda else ' (on GPUs)'}",
            advice=f"unset {one.name}, also where `ray start` was called",
            details={"devices": list(owners)},
        )
