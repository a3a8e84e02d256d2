"""Faults of nodes, of Ray's head, of the rendezvous store and of the network under a sweep."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.integration.fault_cases import Case
from tests.integration.fault_injection import Ended, Waiting, harmed_sweep
from tests.integration.fault_runs import (
    descendants,
    outcomes,
    rows,
    sweep_command,
    write_job,
)
from tests.integration.namespaces import hosts, pull_cable, why_not

# Far off: a lost node must be told without it.
_TIMEOUT_S = 90.0
_NODE_S = 20.0
# The ranks that live stay in the point so long, and then wait for those that do not.
_STAY_S = 5.0
Harm = Callable[[subprocess.Popen[str], Waiting], None]


def measured() -> list[dict[str, Any]]:
    """One entry per fault, as `faults.table` shows them."""
    found = [
        on_nodes("raylet killed", lambda raylet: os.kill(raylet, signal.SIGKILL)),
        on_nodes("node frozen (SIGSTOP of the raylet and its workers)", freeze),
        store_killed(),
        head_gone(),
    ]
    if reason := why_not():
        print(f"network cut: not made, {reason}")
        return found
    return [*found, network_cut()]


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Start a Ray cluster of two nodes with two CPU slots each; the second one can be harmed."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0})
    try:
        cluster.add_node(num_cpus=2, num_gpus=0)
        yield cluster
    finally:
        cluster.shutdown()


def process_id(node: Any, kind: str) -> int:
    return int(node.all_processes[kind][0].process.pid)


def on_nodes(what: str, harm_raylet: Callable[[int], None]) -> dict[str, Any]:
    """Harm to one of two nodes: what needs both is lost, and what fits on the other goes on."""
    with tempfile.TemporaryDirectory(prefix="faults") as name, two_nodes() as cluster:
        folder = Path(name)
        victim = process_id(cluster.list_all_nodes()[-1], "raylet")
        on_victim: list[int] = []

        def harm(_: subprocess.Popen[str], waiting: Waiting) -> None:
            on_victim.extend(rank for rank, each in waiting.items() if each["ppid"] == victim)
            harm_raylet(victim)

        found = node_entry(what, folder, cluster.address, harm, on_victim)
        thaw(victim)  # or it would outlive its cluster
        return found


def node_entry(
    what: str,
    folder: Path,
    address: str,
    harm: Harm,
    on_victim: Sequence[int],
    wrap: Callable[[list[str]], list[str]] = list,
) -> dict[str, Any]:
    write_job(
        folder,
        [("none", 0), ("wait", 0), ("none", 0), ("none", 0)],
        [4, 4, 2, 4],
        timeout_s=_TIMEOUT_S,
    )
    command = wrap(sweep_command(folder, "--device", "cpu", address=address))
    ended = harmed_sweep(command, folder, 1, 4, harm, stay_s=_STAY_S)
    print(ended.said, flush=True)
    case = Case(fault="wait", what=what, wanted=frozenset({"lost"}), limit_s=_NODE_S, rank=-1)
    return entry(case, folder, ended, on_victim)


def freeze(raylet: int) -> None:
    for process in (raylet, *descendants(raylet)):
        os.kill(process, signal.SIGSTOP)


def thaw(raylet: int) -> None:
    for process in (raylet, *descendants(raylet)):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def store_killed() -> dict[str, Any]:
    """Kill the process in which groups find each other, beside a working group; then new groups."""
    with tempfile.TemporaryDirectory(prefix="faults") as name:
        folder = Path(name)
        points = [("none", 0), ("wait", 0), ("none", 0), ("none", 0)]
        write_job(folder, points, [3, 3, 2, 3], timeout_s=20.0)

        def harm(process: subprocess.Popen[str], _: Waiting) -> None:
            titles = descendants(process.pid).items()
            (store,) = (
                pid for pid, title in titles if title.startswith("ray::") and "Store" in title
            )
            os.kill(store, signal.SIGKILL)

        command = sweep_command(folder, "--device", "cpu")
        ended = harmed_sweep(command, folder, 1, 3, harm)
        print(ended.said, flush=True)
        wanted = frozenset({"ok", "lost"})
        case = Case(fault="wait", what="store host killed", wanted=wanted, limit_s=6.0, rank=-1)
        return entry(case, folder, ended, ())


def head_gone() -> dict[str, Any]:
    """Ray's head: the run cannot go on, so what counts is how it ends."""
    with tempfile.TemporaryDirectory(prefix="faults") as name, two_nodes() as cluster:
        folder = Path(name)
        write_job(folder, [("none", 0), ("wait", 0), ("none", 0)], 2, timeout_s=_TIMEOUT_S)
        head = process_id(cluster.head_node, "gcs_server")

        def harm(_: subprocess.Popen[str], __: Waiting) -> None:
            os.kill(head, signal.SIGKILL)

        command = sweep_command(folder, "--device", "cpu", address=cluster.address)
        ended = harmed_sweep(command, folder, 1, 2, harm, stay_s=_STAY_S)
        print(ended.said, flush=True)
        return ended_entry("Ray head killed", folder, ended, ["ok", "lost"], 3)


