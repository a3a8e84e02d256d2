"""all_reduces by size over all nodes: by torchrun on each of them, and by raybench.

Each start of either side is in fresh processes and times all sizes; the sides take turns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from raybench.cluster import Cluster, DeviceKind
from raybench.cluster.failures import cause_of
from raybench.doctor.parity import Parity, SideError, Step, order, time_by_raybench
from raybench.job.model import Measure, Span
from raybench.job.point import Point, Precision
from raybench.records import Device, Measurement, Task

_WORKLOAD = "raybench.workloads.torchrun_launch:TorchrunLaunch"
_MODULE = "raybench.doctor.bare_collectives"
_ANSWER = "raybench: torchrun "
_KIB, _MIB = 2**10, 2**20
_SIZES = {
    "cuda": (32 * _KIB, _MIB, 16 * _MIB, 256 * _MIB),
    "cpu": (4 * _KIB, 256 * _KIB, 8 * _MIB),
}
_WARMUP = 10
# Large messages take so long that fewer show as much.
_ITERATIONS, _FEWER, _LARGE_BYTES = 200, 50, 4 * _MIB
_MARGIN = 0.05
_SETTINGS = Measure(
    warmup=Span(min=1, max=1),
    iterations=Span(min=1, max=1),
    max_seconds=1.0,
    timeout_s=300.0,
    breakdown=False,
)


def steps(kind: DeviceKind) -> tuple[Step, ...]:
    """Return the all_reduces to compare, the smallest first."""
    return tuple(
        Step(
            name=f"parity, all_reduce {_size(size_bytes)}",
            workload="collective",
            params={"operation": "all_reduce", "size_bytes": size_bytes},
            batch_size=None,
            iterations=_ITERATIONS if size_bytes < _LARGE_BYTES else _FEWER,
            margin=_MARGIN,
        )
        for size_bytes in _SIZES[kind]
    )


def compare(
    cluster: Cluster, steps: Sequence[Step], starts: int, tell: Callable[[str], None]
) -> list[Parity]:
    """Run both sides `starts` times over all devices. tell: takes a line for each start.

    Every node must have equally many of them: torchrun gives each as many ranks.
    """
    worker_ids = range(len(cluster.devices))
    found: dict[str, list[Sequence[float]]] = {"torchrun": [], "raybench": []}
    try:
        for side in order(starts):
            if side == "torchrun":
                found[side].append(_by_torchrun(cluster, steps))
            else:
                found[side].append(_by_raybench(cluster, worker_ids, steps))
            times = ", ".join(f"{time_ms:.3f}" for time_ms in found[side][-1])
            tell(f"all_reduce: {side} {len(found[side])} of {starts}: {times} ms")
    except SideError as error:
        return [Parity(step=replace(steps[0], name="parity, all_reduce"), error=str(error))]
    columns = {side: list(zip(*rows, strict=True)) for side, rows in found.items()}
    return [
        Parity(step=step, torchrun_ms=bare_ms, raybench_ms=own_ms)
        for step, bare_ms, own_ms in zip(
            steps, columns["torchrun"], columns["raybench"], strict=True
        )
    ]


def why_not(devices: Sequence[Device]) -> str:
    """Why torchrun cannot have these devices; empty where it can."""
    counts = Counter(device.node_id for device in devices)
    if len(devices) < 2:
        return "there is one device"
    return "nodes have different numbers of devices" if len(set(counts.values())) > 1 else ""


def _by_torchrun(cluster: Cluster, steps: Sequence[Step]) -> list[float]:
    """Time all steps by one start of torchrun on each node. Raises SideError."""
    by_node: dict[str, list[int]] = {}
    for worker_id, device in enumerate(cluster.devices):
        by_node.setdefault(device.node_id, []).append(worker_id)
    first = [worker_ids[0] for worker_ids in by_node.values()]
    answers = cluster.run(launch_task(cluster.devices, list(by_node.values()), steps), first)
    if cause := cause_of(answers):
        raise SideError(f"torchrun: {cause.message}")
    output = "\n".join(one.output for one in answers if isinstance(one, Measurement))
    line = next((line for line in output.splitlines() if line.startswith(_ANSWER)), None)
    if line is None:
        raise SideError("torchrun: no answer")
    told = json.loads(line.removeprefix(_ANSWER))
    return [told[str(step.params["size_bytes"])] for step in steps]


def launch_task(
    devices: Sequence[Device], by_node: Sequence[Sequence[int]], steps: Sequence[Step]
) -> Task:
    """Make the task of one worker a node: to start torchrun there."""
    first = [devices[worker_ids[0]] for worker_ids in by_node]
    spec = {
        "device": first[0].kind,
        "indexes": [devices[worker_id].index for worker_id in by_node[0]],
        "steps": [[step.params["size_bytes"], _WARMUP, step.iterations] for step in steps],
    }
    point = Point(
        workload=_WORKLOAD,
        params={
            "module": _MODULE,
            "spec": json.dumps(spec),
            "addresses": ",".join(device.address for device in first),
            "processes": len(by_node[0]),
        },
        world_size=len(first),
        precision=Precision.FP32,
        batch_size=None,
        global_batch_size=None,
        scaling=None,
    )
    return Task(point=point, settings=_SETTINGS, precisions=None)


def _by_raybench(cluster: Cluster, worker_ids: Sequence[int], steps: Sequence[Step]) -> list[float]:
    """Time all steps in new processes, one after the other in these. Raises SideError."""
    return [
        time_by_raybench(cluster, worker_ids, step, fresh=place == 0)
        for place, step in enumerate(steps)
    ]


def _size(size_bytes: int) -> str:
    return f"{size_bytes // _MIB} MiB" if size_bytes >= _MIB else f"{size_bytes // _KIB} KiB"
