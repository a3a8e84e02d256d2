"""Which devices a point gets on an idle cluster, and which rank each of them has. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal

from raybench.records import Device, RankInfo

Strategy = Literal["pack", "spread"]
Isolation = Literal["cluster", "node", "device"]


def in_device_order(devices: Sequence[Device]) -> list[int]:
    """Positions of `devices` sorted by node (its address, then its id), then by device index.

    Placement groups and GPU ids follow no order of their own, so ranks would change from run
    to run. Nodes that share a machine share an address: the node id tells them apart.
    """

    def key(position: int) -> tuple[str, str, int, str]:
        device = devices[position]
        return (device.address, device.node_id, device.index, device.uuid)

    return sorted(range(len(devices)), key=key)


def choose_workers(
    devices: Sequence[Device], world_size: int, strategy: Strategy
) -> tuple[int, ...]:
    """Choose the workers of a point, in rank order.

    pack fills one node after the other; spread takes from all nodes in turn. Both give ranks by
    node, then by device, as torchrun does. Raises ValueError when there are too few devices.
    """
    if world_size > len(devices):
        raise ValueError(f"{world_size} devices asked, {len(devices)} there")
    by_node: dict[str, list[int]] = {}
    for worker_id, device in enumerate(devices):
        by_node.setdefault(device.node_id, []).append(worker_id)
    if strategy == "spread":
        rounds = zip_longest(*by_node.values())
        order = [worker_id for taken in rounds for worker_id in taken if worker_id is not None]
    else:
        fullest_first = sorted(by_node.values(), key=len, reverse=True)
        order = [worker_id for worker_ids in fullest_first for worker_id in worker_ids]
    return tuple(sorted(order[:world_size]))


def assign_ranks(devices: Sequence[Device]) -> tuple[RankInfo, ...]:
    """Give each device of a group, which are in rank order, its ranks."""
    sizes = Counter(device.node_id for device in devices)
    nodes = list(dict.fromkeys(device.node_id for device in devices))
    taken: Counter[str] = Counter()
    result = []
    for rank, device in enumerate(devices):
        result.append(
            RankInfo(
                rank=rank,
                world_size=len(devices),
                local_rank=taken[device.node_id],
                local_world_size=sizes[device.node_id],
                node_rank=nodes.index(device.node_id),
            )
        )
        taken[device.node_id] += 1
    return tuple(result)


def devices_shared(devices: Sequence[Device]) -> list[str]:
    """UUIDs that more than one worker has: such workers would measure each other."""
    return [
        uuid for uuid, owners in Counter(device.uuid for device in devices).items() if owners > 1
    ]
