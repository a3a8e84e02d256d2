import statistics
from dataclasses import replace

import pyarrow as pa
import pytest
from builders import (
    make_device,
    make_failed,
    make_measure,
    make_measurement,
    make_point,
    make_record,
    make_run,
    make_samples,
)

from raybench.job.point import Precision
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.measurement import Breakdown, PeakParts, RankShare, Repetition, Traffic
from raybench.records.status import Status
from raybench.results.columns import SCHEMA_VERSION, from_row, to_row
from raybench.results.metrics import dense_peak_tflops
from raybench.results.record_rows import point_row, sample_columns
from raybench.results.tables import TABLES, Run, column_units, schema

MS = 1_000_000


def two_ranks(**changes):
    steps = [[10 * MS, 12 * MS, 10 * MS, 32 * MS, 10 * MS, 10 * MS], [11 * MS] * 6]
    ranks = [make_measurement(rank, [ns]) for rank, ns in enumerate(steps)]
    return make_record(make_point(world_size=2), measurements=tuple(ranks), **changes)


def row_of(record, **measure):
    row = vars(point_row("run-a", record, make_measure(**measure)))
    return {name: list(v) if isinstance(v, tuple) else v for name, v in row.items()}


def test_differing_ranks_give_slowest_step():
    row = row_of(two_ranks())
    assert row["step_ms_p50"] == row["step_ms_max"] == 11
    assert row["step_ms_ci_low"] == row["step_ms_ci_high"] == 11


def test_lockstep_ranks_give_median_step():
    steps = [[100 * MS, 102 * MS] * 5, [102 * MS, 100 * MS] * 5]
    measurements = tuple(make_measurement(rank, [ns]) for rank, ns in enumerate(steps))
    row = row_of(make_record(make_point(world_size=2), measurements=measurements))
    assert row["step_ms_p50"] == row["step_ms_max"] == row["step_ms_mean"] == 101
    assert row["skew_ms_p50"] == 2


def test_a_row_tells_how_long_its_attempt_took():
    assert row_of(make_record(duration_s=9.5))["duration_s"] == 9.5


def test_throughput_uses_mean_step_of_slowest_rank():
    row = row_of(two_ranks())
    assert row["step_ms_mean"] == pytest.approx(statistics.mean([10, 12, 10, 32, 10, 10]))
    assert row["throughput"] == pytest.approx(128 / 0.014)


def test_a_mean_far_above_the_median_is_told():
    stalls = make_record(measurements=(make_measurement(0, [[10 * MS] * 16 + [12 * MS]]),))
    [doubt] = row_of(stalls)["doubts"]
    assert (doubt.kind, doubt.value) == (DoubtKind.STALLS, pytest.approx(0.2 / 17))
    for steps in ([10 * MS] * 31 + [12 * MS], [100 * MS] * 99 + [200 * MS]):
        rare = make_record(measurements=(make_measurement(0, [steps]),))
        assert row_of(rare)["doubts"] == []


@pytest.mark.parametrize(
    ("measure", "doubts"),
    [
        ({}, []),
        ({"iterations": None, "seconds": 0.5}, [(DoubtKind.QUICK, 0.048, None)]),
        ({"iterations": None}, [(DoubtKind.SHORT, 0.048, 3.0)]),
        # A fixed count is timed in full, whatever the budget.
        ({"max_seconds": 0.6}, []),
        ({"iterations": 25, "repeats": 2}, [(DoubtKind.FEW_SAMPLES, 6, 50)]),
    ],
)
def test_short_timing_is_a_doubt(measure, doubts):
    row = row_of(make_record(), **measure)
    found = [(one.kind, pytest.approx(one.value, rel=0.01), one.limit) for one in row["doubts"]]
    assert (found, row["quick"]) == (doubts, measure.get("seconds") == 0.5)


def test_changing_level_is_unsteady_or_unknown():
    def doubted(settled, **measure):
        timed = make_samples([8 * MS] * 6)
        repetition = Repetition(warmup=make_samples([MS] * 2), timed=timed, settled=settled)
        row = row_of(make_record(of_ranks={"repetitions": (repetition,)}), **measure)
        return [doubt for doubt in row["doubts"] if doubt.kind is not DoubtKind.SHORT]

    assert doubted(True) == []
    assert doubted(False) == [Doubt(kind=DoubtKind.UNSTEADY, value=2)]
    assert doubted(None, iterations=None) == [Doubt(kind=DoubtKind.TOO_FEW_STEPS, value=6)]
    assert doubted(None) == [], "a fixed count was meant"


