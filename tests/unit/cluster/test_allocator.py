"""The idle workers, and the place of one more point among them."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from fakes import make_device, make_devices
from hypothesis import given
from hypothesis import strategies as st

from raybench.cluster.allocator import (
    DeviceAllocator,
    assign_ranks,
    counts_by_node,
    devices_shared,
    in_device_order,
)
from tests.local_cluster import choose_workers


def test_workers_are_ordered_by_node_then_device():
    devices = make_devices(a=2, b=3)
    shuffled = random.Random(7).sample(devices, len(devices))
    assert [shuffled[position] for position in in_device_order(shuffled)] == devices


def test_places_are_those_of_torchrun():
    ranked = assign_ranks(make_devices(a=1, b=2))
    places = [(p.rank, p.local_rank, p.local_world_size, p.node_rank) for p in ranked]
    assert places == [(0, 0, 1, 0), (1, 0, 2, 1), (2, 1, 2, 1)]
    assert {place.world_size for place in ranked} == {3}


def test_a_device_with_two_owners_is_found():
    devices = [*make_devices(a=2), make_device("b", 0, uuid="GPU-a1")]
    assert devices_shared(devices) == ["GPU-a1"]
    assert devices_shared(make_devices(a=2, b=2)) == []


class Beside:
    """An allocator and the workers that are taken."""

    def __init__(self, *settings):
        self.allocator, self.taken = DeviceAllocator(*settings), set()
        self.take, self.free = self.taken.update, self.taken.difference_update

    def choose(self, world_size):
        return self.allocator.choose(world_size, self.taken)


def allocator_of(isolation="device", strategy="pack", lost=(), **nodes):
    return Beside(make_devices(**nodes), lost, strategy, isolation)


def taken(allocator, *sizes):
    """Places of points of these sizes, taken one after the other."""
    places = []
    for size in sizes:
        places.append(allocator.choose(size))
        if places[-1]:
            allocator.take(places[-1])
    return places


def test_points_keep_their_models_on_a_busy_cluster():
    devices = [make_device(*place) for place in (("a", 0), ("a", 1), ("b", 0))]
    devices[2] = replace(devices[2], name="old")
    allocator = Beside(devices, (), "pack", "device")
    assert taken(allocator, 1, 1, 1) == [(0,), (1,), None]


def test_the_next_point_reuses_the_freed_workers():
    allocator = allocator_of(a=8)
    for freed in reversed(taken(allocator, 2, 4, 2)):
        allocator.free(freed)
        assert taken(allocator, len(freed)) == [freed]


def test_neighbouring_devices_are_preferred_from_even_indices():
    allocator = allocator_of(a=8)
    allocator.take((1,))
    allocator.take((5,))
    # 6 and 7 are the shortest row of idle neighbours; then 2, 3, 4.
    assert taken(allocator, 2, 2) == [(6, 7), (2, 3)]
    assert allocator.choose(2) == (0, 4)


@pytest.mark.parametrize("isolation", ["cluster", "node", "device"])
def test_lost_workers_are_given_to_nobody(isolation):
    allocator = allocator_of(isolation, lost={0, 1}, a=2, b=2)
    assert allocator.allocator.usable_count == 2
    assert allocator.choose(2) == (2, 3)
    assert allocator.choose(3) is None
    allocator.free((0, 1))
    assert allocator.choose(3) is None


@given(
    nodes=st.dictionaries(
        st.sampled_from("abcdef"),
        st.tuples(st.integers(1, 8), st.sampled_from("xy"), st.sampled_from(["old", "new"])),
        min_size=1,
    ),
    isolation=st.sampled_from(["node", "device"]),
    strategy=st.sampled_from(["pack", "spread", "rail"]),
    data=st.data(),
)
def test_concurrent_points_have_disjoint_places_of_equal_shape(nodes, isolation, strategy, data):
    devices = [
        replace(make_device(node, index, rack=rack), name=model)
        for node, (count, rack, model) in nodes.items()
        for index in range(count)
    ]
    allocator, running = Beside(devices, (), strategy, isolation), []
    for _ in range(20):
        world_size = data.draw(st.integers(1, len(devices)))
        if running and data.draw(st.booleans()):
            allocator.free(running.pop(data.draw(st.integers(0, len(running) - 1))))
        if (worker_ids := allocator.choose(world_size)) is None:
            assert running, "every point has a place on the idle cluster"
            continue
        allocator.take(worker_ids)
        running.append(worker_ids)
        alone = choose_workers(devices, world_size, strategy)
        assert shape(devices, worker_ids) == shape(devices, alone)
    used = Counter(worker_id for worker_ids in running for worker_id in worker_ids)
    assert set(used.values()) <= {1}
    nodes = Counter(node for ids in running for node in {devices[one].node_id for one in ids})
    assert isolation == "device" or set(nodes.values()) <= {1}


def shape(devices, worker_ids):
    places = ((devices[worker_id].node_id, devices[worker_id].name) for worker_id in worker_ids)
    return sorted((count, model) for (_, model), count in Counter(places).items())


def racks(**nodes):
    """Devices of the nodes of each rack."""
    return [
        make_device(node, index, rack=rack)
        for rack, its in nodes.items()
        for node, count in its.items()
        for index in range(count)
    ]


# Eight devices on four nodes of two racks: 0 to 3 are of the first.
TWO_RACKS = racks(left={"a": 2, "b": 2}, right={"c": 2, "d": 2})


NODES = make_devices(a=2, b=3, c=1)


@pytest.mark.parametrize(
    ("devices", "strategy", "world_size", "expected"),
    [
        (NODES, "pack", 1, (2,)),
        (NODES, "pack", 3, (2, 3, 4)),
        (NODES, "pack", 4, (0, 2, 3, 4)),
        (NODES, "spread", 2, (0, 2)),
        (NODES, "spread", 3, (0, 2, 5)),
        (NODES, "spread", 5, (0, 1, 2, 3, 5)),
        (TWO_RACKS, "pack", 2, (0, 1)),
        (TWO_RACKS, "pack", 4, (0, 1, 2, 3)),
        (TWO_RACKS, "spread", 2, (0, 4)),
        (TWO_RACKS, "spread", 4, (0, 2, 4, 6)),
        (TWO_RACKS, "rail", 2, (0, 2)),
        (TWO_RACKS, "rail", 3, (0, 1, 2)),
        (TWO_RACKS, "rail", 4, (0, 1, 2, 3)),
        (TWO_RACKS, "rail", 6, (0, 1, 2, 3, 4, 6)),
        # The rack that has most, and no other.
        (racks(small={"a": 2}, big={"b": 2, "c": 2}), "pack", 4, (2, 3, 4, 5)),
    ],
)
def test_each_strategy_chooses_its_nodes_and_racks(devices, strategy, world_size, expected):
    assert choose_workers(devices, world_size, strategy) == expected


def test_nodes_of_a_rack_have_neighbouring_ranks():
    devices = racks(left={"a": 1}, right={"b": 1}) + racks(left={"c": 1})
    assert in_device_order(devices) == [0, 2, 1]


@pytest.mark.parametrize("strategy", ["pack", "spread", "rail"])
def test_workers_start_where_points_will_run(strategy):
    free, of_node = {"a": 2, "b": 2, "c": 2, "d": 2}, {"a": "l", "b": "l", "c": "r", "d": "r"}
    for world_size in range(1, 9):
        chosen = choose_workers(TWO_RACKS, world_size, strategy)
        nodes = Counter(TWO_RACKS[worker_id].node_id for worker_id in chosen)
        assert counts_by_node(free, world_size, strategy, of_node) == nodes
    assert counts_by_node(free, 9, strategy, of_node) == free
    assert counts_by_node({}, 3, strategy) == {}


def test_concurrent_points_stay_in_one_rack():
    allocator = Beside(TWO_RACKS, (), "pack", "device")
    allocator.take((1,))
    assert allocator.choose(4) == (4, 5, 6, 7)
    allocator.take((4,))
    assert allocator.choose(4) is None


def test_concurrent_rail_points_use_one_device_index():
    allocator = Beside(TWO_RACKS, (), "rail", "device")
    allocator.take((0,))
    # Index 0 of node a is taken: both have index 1.
    assert allocator.choose(2) == (1, 3)
    allocator.take((3, 4, 7))
    assert allocator.choose(2) is None
    allocator.free((4, 7))
    assert allocator.choose(2) == (4, 6)
