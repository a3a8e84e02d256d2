"""Workers as Ray actors, one per device, placed once and kept for the whole run."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from raybench.cluster import ranks
from raybench.cluster.ranks import Strategy
from raybench.cluster.ray_answers import all_done, gather
from raybench.cluster.ray_connection import Connection, DeviceKind, first_line
from raybench.cluster.ray_telemetry import TelemetryAgents
from raybench.environment import measured_variables, package_versions
from raybench.errors import ClusterError
from raybench.records import Answer, Device, DeviceSample, Group, Place, Task

_START_TIMEOUT_S = 180.0
_PLACE_TIMEOUT_S = 60.0
_LEAVE_TIMEOUT_S = 30.0
# Not CUDA_: those say which devices and which files this host has.
_FORWARDED = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "MKL_", "NVIDIA_TF32_")


class _Seat:
    """The actor: a Worker, and what only Ray can tell it."""

    def __init__(self, kind: DeviceKind, search_path: str) -> None:
        if search_path not in sys.path:
            sys.path.insert(0, search_path)
        from raybench.cluster.rendezvous import choose_interface
        from raybench.worker import Worker

        choose_interface(_address())
        self._worker = Worker(kind, _assigned_index() if kind == "cuda" else 0)

    def identity(self) -> Device:
        node_id = ray.get_runtime_context().get_node_id()
        return self._worker.identity(node_id=node_id, address=_address())

    def run(self, task: Task, place: Place, group: Group | None) -> Answer:
        return self._worker.run(task, place, group)

    def leave(self) -> None:
        self._worker.leave()


class _Store:
    """The actor that holds the rendezvous, on the driver's node."""

    def __init__(self) -> None:
        from raybench.cluster.rendezvous import StoreHost

        self._host = StoreHost(_address())

    def endpoint(self) -> tuple[str, int]:
        return self._host.endpoint()


def _address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _assigned_index() -> int:
    """torch's index of the GPU that Ray assigned to this actor, with no GPU masked.

    Ray names a GPU by its entry in the raylet's CUDA_VISIBLE_DEVICES where that is set, and torch
    counts along that list.
    """
    (assigned,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",").index(assigned) if visible else int(assigned)


class RayCluster:
    """A Ray cluster and the workers that raybench has on it."""

    def __init__(self, connection: Connection) -> None:
        self._kind = connection.kind
        self._connection = connection
        self._placement: PlacementGroup | None = None
        self._store: Any = None
        self._telemetry: TelemetryAgents | None = None
        self._actors: list[Any] = []
        self._bundles: list[int] = []
        self._devices: tuple[Device, ...] = ()
        self._group: Group | None = None
        self._group_seats: tuple[int, ...] = ()
        self._used_seats: set[int] = set()
        self._epochs = itertools.count()

    @property
    def description(self) -> str:
        noun = "GPU" if self._kind == "cuda" else "CPU worker"
        return f"{self._connection.where}, up to {self.capacity} {noun}{'s' * (self.capacity != 1)}"

    @property
    def capacity(self) -> int:
        return self._connection.capacity

    @property
    def devices(self) -> tuple[Device, ...]:
        return self._devices

    @property
    def lost(self) -> frozenset[int]:
        return frozenset()

    @property
    def coming(self) -> int:
        return 0

    def refresh(self, timeout_s: float) -> None:
        raise NotImplementedError

    def start(self, count: int, strategy: Strategy) -> None:
        """Place `count` actors and learn which device each one has."""
        self._placement = _place(count, self._resource, strategy)
        actors = [self._new_actor(bundle) for bundle in range(count)]
        self._store = _start_store() if count > 1 else None
        devices = _identities(actors)
        order = ranks.in_seat_order(devices)
        self._actors = [actors[position] for position in order]
        self._bundles = order
        self._devices = tuple(devices[position] for position in order)
        _check_devices(self._devices)
        if self._kind == "cuda":
            self._telemetry = TelemetryAgents(self._devices)

    def run(self, task: Task, seats: Sequence[int]) -> tuple[Answer, ...]:
        if task.settings.fresh_workers and self._used_seats.intersection(seats):
            self._leave_group()
            self._replace(seats)
        group = self._group_for(tuple(seats))
        self._used_seats.update(seats)
        places = ranks.places([self._devices[seat] for seat in seats])
        refs = [
            self._actors[seat].run.remote(task, place, group)
            for seat, place in zip(seats, places, strict=True)
        ]
        answers = gather(refs, task.settings.timeout_s)
        if not all(answer.keeps_worker for answer in answers):
            # One broken rank leaves the process group of all of them in an unknown state.
            self._replace(seats)
        return answers

    def telemetry(self) -> tuple[DeviceSample, ...]:
        return self._telemetry.drain() if self._telemetry else ()

    def close(self) -> None:
        """Kill the actors and let go of Ray; a private cluster ends with it."""
        if self._telemetry:
            self._telemetry.stop()
        for actor in [*self._actors, *([self._store] if self._store else [])]:
            ray.kill(actor, no_restart=True)
        if self._placement is not None:
            remove_placement_group(self._placement)
        self._actors, self._store, self._placement = [], None, None
        ray.shutdown()

    @property
    def _resource(self) -> dict[str, float]:
        return {"GPU": 1.0} if self._kind == "cuda" else {"CPU": 1.0}

    def _new_actor(self, bundle: int) -> Any:
        assert self._placement is not None
        return (
            ray.remote(_Seat)
            .options(
                num_gpus=1 if self._kind == "cuda" else 0,
                num_cpus=0 if self._kind == "cuda" else 1,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=bundle
                ),
                runtime_env={"env_vars": _worker_environment()},
            )
            .remote(self._kind, str(Path.cwd()))
        )

    def _group_for(self, seats: tuple[int, ...]) -> Group | None:
        """The process group of these seats: the one at hand when it is theirs, else a new one."""
        if seats == self._group_seats:
            return self._group
        self._leave_group()
        if len(seats) > 1:
            address, port = ray.get(self._store.endpoint.remote(), timeout=_START_TIMEOUT_S)
            name = f"group-{next(self._epochs)}"
            self._group = Group(name=name, store_address=address, store_port=port)
        self._group_seats = seats
        return self._group

    def _leave_group(self) -> None:
        if self._group is not None:
            refs = [self._actors[seat].leave.remote() for seat in self._group_seats]
            if not all_done(refs, _LEAVE_TIMEOUT_S):
                self._replace(self._group_seats)
        self._group, self._group_seats = None, ()

    def _replace(self, seats: Sequence[int]) -> None:
        """New processes on the same devices."""
        self._group, self._group_seats = None, ()
        self._used_seats.difference_update(seats)
        for seat in seats:
            ray.kill(self._actors[seat], no_restart=True)
            self._actors[seat] = self._new_actor(self._bundles[seat])
        devices = list(self._devices)
        fresh = _identities([self._actors[seat] for seat in seats])
        for seat, device in zip(seats, fresh, strict=True):
            devices[seat] = device
        self._devices = tuple(devices)
        _check_devices(self._devices)


