"""Which workers a point gets, and which ranks they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import NamedTuple

from raybench.job.point import Isolation, Strategy
from raybench.records.device import Device
from raybench.records.task import RankInfo


def in_device_order(devices: Sequence[Device]) -> list[int]:
    """Return positions in `devices`, sorted by rack, node and `Device.index`.

    The order in which Ray lists devices changes from run to run.
    """

    def sort_key(position: int) -> tuple[str, str, str, int, str]:
        device = devices[position]
        # Nodes on the same host share an address, but not a node id.
        return (device.rack, device.address, device.node_id, device.index, device.uuid)

    return sorted(range(len(devices)), key=sort_key)


def counts_by_node(
    free: Mapping[str, int], count: int, strategy: Strategy, racks: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Return node id -> number of devices to take: `count` in all, or all free ones if fewer.

    Args:
        free: node id -> number of free devices.
        racks: node id -> rack; nodes without an entry form one rack.
    """
    by_rack: dict[str, dict[str, list[_Candidate]]] = {}
    for node, free_count in sorted(free.items()):
        rack = (racks or {}).get(node, "")
        # Which devices of the node are free does not matter, so number the devices from 0.
        candidates = [_Candidate(node, rail=n, number=n) for n in range(free_count)]
        by_rack.setdefault(rack, {})[node] = candidates
    chosen = _in_choice_order(by_rack, strategy)[:count]
    return dict(Counter(candidate.node_id for candidate in chosen))


class _Candidate(NamedTuple):
    """A device that a point may get."""

    node_id: str
    # Index of the device on its node.
    rail: int
    # A worker id, or the index of the device if no workers are known.
    number: int


def _in_choice_order(
    racks: Mapping[str, Mapping[str, Sequence[_Candidate]]], strategy: Strategy
) -> list[_Candidate]:
    """Return all devices in the order of choice: a point with n devices gets the first n.

    Args:
        racks: rack -> node -> devices of the node.
    """

    def count_devices(nodes: Mapping[str, Sequence[_Candidate]]) -> int:
        return sum(map(len, nodes.values()))

    # Racks with the most devices first, and within a rack nodes with the most devices first.
    largest_racks_first = sorted(racks.values(), key=count_devices, reverse=True)
    devices_by_node = [
        sorted(nodes.values(), key=len, reverse=True) for nodes in largest_racks_first
    ]
    if strategy == "spread":
        # Alternate between the racks, and within a rack between its nodes.
        return _round_robin([_round_robin(nodes) for nodes in devices_by_node])
    # `pack`: fill one node after the other, rack by rack.
    ordered: list[_Candidate] = []
    for nodes in devices_by_node:
        rack_devices = list(chain.from_iterable(nodes))
        if strategy == "rail":
            # Take the devices of one index on all nodes of a rack, then devices of the next index.
            rack_devices.sort(key=lambda candidate: candidate.rail)
        ordered += rack_devices
    return ordered


def _round_robin(groups: Iterable[Sequence[_Candidate]]) -> list[_Candidate]:
    """Return the first device of each group, then the second of each group, and so on."""
    devices: list[_Candidate] = []
    for one_of_each_group in zip_longest(*groups):
        # None stands for a group without further devices.
        devices += [device for device in one_of_each_group if device is not None]
    return devices


def assign_ranks(devices: Sequence[Device]) -> tuple[RankInfo, ...]:
    """Return the ranks of the devices of a point, as torchrun assigns them.

    Args:
        devices: in rank order.
    """
    node_sizes = Counter(device.node_id for device in devices)
    node_ranks = {node: node_rank for node_rank, node in enumerate(node_sizes)}
    next_local_rank: Counter[str] = Counter()
    ranks = []
    for rank, device in enumerate(devices):
        ranks.append(
            RankInfo(
                rank=rank,
                world_size=len(devices),
                local_rank=next_local_rank[device.node_id],
                local_world_size=node_sizes[device.node_id],
                node_rank=node_ranks[device.node_id],
            )
        )
        next_local_rank[device.node_id] += 1
    return tuple(ranks)


def devices_shared(devices: Sequence[Device]) -> list[str]:
    """Return the UUIDs of devices that several workers own.

    Args:
        devices: device of each worker.
    """
    owners = Counter(device.uuid for device in devices)
    return [uuid for uuid, count in owners.items() if count > 1]


# The shape of a point within a rack: (devices of a node, model of the node) -> number of nodes.
_Shape = Counter[tuple[int, str]]
# (node, count) -> `count` idle workers of the node, or no workers if the node has fewer.
_ChooseWorkers = Callable[[str, int], Sequence[int]]


class _RackChoice(NamedTuple):
    """The workers that a shape gets in one rack."""

    # Idle workers that stay unused on the chosen nodes.
    unused: int
    rack: str
    worker_ids: list[int]


