"""The processes that raybench starts as Ray actors, and what Ray's errors say of one that failed.

There is a worker per device, an agent per node (`nodes`), and one store (`cluster`).
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from raybench.cluster import reaper
from raybench.cluster.device_reservation import FOLDER_VARIABLE
from raybench.errors import DETAIL_CHARACTERS, brief, message_of, shorten_start, traceback_of
from raybench.records import (
    Answer,
    Cause,
    Device,
    DeviceKind,
    Failure,
    Group,
    RankInfo,
    Status,
    Task,
)
from raybench.records.environment import variables_that_matter

# Not CUDA_: those say which devices and which files this host has.
_FORWARDED = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "MKL_", "NVIDIA_TF32_")
_EXIT_CODE = re.compile(r"exit code (-?\d+)\.(?: The process receives a (SIG[A-Z]+))?")
_NODE_DEATHS = ("its node has died", "node was terminated", "NodeDiedError", "node is dead")
# Over sockets NCCL notices a dead peer by itself, and torch's watchdog of the survivors then waits
# for 60 s, writes what it has recorded, and ends the process. Without these three it only notes it.
_SURVIVE_A_PEER = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}


class _Worker:
    """The actor around a `Worker`, which is told by Ray where it is and which GPU it has.

    It has no device before `attach_device`.
    """

    def __init__(self, search_path: str) -> None:
        if search_path not in sys.path:
            sys.path.insert(0, search_path)
        reaper.reap_orphans_of_worker()
        gc.disable()  # the collections in between are a sixth of the time of these imports
        from raybench.worker.process_group import choose_interface
        from raybench.worker.worker import load

        choose_interface(node_address())
        load()
        gc.enable()

    def attach_device(
        self, kind: DeviceKind, index: int | None = None, only: Collection[str] | None = None
    ) -> Device | None:
        """Take the device with this index, or the GPU that Ray assigned, and return it.

        index: as of a `Worker`; None is the GPU that Ray assigned. only: names of the devices that
        may be used; return None where it is none of them.
        """
        from raybench.hardware import nvml
        from raybench.worker.worker import Worker

        if index is None:
            # Ray names a GPU by its entry in the raylet's CUDA_VISIBLE_DEVICES where that is set,
            # and torch, which sees all GPUs, counts along that list.
            (assigned,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            index = visible.split(",").index(assigned) if visible else int(assigned)
        if only is not None and kind == "cuda" and nvml.uuid_of(index) not in (None, *only):
            return None
        self._worker = Worker(kind, index)
        node_id = ray.get_runtime_context().get_node_id()
        device = self._worker.identity(node_id=node_id, address=node_address())
        return device if only is None or device.lasting_name in only else None

    def run(self, task: Task, place: RankInfo, group: Group | None) -> Answer:
        return self._worker.run(task, place, group)

    def leave(self) -> None:
        self._worker.leave()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One device of a node, held for us by a bundle of a placement group until that is removed."""

    node_id: str
    placement: PlacementGroup
    bundle: int


@dataclass(slots=True, kw_only=True)
class WorkerHandle:
    """A worker of the pool: its slot and device, and the actor that is its process now.

    is_used: whether this process has run a point. user_class: the class of the user's that it has
    run. environment: variables of the job that its process, or the next one, starts with.
    lost_because: why it cannot be used any more, "" as long as it can.
    """

    slot: Slot
    actor: Any
    device: Device
    is_used: bool = False
    user_class: str = ""
    lost_because: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def start_worker(kind: DeviceKind, slot: Slot, environment: Mapping[str, str] | None = None) -> Any:
    """Start a worker process on the device of this slot; return its `_Worker`. Does not wait.

    Call its `attach_device` next. environment: variables of the job, in addition to those that all
    workers have.
    """
    there = PlacementGroupSchedulingStrategy(
        slot.placement, placement_group_bundle_index=slot.bundle
    )
    variables = {**_worker_environment(), **(environment or {}), reaper.MARK: reaper.new_mark()}
    options = {
        "num_gpus": int(kind == "cuda"),
        "num_cpus": int(kind == "cpu"),
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": there,
        "runtime_env": {"env_vars": variables},
    }
    return ray.remote(_Worker).options(**options).remote(str(Path.cwd()))


