"""Which devices a point gets, and their ranks."""

import random

import pytest
from fakes import make_device, make_devices
from hypothesis import given
from hypothesis import strategies as st

from raybench.cluster.ranks import assign_ranks, choose_workers, devices_shared, in_device_order


def test_workers_are_ordered_by_node_then_device_whatever_order_they_came_in():
    devices = make_devices(a=2, b=3)
    shuffled = random.Random(7).sample(devices, len(devices))
    assert [shuffled[position] for position in in_device_order(shuffled)] == devices


def test_nodes_that_share_an_address_stay_apart():
    devices = [
        make_device("b", 0, address="127.0.0.1"),
        make_device("a", 1, address="127.0.0.1"),
        make_device("b", 1, address="127.0.0.1"),
        make_device("a", 0, address="127.0.0.1"),
    ]
    ordered = [devices[position] for position in in_device_order(devices)]
    assert [(device.node_id, device.index) for device in ordered] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]


@pytest.mark.parametrize(
    ("strategy", "world_size", "expected"),
    [
        ("pack", 1, [("b", 0)]),
        ("pack", 3, [("b", 0), ("b", 1), ("b", 2)]),
        ("pack", 4, [("a", 0), ("b", 0), ("b", 1), ("b", 2)]),
        ("spread", 2, [("a", 0), ("b", 0)]),
        ("spread", 3, [("a", 0), ("b", 0), ("c", 0)]),
        ("spread", 5, [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0)]),
    ],
)
def test_pack_fills_nodes_and_spread_takes_turns(strategy, world_size, expected):
    devices = make_devices(a=2, b=3, c=1)
    worker_ids = choose_workers(devices, world_size, strategy)
    assert [
        (devices[worker_id].node_id, devices[worker_id].index) for worker_id in worker_ids
    ] == expected


def test_too_few_devices_is_said():
    with pytest.raises(ValueError, match="4 devices asked, 3 there"):
        choose_workers(make_devices(a=3), 4, "pack")


def test_places_are_those_of_torchrun():
    ranked = assign_ranks(make_devices(a=1, b=2))
    assert [(p.rank, p.local_rank, p.local_world_size, p.node_rank) for p in ranked] == [
        (0, 0, 1, 0),
        (1, 0, 2, 1),
        (2, 1, 2, 1),
    ]
    assert {place.world_size for place in ranked} == {3}


def test_a_device_with_two_owners_is_found():
    devices = [*make_devices(a=2), make_device("b", 0, uuid="GPU-a1")]
    assert devices_shared(devices) == ["GPU-a1"]
    assert devices_shared(make_devices(a=2, b=2)) == []


@given(
    sizes=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 8), min_size=1),
    data=st.data(),
    strategy=st.sampled_from(["pack", "spread"]),
)
def test_any_choice_gives_distinct_workers_and_whole_places(sizes, data, strategy):
    devices = make_devices(**sizes)
    world_size = data.draw(st.integers(1, len(devices)))
    worker_ids = choose_workers(devices, world_size, strategy)
    assert len(set(worker_ids)) == world_size
    ranked = assign_ranks([devices[worker_id] for worker_id in worker_ids])
    assert [place.rank for place in ranked] == list(range(world_size))
    for node in {place.node_rank for place in ranked}:
        local = [place.local_rank for place in ranked if place.node_rank == node]
        assert local == list(range(len(local)))
