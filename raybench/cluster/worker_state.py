"""What is known of a worker, whatever its launcher, and what follows from it for a point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raybench.cluster.allocator import devices_shared
from raybench.errors import ClusterError
from raybench.records import Answer, Cause, Device, Failure, Task
from raybench.records.environment import package_versions


@dataclass(slots=True, kw_only=True)
class WorkerState:
    """A worker. lost_because: empty as long as it can be used.

    environment: variables that its process was started with, or its next one is.
    """

    device: Device
    is_used: bool = False
    lost_because: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def need_new_processes(task: Task, workers: Sequence[WorkerState]) -> bool:
    """Whether a point asks for fresh ones, or for variables that these were not started with."""
    is_fresh = task.settings.fresh_workers and any(worker.is_used for worker in workers)
    return is_fresh or any(worker.environment != task.worker_environment for worker in workers)


def answer_unstarted(workers: Sequence[WorkerState]) -> tuple[list[Answer], list[str]]:
    """Answer for a point of which a worker was lost before it began, and say why each was."""
    message = "another rank has no worker"
    answers: list[Answer] = [
        Failure.of(Cause.PEER_FAILED, rank=rank, message=message, worker_reusable=True)
        for rank in range(len(workers))
    ]
    return answers, [worker.lost_because for worker in workers]


def check_devices(devices: Sequence[Device]) -> None:
    """Each worker has a device of its own and the driver's versions, or nothing is measured."""
    if shared := devices_shared(devices):
        raise ClusterError(f"several workers were given the same device: {', '.join(shared)}")
    ours = package_versions()
    for device in devices:
        for name in ours.keys() & device.versions.keys():
            if ours[name] != device.versions[name]:
                raise ClusterError(
                    f"{name} is {ours[name]} here and {device.versions[name]} on "
                    f"{device.host} ({device.address}): "
                    "install the same version on every node"
                )
