"""Which devices of which nodes the workers get, held by one placement group for each node.

One group for all would come whole or not at all, and would be thrown into disorder by a lost node.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import ray._private.state
from ray.autoscaler.sdk import request_resources
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raybench.cluster import DeviceKind
from raybench.cluster.ray_cluster.connection import nodes
from raybench.records import Device

# A bundle on devices that were free a moment ago is there in milliseconds, or not at all.
_PLACE_TIMEOUT_S = 2.0
_NODE_ID = "ray.io/node-id"
_RACK = "rack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One device's share of a node, held for us until its placement group is removed."""

    node_id: str
    placement: PlacementGroup
    bundle: int


@dataclass(slots=True, kw_only=True)
class WorkerHandle:
    """A worker and where it is held. lost_because: empty as long as it can be used.

    user_class: the class of the user's that its process has run. environment: variables that its
    process was started with, or its next one is.
    """

    slot: Slot
    actor: Any
    device: Device
    is_used: bool = False
    user_class: str = ""
    lost_because: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def resource(kind: DeviceKind) -> str:
    """Return what Ray calls such a device."""
    return "GPU" if kind == "cuda" else "CPU"


def free_devices(kind: DeviceKind) -> dict[str, int]:
    """Devices by node id that nobody has now; nodes without one are left out."""
    available = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    alive = [node["NodeID"] for node in nodes() if node["Alive"]]
    free = {node: int(available.get(node, {}).get(resource(kind), 0)) for node in alive}
    return {node: count for node, count in free.items() if count}


def racks() -> dict[str, str]:
    """Racks by node id, as `ray start --labels rack=NAME` names them."""
    labels = {node["NodeID"]: node.get("Labels") or {} for node in nodes()}
    return {node: its[_RACK] for node, its in labels.items() if _RACK in its}


def reserve(kind: DeviceKind, wanted: Mapping[str, int]) -> list[Slot]:
    """Hold so many devices on each node; what somebody else was quicker to take is left out."""
    asked = {
        node: placement_group(
            [{resource(kind): 1.0}] * count,
            strategy="STRICT_PACK",
            bundle_label_selector=[{_NODE_ID: node}] * count,
        )
        for node, count in wanted.items()
    }
    slots = []
    deadline_s = time.monotonic() + _PLACE_TIMEOUT_S
    for node, placement in asked.items():
        if placement.wait(max(0.0, deadline_s - time.monotonic())):
            slots += [
                Slot(node_id=node, placement=placement, bundle=bundle)
                for bundle in range(wanted[node])
            ]
        else:
            remove_placement_group(placement)
    return slots


def ask_autoscaler(kind: DeviceKind, count: int) -> None:
    """Have the cluster scaled up to so many devices where it can be; 0 takes that back."""
    request_resources(bundles=[{resource(kind): 1}] * count)
