"""What srun and torchrun set, as their manuals say, becomes the place of a process."""

from __future__ import annotations

import pytest

from raybench.cluster.processes.started import first_host, leaf_switch, read_started, tasks_per_node
from raybench.errors import UsageError

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[03-05,9]",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "gpu03",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "mine",
}


def test_a_task_of_srun_knows_its_place_and_where_the_first_one_is() -> None:
    found = read_started(SRUN)
    assert found is not None
    assert (found.by, found.id, found.rank, found.world_size) == ("srun", "4711.2", 5, 7)
    assert (found.local_rank, found.local_world_size, found.node) == (1, 2, 2)
    assert (found.address, found.port) == ("gpu03", 19711)
    assert not found.is_on_one_host


def test_the_variables_of_a_user_name_another_address() -> None:
    found = read_started({**SRUN, "MASTER_ADDR": "ib-gpu03", "MASTER_PORT": "2000"})
    assert found is not None
    assert (found.address, found.port) == ("ib-gpu03", 2000)


def test_a_process_of_torchrun_leaves_its_port_to_torchruns_own_store() -> None:
    found = read_started(TORCHRUN)
    assert found is not None
    assert (found.by, found.rank, found.node, found.port) == ("torchrun", 3, 1, 29501)
    assert not found.is_on_one_host
    alone = read_started({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"})
    assert alone is not None
    assert alone.is_on_one_host


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        {
            **SRUN,
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
            "SLURM_NODEID": "0",
        },
    ],
    ids=["by hand", "the batch script itself", "srun of one task"],
)
def test_a_process_that_is_alone_was_started_by_nobody(environment: dict[str, str]) -> None:
    assert read_started(environment) is None


def test_what_a_launcher_left_out_is_a_mistake_in_one_line() -> None:
    with pytest.raises(UsageError, match="'GROUP_RANK' is not as they set it") as raised:
        read_started({name: TORCHRUN[name] for name in TORCHRUN if name != "GROUP_RANK"})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2])]
)
def test_slurms_short_form_of_tasks_is_read(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


def test_the_switch_next_to_a_node_is_its_rack() -> None:
    found = read_started({**SRUN, "SLURM_TOPOLOGY_ADDR": "s0.s4.gpu09"})
    assert found is not None
    assert found.rack == "s4"
    assert leaf_switch("gpu09") == leaf_switch("") == ""


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu03", "gpu03"),
        ("gpu03,gpu07", "gpu03"),
        ("gpu[03-05,9],x1", "gpu03"),
        ("rack2-gpu[7]-ib,other", "rack2-gpu7-ib"),
        ("head,gpu[1-4]", "head"),
    ],
)
def test_the_first_of_slurms_hosts_is_read(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
