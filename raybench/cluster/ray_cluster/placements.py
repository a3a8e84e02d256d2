"""Devices that Ray holds for this sweep, and requests for devices that the cluster lacks.

Each placement group has devices of one node. A group of all devices would come whole or not at all,
and would not survive a lost node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from raybench.cluster import timeouts
from raybench.cluster.ray_cluster.ray_internals import free_resources_by_node
from raybench.cluster.ray_cluster.start import ray_nodes
from raybench.records.device import DeviceKind

# Ray's name of a kind of device.
RESOURCE = {"cuda": "GPU", "cpu": "CPU"}
_NODE_ID = "ray.io/node-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One device of a node, held by a bundle of a placement group."""

    node_id: str
    placement: PlacementGroup
    bundle: int


def count_devices(kind: DeviceKind) -> int:
    """Return the number of devices of all living nodes, free or not."""
    totals = (node["Resources"] for node in ray_nodes() if node["Alive"])
    return sum(int(total.get(RESOURCE[kind], 0)) for total in totals)


def free_devices(kind: DeviceKind) -> dict[str, int]:
    """Return node id -> number of free devices, for living nodes that have a free device."""
    available = free_resources_by_node()
    alive = [node["NodeID"] for node in ray_nodes() if node["Alive"]]
    free = {node: int(available.get(node, {}).get(RESOURCE[kind], 0)) for node in alive}
    return {node: count for node, count in free.items() if count}


def hold_devices(kind: DeviceKind, wanted: Mapping[str, int]) -> list[Slot]:
    """Reserve devices in Ray and return a slot for each; waits up to 2 s.

    A node gives all wanted devices or none, as one placement group.

    Args:
        wanted: node id -> number of devices, at least 1.
    """
    groups = {
        node: placement_group(
            [{RESOURCE[kind]: 1.0}] * count,
            strategy="STRICT_PACK",
            bundle_label_selector=[{_NODE_ID: node}] * count,
        )
        for node, count in wanted.items()
    }
    # Not `PlacementGroup.wait`, which often returns False for a ready group within 1 s.
    calls = [placement.ready() for placement in groups.values()]
    done = ray.wait(calls, num_returns=len(calls), timeout=timeouts.PLACEMENT_S)[0]
    slots = []
    for call, (node, group) in zip(calls, groups.items(), strict=True):
        if call in done:
            slots += [Slot(node_id=node, placement=group, bundle=n) for n in range(wanted[node])]
        else:
            remove_placement_group(group)
    return slots


class DeviceRequests:
    """Requests for devices that the cluster lacks.

    Each request is a pending placement group: Ray's autoscaler starts nodes for it, and Ray removes
    it when this process ends. A request by `ray.autoscaler.sdk.request_resources` would stay, and
    would overwrite the request of another sweep.
    """

    def __init__(self, kind: DeviceKind) -> None:
        self._resource = RESOURCE[kind]
        self._groups: list[PlacementGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def ask_for(self, count: int) -> None:
        """Add or remove requests until there are `count`."""
        while len(self._groups) > count:
            remove_placement_group(self._groups.pop())
        while len(self._groups) < count:
            self._groups.append(placement_group([{self._resource: 1.0}]))

    def take_placed(self) -> list[Slot]:
        """Remove the requests that have got a device, and return a slot for each."""
        slots = []
        for group in self._groups:
            table = placement_group_table(group)
            if table.get("state") == "CREATED":
                (node_id,) = table["bundles_to_node_id"].values()
                slots.append(Slot(node_id=node_id, placement=group, bundle=0))
        placed = {slot.placement for slot in slots}
        self._groups = [group for group in self._groups if group not in placed]
        return slots
