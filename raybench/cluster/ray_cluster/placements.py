"""Devices that Ray holds for this sweep, and devices that the cluster is asked to grow by.

Devices are held by placement groups of one node each: one for all would come whole or not at all,
and would be thrown into disorder by a lost node.
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
    """One device of a node, held for us by a bundle of a placement group until that is removed."""

    node_id: str
    placement: PlacementGroup
    bundle: int


def count_devices(kind: DeviceKind) -> int:
    """Return the number of devices of all living nodes, whoever uses them."""
    totals = (node["Resources"] for node in ray_nodes() if node["Alive"])
    return sum(int(total.get(RESOURCE[kind], 0)) for total in totals)


def free_devices(kind: DeviceKind) -> dict[str, int]:
    """Return node id -> number of devices that Ray has free, of the living nodes that have one."""
    available = free_resources_by_node()
    alive = [node["NodeID"] for node in ray_nodes() if node["Alive"]]
    free = {node: int(available.get(node, {}).get(RESOURCE[kind], 0)) for node in alive}
    return {node: count for node, count in free.items() if count}


def hold_devices(kind: DeviceKind, wanted: Mapping[str, int]) -> list[Slot]:
    """Reserve devices in Ray, and return a slot for each. Waits 2 s at most.

    wanted: node id -> number of devices, at least 1. If a node does not give so many in that time,
    none of it is reserved. `remove_placement_group` gives all slots of a node back.
    """
    asked = {
        node: placement_group(
            [{RESOURCE[kind]: 1.0}] * count,
            strategy="STRICT_PACK",
            bundle_label_selector=[{_NODE_ID: node}] * count,
        )
        for node, count in wanted.items()
    }
    # Not `PlacementGroup.wait`: below 1 s it often returns False for a group that is there.
    calls = [placement.ready() for placement in asked.values()]
    done = ray.wait(calls, num_returns=len(calls), timeout=timeouts.PLACEMENT_S)[0]
    slots = []
    for call, (node, group) in zip(calls, asked.items(), strict=True):
        if call in done:
            slots += [Slot(node_id=node, placement=group, bundle=n) for n in range(wanted[node])]
        else:
            remove_placement_group(group)
    return slots


class DeviceRequests:
    """Devices that the cluster lacks, each asked for by a placement group that waits for it.

    Ray's autoscaler starts nodes for groups that it cannot place, and Ray removes the groups of a
    process that has ended. A request of `ray.autoscaler.sdk.request_resources` would stay, and
    would replace that of another sweep.
    """

    def __init__(self, kind: DeviceKind) -> None:
        self._resource = RESOURCE[kind]
        self._groups: list[PlacementGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def ask_for(self, count: int) -> None:
        """Make or remove requests until there are `count`; a removed one holds no device."""
        while len(self._groups) > count:
            remove_placement_group(self._groups.pop())
        while len(self._groups) < count:
            self._groups.append(placement_group([{self._resource: 1.0}]))

    def take_placed(self) -> list[Slot]:
        """Return a slot for each request that Ray has given a device; they are requests no more."""
        slots = []
        for group in self._groups:
            table = placement_group_table(group)
            if table.get("state") == "CREATED":
                (node_id,) = table["bundles_to_node_id"].values()
                slots.append(Slot(node_id=node_id, placement=group, bundle=0))
        placed = {slot.placement for slot in slots}
        self._groups = [group for group in self._groups if group not in placed]
        return slots
