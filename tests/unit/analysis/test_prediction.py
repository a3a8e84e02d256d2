"""Steps on more devices than were measured, from the rows of a run."""

import json
from dataclasses import replace

import pytest
from builders import make_row
from commands import EXAMPLES

from raybench.analysis.prediction import NotPredicted, Unpredictable, predict
from raybench.records.status import Status

PARAMS = {"hidden": "4096", "layers": "8", "bucket_cap_mb": "64", "grad_accumulation": "1"}


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


def both(**changes):
    """Points of one and of two devices."""
    return [row(world_size, 8.0, **changes) for world_size in (1, 2)]


def predicted(rows, *world_sizes):
    """The predictions of a run on nodes of 8 devices."""
    return predict(rows, world_sizes, 8)[0]


def test_exposed_communication_grows_with_bytes_sent_per_device():
    (one,) = predicted([row(1, 8.0), row(2, 9.0)], 4)
    assert one.step_ms == pytest.approx(8.0 + 1.5)
    assert one.comm_exposed_ms == pytest.approx(1.5)
    assert (one.efficiency, one.speed_up) == pytest.approx((8 / 9.5, 4 * 8 / 9.5))
    # From all of the growth hidden to none of it, of 2 ms that take 1.5 times as long.
    assert 8.5 < one.step_ms_low < 9.0
    assert 10.0 < one.step_ms_high < 10.5


def test_fitted_growth_is_linear_and_never_negative():
    for second_ms, third_ms, expected_ms in ((9.5, 10.0, 10.25), (10.0, 9.0, 9.0)):
        (one,) = predicted([row(1, 8.0), row(2, second_ms), row(4, third_ms)], 8)
        assert one.step_ms == pytest.approx(expected_ms)


def test_imprecise_point_is_ignored_when_others_exist():
    good = [row(1, 8.0), row(2, 9.0)]
    assert predicted([*good, row(4, 30.0, step_ms_ci_low=5.0)], 8) == predicted(good, 8)


def of_rounds(*rows, factors):
    """The rows in as many rounds, each of which is slower by a factor."""
    return [
        replace(one, round=number, attempt=number, step_ms_p50=one.step_ms_p50 * factor)
        for number, factor in enumerate(factors, start=1)
        for one in rows
    ]


def half(points, world_size=4):
    (one,) = predicted(points, world_size)
    assert 0 < one.step_ms_low < one.step_ms < one.step_ms_high
    return one.half_interval


def test_only_scattered_rounds_widen_the_interval():
    rows = row(1, 8.0), row(2, 9.0, step_ms_ci_low=8.99, step_ms_ci_high=9.01)
    one = half(rows)
    assert half(of_rounds(*rows, factors=(1.0, 1.001, 0.999))) == pytest.approx(one, rel=0.01)
    assert half(of_rounds(*rows, factors=(1.0, 1.06, 0.94))) > one + 0.03
    # Three rounds and Student's t of two degrees: by no more than a few of the samples' errors.
    assert half(of_rounds(*rows, factors=(1.0, 1.06, 0.94))) < one + 0.20


def test_interval_grows_with_the_extrapolation_distance():
    rows = [row(1, 8.0), row(2, 8.0, comm_ms=0.001, comm_exposed_ms=0.0)]
    halves = [half(rows, world) for world in (3, 4, 8)]
    assert halves[0] < 0.9 * halves[1]
    assert halves[1] == pytest.approx(0.05, abs=0.01)
    assert halves[2] > 1.3 * halves[1]


def test_predicted_efficiency_exceeds_100_percent_only_if_measured():
    (one,) = predicted([row(1, 8.0), row(2, 8.0)], 8)
    assert one.step_ms_low < one.base_ms
    assert (one.efficiency, one.efficiency_high) == (1.0, 1.0)
    (one,) = predicted([row(1, 8.0), row(2, 7.6)], 8)
    assert one.efficiency_high == one.measured_efficiency == pytest.approx(8.0 / 7.6)


