"""What the facts of a device, before and after a check, say of it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from raybench.health import device_facts
from raybench.health.device_facts import facts_readings
from raybench.health.readings import Reading
from raybench.records.devices import DeviceFacts, NvLink
from tests.unit.fakes import make_device

AT = datetime(2026, 11, 22, 10, 0, tzinfo=UTC)
NO_ERRORS = {"crc": 0, "replay": 0, "recovery": 0}
LINKS = tuple(NvLink(link=link, is_active=True, errors=NO_ERRORS) for link in range(4))


def facts_of(index: int = 0, **changes) -> DeviceFacts:
    """A healthy device of an NVSwitch system."""
    healthy = {
        "device": make_device(index=index),
        "read_at": AT,
        "memory_free_bytes": 139 * 2**30,
        "ecc_errors": 0,
        "remapped_rows": 1,
        "is_remap_pending": False,
        "is_remap_failed": False,
        "retired_pages": 2,
        "is_retirement_pending": False,
        "pcie_replays": 3,
        "pcie_lanes": 16,
        "pcie_lanes_max": 16,
        "nvlinks": LINKS,
        "fabric_state": "completed",
        "kernel_xids": (31,),
        "new_xids": (),
        "xids_watched_since": AT,
    }
    return DeviceFacts(**{**healthy, **changes})


def later(facts: DeviceFacts, **changes) -> DeviceFacts:
    """The same device three minutes afterwards."""
    return replace(facts, **{"read_at": AT + timedelta(minutes=3), **changes})


def problems(*readings: Reading) -> dict[str, str]:
    return {one.test.name: one.problem.text for one in readings if one.problem is not None}


def problems_after(**changes) -> dict[str, str]:
    before = facts_of()
    return problems(*facts_readings([before], [later(before, **changes)]))


def links(down: int = -1, **errors: int) -> tuple[NvLink, ...]:
    return tuple(
        NvLink(link=one.link, is_active=one.link != down, errors={**NO_ERRORS, **errors})
        for one in LINKS
    )


def test_a_healthy_device_has_a_value_for_each_fact_and_no_problem():
    before = facts_of()
    readings = facts_readings([before], [later(before)])
    assert problems(*readings) == {}
    values = {one.test.name: one.value for one in readings}
    assert values == {
        "free memory": 139.0,
        "memory errors": 0.0,
        "remapped rows": 1.0,
        "failed remaps": 0.0,
        "retired pages": 2.0,
        "Xid errors": 1.0,
        "PCIe replays": 3.0,
        "PCIe lanes": 16.0,
        "NVLinks up": 4.0,
        "NVLink errors": 0.0,
        "NVLink fabric": 0.0,
    }
    assert {one.subject.name for one in readings} == {"host-a GPU 0"}
    assert {one.test.stage for one in readings} == {"facts"}


@pytest.mark.parametrize(
    ("changes", "test", "problem"),
    [
        ({"ecc_errors": 2}, "memory errors", "2 uncorrected memory errors, 2 of them during"),
        ({"is_remap_pending": True}, "remapped rows", "remapped at the next reset"),
        ({"remapped_rows": 2}, "remapped rows", "1 row of memory went bad during"),
        ({"is_remap_failed": True}, "failed remaps", "no spare row is left"),
        ({"is_retirement_pending": True}, "retired pages", "retired at the next reset"),
        ({"retired_pages": 4}, "retired pages", "2 pages of memory went bad during the check"),
        ({"kernel_xids": (31, 13)}, "Xid errors", "reported Xid 13 during the check"),
        ({"kernel_xids": None, "new_xids": (94,)}, "Xid errors", "reported Xid 94 during"),
        ({"pcie_replays": 28}, "PCIe replays", "25 packets were sent again"),
        ({"pcie_lanes": 8}, "PCIe lanes", "8 of 16 PCIe lanes are in use"),
        ({"nvlinks": links(down=2)}, "NVLinks up", "NVLink 2 is down"),
        ({"nvlinks": links(replay=1)}, "NVLink errors", "NVLink 0: 1 replay error, NVLink 1: 1"),
        ({"nvlinks": links(crc=18_001)}, "NVLink errors", "NVLink 0: 18001 crc errors"),
        ({"fabric_faults": ("degraded bandwidth",)}, "NVLink fabric", "degraded bandwidth"),
    ],
)
def test_each_fault_is_a_problem_of_its_own_fact_alone(changes, test, problem):
    found = problems_after(**changes)
    assert list(found) == [test]
    assert problem in found[test]
    assert test in device_facts.ACTIONS


@pytest.mark.parametrize(
    "changes",
    [
        {"pcie_replays": 27},  # 8 a minute
        {"nvlinks": links(crc=18_000)},  # 100 a second
        {"kernel_xids": ()},  # the log was full
        {"new_xids": None, "kernel_xids": None},
        {"memory_free_bytes": 2**30},
    ],
)
def test_what_good_devices_do_too_is_no_problem(changes):
    assert problems_after(**changes) == {}


def test_errors_from_before_the_check_count_only_where_the_device_itself_failed():
    before = facts_of(kernel_xids=(13, 79), ecc_errors=1, pcie_replays=10**6, nvlinks=links(crc=9))
    assert problems(*facts_readings([before], [later(before)])) == {
        "memory errors": "1 uncorrected memory error since the driver was loaded",
        "Xid errors": "Xid 79 in the kernel's log",
    }
    # A watch that began anew counts from its own beginning.
    before = facts_of(kernel_xids=None, new_xids=(31, 31))
    again = later(before, new_xids=(79,), xids_watched_since=AT + timedelta(minutes=1))
    during = {"Xid errors": "the driver reported Xid 79 during the check"}
    assert problems(*facts_readings([before], [again])) == during


def test_a_link_that_no_board_of_the_node_uses_is_not_missed():
    bridged = (*LINKS[:2], *(replace(link, is_active=False) for link in LINKS[2:]))
    pair = [facts_of(index, fabric_state=None, nvlinks=bridged) for index in range(2)]
    assert problems(*facts_readings(pair, pair)) == {}
    worse = replace(pair[1], nvlinks=tuple(replace(link, is_active=False) for link in LINKS))
    assert problems(*facts_readings(pair, [pair[0], worse])) == {
        "NVLinks up": "NVLink 0, 1 is down"
    }
