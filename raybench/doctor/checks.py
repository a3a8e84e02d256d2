"""The checks of `raybench doctor` that need no work of the devices: each a line with its advice.

A check of one fact of each device is a row of `_RULES`; other checks are functions below it. A fact
that nobody tells is shown as unknown, and is no reason for a warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import resources
from typing import Any

from ruamel.yaml import YAML

from raybench.health.readings import facts_readings
from raybench.records.device import Device
from raybench.records.devices import DeviceFacts, read_topology
from raybench.report.formatting import counted, some
from raybench.report.words import health as words

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
# Reasons by which the hardware itself limits clocks: by a slowdown, heat or its power supply.
_BY_HARDWARE = {"hw_slowdown", "thermal_hw", "power_brake"}
_VERSIONS = ("raybench", "python", "torch", "ray", "cuda", "nccl", "driver")
_SWITCH: Mapping[bool | None, str] = {True: "on", False: "off"}
# raybench sets these itself, for each node or worker to what is right there.
_SET_BY_RAYBENCH = frozenset({"GLOO_SOCKET_IFNAME"})


class Verdict(StrEnum):
    """A check's result. ok: no known fault; warn: numbers may suffer; fail: they do or are none."""

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
    """What is known of the cluster, for the checks.

    devices: those with a worker, by rack, node and index; one at least. missing: how many more the
    cluster has. versions: of this process. refusal: why raybench would measure nothing on these
    devices; empty where it would. others: other sweeps that have the devices, in words. states: of
    the devices, by NVML and the kernel's log; empty: not read.
    """

    devices: tuple[Device, ...]
    missing: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    others: tuple[str, ...] = ()
    states: tuple[DeviceFacts, ...] = ()

    @property
    def is_cuda(self) -> bool:
        """Return whether any worker owns a GPU."""
        return any(device.kind == "cuda" for device in self.devices)


def check_facts(facts: Facts) -> list[Check]:
    """Return the checks that need no computation on the devices, in the order of the output.

    Checks of GPUs are left out if no worker owns one. The last are one for each variable of
    variables.yaml with a value that costs something here, on CPUs also those that only GPUs read.
    `facts.refusal` and `facts.versions`, of this process, are not looked at.
    """
    in_use = (
        "both share the devices and their time: wait for its end, or measure on others; a sweep "
        "started now is refused without --wait SECONDS or --shared"
    )
    others = some(facts.others) or "none on these devices"
    other_sweeps = judge("other sweeps", others, in_use if facts.others else "")
    found = [_models_and_counts(facts), _versions(facts), other_sweeps, _threads(facts)]
    found += [rule.check(facts) for rule in _RULES if facts.is_cuda or not rule.is_of_gpus]
    found += [_errors(facts)] if facts.is_cuda else []
    return [*found, _variables(facts), *_costly_variables(facts)]


def judge(
    name: str, found: str, advice: str, verdict: Verdict = Verdict.WARN, **details: Any
) -> Check:
    """Return a check with `verdict` if there is advice, else ok. details: as in `Check`."""
    verdict = verdict if advice else Verdict.OK
    return Check(name=name, verdict=verdict, found=found, advice=advice, details=details)


def _label(device: Device) -> str:
    """Return a name for people, `alpha cuda:3` or `alpha process 4711`: as unique as host names."""
    number = f"cuda:{device.index}" if device.kind == "cuda" else f"process {device.process_id}"
    return f"{device.host} {number}"


def active_nvlinks(device: Device) -> int | None:
    """Return the number of active NVLinks, 0 also if NVML knows none; None without `topology`."""
    return read_topology(device).nvlinks


def _by_node(facts: Facts) -> dict[str, list[Device]]:
    """Return node id -> its devices; both in the order of `facts.devices`."""
    nodes: dict[str, list[Device]] = {}
    for device in facts.devices:
        nodes.setdefault(device.node_id, []).append(device)
    return nodes