def test_steps_over_several_nodes_are_no_ground():
    rows = [row(1, 8.0), row(2, 9.0)]
    over_two = row(8, 20.0, node_count=2)
    assert predicted([*rows, over_two], 4) == predicted(rows, 4)
    why = NotPredicted(kind=Unpredictable.FEW_WORLDS, world_sizes=(1,))
    assert predict([rows[0], over_two], [4], 8) == ([], [why])


def test_devices_of_several_nodes_are_refused():
    rows = [row(1, 8.0), row(8, 8.5), row(16, 9.875, node_count=2)]
    why = NotPredicted(kind=Unpredictable.SEVERAL_NODES, world_size=32, devices_per_node=8)
    assert predict(rows, [8, 32], 8) == ([], [why])


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (
            [row(1, 8.0), row(2, 9.0, status=Status.OOM)],
            {"kind": Unpredictable.FEW_WORLDS, "world_sizes": (1,)},
        ),
        (
            both(workload="gemm", params={}, comm_ms=None),
            {"kind": Unpredictable.NO_GRADIENTS, "workload": "gemm"},
        ),
        (
            both(params=PARAMS | {"mode": "inference"}),
            {"kind": Unpredictable.NO_GRADIENTS, "workload": "mlp"},
        ),
        (both(scaling="strong", global_batch_size=64), {"kind": Unpredictable.STRONG_SCALING}),
        (both(crowded=True), {"kind": Unpredictable.CROWDED}),
        (
            [row(n, 8.0, device_name=f"H{n}00") for n in (1, 2)],
            {"kind": Unpredictable.SEVERAL_MODELS, "models": ("H100", "H200")},
        ),
        (
            [row(1, 8.0), row(2, 9.0, step_ms_ci_low=8.0, step_ms_ci_high=12.5)],
            {"kind": Unpredictable.IMPRECISE, "world_sizes": (2,), "half_intervals": (0.25,)},
        ),
    ],
)
def test_what_cannot_be_predicted_has_a_reason(rows, why):
    assert predict(rows, [8], 8) == ([], [NotPredicted(**why)])


def test_user_class_needs_timed_communication_for_prediction():
    own = {"workload": "my:Net", "params": {}}
    assert predicted([row(1, 8.0, **own), row(2, 9.0, **own)], 4)[0].step_ms == pytest.approx(9.5)
    assert predicted([row(1, 8.0, **own), row(2, 9.0, **own, comm_ms=None)], 4) == []


def test_series_with_too_few_worlds_is_left_out():
    rows = [row(1, 8.0), row(2, 9.0), row(1, 9.0, batch_size=8, point_id="alone")]
    found, left_out = predict(rows, [4, 8], 8)
    assert len(found) == 2
    assert left_out == [NotPredicted(kind=Unpredictable.FEW_WORLDS, world_sizes=(1,))]


def test_json_has_the_reason_for_omitted_series(command, monkeypatch):
    rows = [row(1, 8.0), row(2, 9.0), row(1, 9.0, batch_size=8, point_id="alone")]
    monkeypatch.setattr("raybench.analysis.rows.point_rows", lambda _: rows)
    words = ("predict", "ddp_scaling", "--world-size", "4", "--format", "json")
    [left_out] = json.loads(command(*words, results=EXAMPLES).out)["left_out"]
    assert (left_out["kind"], left_out["world_sizes"]) == ("few_worlds", [1])
    assert left_out["text"].startswith("a prediction needs ok points of two world sizes")


def test_failed_world_size_is_predicted_from_smallest_worlds(command, monkeypatch):
    rows = [row(1, 8.0), row(2, 9.0), row(4, 9.0, status=Status.OOM)]
    rows += [row(n, 8.0, batch_size=8, point_id=f"b{n}") for n in (2, 3)]
    monkeypatch.setattr("raybench.analysis.rows.point_rows", lambda _: rows)
    told = command("predict", "ddp_scaling", "--world-size", "4", results=EXAMPLES).out
    assert "compared with 1 GPU or 2 GPUs" in " ".join(told.split())
