"""Each column of a point's row, from hand-made measurements of its ranks."""

from dataclasses import replace
from typing import Any

import pytest
from builders import make_device, make_measurement, make_point, make_record, make_samples

from raybench.job.point import Precision
from raybench.records.doubts import NotMeasured
from raybench.records.measurement import Breakdown, Repetition
from raybench.results import metrics
from raybench.results.record_rows import point_metrics
from raybench.stats.outliers import MARK_ERRORS

MS = 1_000_000


def breakdown(local_ms=40.0, **changes):
    """A rank of its own speed: 40 ms without communication, of which the device needs 39."""
    settings: dict[str, Any] = {
        "local_ms": ((local_ms,) * 3, (local_ms,) * 3),
        "device_ms": 39.0,
        "optimizer_ms": 4.0,
        "hooked_ms": (42.0,) * 3,
        "comm_ms": (6.0, 6.2, 6.1),
        "tail_ms": (1.5, 1.5, 1.5),
        "methods": {"comm_exposed_ms": "timed less local"},
        **changes,
    }
    return Breakdown(**settings)


def of(*ranks, **changes):
    point = make_point(world_size=len(ranks), precision=changes.pop("precision", Precision.BF16))
    found = point_metrics(make_record(point, measurements=ranks, **changes))
    return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}


def rank(number=0, step_ms=42.0, **changes):
    return make_measurement(number, [[round(step_ms * MS)] * 6], **changes)


def test_slow_rank_is_named_with_excess():
    slow = breakdown(45.0, device_ms=44.0, comm_ms=(0.5, 1.0, 9.0), hooked_ms=(47.0,) * 3)
    fast = breakdown(tail_ms=(6.5, 6.6, 6.4), comm_ms=(6.0,) * 3, hooked_ms=(47.0,) * 3)
    found = of(*(rank(n, 47.0, breakdown=slow if n == 2 else fast) for n in range(4)))
    assert found["slowest_rank"] == 2
    assert found["straggler_ms"] == pytest.approx(5.0)
    assert found["straggler_device_ms"] == pytest.approx(5.0)
    assert found["straggler_error_ms"] == 0.0
    assert found["local_step_ms_by_rank"] == [40.0, 40.0, 45.0, 40.0]
    assert found["device_ms_by_rank"] == [39.0, 39.0, 44.0, 39.0]
    assert found["wait_ms"] == pytest.approx(5.0)
    # The others' wait is no communication: the rank that comes last does not wait.
    assert found["comm_ms"] == 1.0
    # The step takes 2 ms more than the slowest rank's own, and the collectives 1 ms.
    assert (found["comm_exposed_ms"], found["unexplained_ms"]) == (1.0, pytest.approx(1.0))
    assert found["parts_step_ms"] == pytest.approx(47.0)
    assert (found["compute_ms"], found["optimizer_ms"]) == (pytest.approx(40.0), 4.0)
    assert found["methods"] == {"comm_exposed_ms": "timed less local"}


def test_parts_of_slowest_rank_add_up():
    late = breakdown(45.0, device_ms=39.0)
    found = of(rank(0, 47.0, breakdown=breakdown()), rank(1, 47.0, breakdown=late))
    names = ("compute_ms", "optimizer_ms", "host_gap_ms", "comm_exposed_ms", "unexplained_ms")
    assert sum(found[name] or 0.0 for name in names) == pytest.approx(47.0)
    assert found["host_gap_ms"] == pytest.approx(6.0)
    assert found["straggler_device_ms"] == 0.0


def test_wait_is_none_for_another_step():
    """bf16, batch 512 on two H200s: a wait of 2.50 ms in a step that had no room for it."""
    waiting = breakdown(4.2, device_ms=4.1, hooked_ms=(7.4,) * 3, tail_ms=(3.0,) * 3)
    last = breakdown(4.25, device_ms=4.1, hooked_ms=(7.3,) * 3, tail_ms=(0.5,) * 3)
    found = of(rank(0, 5.925, breakdown=waiting), rank(1, 5.925, breakdown=last))
    assert (found["wait_ms"], found["slowest_rank"]) == (None, None)
    assert found["not_measured"] == {"wait_ms": NotMeasured.OTHER_STEP}
    assert of(rank(0, breakdown=breakdown()))["not_measured"] is None


def test_wait_fits_beside_own_step():
    waiting, last = breakdown(tail_ms=(4.5,) * 3), breakdown(tail_ms=(1.5,) * 3)
    ranks = (rank(0, breakdown=waiting), rank(1, breakdown=last))
    assert of(*ranks)["wait_ms"] == pytest.approx(42.0 - 40.0 - 1.5)
    no_room = breakdown(41.5, tail_ms=(4.5,) * 3)
    assert of(rank(0, breakdown=no_room), ranks[1])["wait_ms"] == 0.0


