"""Which workers a point gets, on an idle cluster and beside other points, and their ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, zip_longest
from typing import NamedTuple

from raybench.job.point import Isolation, Strategy
from raybench.records.device import Device
from raybench.records.task import RankInfo


def in_device_order(devices: Sequence[Device]) -> list[int]:
    """Return positions in `devices`, by rack, node (address as text, then id) and `Device.index`.

    Placement groups and GPU ids come in any order, so ranks would change from run to run. Nodes
    that share a machine share an address: the node id tells them apart.
    """

    def key(position: int) -> tuple[str, str, str, int, str]:
        device = devices[position]
        return (device.rack, device.address, device.node_id, device.index, device.uuid)

    return sorted(range(len(devices)), key=key)


def counts_by_node(
    free: Mapping[str, int], count: int, strategy: Strategy, racks: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Return node id -> how many devices to take from it, `count` in all, or all if fewer are free.

    Nodes that give none are left out. Chooses as `DeviceAllocator` with isolation `cluster`, all
    idle, but as if the indices on each node were 0, 1, ..., and may take other nodes or racks of
    equal size. free: node id -> number of free devices. racks: node id -> rack; others form one.
    """
    there: dict[str, dict[str, list[_Place]]] = {}
    for node, number in sorted(free.items()):
        rack = (racks or {}).get(node, "")
        there.setdefault(rack, {})[node] = [_Place(node, index, index) for index in range(number)]
    chosen = _ordered(there, strategy)[:count]
    return dict(Counter(place.node_id for place in chosen))


class _Place(NamedTuple):
    """A device to choose from. rail: its index on the node. number: its number for the caller."""

    node_id: str
    rail: int
    number: int


def _ordered(
    racks: Mapping[str, Mapping[str, Sequence[_Place]]], strategy: Strategy
) -> list[_Place]:
    """Return all devices in the order of choice: n devices are the first n.

    pack fills one node after the other, rack by rack; spread takes from all racks, and in these
    from all nodes, in turn. rail takes devices of the same index on all nodes of a rack, then of
    the next index, then the next rack. racks: rack -> node -> its devices.
    """

    def size(nodes: Mapping[str, Sequence[_Place]]) -> int:
        return sum(map(len, nodes.values()))

    fullest_first = [
        sorted(nodes.values(), key=len, reverse=True)
        for nodes in sorted(racks.values(), key=size, reverse=True)
    ]
    if strategy == "spread":
        return _in_turn([_in_turn(nodes) for nodes in fullest_first])
    by_rack = [[place for node in nodes for place in node] for nodes in fullest_first]
    if strategy == "rail":
        by_rack = [sorted(places, key=lambda place: place.rail) for places in by_rack]
    return [place for places in by_rack for place in places]


def _in_turn(groups: Iterable[Sequence[_Place]]) -> list[_Place]:
    """Return the first place of each group, then the second of each, and so on."""
    return [place for taken in zip_longest(*groups) for place in taken if place is not None]


def assign_ranks(devices: Sequence[Device]) -> tuple[RankInfo, ...]:
    """Return rank, local rank and node rank for each device of a point, as torchrun has them.

    devices: in rank order, which also numbers the nodes. A local rank is not `Device.index`.
    """
    sizes = Counter(device.node_id for device in devices)
    nodes = {node: place for place, node in enumerate(sizes)}
    taken: Counter[str] = Counter()
    result = []
    for rank, device in enumerate(devices):
        result.append(
            RankInfo(
                rank=rank,
                world_size=len(devices),
                local_rank=taken[device.node_id],
                local_world_size=sizes[device.node_id],
                node_rank=nodes[device.node_id],
            )
        )
        taken[device.node_id] += 1
    return tuple(result)


def devices_shared(devices: Sequence[Device]) -> list[str]:
    """Return the UUIDs of devices that several workers own, each once. devices: of all workers."""
    owners = Counter(device.uuid for device in devices)
    return [uuid for uuid, count in owners.items() if count > 1]


# The shape of a point within a rack: (devices of a node, model of the node) -> number of nodes.
_Shape = Counter[tuple[int, str]]
# Returns that number of workers of a node; none where it has too few.
_WorkersOf = Callable[[str, int], Sequence[int]]


