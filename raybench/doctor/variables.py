"""Checks of environment variables that change what is measured; variables.yaml lists them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ruamel.yaml import YAML

from raybench.doctor.facts import Check, Facts, Verdict, join_names, label
from raybench.doctor.gpu_checks import nvlinks

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "CUDA_", "GLOO_", "NVIDIA_")
# raybench sets these itself, for each node or worker to what is right there.
_SET_BY_RAYBENCH = frozenset({"GLOO_SOCKET_IFNAME"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CostlyVariable:
    """A row of variables.yaml, which says what its fields mean."""

    name: str
    hurts: str | Sequence[str]
    cost: str
    verdict: str = "warn"
    between_nodes: bool = False

    def is_costly(self, value: str) -> bool:
        """Return whether a worker with this value measures something else; an empty one is fine."""
        if self.hurts == "enabled":
            return value.lower() not in ("", "0", "false", "no", "n", "f")
        if self.hurts == "unsorted":
            entries = [entry.strip() for entry in value.split(",")]
            numbers = [int(entry) for entry in entries if entry.isdigit()]
            return len(set(entries)) < len(entries) or numbers != sorted(numbers)
        return bool(value) and (self.hurts == "set" or value.upper() in self.hurts)

    def verdict_on(self, facts: Facts) -> Verdict:
        """Return how bad it is: less on CPU workers, and for peer-to-peer without NVLink.

        CPU workers use neither CUDA nor NCCL; some machines without NVLink need it to be off.
        """
        without_nvlink = self.name.startswith("NCCL_P2P") and not any(map(nvlinks, facts.devices))
        is_used = facts.is_cuda or self.name.startswith("TORCH_DISTRIBUTED")
        return Verdict(self.verdict) if is_used and not without_nvlink else Verdict.WARN


@cache
def _costly_variables() -> tuple[CostlyVariable, ...]:
    text = resources.files("raybench.doctor").joinpath("variables.yaml").read_text("utf-8")
    return tuple(CostlyVariable(**row) for row in YAML(typ="safe", pure=True).load(text))


def variables(facts: Facts) -> Check:
    """Return the check that shows all variables of NCCL, CUDA and torch's collectives."""
    found = {
        f"{name}={value}": None
        for device in facts.devices
        for name, value in device.environment.items()
        if name.startswith(_PREFIXES)
    }
    return Check(name="variables", verdict=Verdict.OK, found=", ".join(found) or "none set")


def differences(facts: Facts) -> Check:
    """Return the check that variables are the same for all workers."""
    names = {name for device in facts.devices for name in device.environment} - _SET_BY_RAYBENCH
    differing: dict[str, str] = {}
    for name in sorted(names):
        owners: dict[str, list[str]] = {}
        for device in facts.devices:
            owners.setdefault(device.environment.get(name, "not set"), []).append(label(device))
        if len(owners) > 1:
            values = (f"{value} on {join_names(on)}" for value, on in owners.items())
            differing[name] = f"{name} is {', '.join(values)}"
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


def costly_variables(facts: Facts) -> Iterator[Check]:
    """Yield a check for each variable whose value costs something on any worker."""
    for one in _costly_variables():
        owners = {
            label(device): device.environment[one.name]
            for device in facts.devices
            if one.is_costly(device.environment.get(one.name, "").strip())
        }
        if not owners or (one.between_nodes and len(facts.nodes) < 2):
            continue
        values = ", ".join(dict.fromkeys(owners.values()))
        everywhere = len(owners) == len(facts.devices)
        where = "" if everywhere else f" on {join_names(list(owners))}"
        yield Check(
            name=one.name,
            verdict=one.verdict_on(facts),
            found=f"{values}{where}: {one.cost}{'' if facts.is_cuda else ' (on GPUs)'}",
            advice=f"unset {one.name}, also where `ray start` was called",
            details={"devices": list(owners)},
        )
