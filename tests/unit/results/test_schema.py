from __future__ import annotations

import pyarrow as pa
import pytest

from raybench.results.tables import SCHEMA_VERSION, TABLES, schema, units

POINTS = """\
run_id point_id attempt status error_type error_message workload params backend
device_type device_name world_size node_count precision batch_size global_batch_size
grad_accumulation setup_s warmup_iterations iterations step_ms_mean step_ms_p50 step_ms_p90
step_ms_p95 step_ms_p99 step_ms_min step_ms_max step_ms_std step_ms_ci_low step_ms_ci_high
throughput skew_ms_p50 slowest_rank host_bound stable throttled peak_mem_allocated_bytes
peak_mem_reserved_bytes compute_ms comm_ms comm_exposed_ms wait_ms data_ms optimizer_ms
host_gap_ms flops_per_step achieved_tflops_per_device mfu_pct algbw_gb_s busbw_gb_s energy_j
warnings scaling cuda_graph repeats inner_iterations step_ms_repeat_std autocorrelation
local_step_ms methods gemm_tflops_per_device gemm_share_pct memory_gb_s throttle_reasons
error_rank error_host error_device error_detail neighbours workload_sha256 raybench_sha256
crowded sm_clock_mhz_p50 energy_j_error burst_tflops_per_device local_step_ms_by_rank
device_ms_by_rank straggler_ms straggler_error_ms straggler_device_ms late_in_turn_ms
hooked_step_ms local_step_drift_ms
round is_control control_of
first_step_ms compiled_step_ms alloc_retries device_allocs transports nccl_choices
"""
SUFFIXES = {
    "_ms": "ms",
    "_s": "s",
    "_ns": "ns",
    "_bytes": "bytes",
    "_gb_s": "GB/s",
    "_mhz": "MHz",
    "_us": "us",
    "gb_per_s": "GB/s",
}


def test_points_has_every_column_of_the_design():
    assert set(POINTS.split()) <= set(schema("points").names)


@pytest.mark.parametrize("table", TABLES)
def test_every_field_carries_a_short_description_and_its_unit(table):
    for column, field in zip(TABLES[table], schema(table), strict=True):
        assert 0 < len(field.metadata[b"description"]) <= 60
        assert field.metadata.get(b"unit", b"").decode() == column.unit == units(table)[field.name]


@pytest.mark.parametrize("table", TABLES)
def test_a_unit_in_a_name_is_the_unit_of_the_column(table):
    for name, unit in units(table).items():
        told = [meant for suffix, meant in SUFFIXES.items() if name.endswith(suffix)]
        assert not told or unit in told, name


@pytest.mark.parametrize("table", TABLES)
def test_the_schema_tells_its_table_and_version_and_has_no_inferred_type(table):
    metadata = schema(table).metadata
    assert metadata[b"table"].decode() == table
    assert metadata[b"schema_version"].decode() == str(SCHEMA_VERSION)
    assert not any(pa.types.is_null(field.type) for field in schema(table))
