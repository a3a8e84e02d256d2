"""Environment variables that change what is measured, by variables.yaml. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from ruamel.yaml import YAML

from raybench.doctor.facts import Check, Facts, Verdict, join_names, label
from raybench.doctor.gpu_checks import nvlinks
from raybench.records import Device

_TOLD = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "CUDA_", "GLOO_", "NVIDIA_")
# raybench sets these itself, for each node or worker as it is right there.
_OWN = frozenset({"GLOO_SOCKET_IFNAME"})
_Trap = Mapping[str, Any]


@cache
def _traps() -> tuple[_Trap, ...]:
    text = resources.files("raybench.doctor").joinpath("variables.yaml").read_text("utf-8")
    return tuple(YAML(typ="safe", pure=True).load(text))


def variables(facts: Facts) -> Check:
    """All variables that concern NCCL, CUDA and torch's collectives."""
    found = {
        f"{name}={value}": None
        for device in facts.devices
        for name, value in device.environment.items()
        if name.startswith(_TOLD)
    }
    text = ", ".join(found) or "none set"
    return Check(name="variables", verdict=Verdict.OK, found=text)


def traps(facts: Facts) -> list[Check]:
    """One check for each variable whose value costs something."""
    return [check for trap in _traps() if (check := _check_trap(trap, facts)) is not None]


def differences(facts: Facts) -> Check:
    """Check that the variables are the same for all workers."""
    names = {name for device in facts.devices for name in device.environment} - _OWN
    differing = {
        name: values for name in sorted(names) if len(values := _values(facts.devices, name)) > 1
    }
    parts = [
        f"{name} is " + ", ".join(f"{value} on {join_names(on)}" for value, on in values.items())
        for name, values in differing.items()
    ]
    return Check(
        name="variables alike",
        verdict=Verdict.WARN if parts else Verdict.OK,
        found="; ".join(parts) or "the same for all workers",
        advice="ranks work in different ways: give `ray start` the same variables on every node, "
        "or set them for the command"
        if parts
        else "",
        details={"differing": sorted(differing)},
    )


def _values(devices: Sequence[Device], name: str) -> dict[str, list[str]]:
    owners: dict[str, list[str]] = {}
    for device in devices:
        owners.setdefault(device.environment.get(name, "not set"), []).append(label(device))
    return owners


def _check_trap(trap: _Trap, facts: Facts) -> Check | None:
    if trap.get("between_nodes") and len(facts.nodes) < 2:
        return None
    name = trap["name"]
    caught = {
        label(device): device.environment[name]
        for device in facts.devices
        if _hurts(trap["hurts"], device.environment.get(name, "").strip())
    }
    if not caught:
        return None
    values = ", ".join(dict.fromkeys(caught.values()))
    everywhere = len(caught) == len(facts.devices)
    where = "" if everywhere else f" on {join_names(list(caught))}"
    return Check(
        name=name,
        verdict=_verdict(trap, facts),
        found=f"{values}{where}: {trap['cost']}{'' if facts.is_cuda else ' (on GPUs)'}",
        advice=f"unset {name}, also where `ray start` was called",
        details={"devices": list(caught)},
    )


def _hurts(how: str | Sequence[str], value: str) -> bool:
    """Whether a variable with this value costs something; one that is empty does not."""
    if how == "enabled":
        return value.lower() not in ("", "0", "false", "no", "n", "f")
    if how == "unsorted":
        entries = [entry.strip() for entry in value.split(",")]
        numbers = [int(entry) for entry in entries if entry.isdigit()]
        return len(set(entries)) < len(entries) or numbers != sorted(numbers)
    return bool(value) and (how == "set" or value.upper() in how)


def _verdict(trap: _Trap, facts: Facts) -> Verdict:
    """CPU workers use neither CUDA nor NCCL; without NVLink some machines need P2P to be off."""
    name = trap["name"]
    without_nvlink = name.startswith("NCCL_P2P") and not any(map(nvlinks, facts.devices))
    if without_nvlink or not (facts.is_cuda or name.startswith("TORCH_DISTRIBUTED")):
        return Verdict.WARN
    return Verdict(trap.get("verdict", "warn"))