def _worker_environment() -> dict[str, str]:
    """What makes an actor's process like one of torchrun's."""
    return {
        # As srun does: a variable set for the sweep is meant for the workers, on every node.
        **{
            name: value
            for name, value in measured_variables().items()
            if name.startswith(_FORWARDED)
        },
        "RAY_worker_niceness": "0",
        # Unmasked: NCCL is slow or hangs across hosts when each rank sees one GPU (ray#61073).
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _place(count: int, resource: dict[str, float], strategy: Strategy) -> PlacementGroup:
    """A placement group of `count` bundles. Ray itself would wait for ever where none fits."""
    placement: PlacementGroup = placement_group([dict(resource)] * count, strategy=strategy.upper())
    deadline_s = time.monotonic() + _PLACE_TIMEOUT_S
    while not placement.wait(2):
        state = placement_group_table(placement)["stats"]["scheduling_state"]
        if state == "INFEASIBLE" or time.monotonic() > deadline_s:
            remove_placement_group(placement)
            name = next(iter(resource))
            raise ClusterError(
                f"{count} x {name} cannot be had from the cluster now ({state.lower()}): others "
                "may use them; see `ray status`, or ask for fewer with --filter 'world_size <= N'"
            )
    return placement


def _start_store() -> Any:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(_Store).options(num_cpus=0, scheduling_strategy=here).remote()


def _identities(actors: Sequence[Any]) -> list[Device]:
    refs = [actor.identity.remote() for actor in actors]
    try:
        return [ray.get(ref, timeout=_START_TIMEOUT_S) for ref in refs]
    except ray.exceptions.GetTimeoutError:
        raise ClusterError(f"a worker did not start within {_START_TIMEOUT_S:.0f} s") from None
    except ray.exceptions.RayError as error:
        raise ClusterError(_why_no_start(error)) from None


def _why_no_start(error: Exception) -> str:
    text = str(error).strip()
    node = re.search(r"\bip=([^,)]+)", text)
    # What a constructor raised stands last, below Ray's own traceback.
    cause = text.splitlines()[-1].strip() if "creation task" in text else first_line(error)
    hint = "; install the same packages on every node" if "ModuleNotFoundError" in cause else ""
    return f"a worker could not start{f' on {node[1]}' if node else ''}: {cause}{hint}"


def _check_devices(devices: Sequence[Device]) -> None:
    """Each worker has a device of its own and the driver's versions, or nothing is measured."""
    if shared := ranks.shared_devices(devices):
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