def test_one_rank_has_no_skew_or_backend():
    row = row_of(make_record())
    assert (row["skew_ms_p50"], row["slowest_rank"], row["backend"]) == (None, None, None)


CHOICES = ("AllReduce 4096 B: RING LL, 2 channels", "AllGather 64 B: RING LL, 1 channel")
WAYS = ("NET/Socket on eth0 (10.0.0.1)", "P2P/CUMEM")


@pytest.mark.parametrize(
    ("column", "by_rank", "expected"),
    [
        ("setup_s", (0.5, 1.5), 1.5),
        ("peak_mem_allocated_bytes", (2**30, 2**30 + 1), 2**30 + 1),
        ("peak_mem_reserved_bytes", (2**31 + 1, 2**31), 2**31 + 1),
        # Of all devices, or unknown.
        ("energy_j", (100.0, 150.0), 250.0),
        ("energy_j", (100.0, None), None),
        # What any rank tells.
        ("nccl_choices", (CHOICES, ()), list(CHOICES)),
        ("nccl_choices", ((), ()), None),
        ("transports", (WAYS[1:], WAYS), list(WAYS)),
        ("transports", ((), ()), None),
        ("is_of_new_process", (True, True), True),
        ("is_of_new_process", (True, False), False),
        ("is_of_new_process", (None, None), None),
    ],
)
def test_rank_metrics_become_one_value(column, by_rank, expected):
    ranks = [make_measurement(r, [[MS] * 6], **{column: told}) for r, told in enumerate(by_rank)]
    row = row_of(make_record(make_point(world_size=2), measurements=tuple(ranks)))
    assert row["new_processes" if column == "is_of_new_process" else column] == expected


def test_energy_counts_devices_without_a_share():
    share = RankShare(
        items=8,
        fixed_ms=0.0,
        items_per_s=1.0,
        slow_ratio=None,
        exchange_ms=0.0,
        predicted_step_ms=8.0,
        crossover_batch=None,
        gradient_error=None,
    )
    ranks = (
        make_measurement(0, [[MS] * 6], energy_j=700.0, share=share),
        make_measurement(1, [[0] * 6], energy_j=90.0, share=replace(share, items=0)),
    )
    row = row_of(make_record(make_point(world_size=2, shares="fast"), measurements=ranks))
    assert row["energy_j"] == 790.0


def test_first_steps_are_of_slowest_rank():
    row = row_of(make_record(measurements=(cold(0, 90, 20), cold(1, 70, 30))))
    assert (row["first_step_ms"], row["compiled_step_ms"]) == (90.0, None)
    assert (row["alloc_retries"], row["device_allocs"]) == (None, None)
    # That after compiling is told where something was compiled.
    row = row_of(make_record(measurements=(cold(0, 90, 20, compiling=1), cold(1, 70, 30))))
    assert row["compiled_step_ms"] == 20.0
    row = row_of(make_record(measurements=(cold(0, 90, 20, compiling=2),)))
    assert row["compiled_step_ms"] is None


def cold(rank, *warmup_ms, compiling=0):
    """Two builds; the warm-up of the first one took so long."""
    measurement = make_measurement(rank, [[MS] * 6] * 2)
    first, second = measurement.repetitions
    warmup = make_samples([ms * MS for ms in warmup_ms])
    first = replace(first, warmup=warmup, compiling_steps=compiling)
    return replace(measurement, repetitions=(first, second))


def sent(kind, calls, message_bytes, ranks=2):
    of_kind = {"kind": kind, "ranks": ranks, "calls": calls}
    return Traffic(**of_kind, message_bytes=message_bytes, bus_bytes=float(message_bytes))


def apart(*breakdowns):
    measurements = [make_measurement(r, [[MS] * 6], breakdown=b) for r, b in enumerate(breakdowns)]
    return row_of(make_record(make_point(world_size=2), measurements=tuple(measurements)))


def test_traffic_is_of_largest_rank_by_kind():
    first = (sent("all_gather", 4, 100), sent("send", 1, 10, ranks=1))
    row = apart(Breakdown(traffic=first), Breakdown(traffic=(sent("all_gather", 4, 120),)))
    assert row["comm_calls"] == {"all_gather": 4, "send of 1": 1}
    assert row["comm_bytes"] == {"all_gather": 120, "send of 1": 10}
    assert row["comm_busbw_gb_s"] is None


