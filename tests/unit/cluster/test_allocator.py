"""The idle workers, and the place of one more point among them."""

import pytest
from fakes import make_device, make_devices
from hypothesis import given
from hypothesis import strategies as st

from raybench.cluster.allocator import DeviceAllocator
from raybench.cluster.ranks import choose_workers


def room(isolation="device", strategy="pack", lost=(), **nodes):
    return DeviceAllocator(make_devices(**nodes), lost, strategy, isolation)


def taken(where, *sizes):
    """Places of points of these sizes, taken one after the other."""
    places = []
    for size in sizes:
        places.append(where.place(size))
        if places[-1]:
            where.take(places[-1])
    return places


def test_points_side_by_side_fill_a_node_before_they_open_the_next():
    assert taken(room(a=4, b=4), 2, 1, 1, 4) == [(0, 1), (2,), (3,), (4, 5, 6, 7)]


def test_a_point_never_spans_more_nodes_than_it_would_on_the_idle_cluster():
    where = room(a=2, b=2)
    assert taken(where, 1) == [(0,)]
    where.take((2,))
    assert where.place(2) is None
    where.free((2,))
    assert where.place(2) == (2, 3)


def test_spread_points_keep_their_devices_on_different_nodes():
    where = room(a=2, b=2, strategy="spread")
    assert taken(where, 2, 2) == [(0, 2), (1, 3)]
    where.free((0, 2))
    where.take((0,))
    assert where.place(2) is None


def test_a_node_that_is_partly_taken_has_nothing_to_offer_with_isolation_node():
    assert taken(room("node", a=4, b=2), 1, 2, 1) == [(4,), (0, 1), None]


def test_a_point_stays_on_the_models_that_it_would_have_on_the_idle_cluster():
    devices = [make_device("a", i, name="new") for i in range(2)]
    devices += [make_device("b", 0, name="old")]
    where = DeviceAllocator(devices, (), "pack", "device")
    assert taken(where, 1, 1, 1) == [(0,), (1,), None]


def test_workers_that_ran_such_a_point_before_are_taken_again_and_not_once_they_ran_another():
    where = room(a=8)
    first, second = taken(where, 2, 2)
    where.free(second)
    where.free(first)
    assert where.place(2) == second
    where.take((2,))
    assert where.place(2) == first


def test_neighbours_are_preferred_and_pairs_begin_at_even_devices():
    where = room(a=8)
    where.take((1,))
    where.take((5,))
    # 6 and 7 are the shortest row of idle neighbours; then 2, 3, 4.
    assert taken(where, 2, 2) == [(6, 7), (2, 3)]
    assert where.place(2) == (0, 4)


def test_late_workers_have_ranks_by_node_all_the_same():
    devices = [*make_devices(a=1, b=2), make_device("a", 1)]
    where = DeviceAllocator(devices, (), "pack", "device")
    assert where.place(4) == (0, 3, 1, 2)


@pytest.mark.parametrize("isolation", ["cluster", "node", "device"])
def test_lost_workers_are_given_to_nobody(isolation):
    where = room(isolation, lost={0, 1}, a=2, b=2)
    assert where.living == 2
    assert where.place(2) == (2, 3)
    assert where.place(3) is None
    where.free((0, 1))
    assert where.place(3) is None


@given(
    sizes=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 8), min_size=1),
    isolation=st.sampled_from(["node", "device"]),
    strategy=st.sampled_from(["pack", "spread"]),
    data=st.data(),
)
def test_whatever_comes_and_goes_places_are_disjoint_and_of_the_same_shape(
    sizes, isolation, strategy, data
):
    devices = make_devices(**sizes)
    where, running = DeviceAllocator(devices, (), strategy, isolation), []
    for _ in range(20):
        world_size = data.draw(st.integers(1, len(devices)))
        if running and data.draw(st.booleans()):
            where.free(running.pop(data.draw(st.integers(0, len(running) - 1))))
        if (worker_ids := where.place(world_size)) is None:
            assert running, "every point has a place on the idle cluster"
            continue
        where.take(worker_ids)
        running.append(worker_ids)
        assert shape(devices, worker_ids) == shape(
            devices, choose_workers(devices, world_size, strategy)
        )
    used = [worker_id for worker_ids in running for worker_id in worker_ids]
    assert len(used) == len(set(used))
    nodes = [
        node
        for worker_ids in running
        for node in {devices[worker_id].node_id for worker_id in worker_ids}
    ]
    assert isolation == "device" or len(nodes) == len(set(nodes))


def shape(devices, worker_ids):
    nodes = [devices[worker_id].node_id for worker_id in worker_ids]
    return sorted(nodes.count(node) for node in set(nodes))
