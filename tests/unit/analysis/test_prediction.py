"""Steps on more devices than were measured, from the rows of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import make_row

from raybench.analysis.prediction import Network, omissions, predict, reduce_times
from raybench.errors import ResultsError
from raybench.records import Status
from raybench.stats.communication import Link, ReduceTimes

PARAMS = {"hidden": "4096", "layers": "8", "bucket_cap_mb": "64", "grad_accumulation": "1"}
# 2 ms of communication on two devices, twice that on eight.
IN_NODE = Network(devices_per_node=8)
TIMES = ReduceTimes(by_world={2: [(1.0, 0.01), (2.0**26, 0.2)], 8: [(1.0, 0.01), (2.0**26, 0.4)]})


def row(world_size, step_ms, **changes):
    several = {"comm_ms": 2.0, "comm_exposed_ms": step_ms - 8.0} if world_size > 1 else {}
    known = {
        **{"point_id": f"p{world_size}", "workload": "mlp", "params": PARAMS, "scaling": "weak"},
        **{"precision": "bf16", "world_size": world_size, "node_count": 1, "batch_size": 64},
        **{"global_batch_size": 64 * world_size, "throughput": 1e3 / step_ms},
        **{"device_type": "cuda", "device_name": "H200", "step_ms_p50": step_ms},
        **{"step_ms_ci_low": 0.99 * step_ms, "step_ms_ci_high": 1.01 * step_ms},
        **{"local_step_ms": 8.0, "compute_ms": 6.0, "optimizer_ms": 2.0, "host_gap_ms": 0.0},
    }
    return make_row(**known | several | changes)


def test_communication_that_fits_beside_the_backward_pass_keeps_its_exposed_share():
    (one,) = predict([row(1, 8.0), row(2, 9.0)], [8], Network(devices_per_node=8, times=TIMES))
    # From 2 to 4 ms of communication, half of which is exposed, beside 4 ms of backward pass.
    assert one.step_ms == pytest.approx(10.0)
    assert one.comm_exposed_ms == pytest.approx(2.0)
    assert (one.efficiency, one.speed_up) == pytest.approx((0.8, 6.4))


def test_the_interval_reaches_from_all_hidden_to_half_of_what_is_expected():
    (one,) = predict([row(1, 8.0), row(2, 9.0)], [8], Network(devices_per_node=8, times=TIMES))
    assert one.step_ms_low < 9.0
    assert one.step_ms_high > 11.0
    assert one.step_ms_low > 8.5
    assert one.step_ms_high < 11.5


def test_a_point_that_is_known_badly_is_no_ground_where_others_are_there():
    wide = row(4, 30.0, step_ms_ci_low=5.0)
    good = row(1, 8.0), row(2, 9.0)
    assert predict([*good, wide], [8], Network(devices_per_node=8, times=TIMES)) == predict(
        [*good], [8], Network(devices_per_node=8, times=TIMES)
    )


def of_rounds(*rows, factors):
    """The rows in as many rounds, each of which is slower by a factor."""
    return [
        replace(one, round=number, attempt=number, step_ms_p50=one.step_ms_p50 * factor)
        for number, factor in enumerate(factors, start=1)
        for one in rows
    ]


def half(points, world_size=4):
    (one,) = predict(points, [world_size], IN_NODE)
    assert 0 < one.step_ms_low < one.step_ms < one.step_ms_high
    return one.half_interval


def test_rounds_that_scatter_widen_the_interval_and_rounds_that_agree_do_not():
    rows = row(1, 8.0), row(2, 9.0, step_ms_ci_low=8.99, step_ms_ci_high=9.01)
    one = half(rows)
    assert half(of_rounds(*rows, factors=(1.0, 1.001, 0.999))) == pytest.approx(one, rel=0.01)
    assert half(of_rounds(*rows, factors=(1.0, 1.06, 0.94))) > one + 0.03
    # Three rounds and Student's t of two degrees: by no more than a few of the samples' errors.
    assert half(of_rounds(*rows, factors=(1.0, 1.06, 0.94))) < one + 0.20


def test_the_interval_grows_with_the_distance_though_communication_does_not():
    rows = [row(1, 8.0), row(2, 8.0, comm_ms=0.001, comm_exposed_ms=0.0)]
    halves = [half(rows, world) for world in (3, 4, 8)]
    assert halves == sorted(halves)
    assert halves[1] == pytest.approx(0.05, abs=0.01)
    assert halves[2] > 1.3 * halves[1]


def test_no_efficiency_is_above_100_percent_unless_the_run_measured_that():
    (one,) = predict([row(1, 8.0), row(2, 8.0)], [8], IN_NODE)
    assert one.step_ms_low < one.base_ms
    assert (one.efficiency, one.efficiency_high) == (1.0, 1.0)
    (one,) = predict([row(1, 8.0), row(2, 7.6)], [8], IN_NODE)
    assert one.efficiency_high == one.measured_efficiency == pytest.approx(8.0 / 7.6)


BETWEEN = ReduceTimes(by_world={8: [(1.0, 0.05), (2.0**26, 2.0)]})


@pytest.mark.parametrize("network", [IN_NODE, Network(devices_per_node=8, times=TIMES)])
def test_more_nodes_than_were_measured_are_refused_without_their_network(network):
    why = r"up to 2 devices on 1 node of 8; 9, 64 devices need 2 to 8 nodes.*--network GB/s@µs"
    with pytest.raises(ResultsError, match=why):
        predict([row(1, 8.0), row(2, 9.0)], [8, 9, 64], network)


def test_as_many_nodes_as_were_measured_need_no_network():
    rows = [row(1, 8.0), row(4, 9.0, node_count=2)]
    assert len(predict(rows, [16], IN_NODE)) == 1
    with pytest.raises(ResultsError, match="on 2 nodes of 8; 17 devices need 3 nodes"):
        predict(rows, [17], IN_NODE)


def test_all_reduces_over_several_nodes_are_used_beyond_a_node_and_not_inside():
    rows = [row(1, 8.0), row(2, 9.0)]
    network = Network(devices_per_node=4, between=BETWEEN)
    assert predict(rows, [4], network) == predict(rows, [4], IN_NODE)
    (eight,) = predict(rows, [8], network)
    # 8 layers of 67 MB in 2 ms each, of which 4 ms are hidden.
    assert eight.step_ms == pytest.approx(9.0 + 0.5 * 2.0 + 16.0 - 4.0, rel=0.01)
    both = Network(devices_per_node=4, between=BETWEEN, times=TIMES)
    (eight,) = predict(rows, [8], both)
    # Ten times as long as those of two devices, and so is the step's communication.
    assert eight.step_ms == pytest.approx(9.0 + 0.5 * 2.0 + 20.0 - 4.0, rel=0.01)


def test_without_measured_all_reduces_exposed_communication_grows_as_the_bytes_on_the_wire():
    (one,) = predict([row(1, 8.0), row(2, 9.0)], [4], IN_NODE)
    assert one.step_ms == pytest.approx(8.0 + 1.5)


def test_a_slow_link_between_nodes_is_exposed_but_for_what_the_computation_hides():
    network = Network(link=Link(bus_gb_s=10.0, latency_us=0.0), devices_per_node=2)
    (one,) = predict([row(1, 8.0), row(2, 9.0)], [4], network)
    travels_ms = 1.5 * 4 * 8 * (4096 * 4096 + 4096) / 10e9 * 1e3
    assert one.step_ms == pytest.approx(9.0 + 0.5 * 2.0 + travels_ms - 4.0)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([row(1, 8.0)], "two world sizes, has 1;"),
        ([row(1, 8.0), row(2, 9.0, status=Status.OOM)], "two world sizes, has 1;"),
        ([row(n, 8.0, workload="gemm", params={}) for n in (1, 2)], "no step of Distributed"),
        ([row(n, 8.0, scaling="strong", global_batch_size=64) for n in (1, 2)], "scales strongly"),
        ([row(n, 8.0, crowded=True) for n in (1, 2)], "shared cores"),
        ([row(1, 8.0), row(2, 9.0, step_ms_ci_high=12.0)], "but has 2 ±17.2%; measure for"),
    ],
)
def test_what_cannot_be_predicted_is_refused_with_the_reason(rows, why):
    with pytest.raises(ResultsError, match=why):
        predict(rows, [8], IN_NODE)


def test_a_class_of_ones_own_is_predicted_where_its_communication_was_timed():
    own = {"workload": "my:Net", "params": {}, "methods": {"local_step_ms": "with noop_hook"}}
    (one,) = predict([row(1, 8.0, **own), row(2, 9.0, **own)], [4], IN_NODE)
    assert one.step_ms == pytest.approx(9.5)
    network = Network(link=Link(bus_gb_s=10.0, latency_us=0.0), devices_per_node=2)
    with pytest.raises(ResultsError, match="bytes of the gradients"):
        predict([row(1, 8.0, **own), row(2, 9.0, **own)], [4], network)


def test_series_that_lack_a_world_are_told_beside_those_that_are_predicted():
    rows = [row(1, 8.0), row(2, 9.0), row(1, 9.0, batch_size=8, point_id="alone")]
    assert len(predict(rows, [4, 8], IN_NODE)) == 2
    assert list(omissions(rows)) == ["alone"]


def test_all_reduces_are_read_from_the_rows_of_a_run_of_collectives():
    def reduced(operation, size_bytes, step_ms, nodes=1):
        params = {"operation": operation, "size_bytes": size_bytes}
        return row(2, step_ms, workload="collective", params=params, node_count=nodes)

    rows = [
        reduced("all_reduce", "1000", 0.5),
        reduced("all_reduce", "1000", 3.0, nodes=2),
        reduced("broadcast", "5000", 0.5),
    ]
    times = reduce_times(rows)
    assert times is not None
    assert times.by_world == {2: [(1000.0, 0.5)]}
    between = reduce_times(rows, between_nodes=True)
    assert between is not None
    assert between.by_world == {2: [(1000.0, 3.0)]}
    assert reduce_times(rows[1:]) is None