def start_on_node(actor: type, node_id: str) -> Any:
    """Start an actor of this class on the node, without a device; return it. Does not wait."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    environment = {
        # Ray's nice 15 lets a busy node look like a dead one.
        "RAY_worker_niceness": "0",
        # The mark shows that its processor time is ours.
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


def node_address() -> str:
    """Return the IP address of this node by which the others reach it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


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


def answer_of(ref: Any, rank: int, device: Device) -> Answer:
    """Return the answer of a rank; a Failure where it raised or its process died.

    ref: of the call, which must have ended.
    """
    try:
        answer: Answer = ray.get(ref)
    except ray.exceptions.RayError as error:
        told = click.unstyle(str(error))  # Ray colours its text for a terminal
        is_dead = isinstance(error, ray.exceptions.RayActorError | ray.exceptions.NodeDiedError)
        is_out_of_memory = isinstance(error, ray.exceptions.OutOfMemoryError) or (
            is_dead and ("running low on memory" in told or "memory monitor" in told)
        )
        if is_dead and not is_out_of_memory and any(words in told for words in _NODE_DEATHS):
            return node_lost(rank, device)
        if is_dead or is_out_of_memory:
            reason = f"the worker process {_how_it_died(told)}"
            if is_out_of_memory:
                host = device.host
                reason = f"Ray's memory monitor killed the worker: {host} has run out of memory"
            return Failure.of(
                Cause.HOST_OUT_OF_MEMORY if is_out_of_memory else Cause.WORKER_DIED,
                rank=rank,
                message=reason,
                detail=shorten_start(told, DETAIL_CHARACTERS),
            )
        # The exception that the worker raised, if any: Ray's text begins with the actor's name.
        cause = getattr(error, "cause", None) or error
        return Failure(
            rank=rank,
            status=Status.ERROR,
            error_type=type(cause).__name__,
            message=click.unstyle(message_of(cause)),
            detail=click.unstyle(traceback_of(error)),
        )
    return answer


def node_lost(rank: int, device: Device) -> Failure:
    """Return the failure of a rank whose node is gone, frozen or cut off. device: the rank's."""
    message = f"node {device.host} does not answer"
    return Failure.of(Cause.NODE_LOST, rank=rank, message=message)


def _how_it_died(told: str) -> str:
    """Return how a process ended, as a phrase such as "died by SIGSEGV". told: Ray's text."""
    if found := _EXIT_CODE.search(told):
        code, signal = found.groups()
        return f"died by {signal}" if signal else f"ended with exit code {code}"
    if "connection error code 2" in told:
        return (
            "ended without a word: by os._exit, or by a signal as SIGKILL, which the kernel sends "
            "out of memory"
        )
    for mark in ("Worker exit detail:", "The actor died because", "The actor is dead because"):
        if mark in told:
            reason = told.split(mark, 1)[1].strip().splitlines()[0]
            return f"died: {reason.split(' Some common causes', 1)[0]}"
    return f"died: {told.strip().splitlines()[0]}"


def why_no_start(error: Exception) -> str:
    """Return in one line for the user why a worker did not start. error: raised by Ray."""
    text = str(error).strip()
    node = re.search(r"\bip=([^,)]+)", text)
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = brief(error.cause)
    elif "creation task" in text:
        # The exception of a constructor stands last, below Ray's own traceback.
        cause = text.splitlines()[-1].strip()
    elif was_killed(error):
        cause = f"its process {_how_it_died(text)}"
    else:
        cause = message_of(error)
    hint = "; install the same packages on every node" if "ModuleNotFoundError" in cause else ""
    return f"a worker could not start{f' on {node[1]}' if node else ''}: {cause}{hint}"


def was_killed(error: Exception) -> bool:
    """Return whether the process of a worker that was starting was killed from outside."""
    is_death = isinstance(error, ray.exceptions.RayActorError)
    return is_death and "creation task" not in str(error)