def test_bus_bandwidth_is_of_timed_gradients():
    timed = Breakdown(traffic=(sent("all_reduce", 2, 3_000_000),), comm_ms=(2.0, 2.0))
    assert apart(timed, timed)["comm_busbw_gb_s"] == {"all_reduce": pytest.approx(1.5)}
    others = replace(timed, traffic=(*timed.traffic, sent("all_gather", 1, 10)))
    assert apart(others, others)["comm_busbw_gb_s"] is None


def test_memory_is_of_largest_rank():
    parts = {"parameters_bytes": 4, "gradients_bytes": 2, "optimizer_bytes": 8, "other_bytes": 1}
    most, less = (Breakdown(peak=PeakParts(**parts, activations_bytes=n)) for n in (100, 50))
    row = apart(less, most)
    names = ("parameters", "gradients", "optimizer", "activations", "other")
    assert [row[f"mem_{name}_bytes"] for name in names] == [4, 2, 8, 100, 1]


@pytest.mark.parametrize(
    ("calls", "doubts"),
    [
        ((0, 0), []),
        ((2, 9), [Doubt(kind=DoubtKind.ALLOCATOR_RETRIES, value=2, limit=0.0)]),
        ((0, 3), [Doubt(kind=DoubtKind.DEVICE_ALLOCS, value=3, limit=0.0)]),
    ],
)
def test_busy_allocator_is_a_doubt(calls, doubts):
    counts = {"alloc_retries": calls[0], "device_allocs": calls[1]}
    row = row_of(make_record(measurements=(make_measurement(0, [[MS] * 6], **counts),)))
    assert (row["alloc_retries"], row["device_allocs"]) == calls
    assert row["doubts"] == doubts


def test_cpu_has_null_memory_and_gloo():
    devices = tuple(make_device(rank, kind="cpu", name="CPU") for rank in range(2))
    none = {"peak_mem_allocated_bytes": None, "peak_mem_reserved_bytes": None}
    row = row_of(make_record(make_point(world_size=2), devices=devices, of_ranks=none))
    assert row["peak_mem_allocated_bytes"] is None
    assert (row["backend"], row["device_type"]) == ("gloo", "cpu")


def test_iterations_are_what_was_done_in_all_repeats():
    record = make_record(measurements=(make_measurement(0, [[MS] * 6, [3 * MS] * 6], warmup=3),))
    row = row_of(record, repeats=2)
    assert (row["repeats"], row["iterations"], row["warmup_iterations"]) == (2, 12, 6)
    assert row["step_ms_p50"] == 2.0


def test_a_wide_interval_is_a_doubt():
    def doubted(most_ms):
        steps = (make_measurement(0, [[9 * MS] * 5 + [most_ms * MS] * 5]),)
        record = make_record(measurements=steps, doubts=(of_record,))
        return row_of(record, iterations=10)["doubts"]

    of_record = Doubt(kind=DoubtKind.NOT_ALONE, subject="run b")
    first, second = doubted(11)
    assert first == of_record
    assert (second.kind, second.value > second.limit) == (DoubtKind.WIDE, True)
    assert doubted(9) == [of_record]


def test_data_wait_is_longest_over_ranks():
    warmup, ranks = make_samples([MS], data=[7 * MS]), []
    for rank, wait in enumerate([2, 4]):
        timed = make_samples([MS] * 5, data=[wait * MS] * 5)
        repetition = Repetition(warmup=warmup, timed=timed)
        ranks.append(make_measurement(rank, [], repetitions=(repetition,)))
    record = make_record(make_point(world_size=2), measurements=tuple(ranks))
    assert row_of(record)["data_ms"] == 4.0
    assert row_of(two_ranks())["data_ms"] is None


def test_repeat_without_data_wait_counts_zero():
    def repetition(count, **parts):
        return Repetition(warmup=make_samples([]), timed=make_samples([MS] * count, **parts))

    first, idle = repetition(3, data=[MS] * 3), repetition(4)
    busy = repetition(4, data=[2 * MS] * 4)
    repeats = enumerate([(first, idle), (first, busy)])
    ranks = tuple(make_measurement(r, [], repetitions=both) for r, both in repeats)
    assert row_of(make_record(measurements=ranks[:1]))["data_ms"] == 0.0
    both = make_record(make_point(world_size=2), measurements=ranks)
    assert row_of(both)["data_ms"] == 2.0


