"""What a check says about the environment of the workers, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from raybench.records.conditions import Condition, FactValue
from raybench.records.devices import Finding
from raybench.records.judgement import CommandKind, Problem, Reason
from raybench.report.formatting import counted, number, some, span

QUESTION = "Is the cluster fit to be measured?"
_CHANNELS = "a collective has fewer channels and less bandwidth"
# Variable -> what a costly value does.
_COSTS: Mapping[str, str] = {
    "NCCL_P2P_DISABLE": "GPUs exchange data through host memory, several times slower",
    "NCCL_P2P_LEVEL": "GPUs exchange data through host memory, several times slower",
    "NCCL_SHM_DISABLE": "ranks without peer access use sockets instead of shared memory",
    "NCCL_IB_DISABLE": "nodes use TCP instead of InfiniBand or RoCE",
    "NCCL_DEBUG": "NCCL writes log lines while it works; WARN is enough",
    "NCCL_ALGO": "one algorithm for all sizes",
    "NCCL_PROTO": "one protocol for all sizes",
    "NCCL_MAX_NCHANNELS": _CHANNELS,
    "NCCL_MAX_CTAS": _CHANNELS,
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "CUDA_DEVICE_MAX_CONNECTIONS": "streams share one queue, so less overlaps",
    "CUDA_VISIBLE_DEVICES": "devices are repeated or not in ascending order",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor asks the driver for memory",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits for collectives",
    "TORCH_NCCL_ENABLE_TIMING": "each collective records timed events",
    "TORCH_DISTRIBUTED_DEBUG": "shapes are compared over gloo before each collective",
    "NVIDIA_TF32_OVERRIDE": "cuBLAS and cuDNN use or avoid TF32 whatever the precision is",
}


def _costly_variable(reason: Reason) -> str:
    """Return the values of a variable, and what they cost."""
    # `names` has the variable, then its values. `limit` is 1 if the variable has an effect on the
    # devices of this cluster, else 0.
    variable, *values = reason.names
    is_used_here = bool(reason.limit)
    text = f"set to {' and '.join(values)}; {_COSTS[variable]}"
    return text if is_used_here else f"{text} (on GPUs)"


def _no_routes(reason: Reason) -> str:
    return f"unknown: {'; '.join(reason.names) or 'the ranks reported no transport'}"


def _fill(text: str) -> Callable[[Reason], str]:
    """Return a function that fills `{value}`, `{limit}` and `{names}` from a reason."""

    def text_of_reason(reason: Reason) -> str:
        value, limit = _number_text(reason.value), _number_text(reason.limit)
        return text.format(value=value, limit=limit, names=some(reason.names))

    return text_of_reason


def _number_text(value: float | None) -> str:
    """Return `2`, `7.10` or `unlimited`; "" for None."""
    if value == math.inf:
        return "unlimited"
    is_whole = value is not None and value % 1 == 0
    return f"{value:,.0f}" if is_whole else number(value, 3)


_CONDITIONS: Mapping[Condition, Callable[[Reason], str]] = {
    Condition.NICENESS: _fill("niceness {value}: other programs get the CPU first"),
    Condition.LITTLE_DISK: _fill("only {value} GiB are free for temporary files"),
    Condition.LITTLE_SHM: _fill("only {value} GiB are free; NCCL and Ray fail when it is full"),
    Condition.LITTLE_MEMLOCK: _fill("only {value} GiB of memory may be locked; RDMA needs more"),
    Condition.MANY_THREADS: _fill("{value} threads of workers share {limit} cores"),
    Condition.LOAD: _fill("load {value} on {limit} cores: other programs slow the workers"),
    Condition.LOW_CLOCKS: _fill("at most {value} MHz; others of the model reach {limit} MHz"),
    Condition.THROTTLED: _fill("clocks are limited before any work: {names}"),
    Condition.POWER_CAP: _fill("{value} W, default {limit} W: heavy steps get lower clocks"),
    Condition.WARM: _fill("{value} °C before any work"),
    Condition.MIG_ON: _fill("MIG is on: a slice is tested, and NCCL cannot join slices"),
    Condition.PERSISTENCE_OFF: _fill("off: starts take longer, and the driver forgets settings"),
    Condition.ECC_OFF: _fill("off: memory errors are not found"),
    Condition.FEW_NVLINKS: _fill("{value} active links; others of the model have {limit}"),
    Condition.OTHER_PROCESSES: lambda reason: (
        f"{counted(int(reason.value or 0), 'other program')} on the GPU"
    ),
    Condition.SLOW_INTERFACE: _fill("{value} Gbit/s; other nodes have {limit} Gbit/s"),
    Condition.FEW_DEVICES: _fill("{value} on this node, {limit} on another node"),
    Condition.MISSING_DEVICES: _fill("{value} without a worker in time"),
    Condition.SEVERAL_MODELS: _fill("{value} models: every step waits for the slowest one"),
    Condition.VERSIONS_DIFFER: _fill("workers have different versions of {names}"),
    Condition.LIBRARIES_DIFFER: _fill("workers have loaded different files of {names}"),
    Condition.VARIABLES_DIFFER: _fill("workers have different values of {names}"),
    Condition.COSTLY_VARIABLE: _costly_variable,
    Condition.OTHER_SWEEPS: _fill("{names}"),
    Condition.SLOW_CONNECTION: _fill("{value} s to connect all devices"),
    Condition.NO_PEER_ACCESS: _fill("{names}: GPUs exchange data through host memory"),
    Condition.UNUSED_ADAPTERS: _fill("nodes use TCP although they have {names}"),
    Condition.INNER_INTERFACE: _fill("{names} leads to no other host, or by a detour"),
    Condition.NO_GPU_DIRECT: _fill("off: data between nodes goes through host memory"),
    Condition.ONE_HOST: _fill("nodes of Ray share a host: the network was not tested"),
    Condition.NO_ROUTES: _no_routes,
}


def condition(reason: Reason) -> str:
    """Return what is wrong with the environment."""
    assert reason.condition is not None, "the kind says so"
    return _CONDITIONS[reason.condition](reason)


def facts(reason: Reason) -> str:
    """Return facts in text, such as `torch 2.11.0, nccl 2.28.9 (alpha GPU 0)`."""
    return ", ".join(map(_fact, reason.facts))


def _fact(fact: FactValue) -> str:
    value = "not set" if fact.value is None else fact.value
    text = " ".join(filter(None, (fact.name, value)))
    return f"{text} ({some(fact.subjects)})" if fact.subjects else text


def no_collective(problem: Problem) -> str:
    """Return why the devices cannot communicate."""
    detail = problem.detail or (problem.status.clause if problem.status else "")
    return ": ".join(filter(None, (*problem.names, detail)))


# Commands of `CommandKind` that are about the environment.
COMMANDS: Mapping[CommandKind, str] = {
    CommandKind.RESTART_RAY: "ray stop; ray start --address=HEAD:6379",
    CommandKind.SHOW_DISK: "df -h",
    CommandKind.ENLARGE_SHM: "docker run --shm-size=8g",
    CommandKind.RAISE_MEMLOCK: "docker run --ulimit memlock=-1",
    CommandKind.SHOW_INTERFACES: "ip -br address; ip -br link",
    CommandKind.SHOW_KERNEL_LOG: "dmesg | grep Xid; nvidia-smi -L",
    CommandKind.SHOW_VERSIONS: "pip freeze; nvidia-smi",
    CommandKind.SHOW_PEERS: "nvidia-smi topo -p2p r; env | grep NCCL_",
    CommandKind.SHOW_RDMA: "ibv_devinfo; ls /dev/infiniband; env | grep NCCL_",
    CommandKind.LOAD_PEERMEM: "modprobe nvidia-peermem",
    CommandKind.TURN_PERSISTENCE_ON: "nvidia-smi -pm 1",
    CommandKind.RESET_CLOCKS: "nvidia-smi -rgc -i {uuid}",
    CommandKind.SHOW_THROTTLING: "nvidia-smi -q -d PERFORMANCE -i {uuid}",
    CommandKind.TURN_MIG_OFF: "nvidia-smi -mig 0 -i {uuid}",
    CommandKind.TURN_ECC_ON: "nvidia-smi -e 1 -i {uuid}",
    CommandKind.INSTALL: "pip install {names}",
    CommandKind.CHOOSE_INTERFACE: "ip -br address; export {names}=INTERFACE",
    CommandKind.LIMIT_THREADS: "export OMP_NUM_THREADS=1",
    CommandKind.START_WITHOUT_NICE: "nice  # must print 0 in the shell that starts raybench",
    CommandKind.SHOW_RAY: "ray status",
    CommandKind.WAIT: "raybench health --wait 600",
    CommandKind.CHECK_LOUDLY: "NCCL_DEBUG=WARN raybench health --only environment",
}
# Commands that do not name their hosts.
ANYWHERE = frozenset(
    {
        CommandKind.LIMIT_THREADS,
        CommandKind.START_WITHOUT_NICE,
        CommandKind.SHOW_RAY,
        CommandKind.WAIT,
        CommandKind.CHECK_LOUDLY,
    }
)


def summary(healthy: int, unknown: int, transports: Sequence[str]) -> str:
    """Return the line about the environment in a report.

    Args:
        healthy: number of facts without a fault.
        unknown: number of facts that nothing here reports.
        transports: that the devices use.
    """
    parts = [f"{counted(healthy, 'fact')} {'is' if healthy == 1 else 'are'} fine"]
    if unknown:
        parts.append(f"{unknown} cannot be read here")
    if transports:
        parts.append(f"transport: {some(transports)}")
    return f"Environment: {'; '.join(parts)}."


def note(test: str, names: Sequence[str], reason: str) -> str:
    """Return a note on subjects with the same reason: `power cap of alpha GPU 2: 500 W, ...`.

    Args:
        names: of the subjects; empty for the cluster.
    """
    return f"{test} of {some(names, 3)}: {reason}" if names else f"{test}: {reason}"


def more_notes(count: int) -> str:
    """Return the line that counts the notes that are not shown."""
    return f"{counted(count, 'more note')}; --json and the page have all facts"


def headline(devices: str, notes: int) -> str:
    """Return the verdict of a check of the environment alone, if nothing is bad.

    Args:
        devices: such as "both GPUs".
        notes: number of facts with a note.
    """
    text = f"nothing is wrong with the environment of {devices}"
    return f"{text}; {counted(notes, 'fact')} may disturb measurements" if notes else text


def fact_values(findings: Iterable[Finding]) -> str:
    """Return what one test of the environment has read, over all subjects."""
    findings = list(findings)
    texts = dict.fromkeys(finding.evidence for finding in findings if finding.evidence)
    if texts:
        return "; ".join(texts)
    values = sorted({finding.value for finding in findings if finding.value is not None})
    if not values:
        return "unknown"
    unit = findings[0].unit
    if not unit:
        # The value of a switch is 0 or 1.
        return " and ".join("on" if value else "off" for value in values)
    text = span(_number_text(values[0]), _number_text(values[-1]))
    # `unlimited` needs no unit.
    return text if values[0] == math.inf else f"{text} {unit}"