def test_a_single_rank_has_no_communication():
    found = of(rank(breakdown=breakdown(comm_ms=(), tail_ms=(), hooked_ms=())))
    assert [found[f"{name}_ms"] for name in ("comm", "comm_exposed", "wait")] == [None] * 3
    assert (found["slowest_rank"], found["straggler_ms"]) == (None, None)
    assert found["local_step_ms_by_rank"] == [40.0]


def test_parts_need_breakdown_of_every_rank():
    for ranks in ([rank(0), rank(1)], [rank(0, breakdown=breakdown()), rank(1)]):
        found = of(*ranks)
        names = ("local_step", "compute", "comm", "comm_exposed", "wait", "optimizer", "host_gap")
        assert [found[f"{name}_ms"] for name in names] == [None] * len(names)
        assert (found["host_bound"], found["methods"]) == (None, None)
        assert found["local_step_ms_by_rank"] is found["device_ms_by_rank"] is None


def test_slow_rank_without_breakdown_by_timed_steps():
    assert of(rank(0, 42), rank(2, 43))["slowest_rank"] == 2, "rank 1 has no share of the step"
    assert of(rank(0, 42), rank(1, 42.5))["slowest_rank"] is None


def test_late_host_must_exceed_wandering():
    """On hosts that are 10 % slower for a second and faster again, a rank is late by chance."""
    wandering = [[round(ms * MS) for ms in (40.0, 46.0, 41.0, 45.0) for _ in range(10)]]
    ranks = [make_measurement(number, wandering, breakdown=breakdown()) for number in (0, 1)]
    late = of(ranks[0], replace(ranks[1], breakdown=breakdown(43.0, device_ms=39.0)))
    assert late["straggler_ms"] == pytest.approx(3.0)
    assert late["straggler_error_ms"] > 3.0 / MARK_ERRORS
    assert late["slowest_rank"] is None
    slow = of(ranks[0], replace(ranks[1], rank=2, breakdown=breakdown(43.0, device_ms=42.0)))
    assert (slow["straggler_error_ms"], slow["slowest_rank"]) == (0.0, 2)


def test_compute_on_cpu_excludes_optimizer_and_data():
    timed = make_samples([42 * MS] * 6, data=[3 * MS] * 6)
    measured = replace(
        rank(breakdown=breakdown(device_ms=None)),
        repetitions=(Repetition(warmup=make_samples([]), timed=timed),),
    )
    found = of(measured)
    assert found["compute_ms"] == pytest.approx(40 - 4 - 3)
    assert (found["host_gap_ms"], found["host_bound"]) == (None, None)


@pytest.mark.parametrize(
    ("device_ms", "bound"), [(39.9, False), (38.0, False), (30.0, True), (41.0, False)]
)
def test_host_bound_above_five_percent_idle(device_ms, bound):
    found = of(rank(breakdown=breakdown(device_ms=device_ms)))
    assert found["host_bound"] is bound
    assert found["host_gap_ms"] == pytest.approx(max(0.0, 40 - device_ms))


def test_host_bound_follows_slowest_rank():
    late, fast = breakdown(42.0, device_ms=30.0), breakdown()
    assert of(rank(0, breakdown=fast), rank(1, breakdown=late))["host_bound"] is True
    early = breakdown(38.0, device_ms=30.0)
    assert of(rank(0, breakdown=fast), rank(1, breakdown=early))["host_bound"] is False


def test_bandwidths_are_those_of_nccl_tests():
    settings = {"items_per_step": None, "message_bytes": 2**30, "busbw_factor": 1.5}
    found = of(*(rank(n, 4.5, **settings) for n in range(4)))
    assert found["algbw_gb_s"] == pytest.approx(2**30 / 4.5e-3 / 1e9)
    assert found["busbw_gb_s"] == pytest.approx(1.5 * 2**30 / 4.5e-3 / 1e9)
    assert (found["throughput"], found["memory_gb_s"]) == (None, None)
    # Where the first rank waits for another, as in `host_copy` with local_rank 1.
    waiting = of(rank(0, 4.5, memory_bytes=0), rank(1, 4.5, memory_bytes=2**30))
    assert waiting["memory_gb_s"] == pytest.approx(2**30 / 4.5e-3 / 1e9)