def network_cut() -> dict[str, Any]:
    """Pull the cable of one of two hosts: nobody is told anything."""
    with tempfile.TemporaryDirectory(prefix="faults") as name, hosts(2) as (head, other):
        head.start_ray("--head", "--port=6379", "--include-dashboard=false")
        other.start_ray(f"--address={head.address}:6379")
        on_victim: list[int] = []

        def harm(_: subprocess.Popen[str], waiting: Waiting) -> None:
            on_victim.extend(rank for rank, each in waiting.items() if each["host"] == other.name)
            pull_cable(head, other)

        address = f"{head.address}:6379"
        return node_entry("network cut", Path(name), address, harm, on_victim, head.command)


def entry(case: Case, folder: Path, ended: Ended, on_victim: Sequence[int]) -> dict[str, Any]:
    """Of a sweep that went on after the fault."""
    attempts = outcomes(folder, {1: case}, _TIMEOUT_S)
    first, after = attempts[0], [row for row in rows(folder) if row["number"] > 1]
    # The next attempt that reached workers; one that is skipped costs nothing.
    next_row_s = attempts[0].next_row_s
    right = all(each.status in case.wanted for each in attempts)
    fit = [row["status"] for row in after if row["world_size"] == 2]
    named = None if first.error_rank is None else first.error_rank in on_victim
    return {
        "fault": case.what,
        "statuses": [each.status for each in attempts],
        "error_type": first.error_type,
        "message": first.message,
        "rank_right": named,
        "from": "deadline" if first.after_deadline else "fault",
        "next_row_s": [each.next_row_s for each in attempts],
        "next_step_s": [each.next_step_s for each in attempts],
        "limit_s": case.limit_s,
        "later_points": [f"{row['world_size']}: {row['status']}" for row in after],
        "exit_code": ended.code,
        "said": ended.said,
        "left": ended.left,
        "as_wanted": right
        and fit == ["ok"]
        and next_row_s is not None
        and next_row_s <= case.limit_s,
    }


def ended_entry(
    what: str, folder: Path, ended: Ended, wanted: Sequence[str], code: int
) -> dict[str, Any]:
    """Of a sweep that the fault ended: its rows, its exit code, and how soon it was gone."""
    found = rows(folder)
    last = found[-1]
    in_time = ended.end_s <= _NODE_S and ended.gone_s is not None
    return {
        "fault": what,
        "statuses": [row["status"] for row in found],
        "error_type": last["error_type"],
        "message": last["error_message"],
        "exit_code": ended.code,
        "end_s": ended.end_s,
        "gone_s": ended.gone_s,
        "limit_s": _NODE_S,
        "said": ended.said,
        "left": ended.left,
        "as_wanted": [row["status"] for row in found] == list(wanted)
        and ended.code == code
        and in_time,
    }
