"""Devices of several models in one cluster: points on some of them, held against what each does."""

import pytest
from builders import make_measure
from fakes import ScriptedWorker, make_device, make_measurement, make_settings

from raybench.analysis.scaling import scaling
from raybench.job.model import load_job
from raybench.job.plan import make_plan
from raybench.records import Cause, Status
from raybench.results.point_row import point_row
from raybench.sweep.loop import sweep
from raybench.sweep.rounds import Rounds
from tests.local_cluster import LocalCluster

HEAD = "version: 1\nname: job\nworkload: {kind: mlp}\nplacement: {isolation: %s}\n"
STEP_NS = {"NVIDIA H200": 1_000_000, "NVIDIA A100": 2_000_000}
# Two of each node; ranks are by node, so 0 and 1 are an H200 and an A100.
FLEET = [make_device(node, index, name=name) for node in "ab" for index, name in enumerate(STEP_NS)]


def worker_of(device):
    """A worker that keeps step with the slowest of its point."""

    def script(point, rank):
        is_mixed = point.devices == "any" and point.world_size > 1
        step_ns = max(STEP_NS.values()) if is_mixed else STEP_NS[device.name]
        return make_measurement(rank, (step_ns,) * 6)

    return ScriptedWorker(script)


def plan_of(folder, matrix, isolation="cluster"):
    path = folder / "job.yaml"
    path.write_text(HEAD % isolation + f"matrix: {{batch_size: 8, {matrix}}}\nbaseline: {{}}\n")
    return make_plan(load_job(path))


def run(plan, isolation="cluster"):
    """The records, by the devices that were asked for and their number."""
    cluster = LocalCluster(FLEET, worker_of)
    cluster.start(len(FLEET), "pack")
    written = []
    list(sweep(Rounds(plan=plan), make_settings(isolation=isolation), cluster, written.extend))
    return {(one.point.devices, one.point.world_size): one for _, one in written}


@pytest.mark.parametrize("isolation", ["cluster", "node", "device"])
def test_points_run_on_the_devices_that_they_ask_for(tmp_path, isolation):
    plan = plan_of(tmp_path, "world_size: 2, devices: [H200, A100, any, 3/0]", isolation)
    found = run(plan, isolation)
    models = {
        devices: [device.name.removeprefix("NVIDIA ") for device in record.devices]
        for (devices, _), record in found.items()
    }
    assert models == {
        "H200": ["H200", "H200"],
        "A100": ["A100", "A100"],
        "any": ["H200", "A100"],
        "3/0": ["H200", "A100"],
    }
    assert [device.node_id for device in found["3/0", 2].devices] == ["a", "b"]


def test_a_point_for_which_too_few_of_a_model_are_there_says_what_is(tmp_path):
    record = run(plan_of(tmp_path, "world_size: 3, devices: A100"))["A100", 3]
    assert (record.status, record.error_type) == (Status.SKIPPED, Cause.TOO_FEW_DEVICES)
    assert record.error_message == (
        "needs 3 devices, 2 are A100; the cluster has 2 x NVIDIA H200, 2 x NVIDIA A100"
    )


def scaled(plan):
    points = [point_row("run-a", record, make_measure()) for record in run(plan).values()]
    return {(row.devices, row.world_size): row for row in scaling(points, {"world_size": 1})}


def test_efficiency_is_held_against_what_the_devices_do_alone(tmp_path):
    rows = scaled(plan_of(tmp_path, "world_size: [1, 2, 4], devices: [H200, A100, any]"))
    assert rows["any", 4].models_by_rank == ("NVIDIA H200", "NVIDIA A100") * 2
    assert rows["H200", 2].efficiency == pytest.approx(1.0)
    assert rows["A100", 2].efficiency == pytest.approx(1.0)
    # Four samples sets in 2 ms; two H200s and two A100s alone do six.
    assert rows["any", 4].speed_up == pytest.approx(2.0)
    assert rows["any", 4].efficiency == pytest.approx(4 / 6)
    assert rows["any", 2].efficiency == pytest.approx(2 / 3)
    assert rows["any", 4].lost_comm is None


def test_where_a_model_was_not_measured_alone_there_is_no_efficiency_and_a_reason(tmp_path):
    rows = scaled(plan_of(tmp_path, "world_size: [1, 2]"))
    assert rows["any", 2].efficiency is None
    assert "what NVIDIA A100 does alone was not measured" in rows["any", 2].why
