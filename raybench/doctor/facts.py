"""What doctor knows and what it says: plain values, and the words that all checks share. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from raybench.records import Device
from raybench.records.device_facts import DeviceFacts

UNKNOWN = "unknown"
_NAMES_SHOWN = 4


class Verdict(StrEnum):
    """ok: fit to be measured, as far as is known. warn: numbers may suffer. fail: they do."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of doctor's answer.

    found: what is the case. advice: what to do; empty when the verdict is ok.
    details: figures for programs, by name with the unit in it.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the checks look at.

    devices: those with a worker, by node and then by index. versions: of this process.
    refusal: why raybench would measure nothing on these devices; empty when it would. others: other
    sweeps that have the devices, in words. states: of the devices, as NVML and the kernel tell it.
    """

    devices: tuple[Device, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    others: tuple[str, ...] = ()
    states: tuple[DeviceFacts, ...] = ()

    @property
    def is_cuda(self) -> bool:
        """Whether the workers own GPUs."""
        return any(device.kind == "cuda" for device in self.devices)

    @property
    def nodes(self) -> dict[str, list[Device]]:
        """The devices of each node, by its id."""
        nodes: dict[str, list[Device]] = {}
        for device in self.devices:
            nodes.setdefault(device.node_id, []).append(device)
        return nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What doctor answers. cluster: which one, in words. environment: of this process."""

    cluster: str
    facts: Facts
    checks: tuple[Check, ...]
    environment: Mapping[str, str]

    @property
    def has_failed(self) -> bool:
        """Whether a check failed."""
        return any(check.verdict is Verdict.FAIL for check in self.checks)


def label(device: Device) -> str:
    """Name a device in a few words."""
    number = f"cuda:{device.index}" if device.kind == "cuda" else f"process {device.process_id}"
    return f"{device.host} {number}"


def join_names(names: Sequence[str]) -> str:
    """List the first few names, and how many there are besides."""
    text = ", ".join(names[:_NAMES_SHOWN])
    left = len(names) - _NAMES_SHOWN
    return f"{text} and {left} more" if left > 0 else text


def describe(devices: Sequence[Device], tell: Callable[[Device], str | None]) -> str:
    """Write what the devices say: once when all agree, else by whom, what most say first.

    tell: None where the fact is unknown.
    """
    groups: dict[str, list[str]] = {}
    for device in devices:
        groups.setdefault(tell(device) or UNKNOWN, []).append(label(device))
    (most, owners), *others = sorted(groups.items(), key=lambda group: -len(group[1]))
    if not others:
        return most
    parts = [f"{text} on {join_names(names)}" for text, names in others]
    return "; ".join([f"{most} on {count_noun(len(owners), 'device')}", *parts])


def count_noun(count: int, noun: str) -> str:
    """Write a count and its noun."""
    return f"{count} {noun}{'s' * (count != 1)}"


def judge(
    name: str, found: str, bad: Sequence[Device], advice: str, verdict: Verdict = Verdict.WARN
) -> Check:
    """Make a check that holds for all devices but the `bad` ones, for which `advice` is given."""
    if not bad:
        return Check(name=name, verdict=Verdict.OK, found=found)
    names = [label(device) for device in bad]
    return Check(name=name, verdict=verdict, found=found, advice=advice, details={"devices": names})
