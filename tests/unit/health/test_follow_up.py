"""What is run after the passes: halves of slow groups, slow pairs by themselves, a burn-in."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders import make_device, make_measurement, make_record

from raybench.health.follow_up import confirmations, halve, slow_groups, slower_half
from raybench.health.readings import Reading, drift, read_record
from raybench.health.suite import Fleet, Probe, probes
from raybench.health.verdicts import judge

_SLOW_NS, _USUAL_NS = 9_000_000, 1_000_000


def fleet_of(count: int) -> Fleet:
    return Fleet(devices=tuple(make_device(rank) for rank in range(count)))


def read(probe: Probe, fleet: Fleet, slow: Sequence[int] = (), number: int = 1) -> list[Reading]:
    """What is read where these ranks are slow; in a group or a pair all wait for the slowest."""
    measurements = [
        replace(
            make_measurement(rank, [[_SLOW_NS if rank in slow else _USUAL_NS] * 5]),
            message_bytes=2**28,
            busbw_factor=1.0,
        )
        for rank in range(fleet.size)
    ]
    record = make_record(
        probe.point, devices=fleet.devices, measurements=tuple(measurements), round=number
    )
    return list(read_record(record, probe, fleet))


def test_a_slow_group_is_halved_until_the_slow_half_is_a_pair():
    fleet = fleet_of(8)
    made = probes(fleet, ["pairs", "together"])
    pairs = [one for probe in made if probe.test.reads == "pairs" for one in read(probe, fleet)]
    fast, slow = (
        [one for probe in made if probe.test.reads == "groups" for one in read(probe, fleet, ranks)]
        for ranks in ([], [5])
    )
    # A group that keeps what its pairs promise is left alone.
    assert not slow_groups(made, [*pairs, *fast], judge([*pairs, *fast], fleet.devices), fleet)
    [split] = slow_groups(made, [*pairs, *slow], (), fleet)
    assert split.halves == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert split.probe.point.params["groups"] == "0-3,4-7"
    half = slower_half(split, read(split.probe, fleet, [5]), fleet)
    assert half == (4, 5, 6, 7)
    again = halve(half, split.probe, fleet)
    assert again.halves == ((4, 5), (6, 7))
    assert slower_half(again, read(again.probe, fleet, [5]), fleet) is None
    # Halves that are fast alike end the search.
    assert slower_half(split, read(split.probe, fleet), fleet) is None
    assert slower_half(split, (), fleet) is None


def test_of_pairs_at_the_same_time_the_slow_one_comes_again_alone():
    fleet = fleet_of(6)
    readings = [
        one
        for number in (1, 2, 3)
        for probe in probes(fleet, ["pairs"], serial=True)
        for slow in [(1, 3) if probe.point.params["partners"] == "1-3" else ()]
        for one in read(probe, fleet, slow, number)
    ]
    made = probes(fleet, ["pairs"])
    confirmed = confirmations(made, judge(readings, fleet.devices), fleet)
    copies = [one for one in confirmed if one.test.name == "copy 256 MiB, one pair at a time"]
    partners = [str(one.point.params["partners"]) for one in copies]
    assert partners.count("1-3") == 2  # forward and backward
    assert len(set(partners)) == 3
    assert len({one.point.point_id for one in confirmed}) == len(confirmed)


@pytest.mark.parametrize(("last", "ratio"), [(100.0, 1.0), (80.0, 1.25)])
def test_drift_is_the_last_tenth_of_a_burn_in_against_the_first(last, ratio):
    fleet = fleet_of(1)
    [probe] = probes(fleet, ["burn-in"])
    values = [100.0] * 18 + [last] * 2
    readings = [
        Reading(test=probe.test, subject=fleet.subjects[0], pass_number=number, value=value)
        for number, value in enumerate(values, 4)
    ]
    [found] = drift(readings, 0.01)
    assert found.value == pytest.approx(ratio)
    assert found.test.name == f"{probe.test.name} drift"
    assert not list(drift(readings[:1], 0.01))