class DeviceAllocator:
    """Chooses workers for one more point among the alive workers of a cluster.

    A point gets as many devices of as many nodes of the same models as it would get on the idle
    cluster: points beside it change which ones, never how many it has on one node, or how many
    nodes of one rack. A node's model is the name of its first device.

    devices: by worker id. lost: ids of unusable workers. strategy: how a point is laid out on nodes
    and racks. isolation: `cluster` lets a point run alone, `node` alone on its nodes. chosen: the
    workers that points may have, None for all. alive: number of these not lost, taken or not.
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
        self._worker_ids = [one for one in alive if chosen is None or one in chosen]
        self.alive = len(self._worker_ids)
        self._order = {worker_id: position for position, worker_id in enumerate(self._worker_ids)}
        self._of_node: dict[str, list[int]] = {}
        self._kind: dict[str, tuple[str, str]] = {}  # rack and model by node
        racks: dict[str, dict[str, list[_Place]]] = {}
        for worker_id in self._worker_ids:
            device, node = devices[worker_id], devices[worker_id].node_id
            self._of_node.setdefault(node, []).append(worker_id)
            self._kind.setdefault(node, (device.rack, device.name))
            place = _Place(node, device.index, worker_id)
            racks.setdefault(device.rack, {}).setdefault(node, []).append(place)
        self._order_of_choice = [place.number for place in _ordered(racks, strategy)]

    def choose(self, world_size: int, taken: Collection[int] = ()) -> tuple[int, ...] | None:
        """Return the ids of workers for one more point, in rank order; None if it has to wait.

        None also if there are fewer workers than it needs. A fit over several racks or on rails may
        be missed. Nothing is reserved. taken: workers of running points, which may be lost.
        """
        if world_size > self.alive or (self._isolation == "cluster" and taken):
            return None
        busy = self._alive.intersection(taken)
        if not busy and (self._isolation == "cluster" or self._strategy == "rail"):
            return self._on_idle_cluster(world_size)
        used = {self._devices[worker_id].node_id for worker_id in busy}
        idle: dict[str, list[int]] = {}
        for worker_id in self._worker_ids:
            node = self._devices[worker_id].node_id
            if worker_id not in busy and not (self._isolation == "node" and node in used):
                idle.setdefault(node, []).append(worker_id)
        # On an idle cluster its racks fit, though not always in the order that `_find` tries.
        alone = None if busy else self._on_idle_cluster(world_size)
        found = self._find(world_size, idle) or alone
        return found and tuple(sorted(found, key=self._order.__getitem__))

    def _on_idle_cluster(self, world_size: int) -> tuple[int, ...]:
        """Return the workers of a point that runs alone, in rank order."""
        chosen = self._order_of_choice[:world_size]
        return tuple(sorted(chosen, key=self._order.__getitem__))

    def _find(self, world_size: int, idle: Mapping[str, Sequence[int]]) -> tuple[int, ...] | None:
        """Return idle workers in the shape that the point has on the idle cluster, in any order.

        None where no rack has room for its part of the shape. idle: node -> its idle workers.
        """
        shapes: dict[str, _Shape] = {}
        nodes = Counter(self._devices[one].node_id for one in self._on_idle_cluster(world_size))
        for node, count in nodes.items():
            rack, model = self._kind[node]
            shapes.setdefault(rack, Counter())[count, model] += 1
        racks: dict[str, dict[str, Sequence[int]]] = {}
        for node, worker_ids in idle.items():
            racks.setdefault(self._kind[node][0], {})[node] = worker_ids
        found: list[int] = []
        for shape in sorted(shapes.values(), key=Counter.total, reverse=True):
            # The rack that keeps the fewest idle workers on the nodes used: idle nodes stay idle.
            best: tuple[int, str, list[int]] | None = None
            for rack, there in racks.items():
                fullest_last = sorted(there, key=lambda node: len(idle[node]))
                for workers_of in self._ways(there):
                    chosen = self._fill(shape, fullest_last, workers_of)
                    left = sum(len(there[node]) - len(workers) for node, workers in chosen.items())
                    if chosen and (best is None or left < best[0]):
                        best = left, rack, list(chain.from_iterable(chosen.values()))
            if best is None:
                return None
            del racks[best[1]]
            found += best[2]
        return tuple(found)

    def _ways(self, idle: Mapping[str, Sequence[int]]) -> Iterator[_WorkersOf]:
        """Yield the ways to take workers of the nodes of a rack, which have these idle workers.

        On rails all nodes give the same indices, one way for each index to begin with.
        """
        if self._strategy != "rail":
            yield partial(self._side_by_side, idle)
            return
        by_index = {
            node: {self._devices[worker_id].index: worker_id for worker_id in worker_ids}
            for node, worker_ids in idle.items()
        }
        rails = sorted({index for there in by_index.values() for index in there})
        for start in range(len(rails)):
            yield partial(_on_rails, by_index, rails[start:] + rails[:start])

    def _fill(
        self, shape: _Shape, nodes: Iterable[str], workers_of: _WorkersOf
    ) -> dict[str, Sequence[int]]:
        """Return by node workers that make the shape, of the first nodes that fit; {} if none."""
        chosen: dict[str, Sequence[int]] = {}
        for (count, model), wanted in sorted(shape.items(), reverse=True):
            fitting = (
                (node, workers)
                for node in nodes
                if node not in chosen
                and self._kind[node][1] == model
                and (workers := workers_of(node, count))
            )
            chosen |= dict(list(islice(fitting, wanted)))
        return chosen if len(chosen) == shape.total() else {}

    def _side_by_side(
        self, idle: Mapping[str, Sequence[int]], node: str, count: int
    ) -> Sequence[int]:
        """Return `count` of a node's idle workers, of the shortest row of neighbours that suffices.

        In the row they begin at a multiple of `count` where possible, because pairs and quartets
        of devices are wired so. Empty where fewer are idle.
        """
        if len(idle[node]) < count:
            return ()
        local = {worker_id: place for place, worker_id in enumerate(self._of_node[node])}
        rows: list[list[int]] = []
        for worker_id in idle[node]:
            if rows and local[worker_id] == local[rows[-1][-1]] + 1:
                rows[-1].append(worker_id)
            else:
                rows.append([worker_id])
        row = min((row for row in rows if len(row) >= count), key=len, default=list(idle[node]))
        starts = range(len(row) - count + 1)
        start = next((start for start in starts if local[row[start]] % count == 0), 0)
        return row[start : start + count]


def _on_rails(
    by_index: Mapping[str, Mapping[int, int]], rails: Sequence[int], node: str, count: int
) -> list[int]:
    """Return the node's workers with the first `count` of these indices; [] where it lacks one."""
    found = [by_index[node][rail] for rail in rails[:count] if rail in by_index[node]]
    return found if len(found) == count else []
