"""The actors that raybench runs on a Ray cluster, and the processes that they get.

A worker per device, an agent per node, and one store.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from raybench.cluster import DeviceKind, reaper
from raybench.cluster.device_locks import FOLDER_VARIABLE
from raybench.cluster.ray_cluster.node_agent import NodeAgent
from raybench.records import Answer, Device, Group, RankInfo, Task
from raybench.records.environment import variables_that_matter

# Not CUDA_: those say which devices and which files this host has.
_FORWARDED = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "MKL_", "NVIDIA_TF32_")
# Over sockets NCCL notices a dead peer by itself, and torch's watchdog of the survivors then waits
# for 60 s, writes what it has recorded, and ends the process. Without these three it only notes it.
_SURVIVE_A_PEER = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}


class _Worker:
    """A Worker, and what only Ray can tell it. It has no device before `attach_device`."""

    def __init__(self, search_path: str) -> None:
        if search_path not in sys.path:
            sys.path.insert(0, search_path)
        reaper.reap_orphans_of_worker()
        gc.disable()  # the collections in between are a sixth of the time of these imports
        from raybench.worker.rendezvous import choose_interface
        from raybench.worker.worker import load

        choose_interface(_address())
        load()
        gc.enable()

    def is_loaded(self) -> bool:
        """Show that this process has done all that can be done without a device."""
        return True

    def attach_device(
        self, kind: DeviceKind, index: int | None = None, only: Collection[str] | None = None
    ) -> Device | None:
        """Take this device, or the GPU that Ray assigned, and say which it is.

        only: names of the devices that may be taken; None where it is none of them.
        """
        from raybench.hardware import nvml
        from raybench.worker.worker import Worker

        if index is None:
            index = _index_of_gpu()
        if only is not None and kind == "cuda" and nvml.uuid_of(index) not in (None, *only):
            return None
        self._worker = Worker(kind, index)
        node_id = ray.get_runtime_context().get_node_id()
        device = self._worker.identity(node_id=node_id, address=_address())
        return device if only is None or device.lasting_name in only else None

    def run(self, task: Task, place: RankInfo, group: Group | None) -> Answer:
        return self._worker.run(task, place, group)

    def leave(self) -> None:
        self._worker.leave()

    def end(self) -> None:
        """End this process where Ray's head is gone, which `ray.kill` would ask."""
        os.kill(os.getpid(), signal.SIGKILL)


class _Store:
    """Holds the rendezvous, on the driver's node."""

    def __init__(self) -> None:
        from raybench.worker.rendezvous import StoreHost

        self._host = StoreHost(_address())

    def endpoint(self) -> tuple[str, int]:
        return self._host.endpoint()

    def tell_abort(self, group: Group) -> None:
        self._host.tell_abort(group)


def start_worker(
    kind: DeviceKind,
    placement: PlacementGroup,
    bundle: int,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Start a worker that Ray gives the device of this bundle, with these variables of a job."""
    there = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle)
    gpus, cpus = int(kind == "cuda"), int(kind == "cpu")
    return _start_actor(there, num_gpus=gpus, num_cpus=cpus, environment=environment or {})


def start_standby(node_id: str) -> Any:
    """Start a worker on this node that Ray gives no device."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return _start_actor(there, num_gpus=0, num_cpus=0, environment={})


def _start_actor(
    there: Any, *, num_gpus: int, num_cpus: int, environment: Mapping[str, str]
) -> Any:
    variables = {**_worker_environment(), **environment, reaper.MARK: reaper.new_mark()}
    options = {
        "num_gpus": num_gpus,
        "num_cpus": num_cpus,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": there,
        "runtime_env": {"env_vars": variables},
    }
    return ray.remote(_Worker).options(**options).remote(str(Path.cwd()))


def start_store() -> Any:
    """Start a store on this node."""
    return _on_node(_Store, ray.get_runtime_context().get_node_id())


def start_agent(node_id: str) -> Any:
    """Start an agent on this node."""
    return _on_node(NodeAgent, node_id)


def _on_node(actor: type, node_id: str) -> Any:
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    environment = {
        # Ray's nice 15 lets a busy node look like a dead one.
        "RAY_worker_niceness": "0",
        # By which its processor time is known to be ours.
        reaper.MARK: reaper.new_mark(),
    }
    if folder := os.environ.get(FOLDER_VARIABLE):
        environment[FOLDER_VARIABLE] = folder
    options = {
        "num_cpus": 0,
        "max_restarts": 0,
        "scheduling_strategy": there,
        "runtime_env": {"env_vars": environment},
    }
    return ray.remote(actor).options(**options).remote()


def _address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _index_of_gpu() -> int:
    """Return torch's index of the GPU that Ray assigned to this actor, with no GPU masked.

    Ray names a GPU by its entry in the raylet's CUDA_VISIBLE_DEVICES where that is set, and torch
    counts along that list.
    """
    (assigned,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(assigned) if visible else int(assigned)


def _worker_environment() -> dict[str, str]:
    """Return the variables that make an actor's process like one of torchrun's."""
    return {
        **_SURVIVE_A_PEER,
        # As srun does: a variable set for the sweep is meant for the workers, on every node.
        **{
            name: value
            for name, value in variables_that_matter().items()
            if name.startswith(_FORWARDED)
        },
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "RAY_worker_niceness": "0",
        # Ray would turn the log over in threads of the worker, behind a pipe: they would run beside
        # what is measured, and the last words of a crash, which say its reason, would be lost.
        "RAY_ROTATION_MAX_BYTES": "0",
        # Unmasked: NCCL is slow or hangs across hosts when each rank sees one GPU (ray#61073).
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    }
