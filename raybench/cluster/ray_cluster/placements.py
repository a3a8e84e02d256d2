"""Devices that Ray holds for this sweep, and requests for devices that the cluster lacks.

Each placement group has devices of one node, so that it survives the loss of other nodes.
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
    resources = (node["Resources"] for node in ray_nodes() if node["Alive"])
    return sum(int(amounts.get(RESOURCE[kind], 0)) for amounts in resources)


def free_devices(kind: DeviceKind) -> dict[str, int]:
    """Return node id -> number of free devices, for living nodes with a free device."""
    available = free_resources_by_node()
    free = {}
    for node in ray_nodes():
        count = int(available.get(node["NodeID"], {}).get(RESOURCE[kind], 0))
        if node["Alive"] and count:
            free[node["NodeID"]] = count
    return free


def hold_devices(kind: DeviceKind, wanted: Mapping[str, int]) -> list[Slot]:
    """Reserve devices in Ray and return a slot for each; wait up to 2 s.

    A node gives all wanted devices or none.

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
    # `PlacementGroup.wait` often returns False for a group that was ready within 1 s.
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
    """Requests for devices that the cluster lacks, so that Ray's autoscaler starts nodes."""

    def __init__(self, kind: DeviceKind) -> None:
        # Each request is a pending placement group, which Ray removes when this process ends. A
        # request by `ray.autoscaler.sdk.request_resources` would outlive this process, and would
        # overwrite the request of another sweep.
        self._resource = RESOURCE[kind]
        self._groups: list[PlacementGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def ask_for(self, count: int) -> None:
        """Add or remove requests until there are `count` requests."""
        while len(self._groups) > count:
            remove_placement_group(self._groups.pop())
        while len(self._groups) < count:
            self._groups.append(placement_group([{self._resource: 1.0}]))

    def take_placed(self) -> list[Slot]:
        """Remove the requests that have got a device, and return a slot for each of them."""
        slots = []
        for group in self._groups:
            table = placement_group_table(group)
            if table.get("state") == "CREATED":
                (node_id,) = table["bundles_to_node_id"].values()
                slots.append(Slot(node_id=node_id, placement=group, bundle=0))
        placed = {slot.placement for slot in slots}
        self._groups = [group for group in self._groups if group not in placed]
        return slots
