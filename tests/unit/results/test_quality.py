"""What makes a point's number doubtful, told from its row alone."""

import os
from dataclasses import replace

import pytest
from builders import make_device, make_measure, make_measurement, make_point, make_record, make_row

from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.environment import usable_cores
from raybench.records.measurement import Breakdown
from raybench.report import formatting
from raybench.results.columns import to_row
from raybench.results.metrics import crowding, half_interval, is_imprecise
from raybench.results.point_row import is_slowed_by_one_rank, why_no_breakdown
from raybench.results.record_rows import point_row
from raybench.stats.outliers import MARK_SHARE


def row(step_ms, device_type="cuda", **columns):
    return make_row(step_ms_p50=step_ms, device_type=device_type, **columns)


def test_interval_is_wide_beyond_ten_percent():
    assert half_interval(row(10.0, step_ms_ci_low=9.0, step_ms_ci_high=12.0)) == pytest.approx(0.15)
    assert is_imprecise(row(10.0, step_ms_ci_low=8.9, step_ms_ci_high=11.0))
    assert not is_imprecise(row(10.0, step_ms_ci_low=9.1, step_ms_ci_high=11.0))
    # What is not known is no reason to doubt.
    assert half_interval(row(10.0)) is None
    assert not any(is_imprecise(row(step_ms)) for step_ms in (10.0, None))


@pytest.mark.parametrize(
    ("parts", "contradicts"),
    [
        ({"compute_ms": 7.0, "optimizer_ms": 2.0, "comm_exposed_ms": 2.1}, True),
        ({"compute_ms": 7.0, "optimizer_ms": 2.0, "comm_exposed_ms": 1.9}, False),
        ({"compute_ms": 9.0, "host_gap_ms": 2.1}, True),
        ({"local_step_ms": 11.1}, True),
        ({"local_step_ms": 10.9}, False),
        # A slow rank's work is in the compute, and what the others wait for it is beside it.
        ({"compute_ms": 9.0, "comm_exposed_ms": 1.0, "wait_ms": 5.0}, False),
        ({"wait_ms": 11.1}, True),
        ({}, False),
        # Data counts beside compute on a CPU alone.
        ({"compute_ms": 8.0, "data_ms": 4.0}, False),
        ({"compute_ms": 8.0, "data_ms": 4.0, "device_type": "cpu"}, True),
        ({"compute_ms": 30.0, "step_ms_p50": None}, False),
    ],
)
def test_no_breakdown_ten_percent_above_step(parts, contradicts):
    known = {"step_ms_p50": 10.0, "device_type": "cuda"}
    assert (why_no_breakdown(make_row(**known | parts)) is not None) is contradicts


def slow_row(step_ms, *local_ms, **changes):
    """The row of a point whose ranks have these local steps, at the pace of the device."""
    step_ns = [[round(step_ms * 1e6)] * 6]
    alike = {"hooked_ms": (step_ms,) * 3, "tail_ms": (0.1,) * 3}
    ranks = []
    for rank, ms in enumerate(local_ms):
        parts = Breakdown(
            local_ms=((ms,) * 3, (ms,) * 3),
            device_ms=changes.get("device_ms", {}).get(rank, ms),
            comm_ms=(changes.get("comm_ms", 0.0),) * 3,
            **alike,
        )
        ranks.append(make_measurement(rank, step_ns, breakdown=parts))
    point = make_point(world_size=len(local_ms))
    return point_row("r", make_record(point, measurements=tuple(ranks)), make_measure())


def slowed(row):
    """The doubts but that the host is slow, which the builder leaves open."""
    return [doubt for doubt in row.doubts if doubt.kind is not DoubtKind.HOST_BOUND]


def test_slow_rank_doubt_is_a_share():
    [doubt] = slowed(slow_row(11.51, 6.05, 11.03))
    assert (doubt.kind, doubt.subject) == (DoubtKind.SLOW_RANK, "rank 1")
    assert (doubt.value, doubt.limit) == (pytest.approx(4.98 / 11.51), MARK_SHARE)
    row = slow_row(8.55, 6.05, 8.55, 6.05, comm_ms=1.0, device_ms={1: 6.05})
    [host] = slowed(row)
    assert host.value == pytest.approx(2.5 / 8.55)
    assert (row.straggler_ms, row.straggler_device_ms) == (pytest.approx(2.5), 0.0)
    [both] = slowed(slow_row(8.55, 8.55, 6.05, device_ms={0: 7.3}))
    assert both.subject == "rank 0"
    assert slowed(slow_row(6.49, 6.03, 6.05)) == []


def test_late_ranks_and_negative_communication_are_doubts():
    measured = [make_measurement(rank, [[10_000_000] * 6]) for rank in (0, 1)]
    steps = [((8.0, 9.0) * 3, (8.0, 9.0) * 3), ((9.0, 8.0) * 3, (9.0, 8.0) * 3)]
    parts = [Breakdown(local_ms=local) for local in steps]
    ranks = tuple(replace(m, breakdown=part) for m, part in zip(measured, parts, strict=True))
    told = point_row("r", make_record(make_point(world_size=2), measurements=ranks), make_measure())
    assert Doubt(kind=DoubtKind.LATE_IN_TURN, value=pytest.approx(0.05), limit=0.02) in told.doubts
    [doubt] = slowed(slow_row(10.0, 10.5, 10.5))
    assert (doubt.kind, doubt.value) == (DoubtKind.PARTS_EXCEED, pytest.approx(0.05))
    assert slowed(slow_row(10.0, 10.1, 10.1)) == []


def test_rounds_without_common_rank_name_none():
    late = {"straggler_ms": 2.0, "straggler_error_ms": 0.1}
    assert is_slowed_by_one_rank(row(10.0, **late, slowest_rank=0))
    assert not is_slowed_by_one_rank(row(10.0, **late, slowest_rank=None))


def cpu_workers(count, **facts):
    known = {"kind": "cpu", "name": "CPU", "cpu_count": 2, "host": "alpha", "address": "10.0.0.1"}
    return [make_device(rank, **known | facts) for rank in range(count)]


def test_crowding_counts_cores_of_host():
    def crowded(devices):
        point = make_point(world_size=len(devices))
        row = point_row("r", make_record(point, devices=tuple(devices)), make_measure())
        return row.crowded, list(crowding(devices))

    assert crowded(cpu_workers(2)) == (False, [])
    shared = (True, [Doubt(kind=DoubtKind.CROWDED, value=4, limit=2, subject="alpha")])
    assert crowded(cpu_workers(4)) == shared
    assert crowded([*cpu_workers(2), *cpu_workers(2, node_id="node-b")]) == shared
    elsewhere = cpu_workers(2, node_id="node-b", host="beta", address="10.0.0.2")
    assert crowded([*cpu_workers(2), *elsewhere]) == (False, [])
    assert crowded([make_device(rank, cpu_count=1) for rank in range(4)]) == (None, [])


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_usable_cores_heed_affinity_and_quota(tmp_path, files, cores):
    for name, content in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert usable_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_the_machine_counts_processors_and_not_workers():
    def told(devices):
        return formatting.machine([to_row(device) for device in devices])

    assert told(cpu_workers(2)) == "2 workers on 1 x CPU (2 cores)"
    assert told(cpu_workers(1, cpu_count=1)) == "1 worker on 1 x CPU (1 core)"
    beta = cpu_workers(2, node_id="b", host="beta")
    assert told([*cpu_workers(2), *beta]) == "4 workers on 2 x CPU (2 cores each)"
    assert told([make_device(0), make_device(1)]) == "2 x NVIDIA H200 on 1 node"
