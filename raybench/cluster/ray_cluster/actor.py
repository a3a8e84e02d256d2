"""The process of a worker: the actor around a `Worker`, how it is started, and how it died."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raybench.cluster import reaper
from raybench.cluster.ray_cluster.nodes import node_address
from raybench.cluster.ray_cluster.placements import Slot
from raybench.errors import brief, message_of
from raybench.records.device import Device, DeviceKind
from raybench.records.environment import FORWARDED_VARIABLE
from raybench.records.measurement import RankAnswer
from raybench.records.task import GroupSpec, RankInfo, Task

# Prefixes of variables that workers take over from the driver. CUDA_ variables name devices and
# files of the driver's host, so they are not taken over.
_FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "MKL_", "NVIDIA_TF32_")
_EXIT_CODE = re.compile(r"exit code (-?\d+)\.(?: The process receives a (SIG[A-Z]+))?")
# When a peer dies, NCCL over sockets notices, and torch's watchdog of each survivor would wait for
# 60 s, dump its recording, and end the process. With these variables the watchdog only logs.
# DUMP_ON_TIMEOUT must stay 0: torch asks all ranks for a dump by the key "exception_dump" of the
# TCP store, without the prefix of the process group. All points of a run share the store, so one
# failed point would make the workers of all other points dump, wait for 8 minutes and abort
# (HeartbeatMonitor in ProcessGroupNCCL.cpp). raybench reads the recordings itself (raybench.hangs).
_SURVIVE_DEATH_OF_RANK = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}


class _Worker:
    """The actor around a `Worker`. Call `attach_device` first."""

    def __init__(self, search_path: str) -> None:
        """Load the modules of points; `search_path` has the user's modules."""
        if search_path not in sys.path:
            sys.path.insert(0, search_path)
        reaper.reap_orphans_of_worker()
        gc.disable()  # garbage collections would take a sixth of the time of the imports
        from raybench.worker.process_group import choose_interface
        from raybench.worker.worker import preload

        choose_interface(node_address())
        preload()
        gc.enable()

    def attach_device(
        self, kind: DeviceKind, index: int | None = None, only: Collection[str] | None = None
    ) -> Device | None:
        """Take a device and return it; None if the device is not in `only`.

        Args:
            index: index of the device on its node; None: the GPU that Ray has assigned.
            only: names of the devices that may be used; None for all.
        """
        from raybench.hangs.responder import choose_ras_address
        from raybench.hardware import nvml
        from raybench.worker.worker import Worker

        if kind == "cuda":
            choose_ras_address()
        if index is None:
            # Ray names a GPU by its entry in the raylet's CUDA_VISIBLE_DEVICES. torch sees all GPUs
            # and numbers them in the order of that list.
            (assigned,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            index = visible.split(",").index(assigned) if visible else int(assigned)
        # Ask NVML first, because making a `Worker` takes seconds.
        if only is not None and kind == "cuda":
            uuid = nvml.uuid_of(index)
            if uuid is not None and uuid not in only:
                return None
        self._worker = Worker(kind, index)
        node_id = ray.get_runtime_context().get_node_id()
        device = self._worker.identity(node_id=node_id, address=node_address())
        return device if only is None or device.lasting_name in only else None

    def run(self, task: Task, rank_info: RankInfo, group: GroupSpec | None) -> RankAnswer:
        return self._worker.run(task, rank_info, group)

    def leave(self) -> None:
        self._worker.leave()


def start_worker(kind: DeviceKind, slot: Slot, environment: Mapping[str, str] | None = None) -> Any:
    """Start a worker process on a slot; do not wait. Return the handle of the actor.

    Call `attach_device` of the actor next.

    Args:
        environment: variables of the job; they override forwarded variables and defaults.
    """
    placement = PlacementGroupSchedulingStrategy(
        slot.placement, placement_group_bundle_index=slot.bundle
    )
    variables = {
        **_SURVIVE_DEATH_OF_RANK,
        **_forwarded(os.environ),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "RAY_worker_niceness": "0",
        # Ray rotates logs in threads of the worker, which disturb the measurement and lose the last
        # lines of a crash. The node's agent limits the log instead.
        "RAY_ROTATION_MAX_BYTES": "0",
        # NCCL is slow or hangs across hosts when each rank sees one GPU (ray#61073).
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        **(environment or {}),
        reaper.MARK: reaper.new_mark(),
    }
    options = {
        "num_gpus": int(kind == "cuda"),
        "num_cpus": int(kind == "cpu"),
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": placement,
        "runtime_env": {"env_vars": variables},
    }
    return ray.remote(_Worker).options(**options).remote(str(Path.cwd()))


def _forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the driver that the user means for the workers on all nodes."""
    names = environment.get(FORWARDED_VARIABLE, "").split(",")
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_FORWARDED_PREFIXES) or name in names
    }


def pickle_by_value(value: object) -> bytes:
    """Pickle an object with the code of functions that workers cannot import."""
    pickled: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return pickled


def why_no_start(error: Exception) -> str:
    """Return why a worker did not start, by Ray's error, as one line for the user."""
    text = str(error).strip()
    address = re.search(r"\bip=([^,)]+)", text)
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = brief(error.cause)
    elif "creation task" in text:
        # The last line, below Ray's own traceback, is the exception of the constructor.
        cause = text.splitlines()[-1].strip()
    elif was_killed(error):
        cause = f"its process {how_it_died(text)}"
    else:
        cause = message_of(error)
    hint = "; install the same packages on every node" if "ModuleNotFoundError" in cause else ""
    where = f" on {address[1]}" if address else ""
    return f"a worker could not start{where}: {cause}{hint}"


def how_it_died(text: str) -> str:
    """Return how a process ended, as "died by SIGSEGV", from the text of Ray's error."""
    if match := _EXIT_CODE.search(text):
        code, signal = match.groups()
        return f"died by {signal}" if signal else f"ended with exit code {code}"
    if "connection error code 2" in text:
        return (
            "ended without a word: by os._exit, or by a signal as SIGKILL, which the kernel sends "
            "out of memory"
        )
    reason = text
    for introduction in (
        "Worker exit detail:",
        "The actor died because",
        "The actor is dead because",
    ):
        if introduction in text:
            _, reason = text.split(introduction, 1)
            break
    first_line, _, _ = reason.strip().partition("\n")
    # Ray appends general advice.
    own_reason, _, _ = first_line.partition(" Some common causes")
    return f"died: {own_reason}"


def was_killed(error: Exception) -> bool:
    """Return whether a worker was killed while it started; False if its constructor raised."""
    is_death = isinstance(error, ray.exceptions.RayActorError)
    return is_death and "creation task" not in str(error)