def test_failed_point_has_reason_and_no_numbers():
    devices = (make_device(0), make_device(3, host="beta"))
    failed = make_failed(
        make_point(world_size=2), devices=devices, error_rank=1, error_detail="Traceback\n  line"
    )
    row = row_of(failed)
    assert (row["status"], row["error_type"]) == ("oom", "OutOfMemoryError")
    assert row["step_ms_p50"] is None
    named = ("error_rank", "error_host", "error_device", "error_detail")
    assert [row[name] for name in named] == [1, "beta", "cuda:3", "Traceback\n  line"]
    unplaced = row_of(make_failed(status=Status.LOST, devices=(), error_rank=0))
    assert [unplaced[name] for name in named] == [0, None, None, None]
    of_devices = ("device_name", "node_count", "backend")
    assert [unplaced[name] for name in of_devices] == [None] * 3
    assert [row_of(make_record())[name] for name in named] == [None] * 4


def test_parameters_are_text_that_yaml_readers_know():
    record = make_record(make_point(params={"compile": True, "lr": 1e-3, "hidden": 8}))
    assert row_of(record)["params"] == {"compile": "true", "lr": "0.001", "hidden": "8"}


def test_samples_keep_every_iteration():
    timed = make_samples([5, 6], data=[1, 2], tokenize=[3, 4])
    repetition = Repetition(warmup=make_samples([9]), timed=timed)
    record = make_record(of_ranks={"repetitions": (repetition,)})
    columns = sample_columns("run-a", record)
    content = zip(*columns.values(), strict=True)
    warm, first, second = (dict(zip(columns, row, strict=True)) for row in content)
    assert (warm["is_warmup"], warm["step_ns"], warm["data_ns"]) == (True, 9, None)
    assert (first["is_warmup"], first["iteration"], first["repeat"]) == (False, 0, 0)
    assert (second["iteration"], second["start_ns"], second["step_ns"]) == (1, 5, 6)
    assert (second["data_ns"], second["other_parts_ns"]) == (2, {"tokenize": 4})


def test_run_survives_its_row():
    run = make_run()
    assert from_row(Run, to_row(run)) == replace(run, baseline={"world_size": "1"})


SUFFIXES = {
    "_ms": "ms",
    "_s": "s",
    "_ns": "ns",
    "_bytes": "bytes",
    "_gb_s": "GB/s",
    "_mhz": "MHz",
    "_us": "us",
    "_items_per_s": "items/s",
    "gb_per_s": "GB/s",
}


@pytest.mark.parametrize("table", TABLES)
def test_schema_has_table_version_and_descriptions(table):
    metadata = schema(table).metadata
    assert metadata[b"table"].decode() == table
    assert metadata[b"schema_version"].decode() == str(SCHEMA_VERSION)
    for column, field in zip(TABLES[table], schema(table), strict=True):
        assert not pa.types.is_null(field.type)
        assert 0 < len(field.metadata[b"description"]) <= 60
        assert (
            field.metadata.get(b"unit", b"").decode()
            == column.unit
            == column_units(table)[field.name]
        )


@pytest.mark.parametrize("table", TABLES)
def test_unit_in_name_matches_column(table):
    for name, unit in column_units(table).items():
        told = [meant for suffix, meant in SUFFIXES.items() if name.endswith(suffix)]
        assert not told or unit in told, name


@pytest.mark.parametrize(
    ("name", "fp32", "tf32", "bf16"),
    [
        ("NVIDIA H200", 67.0, 494.5, 989.5),
        ("NVIDIA H100 80GB HBM3", 66.9, 494.7, 989.4),
        ("A100-SXM4-40GB", 19.5, 156.0, 312.0),  # as drivers before 460 call it
        ("NVIDIA B200", None, 1125.0, 2250.0),
        ("AMD Instinct MI355X", 157.3, None, 2516.6),
        ("Tesla V100-SXM2-16GB", 15.7, None, None),
        # A name that is only similar may be another card, or a slice of one.
        ("NVIDIA H100", None, None, None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None, None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None, None),
        ("Intel(R) Xeon(R)", None, None, None),
    ],
)
def test_peaks_depend_on_form_factor(name, fp32, tf32, bf16):
    asked = [dense_peak_tflops(name, p) for p in (Precision.FP32, Precision.TF32, Precision.BF16)]
    assert asked == [fp32, tf32, bf16]
    assert dense_peak_tflops("NVIDIA H100 PCIe", Precision.FLOAT8) == 1513.0
