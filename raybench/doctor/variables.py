"""Environment variables that change what is measured, and what each of them costs. Pure.

Sources: the lists of environment variables of NCCL (docs.nvidia.com/deeplearning/nccl), of
ProcessGroupNCCL (pytorch.org/docs/stable/torch_nccl_environment_variables.html) and of CUDA
(CUDA C++ Programming Guide, appendix on environment variables).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raybench.doctor.facts import Check, Facts, Verdict, join_names, label
from raybench.doctor.gpu_checks import nvlinks
from raybench.records import Device

_TOLD = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "CUDA_", "GLOO_", "NVIDIA_")
# raybench sets these itself, for each node or worker as it is right there.
_OWN = frozenset({"GLOO_SOCKET_IFNAME"})


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "n", "f")


def _is_set(value: str) -> bool:
    return bool(value.strip())


def _one_of(*words: str) -> Callable[[str], bool]:
    return lambda value: value.strip().upper() in words


def _is_odd_list(value: str) -> bool:
    """Repeats, or numbers that do not ascend: cuda:0 is then not the first device."""
    entries = [entry.strip() for entry in value.split(",")]
    numbers = [int(entry) for entry in entries if entry.isdigit()]
    return len(set(entries)) < len(entries) or numbers != sorted(numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trap:
    """A variable, the values that hurt, and what they cost.

    between_nodes: matters only where there are several.
    """

    name: str
    hurts: Callable[[str], bool]
    cost: str
    verdict: Verdict = Verdict.WARN
    between_nodes: bool = False


_TRAPS = (
    _Trap(
        name="NCCL_P2P_DISABLE",
        hurts=_is_on,
        cost="GPUs do not reach each other by NVLink or PCIe, data goes through host memory: "
        "collectives are several times slower (a training step once 1.6 times)",
        verdict=Verdict.FAIL,
    ),
    _Trap(
        name="NCCL_P2P_LEVEL",
        hurts=_one_of("LOC", "0"),
        cost="never uses peer-to-peer transfers, as NCCL_P2P_DISABLE=1",
        verdict=Verdict.FAIL,
    ),
    _Trap(
        name="NCCL_SHM_DISABLE",
        hurts=_is_on,
        cost="ranks without peer-to-peer talk over network sockets instead of shared memory",
    ),
    _Trap(
        name="NCCL_IB_DISABLE",
        hurts=_is_on,
        cost="nodes talk over TCP instead of InfiniBand or RoCE, a fraction of its bandwidth",
        verdict=Verdict.FAIL,
        between_nodes=True,
    ),
    _Trap(
        name="NCCL_DEBUG",
        hurts=_one_of("INFO", "TRACE"),
        cost="NCCL writes log lines while it works; WARN is enough",
    ),
    _Trap(
        name="NCCL_ALGO",
        hurts=_is_set,
        cost="one algorithm is forced on all sizes, which is right for few of them",
    ),
    _Trap(
        name="NCCL_PROTO",
        hurts=_is_set,
        cost="one protocol is forced on all sizes, which is right for few of them",
    ),
    _Trap(
        name="NCCL_MAX_NCHANNELS",
        hurts=_is_set,
        cost="limits how many channels, and so how much bandwidth, a collective may use",
    ),
    _Trap(
        name="NCCL_MAX_CTAS",
        hurts=_is_set,
        cost="limits how many channels, and so how much bandwidth, a collective may use",
    ),
    _Trap(
        name="CUDA_LAUNCH_BLOCKING",
        hurts=_is_on,
        cost="every kernel is waited for before the next is launched: no overlap at all",
        verdict=Verdict.FAIL,
    ),
    _Trap(
        name="CUDA_DEVICE_MAX_CONNECTIONS",
        hurts=_one_of("1"),
        cost="all streams share one queue, so communication overlaps less with computing",
    ),
    _Trap(
        name="CUDA_VISIBLE_DEVICES",
        hurts=_is_odd_list,
        cost="devices are repeated or out of order: ranks do not sit where one expects them",
    ),
    _Trap(
        name="PYTORCH_NO_CUDA_MEMORY_CACHING",
        hurts=_is_set,
        cost="every tensor asks the driver for memory, which waits for the device",
        verdict=Verdict.FAIL,
    ),
    _Trap(
        name="TORCH_NCCL_BLOCKING_WAIT",
        hurts=_is_on,
        cost="wait() holds the host until the collective is done, so it issues nothing meanwhile",
    ),
    _Trap(
        name="TORCH_NCCL_ENABLE_TIMING",
        hurts=_is_on,
        cost="timed CUDA events are recorded around each collective",
    ),
    _Trap(
        name="TORCH_DISTRIBUTED_DEBUG",
        hurts=_one_of("DETAIL"),
        cost="every collective is preceded by one that compares shapes over gloo",
        verdict=Verdict.FAIL,
    ),
    _Trap(
        name="NVIDIA_TF32_OVERRIDE",
        hurts=_is_set,
        cost="switches TF32 in cuBLAS and cuDNN whatever the precision of the point says",
    ),
)


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
    return [check for trap in _TRAPS if (check := _check_traps(trap, facts)) is not None]


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


def _check_traps(trap: _Trap, facts: Facts) -> Check | None:
    if trap.between_nodes and len(facts.nodes) < 2:
        return None
    caught = {
        label(device): device.environment[trap.name]
        for device in facts.devices
        if trap.name in device.environment and trap.hurts(device.environment[trap.name])
    }
    if not caught:
        return None
    values = ", ".join(dict.fromkeys(caught.values()))
    everywhere = len(caught) == len(facts.devices)
    where = "" if everywhere else f" on {join_names(list(caught))}"
    return Check(
        name=trap.name,
        verdict=_verdict(trap, facts),
        found=f"{values}{where}: {trap.cost}{'' if facts.is_cuda else ' (on GPUs)'}",
        advice=f"unset {trap.name}, also where `ray start` was called",
        details={"devices": list(caught)},
    )


def _verdict(trap: _Trap, facts: Facts) -> Verdict:
    """CPU workers use neither CUDA nor NCCL; without NVLink some machines need P2P to be off."""
    without_nvlink = trap.name.startswith("NCCL_P2P") and not any(map(nvlinks, facts.devices))
    if without_nvlink or not (facts.is_cuda or trap.name.startswith("TORCH_DISTRIBUTED")):
        return Verdict.WARN
    return trap.verdict
