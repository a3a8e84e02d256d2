"""Which seats are idle, and which of them a point gets beside others. No clock, no cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from raybench.cluster.ranks import Isolation, Strategy, choose_seats, in_seat_order
from raybench.records import Device


class Room:
    """The living seats of a cluster, which of them are taken, and the place for one more point.

    A point gets as many devices of as many nodes of the same models as it would get on the idle
    cluster: what runs beside it changes which ones, never how many it has on one node. A node's
    model is the name of its first device.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        lost: Collection[int],
        strategy: Strategy,
        isolation: Isolation,
    ) -> None:
        self._strategy, self._isolation = strategy, isolation
        self._seats = [seat for seat in in_seat_order(devices) if seat not in lost]
        self._devices = [devices[seat] for seat in self._seats]
        self._node: dict[int, str] = {}
        self._of_node: dict[str, list[int]] = {}
        self._model: dict[str, str] = {}
        for seat, device in zip(self._seats, self._devices, strict=True):
            self._node[seat] = device.node_id
            self._model.setdefault(device.node_id, device.name)
            self._of_node.setdefault(device.node_id, []).append(seat)
        self._order = {seat: position for position, seat in enumerate(self._seats)}
        self._largest = max(map(len, self._of_node.values()), default=0)
        self._taken: set[int] = set()
        self._on_idle_cluster: dict[int, tuple[int, ...]] = {}
        # (model, seats that a point can have of the node) -> nodes; a dict keeps their order.
        self._nodes: dict[tuple[str, int], dict[str, None]] = {}
        for node in self._of_node:
            self._nodes.setdefault(self._offer(node), {})[node] = None
        # world_size -> idle seats that ran a point together and none since: their process group
        # may still be there.
        self._kept: dict[int, dict[tuple[int, ...], None]] = {}
        self._last_used: dict[int, tuple[int, ...]] = {}

    @property
    def living(self) -> int:
        """How many seats there are, taken or not."""
        return len(self._seats)

    @property
    def is_idle(self) -> bool:
        """Whether no seat is taken."""
        return not self._taken

    def place(self, world_size: int) -> tuple[int, ...] | None:
        """The seats of one more point, in rank order; None where it has to wait for others."""
        if world_size > self.living - len(self._taken):
            return None
        if self._isolation == "cluster":
            return self._alone(world_size) if self.is_idle else None
        if kept := next(iter(self._kept.get(world_size, ())), None):
            return kept
        seats = self._find(world_size)
        return None if seats is None else tuple(sorted(seats, key=self._order.__getitem__))

    def take(self, seats: Sequence[int]) -> None:
        """Give these seats to a point; those that are lost stay out."""
        self._change(seats, self._taken.update)
        for seat in seats:
            before = self._last_used.get(seat, ())
            self._kept.get(len(before), {}).pop(before, None)
            self._last_used[seat] = tuple(seats)

    def free(self, seats: Sequence[int]) -> None:
        """Take these seats back; those that are lost meanwhile stay out."""
        self._change(seats, self._taken.difference_update)
        if len(seats) > 1 and self._node.keys() >= set(seats):
            self._kept.setdefault(len(seats), {})[tuple(seats)] = None

    def _alone(self, world_size: int) -> tuple[int, ...]:
        if world_size not in self._on_idle_cluster:
            positions = choose_seats(self._devices, world_size, self._strategy)
            self._on_idle_cluster[world_size] = tuple(self._seats[p] for p in positions)
        return self._on_idle_cluster[world_size]

    def _find(self, world_size: int) -> list[int] | None:
        """Seats on the nodes that have the least to offer beyond them: full nodes stay whole."""
        per_node = Counter(self._node[seat] for seat in self._alone(world_size))
        wanted = Counter((count, self._model[node]) for node, count in per_node.items())
        found: dict[str, list[int]] = {}
        for (count, model), nodes in sorted(wanted.items(), reverse=True):
            for node in self._nodes_with(count, model, nodes, found):
                idle = [seat for seat in self._of_node[node] if seat not in self._taken]
                found[node] = self._side_by_side(idle, count)
                nodes -= 1
            if nodes:
                return None
        return [seat for seats in found.values() for seat in seats]

    def _nodes_with(self, count: int, model: str, wanted: int, used: Collection[str]) -> list[str]:
        """At most `wanted` nodes of the model that can give so many seats, but for those used."""
        nodes: list[str] = []
        for offered in range(count, self._largest + 1):
            for node in self._nodes.get((model, offered), ()):
                if len(nodes) == wanted:
                    return nodes
                if node not in used:
                    nodes.append(node)
        return nodes

    def _side_by_side(self, idle: Sequence[int], count: int) -> list[int]:
        """`count` of a node's idle seats: of the shortest row of neighbours that is long enough.

        In it they begin at a multiple of `count` where they can, as pairs and quartets of devices
        are wired.
        """
        local = {seat: place for place, seat in enumerate(self._of_node[self._node[idle[0]]])}
        rows: list[list[int]] = []
        for seat in idle:
            if rows and local[seat] == local[rows[-1][-1]] + 1:
                rows[-1].append(seat)
            else:
                rows.append([seat])
        row = min((row for row in rows if len(row) >= count), key=len, default=list(idle))
        starts = range(len(row) - count + 1)
        start = next((start for start in starts if local[row[start]] % count == 0), 0)
        return row[start : start + count]

    def _offer(self, node: str) -> tuple[str, int]:
        """The model of the node, and how many seats of it a point can have."""
        seats = self._of_node[node]
        idle = sum(seat not in self._taken for seat in seats)
        if self._isolation == "node" and idle < len(seats):
            idle = 0
        return self._model[node], idle

    def _change(self, seats: Sequence[int], change: Callable[[Iterable[int]], None]) -> None:
        living = [seat for seat in seats if seat in self._node]
        nodes = {self._node[seat]: None for seat in living}
        for node in nodes:
            del self._nodes[self._offer(node)][node]
        change(living)
        for node in nodes:
            self._nodes.setdefault(self._offer(node), {})[node] = None
