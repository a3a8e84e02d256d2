"""State and error counters of devices, before a health check and after it, as its first readings.

Facts are not compared between devices: a fact that is wrong has a problem. A fact that the driver
does not tell has neither value nor problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from raybench.health.readings import Problem, Reading
from raybench.health.suite import HealthTest, device_subject
from raybench.records.devices import DeviceFacts
from raybench.records.health import Action
from raybench.report.plain_text import counted

_BYTES_PER_GIB = 2**30
_S_PER_MIN = 60.0
# Limits of NVIDIA's DCGM (dcgm_gpu_hardware_limits.h): so many are part of a good link's work.
_REPLAYS_PER_MIN = 8.0
_CRC_ERRORS_PER_S = 100.0
# Xid errors by which the driver says that the hardware is at fault, in NVIDIA's catalogue:
# uncorrectable memory, the microcontroller, remapping, NVLink, off the bus, uncontained memory,
# the system processor (two), unrecovered memory. Others are mostly a program's, or told elsewhere.
_HARDWARE_XIDS = frozenset({48, 62, 64, 74, 79, 95, 119, 120, 140})

FREE_MEMORY, MEMORY_ERRORS, PCIE_LANES = "free memory", "memory errors", "PCIe lanes"
# The unit of each fact, and what to do about a problem with it.
_FACTS: Mapping[str, tuple[str, Action]] = {
    # What workloads can have; other programs may hold the rest.
    FREE_MEMORY: ("GiB", Action.SETTING),
    # Errors that could not be corrected: results are lost.
    MEMORY_ERRORS: ("errors", Action.RESET),
    # Rows of memory that a spare one replaces, at once or at a reset.
    "remapped rows": ("rows", Action.RESET),
    # A bad row has no spare one left.
    "failed remaps": ("", Action.REPLACE),
    "retired pages": ("pages", Action.RESET),
    # What the driver noted as errors of the device or of a program.
    "Xid errors": ("errors", Action.RESET),
    # Packets sent again: a bad contact or cable.
    "PCIe replays": ("packets", Action.WATCH),
    # Fewer lanes in use carry less between host and GPU.
    PCIE_LANES: ("lanes", Action.REPLACE),
    "NVLinks up": ("links", Action.RESET),
    # Transfers that had to be repeated.
    "NVLink errors": ("errors", Action.WATCH),
    # What the fabric manager says of the device's links.
    "NVLink fabric": ("faults", Action.RESET),
}
ACTIONS: Mapping[str, Action] = {name: action for name, (_, action) in _FACTS.items()}


def facts_readings(
    before: Sequence[DeviceFacts], after: Sequence[DeviceFacts]
) -> tuple[Reading, ...]:
    """Return a reading of each fact of each GPU: its value after the check, and any problem.

    The value is None where the driver does not tell it. before: may lack devices, which then count
    as unchanged. CPUs have no facts and no readings.
    """
    earlier = {facts.device.uuid: facts for facts in before}
    links = _expected_links(after)
    return tuple(
        reading
        for now in after
        if now.device.kind == "cuda"
        for reading in _device_readings(
            earlier.get(now.device.uuid, now), now, links[now.device.node_id, now.device.name]
        )
    )


def _expected_links(facts: Sequence[DeviceFacts]) -> dict[tuple[str, str], frozenset[int]]:
    """Return the NVLinks that devices of one model on one node should have, by (node id, model).

    Those that are up on any of them; all where an NVSwitch connects any. Boards with bridges have
    some, and a virtual machine of one GPU may have none.
    """
    expected: dict[tuple[str, str], frozenset[int]] = {}
    for one in facts:
        links = one.nvlinks or ()
        is_switched = one.fabric_state is not None and any(link.is_active for link in links)
        found = {link.link for link in links if link.is_active or is_switched}
        key = one.device.node_id, one.device.name
        expected[key] = expected.get(key, frozenset()) | found
    return expected


def _device_readings(
    before: DeviceFacts, now: DeviceFacts, expected_links: frozenset[int]
) -> Iterator[Reading]:
    """Yield a reading of each fact of one GPU; all have the problem if it was lost meanwhile.

    expected_links: numbers of the NVLinks that should be up.
    """
    # What was read before and is silent now is lost; many containers have no NVML at all.
    lost = now.unread if now.unread != before.unread else ""
    for name, (value, problem) in _values(before, now, expected_links).items():
        yield Reading(
            test=HealthTest(
                name=name, stage="facts", unit=_FACTS[name][0], floor=0.0, is_compared=False
            ),
            subject=device_subject(now.device),
            pass_number=1,
            value=None if value is None else float(value),
            problem=Problem(text=lost or problem) if lost or problem else None,
        )


def _values(
    before: DeviceFacts, now: DeviceFacts, expected_links: frozenset[int]
) -> dict[str, tuple[float | None, str]]:
    """Return (value, problem) of each fact by its name.

    The value is None where it is not known, the problem is empty where there is none.
    """
    minutes = (now.read_at - before.read_at).total_seconds() / _S_PER_MIN
    lanes, most_lanes = now.pcie_lanes, now.pcie_lanes_max
    has_few_lanes = lanes is not None and most_lanes is not None and lanes < most_lanes
    replays = _growth(before.pcie_replays, now.pcie_replays)
    has_many_replays = replays > _REPLAYS_PER_MIN * max(1.0, minutes)
    down = [one.link for one in now.nvlinks or () if not one.is_active]
    down = sorted(expected_links.intersection(down))
    counts = [sum(one.errors.values()) for one in now.nvlinks or () if one.errors]
    xids = [found for found in (now.kernel_xids, now.new_xids) if found is not None]
    return {
        FREE_MEMORY: (now.memory_free_bytes and now.memory_free_bytes / _BYTES_PER_GIB, ""),
        MEMORY_ERRORS: (now.ecc_errors, _memory_problem(before, now)),
        "remapped rows": (
            now.remapped_rows,
            "a row of memory is to be remapped at the next reset"
            if now.is_remap_pending
            else _went_bad(_growth(before.remapped_rows, now.remapped_rows), "row"),
        ),
        "failed remaps": (
            now.is_remap_failed,
            "no spare row is left" if now.is_remap_failed else "",
        ),
        "retired pages": (
            now.retired_pages,
            "a page of memory is to be retired at the next reset"
            if now.is_retirement_pending
            else _went_bad(_growth(before.retired_pages, now.retired_pages), "page"),
        ),
        "Xid errors": (max(map(len, xids)) if xids else None, _xid_problem(before, now)),
        "PCIe replays": (
            now.pcie_replays,
            f"{replays} packets were sent again over PCIe during the check"
            if has_many_replays
            else "",
        ),
        PCIE_LANES: (
            lanes,
            f"{lanes} of {most_lanes} PCIe lanes are in use" if has_few_lanes else "",
        ),
        "NVLinks up": (
            None if now.nvlinks is None else sum(link.is_active for link in now.nvlinks),
            f"NVLink {_numbers(down)} is down" if down else "",
        ),
        "NVLink errors": (sum(counts) if counts else None, _link_errors(before, now, minutes)),
        "NVLink fabric": (
            None if now.fabric_state is None else len(now.fabric_faults),
            ", ".join(now.fabric_faults),
        ),
    }


def _memory_problem(before: DeviceFacts, now: DeviceFacts) -> str:
    """Return how many uncorrected memory errors there are, in words; empty for none."""
    if not now.ecc_errors:
        return ""
    grown = _growth(before.ecc_errors, now.ecc_errors)
    when = f", {grown} of them during the check" if grown else " since the driver was loaded"
    return f"{counted(now.ecc_errors, 'uncorrected memory error')}{when}"


def _went_bad(grown: int, noun: str) -> str:
    return f"{counted(grown, noun)} of memory went bad during the check" if grown else ""


def _xid_problem(before: DeviceFacts, now: DeviceFacts) -> str:
    """Return Xid errors of the check, else earlier ones of the hardware, in words; empty for none.

    NVML reports only errors since it is watched; the log is complete, where it may be read.
    """
    # A full log has lost its oldest lines meanwhile.
    logged = Counter(now.kernel_xids or ()) - Counter(before.kernel_xids or ())
    if before.kernel_xids is not None and logged:
        new = sorted(logged.elements())
    else:
        # An agent that was replaced meanwhile watches anew.
        is_same_watch = now.xids_watched_since == before.xids_watched_since
        new = list((now.new_xids or ())[len(before.new_xids or ()) if is_same_watch else 0 :])
    if new:
        return f"the driver reported Xid {_numbers(new)} during the check"
    old = [xid for xid in now.kernel_xids or () if xid in _HARDWARE_XIDS]
    return f"Xid {_numbers(old)} in the kernel's log" if old else ""


def _link_errors(before: DeviceFacts, now: DeviceFacts, minutes: float) -> str:
    """Return which NVLinks had more errors than good links have, in words; empty for none."""
    earlier = {link.link: link.errors for link in before.nvlinks or ()}
    least = {"crc": _CRC_ERRORS_PER_S * max(1.0, minutes * _S_PER_MIN)}
    grown = [
        f"NVLink {link.link}: {counted(more, f'{kind} error')}"
        for link in now.nvlinks or ()
        for kind, errors in link.errors.items()
        if (more := errors - earlier.get(link.link, {}).get(kind, errors)) > least.get(kind, 0.0)
    ]
    return f"{', '.join(grown)} during the check" if grown else ""


def _growth(before: int | None, now: int | None) -> int:
    """Return by how much a counter grew; 0 where it is unknown before or now.

    One that was reset meanwhile grew by all that it shows.
    """
    if before is None or now is None:
        return 0
    return now - before if now >= before else now


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, dict.fromkeys(numbers)))