class DeviceAllocator:
    """Chooses workers for one more point among the usable workers of a cluster.

    A point always gets the shape that it would get on the idle cluster: as many nodes of each rack
    and model, and as many devices of each node. All devices of a node count as the model of its
    first device.

    Args:
        devices: device of each worker id.
        lost: ids of unusable workers.
        strategy: how a point is laid out over nodes and racks.
        isolation: `cluster` runs one point at a time, `node` one point at a time on a node.
        chosen: ids of the workers that points may have; None: all.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        lost: Collection[int],
        strategy: Strategy,
        isolation: Isolation,
        chosen: Collection[int] | None = None,
    ) -> None:
        self._strategy, self._isolation = strategy, isolation
        self._devices = devices
        alive = [worker_id for worker_id in in_device_order(devices) if worker_id not in lost]
        self._alive = frozenset(alive)
        self._worker_ids = [
            worker_id for worker_id in alive if chosen is None or worker_id in chosen
        ]
        # Number of usable workers that points may have, idle or not.
        self.usable_count = len(self._worker_ids)
        # Worker id -> position in rank order.
        self._rank_order = {worker: position for position, worker in enumerate(self._worker_ids)}
        # Node -> usable workers, and node -> (rack, model).
        self._workers_of_node: dict[str, list[int]] = {}
        self._rack_and_model: dict[str, tuple[str, str]] = {}
        # Rack -> node -> devices.
        racks: dict[str, dict[str, list[_Candidate]]] = {}
        for worker_id in self._worker_ids:
            device, node = devices[worker_id], devices[worker_id].node_id
            self._workers_of_node.setdefault(node, []).append(worker_id)
            self._rack_and_model.setdefault(node, (device.rack, device.name))
            candidate = _Candidate(node, rail=device.index, number=worker_id)
            racks.setdefault(device.rack, {}).setdefault(node, []).append(candidate)
        # On the idle cluster, a point with n devices gets the first n workers of this list.
        self._choice_order = [candidate.number for candidate in _in_choice_order(racks, strategy)]

    def choose(self, world_size: int, taken: Collection[int] = ()) -> tuple[int, ...] | None:
        """Return the ids of workers for one more point, in rank order; None if it has to wait.

        Reserves nothing. The search is greedy: it may miss a fit over several racks or on rails.

        Args:
            taken: workers of running points.
        """
        has_to_run_alone = self._isolation == "cluster"
        if world_size > self.usable_count or (has_to_run_alone and taken):
            return None
        # Workers that were lost while their point ran keep no other point from a node.
        busy = self._alive.intersection(taken)
        # The search keeps idle nodes for more points. It is needless for a point that runs alone,
        # and for rails on an idle cluster: the order of choice follows the rails.
        if not busy and (has_to_run_alone or self._strategy == "rail"):
            return self._on_idle_cluster(world_size)
        busy_nodes = {self._devices[worker_id].node_id for worker_id in busy}
        idle: dict[str, list[int]] = {}  # node -> idle workers
        for worker_id in self._worker_ids:
            node = self._devices[worker_id].node_id
            # With isolation `node`, a node with a running point gets no other point.
            is_node_taken = self._isolation == "node" and node in busy_nodes
            if worker_id not in busy and not is_node_taken:
                idle.setdefault(node, []).append(worker_id)
        workers = self._fit_into_idle(world_size, idle)
        if workers is None and not busy:
            # On an idle cluster the shape always fits, but the search may miss the fit.
            workers = self._on_idle_cluster(world_size)
        return None if workers is None else self._in_rank_order(workers)

    def _in_rank_order(self, worker_ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(worker_ids, key=self._rank_order.__getitem__))

    def _on_idle_cluster(self, world_size: int) -> tuple[int, ...]:
        """Return the workers of a point on the idle cluster, in rank order."""
        return self._in_rank_order(self._choice_order[:world_size])

    def _fit_into_idle(
        self, world_size: int, idle: Mapping[str, Sequence[int]]
    ) -> tuple[int, ...] | None:
        """Return idle workers in the shape that the point has on the idle cluster, if they fit.

        Args:
            idle: node -> its idle workers.
        """
        # Rack -> shape of the point's part in this rack on the idle cluster.
        shapes: dict[str, _Shape] = {}
        workers = self._on_idle_cluster(world_size)
        nodes = Counter(self._devices[worker_id].node_id for worker_id in workers)
        for node, count in nodes.items():
            rack, model = self._rack_and_model[node]
            shapes.setdefault(rack, Counter())[count, model] += 1
        # Rack -> node -> idle workers.
        idle_racks: dict[str, dict[str, Sequence[int]]] = {}
        for node, worker_ids in idle.items():
            rack, _ = self._rack_and_model[node]
            idle_racks.setdefault(rack, {})[node] = worker_ids

        # Find a rack for each shape, the shape with most nodes first.
        chosen_workers: list[int] = []
        for shape in sorted(shapes.values(), key=Counter.total, reverse=True):
            # Take the rack that leaves the fewest idle workers on the chosen nodes, so that idle
            # nodes stay idle.
            best: _RackChoice | None = None
            for rack, idle_nodes in idle_racks.items():
                least_idle_first = sorted(idle_nodes, key=lambda node: len(idle[node]))
                # Nodes must agree on a way: with `rail`, on the indices of their devices.
                for choose_workers in self._ways_to_choose_workers(idle_nodes):
                    # Node -> chosen workers; empty if the shape does not fit into this rack.
                    chosen = self._fill_shape(shape, least_idle_first, choose_workers)
                    unused = sum(len(idle_nodes[node]) - len(ids) for node, ids in chosen.items())
                    if chosen and (best is None or unused < best.unused):
                        worker_ids = list(chain.from_iterable(chosen.values()))
                        best = _RackChoice(unused, rack, worker_ids)
            if best is None:
                return None
            del idle_racks[best.rack]
            chosen_workers += best.worker_ids
        return tuple(chosen_workers)

    def _ways_to_choose_workers(
        self, idle: Mapping[str, Sequence[int]]
    ) -> Iterator[_ChooseWorkers]:
        """Yield the functions that may choose the workers of each node, to be tried in turn.

        Args:
            idle: node of one rack -> its idle workers.
        """
        if self._strategy != "rail":
            yield partial(self._choose_neighbours, idle)
            return
        # Node -> index of the device -> idle worker.
        by_index: dict[str, dict[int, int]] = {}
        for node, worker_ids in idle.items():
            by_index[node] = {self._devices[worker_id].index: worker_id for worker_id in worker_ids}
        rails = sorted(set(chain.from_iterable(by_index.values())))
        # All nodes must give devices of the same indices (rails), and each rail may be the first.
        for start in range(len(rails)):
            rotated_rails = rails[start:] + rails[:start]
            yield partial(_choose_on_rails, by_index, rotated_rails)

    def _fill_shape(
        self,
        shape: _Shape,  # (devices of a node, model) -> number of nodes
        nodes_of_rack: Iterable[str],
        choose_workers: _ChooseWorkers,
    ) -> dict[str, Sequence[int]]:
        """Return node -> workers in this shape, on the first suitable nodes; {} without a fit."""
        chosen: dict[str, Sequence[int]] = {}
        # Find the nodes that give the most devices first, because few nodes suit.
        for (count, model), wanted_nodes in sorted(shape.items(), reverse=True):
            missing_nodes = wanted_nodes
            for node in nodes_of_rack:
                if missing_nodes == 0:
                    break
                _, model_of_node = self._rack_and_model[node]
                if node not in chosen and model_of_node == model:
                    workers = choose_workers(node, count)
                    if workers:
                        chosen[node] = workers
                        missing_nodes -= 1
        return chosen if len(chosen) == shape.total() else {}

    def _choose_neighbours(
        self, idle: Mapping[str, Sequence[int]], node: str, count: int
    ) -> Sequence[int]:
        """Return `count` idle workers of a node, neighbours if possible; () if it has fewer."""
        if len(idle[node]) < count:
            return ()
        workers = self._workers_of_node[node]
        position = {worker_id: position for position, worker_id in enumerate(workers)}
        # Split the idle workers into runs of neighbours, and take the shortest run that suffices.
        runs: list[list[int]] = []
        for worker_id in idle[node]:
            if runs and position[worker_id] == position[runs[-1][-1]] + 1:
                runs[-1].append(worker_id)
            else:
                runs.append([worker_id])
        long_runs = [run for run in runs if len(run) >= count]
        run = min(long_runs, key=len, default=list(idle[node]))
        # Begin at a multiple of `count` if possible, because pairs and quartets of devices are
        # wired together.
        starts = range(len(run) - count + 1)
        aligned_starts = [start for start in starts if position[run[start]] % count == 0]
        start = aligned_starts[0] if aligned_starts else 0
        return run[start : start + count]


def _choose_on_rails(
    by_index: Mapping[str, Mapping[int, int]], rails: Sequence[int], node: str, count: int
) -> list[int]:
    """Return the workers on the first `count` rails of a node; [] if a worker is missing.

    Args:
        by_index: node -> index of the device -> idle worker.
        rails: indices of devices.
    """
    workers = [by_index[node][rail] for rail in rails[:count] if rail in by_index[node]]
    return workers if len(workers) == count else []
