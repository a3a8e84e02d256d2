"""The action for a subject that is not healthy, and the commands to type for it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from raybench.health.device_facts import ACTIONS
from raybench.health.suite import WAIT_TEST
from raybench.records import Device
from raybench.records.health import Action, Finding, Verdict

# Variables that make all devices or links slow: in tests that use NCCL, and in those that launch
# kernels. NCCL_NVLS_ENABLE=0 does not: the expected figures are without it.
_SLOWING_NCCL = (
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS"),
)
_SLOWING_KERNELS = ("CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE")
_STAGES_OF_NCCL = ("pairs", "together", "smoke", "straggler", "burn-in")
_OFF = ("", "0")


def advise(finding: Finding, known: Mapping[str, Device]) -> tuple[Action, Sequence[str]]:
    """Return the action for a finding that is not healthy, and the commands, a line each.

    known: the devices by the identity that subjects have of them.
    """
    devices = [known[uuid] for uuid in finding.subject.uuids if uuid in known]
    kind, stage = finding.subject.kind, finding.stage
    action = Action.WATCH
    if stage == "facts":
        action = ACTIONS.get(finding.test, Action.WATCH)
    elif finding.verdict is Verdict.UNTESTED or finding.test == WAIT_TEST or not devices:
        action = Action.WATCH
    elif kind in ("node", "cluster") and (names := _slowing_variables(finding, devices)):
        return Action.SETTING, [f"unset {' '.join(names)}"]
    elif kind == "cluster":
        # What all devices share.
        topology = f"nvidia-smi topo -m; numactl --hardware; lscpu  # on {devices[0].host}"
        return action, [topology if stage == "host-links" else "raybench doctor"]
    elif kind in ("pair", "node"):
        return action, [_look_at_path(devices)]
    elif finding.ratio is not None or finding.value is None:
        return _about_slow(finding, devices[0])
    elif finding.verdict is not Verdict.SUSPECT:
        # Wrong results; suspect is a device of which some passes failed.
        action = Action.REPLACE
    return action, _commands(action, devices)


def _about_slow(finding: Finding, device: Device) -> tuple[Action, Sequence[str]]:
    """Return the advice for a slow device: other programs, a power limit, or the device itself."""
    if device.kind == "cpu":
        return Action.WATCH, [f"ps -eo pcpu,psr,pid,comm --sort=-pcpu | head  # on {device.host}"]
    at = f"-i {device.index}  # on {device.host}"
    is_bad = finding.verdict is Verdict.BAD
    if finding.stage == "host-links":
        return Action.RESET if is_bad else Action.WATCH, [f"nvidia-smi -q {at}, GPU Link Info"]
    if device.other_processes:
        return Action.SETTING, [f"nvidia-smi -q -d PIDS {at}"]
    cap, default = device.power_cap_w, device.power_cap_default_w
    if cap is not None and default is not None and cap < default:
        return Action.SETTING, [f"nvidia-smi --power-limit={default:g} {at}"]
    if not is_bad:
        return Action.WATCH, ["raybench health --only alone --burn-in 10m"]
    return Action.RESET, _commands(Action.RESET, [device])


def _commands(action: Action, devices: Iterable[Device]) -> Sequence[str]:
    """Return what resets the devices, keeps jobs off their nodes, or shows the first of them."""
    if action is Action.RESET:
        return [f"nvidia-smi --gpu-reset -i {one.index}  # on {one.host}" for one in devices]
    if action is Action.REPLACE:
        hosts = [shlex.quote(host) for host in dict.fromkeys(device.host for device in devices)]
        slurm = "scontrol update nodename={} state=drain reason='raybench health'"
        return [line.format(host) for host in hosts for line in (slurm, "kubectl cordon {}")]
    return [
        f"nvidia-smi -q -i {device.index}  # on {device.host}"
        if device.kind == "cuda"
        else f"ps -o pid,stat,pcpu,wchan:20,comm -p {device.process_id}  # on {device.host}"
        for device in devices
    ][:1]


def _look_at_path(devices: Sequence[Device]) -> str:
    """Return the command that shows the links between these devices."""
    hosts = dict.fromkeys(device.host for device in devices)
    if len({device.node_id for device in devices}) == 1 and devices[0].kind == "cuda":
        return f"nvidia-smi topo -m; nvidia-smi nvlink --status  # on {devices[0].host}"
    return f"ip -s link; tc qdisc show  # on {' and on '.join(hosts)}"


def _slowing_variables(finding: Finding, devices: Sequence[Device]) -> list[str]:
    """Return the variables that are set on any device and are known to make such a test slow."""
    is_of_nccl = finding.stage in _STAGES_OF_NCCL and not finding.test.startswith("copy ")
    names = (_SLOWING_NCCL if is_of_nccl else ()) + (
        _SLOWING_KERNELS if finding.stage != "host-links" else ()
    )
    return [
        name
        for name in names
        if any(device.environment.get(name, "") not in _OFF for device in devices)
    ]
