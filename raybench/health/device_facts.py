"""State and error counters of devices, before a health check and after it, as its first readings.

Facts are not compared between devices: a fact that is wrong has a problem. A fact that the driver
does not tell has neither value nor problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from raybench.health.readings import Problem, Reading
from raybench.health.suite import HealthTest, device_subject
from raybench.records.device_facts import DeviceFacts
from raybench.records.health import Action
from raybench.report.plain_text import counted

_Links = Mapping[tuple[str, str], AbstractSet[int]]

_BYTES_PER_GIB = 2**30
_S_PER_MIN = 60.0
# Limits of NVIDIA's DCGM (dcgm_gpu_hardware_limits.h): so many are part of a good link's work.
_REPLAYS_PER_MIN = 8.0
_CRC_ERRORS_PER_S = 100.0
# Xid errors by which the driver says that the hardware is at fault, in NVIDIA's catalogue:
# uncorrectable memory, the microcontroller, remapping, NVLink, off the bus, uncontained memory,
# the system processor (two), unrecovered memory. Others are mostly a program's, or told elsewhere.
_HARDWARE_XIDS = frozenset({48, 62, 64, 74, 79, 95, 119, 120, 140})


def _fact(name: str, unit: str, meaning: str) -> HealthTest:
    return HealthTest(
        name=name, stage="facts", unit=unit, floor=0.0, meaning=meaning, is_compared=False
    )


FREE_MEMORY = _fact("free memory", "GiB", "What workloads can have; others may hold the rest.")
MEMORY_ERRORS = _fact(
    "memory errors", "errors", "Errors of memory that could not be corrected: results are lost."
)
REMAPPED_ROWS = _fact(
    "remapped rows", "rows", "Rows of memory that a spare one replaces, at once or at a reset."
)
FAILED_REMAPS = _fact("failed remaps", "", "Whether a bad row has no spare one left.")
RETIRED_PAGES = _fact("retired pages", "pages", "Pages of memory that are not used any more.")
XIDS = _fact("Xid errors", "errors", "What the driver noted as errors of the device or a program.")
PCIE_REPLAYS = _fact("PCIe replays", "packets", "Packets sent again: a bad contact or cable.")
PCIE_LANES = _fact("PCIe lanes", "lanes", "Lanes in use: fewer carry less between host and GPU.")
NVLINKS = _fact(
    "NVLinks up", "links", "Links to the other GPUs: each that is down costs its share."
)
NVLINK_ERRORS = _fact("NVLink errors", "errors", "Transfers over NVLink that had to be repeated.")
FABRIC = _fact("NVLink fabric", "faults", "What the fabric manager says of the device's links.")

# What to do about a problem with each.
ACTIONS: Mapping[str, Action] = {
    FREE_MEMORY.name: Action.SETTING,
    MEMORY_ERRORS.name: Action.RESET,
    REMAPPED_ROWS.name: Action.RESET,
    FAILED_REMAPS.name: Action.REPLACE,
    RETIRED_PAGES.name: Action.RESET,
    XIDS.name: Action.RESET,
    PCIE_REPLAYS.name: Action.WATCH,
    PCIE_LANES.name: Action.REPLACE,
    NVLINKS.name: Action.RESET,
    NVLINK_ERRORS.name: Action.WATCH,
    FABRIC.name: Action.RESET,
}


def facts_readings(
    before: Sequence[DeviceFacts], after: Sequence[DeviceFacts]
) -> tuple[Reading, ...]:
    """Return a reading of each fact of each GPU, from its facts before and after the check.

    before: may lack devices, which then count as unchanged. CPUs have no facts and no readings.
    """
    earlier = {facts.device.uuid: facts for facts in before}
    linked = _expected_links(after)
    return tuple(
        reading
        for now in after
        if now.device.kind == "cuda"
        for reading in _device_readings(earlier.get(now.device.uuid, now), now, linked)
    )


def _device_readings(before: DeviceFacts, now: DeviceFacts, linked: _Links) -> list[Reading]:
    links = linked.get(_kin(now), frozenset())
    rows = _total(now.remapped_rows_correctable, now.remapped_rows_uncorrectable)
    free = None if now.memory_free_bytes is None else now.memory_free_bytes / _BYTES_PER_GIB
    links_up = None if now.nvlinks is None else sum(link.is_active for link in now.nvlinks)
    faults = None if now.fabric_state is None else len(now.fabric_faults)
    values: list[tuple[HealthTest, float | None, str | None]] = [
        (FREE_MEMORY, free, None),
        (MEMORY_ERRORS, now.ecc_errors, _ecc_problem(before, now)),
        (REMAPPED_ROWS, rows, _remap_problem(before, now)),
        (FAILED_REMAPS, now.is_remap_failed, "no spare row is left" * bool(now.is_remap_failed)),
        (RETIRED_PAGES, now.retired_pages, _retirement_problem(before, now)),
        (XIDS, _xid_count(now), _xid_problem(before, now)),
        (PCIE_REPLAYS, now.pcie_replays, _replay_problem(before, now)),
        (PCIE_LANES, now.pcie_lanes, _lanes_problem(now)),
        (NVLINKS, links_up, _links_problem(now, links)),
        (NVLINK_ERRORS, _link_error_count(now), _link_errors_problem(before, now)),
        (FABRIC, faults, ", ".join(now.fabric_faults)),
    ]
    # What was read before and is silent now is lost; many containers have no NVML at all.
    lost = now.unread if now.unread != before.unread else ""
    return [
        Reading(
            test=test,
            subject=device_subject(now.device),
            pass_number=1,
            value=None if value is None else float(value),
            problem=Problem(text=lost or problem or "") if lost or problem else None,
        )
        for test, value, problem in values
    ]


def _ecc_problem(before: DeviceFacts, now: DeviceFacts) -> str | None:
    if not now.ecc_errors:
        return None
    grown = _growth(before.ecc_errors, now.ecc_errors)
    when = f", {grown} of them during the check" if grown else " since the driver was loaded"
    return f"{counted(now.ecc_errors, 'uncorrected memory error')}{when}"


def _remap_problem(before: DeviceFacts, now: DeviceFacts) -> str | None:
    grown = _growth(
        _total(before.remapped_rows_correctable, before.remapped_rows_uncorrectable),
        _total(now.remapped_rows_correctable, now.remapped_rows_uncorrectable),
    )
    if now.is_remap_pending:
        return "a row of memory is to be remapped at the next reset"
    return f"{counted(grown, 'row')} of memory went bad during the check" if grown else None


def _retirement_problem(before: DeviceFacts, now: DeviceFacts) -> str | None:
    grown = _growth(before.retired_pages, now.retired_pages)
    if now.is_retirement_pending:
        return "a page of memory is to be retired at the next reset"
    return f"{counted(grown, 'page')} of memory went bad during the check" if grown else None


def _xid_count(now: DeviceFacts) -> int | None:
    known = [xids for xids in (now.kernel_xids, now.new_xids) if xids is not None]
    return max(map(len, known)) if known else None


def _xid_problem(before: DeviceFacts, now: DeviceFacts) -> str | None:
    """Return what is wrong: errors of the check, else earlier ones that the hardware is blamed for.

    NVML reports only errors since it is watched; the log is complete, where it may be read.
    """
    new = _new_xids(before, now)
    if new:
        return f"the driver reported Xid {_numbers(new)} during the check"
    old = [xid for xid in now.kernel_xids or () if xid in _HARDWARE_XIDS]
    return f"Xid {_numbers(old)} in the kernel's log" if old else None


def _new_xids(before: DeviceFacts, now: DeviceFacts) -> list[int]:
    # A full log has lost its oldest lines meanwhile.
    logged = Counter(now.kernel_xids or ()) - Counter(before.kernel_xids or ())
    if before.kernel_xids is not None and logged:
        return sorted(logged.elements())
    # An agent that was replaced meanwhile watches anew.
    is_same_watch = now.xids_watched_since == before.xids_watched_since
    return list((now.new_xids or ())[len(before.new_xids or ()) if is_same_watch else 0 :])


def _replay_problem(before: DeviceFacts, now: DeviceFacts) -> str | None:
    grown = _growth(before.pcie_replays, now.pcie_replays)
    if grown <= _REPLAYS_PER_MIN * max(1.0, _elapsed_s(before, now) / _S_PER_MIN):
        return None
    return f"{grown} packets were sent again over PCIe during the check"


def _lanes_problem(now: DeviceFacts) -> str | None:
    lanes, most = now.pcie_lanes, now.pcie_lanes_max
    if lanes is None or most is None or lanes >= most:
        return None
    return f"{lanes} of {most} PCIe lanes are in use"


def _links_problem(now: DeviceFacts, links: AbstractSet[int]) -> str | None:
    down = [link.link for link in now.nvlinks or () if not link.is_active and link.link in links]
    return f"NVLink {_numbers(down)} is down" if down else None


def _expected_links(facts: Sequence[DeviceFacts]) -> _Links:
    """Return the NVLinks that devices of one model on one node should have, by node and model.

    Those that are up on any of them; all where an NVSwitch connects any. Boards with bridges have
    some, and a virtual machine of one GPU may have none.
    """
    expected: dict[tuple[str, str], frozenset[int]] = {}
    for one in facts:
        links = one.nvlinks or ()
        is_switched = one.fabric_state is not None and any(link.is_active for link in links)
        found = {link.link for link in links if link.is_active or is_switched}
        expected[_kin(one)] = expected.get(_kin(one), frozenset()) | found
    return expected


def _kin(facts: DeviceFacts) -> tuple[str, str]:
    return facts.device.node_id, facts.device.name


def _link_errors_problem(before: DeviceFacts, now: DeviceFacts) -> str | None:
    earlier = {link.link: link.errors for link in before.nvlinks or ()}
    least = {"crc": _CRC_ERRORS_PER_S * max(1.0, _elapsed_s(before, now))}
    grown = [
        f"NVLink {link.link}: {counted(more, f'{kind} error')}"
        for link in now.nvlinks or ()
        for kind, errors in link.errors.items()
        if (more := errors - earlier.get(link.link, {}).get(kind, errors)) > least.get(kind, 0.0)
    ]
    return f"{', '.join(grown)} during the check" if grown else None


def _link_error_count(now: DeviceFacts) -> int | None:
    counted = [link.errors for link in now.nvlinks or () if link.errors]
    return sum(sum(errors.values()) for errors in counted) if counted else None


def _growth(before: int | None, now: int | None) -> int:
    """Return by how much a counter grew; one that was reset meanwhile grew by all that it shows."""
    if before is None or now is None:
        return 0
    return now - before if now >= before else now


def _elapsed_s(before: DeviceFacts, now: DeviceFacts) -> float:
    return (now.read_at - before.read_at).total_seconds()


def _total(*counts: int | None) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, dict.fromkeys(numbers)))
