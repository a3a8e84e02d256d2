"""Processes forked from one that has imported torch already, which takes seconds."""

import contextlib
import gc
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "pytest",
        "raybench.worker.state",
        "raybench.measure.breakdown",
        "raybench.workloads.networks",
        # With pandas and much of raybench, which the tests of each rank import.
        "tests.unit.builders",
    ]
)


def run_ranks(run_rank: Callable[..., T], world_size: int, *arguments: object) -> list[T]:
    """Call `run_rank(rank, *arguments)` in a process for each rank; their answers."""
    with ProcessPoolExecutor(world_size, mp_context=SERVER) as pool:
        answers = [pool.submit(run_rank, rank, *arguments) for rank in range(world_size)]
        return [answer.result(timeout=240) for answer in answers]


def answers_of_ranks(run_rank: Callable[..., Any], world_size: int, *arguments: object) -> Any:
    """Make a fixture of a module: what `run_rank(rank, *arguments, store)` answers, by rank."""

    @pytest.fixture(scope="module")
    def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
        store = tmp_path_factory.mktemp("group") / "store"
        return run_ranks(run_rank, world_size, *arguments, str(store))

    return answers


@contextlib.contextmanager
def gloo(rank: int, world_size: int, store: str) -> Iterator[None]:
    """Be this rank of a group of gloo, in one thread. store: a file that is not there yet.

    Let no model in DDP outlive it: where DDP holds the group last, it ends gloo's threads while it
    holds the interpreter's lock, for which they may wait.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # What was imported, as a worker does it: points collect garbage several times.
    gc.freeze()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=200),
    )
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()