def test_mfu_and_gemm_share_have_different_references(monkeypatch):
    monkeypatch.setattr(metrics, "dense_peak_tflops", lambda name, precision: 1000.0)
    step = {"flops_per_step": 4e12, "model_flops_per_step": 5e12}
    found = of(rank(0, 10.0, gemm_tflops=800.0, **step), rank(1, 10.0, gemm_tflops=750.0, **step))
    rates = {"achieved_tflops_per_device": 400.0, "gemm_tflops_per_device": 750.0}
    shares = {"mfu_pct": 40.0, "mfu_6n_pct": 50.0, "gemm_share_pct": 400 / 7.5}
    expected = {"flops_per_step": 4e12, **rates, **shares}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_unknown_device_has_no_mfu(monkeypatch):
    peaks = {"Known": 1000.0, "Slower": 500.0}
    monkeypatch.setattr(metrics, "dense_peak_tflops", lambda name, precision: peaks.get(name))
    ranks = [rank(n, 10.0, flops_per_step=4e12) for n in (0, 1)]

    def mfu(*names, kind="cuda"):
        devices = tuple(make_device(n, name=name, kind=kind) for n, name in enumerate(names))
        return of(*ranks, devices=devices)["mfu_pct"]

    assert mfu("Known", "Known") == pytest.approx(40.0)
    assert mfu("Known", "Slower") == pytest.approx(80.0)
    assert mfu("Known", "Another") is None
    assert mfu("Known", "Known", kind="cpu") is None


def test_unknown_operations_make_no_rate():
    found = of(rank(gemm_tflops=800.0))
    names = ("flops_per_step", "achieved_tflops_per_device", "mfu_pct", "mfu_6n_pct")
    assert [found[name] for name in (*names, "gemm_share_pct")] == [None] * 5


def test_clock_is_of_slowest_device():
    fast, slow = rank(0, sm_clocks_mhz=(1980, 1980, 1965)), rank(1, sm_clocks_mhz=(1755, 1770))
    assert of(fast, slow)["sm_clock_mhz_p50"] == 1762.5
    assert of(fast, rank(1))["sm_clock_mhz_p50"] is None


def test_burst_covers_first_30_ms():
    def product(warmup_ms):
        measured = make_measurement(0, [[2 * MS] * 30], flops_per_step=2e12)
        warm = make_samples([ms * MS for ms in warmup_ms])
        repetition = replace(measured.repetitions[0], warmup=warm)
        point = make_point(batch_size=None, global_batch_size=None, scaling=None)
        ranks = (replace(measured, repetitions=(repetition,)),)
        return point_metrics(make_record(point, measurements=ranks))

    # The first step is cold, and what comes after 30 ms is slowed by the power limit.
    found = product([500, *[1] * 30, *[4] * 100])
    assert found["burst_tflops_per_device"] == pytest.approx(2000.0)
    assert found["achieved_tflops_per_device"] == pytest.approx(1000.0)
    assert product([500, 20, 20, 20, 40])["burst_tflops_per_device"] == pytest.approx(100.0)
    assert product([500, 1, 1])["burst_tflops_per_device"] is None
    assert of(rank(flops_per_step=2e12))["burst_tflops_per_device"] is None


def marked(marks, reasons=()):
    measured = rank(throttle_reasons=reasons)
    [repetition] = measured.repetitions
    timed = replace(repetition.timed, throttled=marks)
    return replace(measured, repetitions=(replace(repetition, timed=timed),))


def test_one_throttled_sample_marks_the_point():
    slow = marked((False,) * 5 + (True,), ("sw_power_cap", "sw_thermal"))
    found = of(marked((False,) * 6), replace(slow, rank=1))
    assert (found["throttled"], found["throttle_reasons"]) == (True, ["sw_power_cap", "sw_thermal"])
    found = of(marked((False,) * 6))
    assert (found["throttled"], found["throttle_reasons"]) == (False, [])
    without_counters = of(rank())
    assert without_counters["throttled"] is without_counters["throttle_reasons"] is None


def test_stable_needs_all_repeats():
    def settled(*answers):
        measured = make_measurement(0, [[MS] * 60] * len(answers))
        parts = zip(measured.repetitions, answers, strict=True)
        repetitions = tuple(
            replace(part, settled=answer, inner_iterations=20) for part, answer in parts
        )
        found = of(replace(measured, repetitions=repetitions))
        assert found["inner_iterations"] == 20
        return found["stable"]

    assert settled(True, True) is True
    assert settled(True, False) is False
    assert settled(None, False) is False
    assert settled(True, None) is None, "too few steps tell nothing"


def test_ranks_without_items_do_not_count():
    assert of(rank(0, 10.0), rank(1, 10.0, items_per_step=None))["throughput"] == 6400
    assert of(rank(0, 10.0, items_per_step=None))["throughput"] is None
