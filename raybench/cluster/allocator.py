"""Which workers a point gets, on an idle cluster and beside other points, and their ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

from raybench.records import Device, RankInfo

Strategy = Literal["pack", "spread", "rail"]
Isolation = Literal["cluster", "node", "device"]


def in_device_order(devices: Sequence[Device]) -> list[int]:
    """Return the positions of `devices`, sorted by rack, node (address, then id) and device index.

    Placement groups and GPU ids come in any order, so ranks would change from run to run. Nodes
    that share a machine share an address: the node id tells them apart.
    """

    def key(position: int) -> tuple[str, str, str, int, str]:
        device = devices[position]
        return (device.rack, device.address, device.node_id, device.index, device.uuid)

    return sorted(range(len(devices)), key=key)


def choose_workers(
    devices: Sequence[Device], world_size: int, strategy: Strategy
) -> tuple[int, ...]:
    """Return the positions in `devices` of the workers of a point, in ascending order.

    pack fills one node after the other, rack by rack; spread takes from all racks, and in these
    from all nodes, in turn. rail takes devices of the same index on all nodes of a rack, then of
    the next index, then the next rack. All give ranks by node, then by device, as torchrun does.
    Raises ValueError when there are too few devices.
    """
    if world_size > len(devices):
        raise ValueError(f"{world_size} devices asked, {len(devices)} there")
    return tuple(sorted(_in_order_of_choice(devices, strategy)[:world_size]))


def _in_order_of_choice(devices: Sequence[Device], strategy: Strategy) -> list[int]:
    """Return the positions of all devices; a point of n devices gets the first n."""
    racks: dict[str, dict[str, list[_Place]]] = {}
    for worker_id, device in enumerate(devices):
        node = racks.setdefault(device.rack, {}).setdefault(device.node_id, [])
        node.append(_Place(device.node_id, device.index, worker_id))
    return [place.number for place in _ordered(racks, strategy)]


def shares(
    free: Mapping[str, int], count: int, strategy: Strategy, racks: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Return by node id how many of `count` devices each node gives; fewer where fewer are free.

    Like `choose_workers`, where only the number of free devices of each node is known. racks: by
    node id, of the nodes that have one.
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
    """Return all devices, in the order of choice. racks: rack -> node -> its devices."""

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
    rounds = zip_longest(*groups)
    return [place for taken in rounds for place in taken if place is not None]


def assign_ranks(devices: Sequence[Device]) -> tuple[RankInfo, ...]:
    """Return the ranks of the devices of a point, which are in rank order."""
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
    """Return the UUIDs that several workers have: such workers would measure each other."""
    return [
        uuid for uuid, owners in Counter(device.uuid for device in devices).items() if owners > 1
    ]


# The shape of a point within a rack: (devices of a node, model of the node) -> number of nodes.
_Shape = Counter[tuple[int, str]]


class DeviceAllocator:
    """The alive workers of a cluster, which of them are taken, and the place for one more point.

    A point gets as many devices of as many nodes of the same models as it would get on the idle
    cluster: points beside it change which ones, never how many it has on one node, or how many
    nodes of one rack. A node's model is the name of its first device.

    chosen: the workers that points may have, None for all; of the others it only counts which are
    taken.
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
        alive = [worker_id for worker_id in in_device_order(devices) if worker_id not in lost]
        self._worker_ids = [one for one in alive if chosen is None or one in chosen]
        self._node_of_unchosen = {
            one: devices[one].node_id for one in {*alive} - {*self._worker_ids}
        }
        self._unchosen_taken: Counter[str] = Counter()
        self._devices = [devices[worker_id] for worker_id in self._worker_ids]
        self._node: dict[int, str] = {}
        self._of_node: dict[str, list[int]] = {}
        self._model: dict[str, tuple[str, str]] = {}
        self._index: dict[int, int] = {}
        for worker_id, device in zip(self._worker_ids, self._devices, strict=True):
            self._node[worker_id], self._index[worker_id] = device.node_id, device.index
            self._model.setdefault(device.node_id, (device.rack, device.name))
            self._of_node.setdefault(device.node_id, []).append(worker_id)
        self._order = {worker_id: position for position, worker_id in enumerate(self._worker_ids)}
        self._largest = max(map(len, self._of_node.values()), default=0)
        self._order_of_choice = [
            self._worker_ids[position] for position in _in_order_of_choice(self._devices, strategy)
        ]
        self._taken: set[int] = set()
        self._on_idle_cluster: dict[int, tuple[int, ...]] = {}
        self._racks = list(dict.fromkeys(device.rack for device in self._devices))
        # (its rack and model, workers that a point can have of the node) -> nodes; a dict keeps
        # their order.
        self._nodes: dict[tuple[tuple[str, str], int], dict[str, None]] = {}
        for node in self._of_node:
            self._nodes.setdefault(self._available(node), {})[node] = None
        # world_size -> idle workers that ran a point together and none since: their process group
        # may still exist.
        self._idle_groups: dict[int, dict[tuple[int, ...], None]] = {}
        # Groups that this allocator chose; only these are reused for the next point.
        self._chosen_here: set[tuple[int, ...]] = set()
        self._last_used: dict[int, tuple[int, ...]] = {}

    @property
    def alive(self) -> int:
        """Number of workers that points may have, taken or not."""
        return len(self._worker_ids)

    @property
    def is_idle(self) -> bool:
        """Whether no worker is taken."""
        return not self._taken

    def choose(self, world_size: int) -> tuple[int, ...] | None:
        """Return the workers for one more point, in rank order; None where it has to wait.

        They are not taken yet.
        """
        worker_ids = self._choose(world_size)
        if worker_ids is not None:
            self._chosen_here.add(worker_ids)
        return worker_ids

    def _choose(self, world_size: int) -> tuple[int, ...] | None:
        if world_size > self.alive - len(self._taken):
            return None
        if self._isolation == "cluster":
            return self._on_idle(world_size) if self.is_idle else None
        if group := next(iter(self._idle_groups.get(world_size, ())), None):
            return group
        worker_ids = self._find(world_size)
        return (
            None if worker_ids is None else tuple(sorted(worker_ids, key=self._order.__getitem__))
        )

    def take(self, worker_ids: Sequence[int]) -> None:
        """Mark these workers as taken by a point; lost ones are ignored."""
        if self._isolation == "cluster":
            self._taken.update(worker_ids)  # nothing else runs: no node is chosen beside others
            return
        self._change(worker_ids, self._taken.update, unchosen=1)
        for worker_id in worker_ids:
            before = self._last_used.get(worker_id, ())
            self._idle_groups.get(len(before), {}).pop(before, None)
            self._last_used[worker_id] = tuple(worker_ids)

    def free(self, worker_ids: Sequence[int]) -> None:
        """Mark these workers as idle again; those that were lost meanwhile are ignored."""
        if self._isolation == "cluster":
            self._taken.difference_update(worker_ids)
            return
        self._change(worker_ids, self._taken.difference_update, unchosen=-1)
        was_chosen_here = tuple(worker_ids) in self._chosen_here and self._node.keys() >= set(
            worker_ids
        )
        if len(worker_ids) > 1 and was_chosen_here:
            self._idle_groups.setdefault(len(worker_ids), {})[tuple(worker_ids)] = None

    def _on_idle(self, world_size: int) -> tuple[int, ...]:
        if world_size not in self._on_idle_cluster:
            chosen = self._order_of_choice[:world_size]
            self._on_idle_cluster[world_size] = tuple(sorted(chosen, key=self._order.__getitem__))
        return self._on_idle_cluster[world_size]

    def _find(self, world_size: int) -> Sequence[int] | None:
        """Return idle workers in the shape that the point has on the idle cluster, rack by rack.

        None where there are none.
        """
        alone, on_rails = self._on_idle(world_size), self._strategy == "rail"
        if self.is_idle and on_rails:
            return alone
        shapes: dict[str, _Shape] = {}
        for node, count in Counter(self._node[worker_id] for worker_id in alone).items():
            rack, model = self._model[node]
            shapes.setdefault(rack, Counter())[count, model] += 1
        found: list[int] = []
        used: set[str] = set()
        for shape in sorted(shapes.values(), key=Counter.total, reverse=True):
            racks = [rack for rack in self._racks if rack not in used]
            fit = self._fit_rails(racks, shape) if on_rails else self._fit(racks, shape)
            if fit is None:
                return None
            rack, worker_ids = fit
            used.add(rack)
            found += worker_ids
        return found

    def _fit(self, racks: Sequence[str], shape: _Shape) -> tuple[str, list[int]] | None:
        """Return the rack that keeps the fewest idle workers on the nodes used, and the workers.

        So nodes that are wholly idle stay so. None where no rack has room.
        """
        best: tuple[int, str, dict[str, int]] | None = None
        for rack in racks:
            nodes: dict[str, int] = {}
            for (count, model), wanted in sorted(shape.items(), reverse=True):
                chosen = self._nodes_with(count, (rack, model), wanted, nodes)
                nodes |= dict.fromkeys(chosen, count)
            if len(nodes) == shape.total():
                left = sum(self._available(node)[1] - count for node, count in nodes.items())
                if best is None or left < best[0]:
                    best = left, rack, nodes
        if best is None:
            return None
        _, rack, nodes = best
        return rack, [
            worker_id
            for node, count in nodes.items()
            for worker_id in self._side_by_side(self._idle(node), count)
        ]

    def _fit_rails(self, racks: Sequence[str], shape: _Shape) -> tuple[str, list[int]] | None:
        """Return the first rack whose nodes have the same indices idle, and the workers.

        None where there is no such rack.
        """
        for rack in racks:
            idle = {
                node: {self._index[worker_id]: worker_id for worker_id in self._idle(node)}
                for node, (its_rack, _) in self._model.items()
                if its_rack == rack and self._available(node)[1]
            }
            rails = sorted({index for there in idle.values() for index in there})
            for start in range(len(rails)):
                if worker_ids := self._on_rails(idle, rails[start:] + rails[:start], shape):
                    return rack, worker_ids
        return None

    def _on_rails(
        self, idle: Mapping[str, Mapping[int, int]], rails: Sequence[int], shape: _Shape
    ) -> list[int]:
        """Return workers with the first of these indices on each node; [] where nodes lack them.

        idle: node -> index -> worker.
        """
        nodes: dict[str, int] = {}
        for (count, model), wanted in sorted(shape.items(), reverse=True):
            fitting = [
                node
                for node, there in idle.items()
                if node not in nodes
                and self._model[node][1] == model
                and there.keys() >= set(rails[:count])
            ]
            nodes |= dict.fromkeys(fitting[:wanted], count)
        if len(nodes) < shape.total():
            return []
        return [idle[node][rail] for node, count in nodes.items() for rail in rails[:count]]

    def _idle(self, node: str) -> list[int]:
        return [worker_id for worker_id in self._of_node[node] if worker_id not in self._taken]

    def _nodes_with(
        self, count: int, model: tuple[str, str], wanted: int, used: Collection[str]
    ) -> list[str]:
        """Return at most `wanted` nodes of the model that have `count` workers, without `used`."""
        nodes: list[str] = []
        for available in range(count, self._largest + 1):
            for node in self._nodes.get((model, available), ()):
                if len(nodes) == wanted:
                    return nodes
                if node not in used:
                    nodes.append(node)
        return nodes

    def _side_by_side(self, idle: Sequence[int], count: int) -> list[int]:
        """Return `count` of a node's idle workers, of the shortest row of neighbours that suffices.

        In the row they begin at a multiple of `count` where possible, because pairs and quartets
        of devices are wired so.
        """
        local = {
            worker_id: place for place, worker_id in enumerate(self._of_node[self._node[idle[0]]])
        }
        rows: list[list[int]] = []
        for worker_id in idle:
            if rows and local[worker_id] == local[rows[-1][-1]] + 1:
                rows[-1].append(worker_id)
            else:
                rows.append([worker_id])
        row = min((row for row in rows if len(row) >= count), key=len, default=list(idle))
        starts = range(len(row) - count + 1)
        start = next((start for start in starts if local[row[start]] % count == 0), 0)
        return row[start : start + count]

    def _available(self, node: str) -> tuple[tuple[str, str], int]:
        """Return rack and model of the node, and how many of its workers a point can have now."""
        worker_ids = self._of_node[node]
        idle = sum(worker_id not in self._taken for worker_id in worker_ids)
        is_used = idle < len(worker_ids) or self._unchosen_taken[node] > 0
        if self._isolation == "node" and is_used:
            idle = 0
        return self._model[node], idle

    def _change(
        self, worker_ids: Sequence[int], change: Callable[[Iterable[int]], None], *, unchosen: int
    ) -> None:
        """Change which workers are taken, and file their nodes by what they can give then.

        unchosen: what each of the workers adds to its node's count that points may not have.
        """
        alive = [worker_id for worker_id in worker_ids if worker_id in self._node]
        others = [
            self._node_of_unchosen[one] for one in worker_ids if one in self._node_of_unchosen
        ]
        changed = dict.fromkeys([*(self._node[worker_id] for worker_id in alive), *others])
        nodes = [node for node in changed if node in self._of_node]
        for node in nodes:
            del self._nodes[self._available(node)][node]
        change(alive)
        for node in others:
            self._unchosen_taken[node] += unchosen
        for node in nodes:
            self._nodes.setdefault(self._available(node), {})[node] = None
