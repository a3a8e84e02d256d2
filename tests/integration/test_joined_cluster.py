"""A sweep on a cluster that is there, all of whose slots are free."""

from tests.integration.sweeps import raybench, sweep_command, table, write_text

JOB = """\
workload: {kind: mlp, hidden: 32}
matrix: {world_size: 3, batch_size: 4}
placement: {strategy: spread}
measure: {warmup: 2, iterations: 5}
"""


def test_a_sweep_joins_the_cluster_at_its_address(three_nodes, tmp_path):
    write_text(tmp_path, JOB)
    _, _, _, *words = sweep_command(tmp_path, "--device", "cpu", address=three_nodes)
    done = raybench(*words)
    assert done.returncode == 0, done.stderr
    assert f"Ray cluster at {three_nodes}, up to 6 CPU workers" in done.stderr
    (point,) = table(tmp_path).to_dict("records")
    assert (point["node_count"], point["strategy"]) == (3, "spread")
    assert sorted(table(tmp_path, "devices")["rack"]) == ["left", "left", "right"]