def _describe(devices: Sequence[Device], values: Iterable[str | None]) -> str:
    """Return a fact of the devices: once where all agree, else with the devices that have it.

    The commonest first, as `on on 3 devices; off on alpha cuda:2`. values: of each device, in
    words; None or empty where it is unknown.
    """
    groups: dict[str, list[str]] = {}
    for device, value in zip(devices, values, strict=True):
        groups.setdefault(value or _UNKNOWN, []).append(_label(device))
    (most, owners), *others = sorted(groups.items(), key=lambda group: -len(group[1]))
    if not others:
        return most
    parts = [f"{text} on {some(names)}" for text, names in others]
    return "; ".join([f"{most} on {counted(len(owners), 'device')}", *parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """A check that looks at one fact of each device.

    fact: in words; None where it is unknown. is_bad: whether it warns because of a device, given
    all of its model; must be False where the fact is unknown. advice: where any device is bad.
    is_grave: whether a bad device makes it fail instead of warn. is_of_gpus: whether it is left out
    where no worker owns a GPU. is_of_nodes: whether only the first device of each node is asked.
    """

    name: str
    fact: Callable[[Device], str | None]
    is_bad: Callable[[Device, Sequence[Device]], bool]
    advice: str
    is_grave: Callable[[Device], bool] = lambda _: False
    is_of_gpus: bool = True
    is_of_nodes: bool = False

    def check(self, facts: Facts) -> Check:
        """Return the check over all devices; details: {"devices": labels of the bad ones}."""
        asked = [own[0] for own in _by_node(facts).values()] if self.is_of_nodes else facts.devices
        of_model: dict[str, list[Device]] = {}
        for device in asked:
            of_model.setdefault(device.name, []).append(device)
        bad = [device for device in asked if self.is_bad(device, of_model[device.name])]
        found, advice = _describe(asked, map(self.fact, asked)), self.advice if bad else ""
        verdict = Verdict.FAIL if any(map(self.is_grave, bad)) else Verdict.WARN
        return judge(self.name, found, advice, verdict, devices=list(map(_label, bad)))


def _words(form: str, *values: float | None) -> str | None:
    """Return the values in a text with a place for each; None where any of them is unknown."""
    return None if None in values else form.format(*values)


def _is_below(value: float | None, least: float | None) -> bool:
    """Return whether a value is below another one; False where one of them is unknown."""
    return value is not None and least is not None and value < least


def _limits(device: Device) -> list[str]:
    """Return why the clocks of a device are limited; being idle is no such reason."""
    return [reason for reason in device.throttle_reasons if reason != "idle"]


_RULES = (
    _Rule(
        name="niceness",
        fact=lambda device: str(device.niceness),
        is_bad=lambda device, _: device.niceness > 0,
        advice="other programs get the CPU before these workers, and steps that wait for Python "
        "get slower: start Ray without `nice`",
        is_of_gpus=False,
    ),
    _Rule(
        name="disk",
        fact=lambda d: _words("{:.1f} GiB free", d.disk_free_bytes and d.disk_free_bytes / _GIB),
        is_bad=lambda device, _: _is_below(device.disk_free_bytes, _LEAST_DISK_BYTES),
        advice="little room for temporary files (compiled kernels, Ray's logs): free some, or set "
        "TMPDIR",
        is_of_gpus=False,
        is_of_nodes=True,
    ),
    _Rule(
        name="/dev/shm",
        fact=lambda d: _words("{:.1f} GiB free", d.shm_free_bytes and d.shm_free_bytes / _GIB),
        is_bad=lambda device, _: _is_below(device.shm_free_bytes, _LEAST_SHM_BYTES),
        advice="NCCL and Ray share memory there and fail when it is full: start the container with "
        "--shm-size=8g (or --ipc=host)",
        is_of_gpus=False,
        is_of_nodes=True,
    ),
    _Rule(
        name="clocks",
        fact=lambda device: _words("SM up to {} MHz", device.sm_clock_max_mhz),
        is_bad=lambda device, every: _is_below(
            device.sm_clock_max_mhz, max(one.sm_clock_max_mhz or 0 for one in every)
        ),
        advice="lower than on others of the model: undo locked clocks with `nvidia-smi -rgc`",
    ),
    _Rule(
        name="throttling",
        # Without a clock NVML has told nothing, and then no reason means nothing.
        fact=lambda device: ", ".join(_limits(device)) or _words("none", device.sm_clock_mhz),
        is_bad=lambda device, _: bool(_limits(device)),
        advice="clocks are limited before any work: look at cooling, power supply, caps and set "
        "clocks (nvidia-smi -q -d PERFORMANCE)",
        is_grave=lambda device: not _BY_HARDWARE.isdisjoint(device.throttle_reasons),
    ),
    _Rule(
        name="power cap",
        fact=lambda d: _words("{:.0f} W, default {:.0f} W", d.power_cap_w, d.power_cap_default_w),
        is_bad=lambda device, _: _is_below(
            device.power_cap_w and device.power_cap_w + _POWER_ROUNDING_W,
            device.power_cap_default_w,
        ),
        advice="below the default: heavy steps run at lower clocks; if that is not wanted, set it "
        "with `nvidia-smi -pl WATTS`",
    ),
    _Rule(
        name="temperature",
        fact=lambda d: _words(
            "{:.0f} °C" if _is_below(_WARM_C, d.temperature_c) else f"up to {_WARM_C:.0f} °C",
            d.temperature_c,
        ),
        is_bad=lambda device, _: _is_below(_WARM_C, device.temperature_c),
        advice="warm before any work: look at fans and airflow, and at who else uses the device",
    ),
    _Rule(
        name="MIG",
        fact=lambda device: _SWITCH.get(device.mig_mode),
        is_bad=lambda device, _: bool(device.mig_mode),
        advice="a slice of a GPU is measured, NCCL cannot join slices, and clocks and power are "
        "shared with the other slices: switch it off with `nvidia-smi -mig 0`",
    ),
    _Rule(
        name="persistence",
        fact=lambda device: _SWITCH.get(device.persistence_mode),
        is_bad=lambda device, _: device.persistence_mode is False,
        advice="the driver unloads when idle: starts take seconds longer and clock settings are "
        "lost; switch it on with `nvidia-smi -pm 1`",
    ),
    _Rule(
        name="NVLink",
        fact=lambda device: _words("{} active links", active_nvlinks(device)),
        is_bad=lambda device, every: _is_below(
            active_nvlinks(device), max(active_nvlinks(one) or 0 for one in every)
        ),
        advice="fewer links than others of the model, so every collective waits for it: see "
        "`nvidia-smi nvlink --status`, the fabric manager and dmesg",
    ),
    _Rule(
        name="other use",
        fact=lambda device: _words("other processes: {}", device.other_processes),
        is_bad=lambda device, _: bool(device.other_processes),
        advice="others share the device, and its time: find them with `nvidia-smi`, end them or "
        "wait",
    ),
)


def _models_and_counts(facts: Facts) -> Check:
    """Return the check of models and counts: it warns if they differ, fails if one is missing."""
    models = Counter(device.name for device in facts.devices)
    per_node = [f"{owned[0].host} {len(owned)}" for owned in _by_node(facts).values()]
    kinds = ", ".join(f"{count} x {name}" for name, count in models.most_common())
    advice = []
    if facts.missing:
        advice.append(f"{facts.missing} more gave no worker in time: see `ray status`")
    if len(models) > 1:
        advice.append(
            "different models: every step waits for the slowest; measure each on its own, or read "
            "world sizes that mix them with that in mind"
        )
    if len({len(owned) for owned in _by_node(facts).values()}) > 1:
        advice.append(
            "nodes differ in their count: if one should have more, look for a GPU that fell off "
            "the bus (dmesg | grep Xid) and at what Ray was told (ray status)"
        )
    found = f"{kinds} on {counted(len(per_node), 'node')} ({some(per_node)})"
    verdict = Verdict.FAIL if facts.missing else Verdict.WARN
    return judge("devices", found, "; ".join(advice), verdict)


def _versions(facts: Facts) -> Check:
    """Return the check of software; it fails where workers have different versions.

    An unknown version is not compared. CUDA, NCCL and the driver are left out on CPUs.
    """
    values_by_name = {
        name: [
            one.driver_version if name == "driver" else one.versions.get(name)
            for one in facts.devices
        ]
        for name in _VERSIONS[: None if facts.is_cuda else -3]
    }
    differing = [name for name, values in values_by_name.items() if len({*values} - {None}) > 1]
    found = ", ".join(f"{one} {_describe(facts.devices, of)}" for one, of in values_by_name.items())
    advice = f"install the same {' and '.join(differing)} on every node" if differing else ""
    return judge("versions", found, advice, Verdict.FAIL, differing=differing)


def _threads(facts: Facts) -> Check:
    """Return the check of threads; a warning where those of a node's workers exceed its cores."""
    lines, is_crowded = [], False
    for owned in _by_node(facts).values():
        wanted, cores = sum(d.omp_num_threads for d in owned), min(d.cpu_count for d in owned)
        has = f"{counted(wanted, 'thread')} in {counted(len(owned), 'worker')}"
        lines.append(f"{has} for {counted(cores, 'core')} on {owned[0].host}")
        is_crowded |= wanted > cores
    advice = (
        "more threads than cores: they take turns, and times scatter; set OMP_NUM_THREADS lower, "
        "give the workers more cores, or use fewer workers"
    )
    return judge("threads", some(lines), advice if is_crowded else "")


def _errors(facts: Facts) -> Check:
    """Return the check of faults of the hardware: bad memory, links that are down, Xids.

    It fails where `raybench health` would find one at its start; "unknown" if no fact was read.
    """
    readings = facts_readings(facts.states, facts.states)
    lines = [f"{one.subject.name}: {words.problem(one.problem)}" for one in readings if one.problem]
    is_known = any(one.value is not None for one in readings)
    advice = (
        "the hardware may be at fault: reset the GPU or restart its node, then see what "
        "`raybench health` says of it (nvidia-smi -q -d ECC,ROW_REMAPPER; dmesg | grep Xid)"
    )
    found = "; ".join(lines) or ("none" if is_known else _UNKNOWN)
    return judge("errors", found, advice if lines else "", Verdict.FAIL)


def _variables(facts: Facts) -> Check:
    """Return the check of variables; a warning where workers have other values, or lack some.

    Without those that raybench sets itself for each node.
    """
    names = {name for device in facts.devices for name in device.environment} - _SET_BY_RAYBENCH
    values_by_name = {
        name: [device.environment.get(name, "not set") or "empty" for device in facts.devices]
        for name in sorted(names)
    }
    differing = [name for name, values in values_by_name.items() if len(set(values)) > 1]
    words = (f"{one}={_describe(facts.devices, of)}" for one, of in values_by_name.items())
    advice = (
        "ranks work in different ways: give `ray start` the same variables on every node, or set "
        "them for the command"
    )
    found = ", ".join(words) or "none set"
    return judge("variables", found, advice if differing else "", differing=differing)


def _costly_variables(facts: Facts) -> Iterator[Check]:
    """Yield a check for each variable whose value costs something on any worker.

    One that costs something between nodes alone is left out where there is one node.
    """
    text = resources.files("raybench.doctor").joinpath("variables.yaml").read_text("utf-8")
    for row in YAML(typ="safe", pure=True).load(text):
        name = row["name"]
        given = [(_label(one), one.environment.get(name, "").strip()) for one in facts.devices]
        costly = [(owner, value) for owner, value in given if _is_costly(row["hurts"], value)]
        owners, values = [owner for owner, _ in costly], [value for _, value in costly]
        if not values or (row.get("between_nodes") and len(_by_node(facts)) < 2):
            continue
        # CPU workers use neither CUDA nor NCCL; some machines without NVLink need peer-to-peer off.
        is_needed = name.startswith("NCCL_P2P") and not any(map(active_nvlinks, facts.devices))
        is_used = facts.is_cuda or name.startswith("TORCH_DISTRIBUTED")
        where = "" if len(values) == len(facts.devices) else f" on {some(owners)}"
        yield judge(
            name,
            f"{', '.join(dict.fromkeys(values))}{where}: {row['cost']}"
            + ("" if is_used else " (on GPUs)"),
            f"unset {name}, also where `ray start` was called",
            Verdict(row.get("verdict", "warn")) if is_used and not is_needed else Verdict.WARN,
            devices=owners,
        )


def _is_costly(hurts: str | Sequence[str], value: str) -> bool:
    """Return whether a value of a variable costs something; an empty one never does.

    hurts: as variables.yaml explains it.
    """
    if hurts == "enabled":
        return value.lower() not in ("", "0", "false", "no", "n", "f")
    if hurts == "unsorted":
        entries = [entry.strip() for entry in value.split(",")]
        numbers = [int(entry) for entry in entries if entry.isdigit()]
        return len(set(entries)) < len(entries) or numbers != sorted(numbers)
    return bool(value) and (hurts == "set" or value.upper() in hurts)
