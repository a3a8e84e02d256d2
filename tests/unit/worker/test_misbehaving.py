"""What one point answers ends neither the run nor the next point, whatever it is."""

from typing import Any

import pytest
from fakes import make_point, measure_here

from raybench import load

NUMBER = "must be a number from 0 to 1e+30, given"
# By workload: the status of its point, and what its message says, or a column and its value.
CASES: dict[str, tuple[str, str | tuple[str, Any]]] = {
    "ManyFlops": ("ok", ("flops_per_step", float(6 * 70_000_000_000 * 32_769))),
    "NumpySizes": ("ok", ("flops_per_step", 8.0)),
    "Googols": ("error", f"workload Googols: items_per_step {NUMBER} 1000"),
    "TooManyDigits": ("error", f"workload TooManyDigits: items_per_step {NUMBER} an object of"),
    "HugeFlops": ("error", f"workload HugeFlops: flops_per_step {NUMBER} 1e+308"),
    "EndlessItems": ("error", f"workload EndlessItems: items_per_step {NUMBER} inf"),
    "NoNumber": ("error", f"workload NoNumber: flops_per_step {NUMBER} nan"),
    "NegativeItems": ("error", f"workload NegativeItems: items_per_step {NUMBER} -1"),
    "Textual": ("error", f"workload Textual: items_per_step {NUMBER} '4'"),
    "HalfPart": ("ok", ("iterations", 3)),
    "NumberedPart": ("error", "the name of a part must be a text, given 5"),
    "HalfParameter": ("ok", ("params", [("text", "?")])),
    "StoppedClock": ("ok", ("iterations", 3)),
    "HalfText": ("error", "bad ? text"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A run of all of them in one process, with a good point after each."""
    points = []
    for place, name in enumerate(CASES):
        params = {"text": "\ud800"} if name == "HalfParameter" else {}
        points.append(make_point(workload=f"misbehaving_workloads:{name}", params=params))
        good = {"workload": "mlp", "params": {"hidden": 16, "layers": 1}, "batch_size": place + 1}
        points.append(make_point(**good))
    root = tmp_path_factory.mktemp("misbehaving")
    return measure_here(root, points, warmup=1, iterations=3, breakdown=False)


@pytest.fixture(scope="module")
def points(results):
    return load(results, "points").set_index("workload", drop=False)


@pytest.mark.parametrize("name", CASES)
def test_each_misbehaving_workload_has_the_expected_row(points, name):
    status, told = CASES[name]
    row = points.loc[f"misbehaving_workloads:{name}"]
    assert row["status"] == status, row["error_message"]
    if isinstance(told, tuple):
        column, value = told
        kept = row[column]
        assert (list(dict(kept).items()) if column == "params" else kept) == value
    else:
        assert told in row["error_message"]


def test_the_point_after_each_is_good(points):
    assert points.loc["mlp"]["status"].tolist() == ["ok"] * len(CASES)


def test_only_points_that_are_ok_have_samples(results, points):
    samples = load(results, "samples")
    ok = set(points[points["status"] == "ok"]["point_id"])
    assert set(samples["point_id"]) == ok
    assert {"x?"} == {
        name for parts in samples["other_parts_ns"].dropna() for name, _ in dict(parts).items()
    }


@pytest.mark.parametrize("words", [["report", "run-a"], ["show", "run-a"], ["list"]])
def test_such_a_run_can_be_read(results, command, words):
    done = command(*words, results=results)
    assert done.code == 0
    assert "Traceback" not in done.err
