"""Two ranks on gloo: what rank 0 decides, and whose steps it looks at."""

import time

import pytest
import torch
from builders import make_context
from forked import gloo, run_ranks

from raybench.job.model import Measure
from raybench.measure.instruments import broadcast_from_rank_0, gather_durations, max_over_ranks
from raybench.measure.phases import measure
from raybench.records import Measurement
from raybench.workloads.base import Workload

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")
SLOW_S = 0.004


class Lagging(Workload):
    """Rank 1 needs 4 ms for a step, rank 0 next to nothing, and they do not wait for each other."""

    def __init__(self, rank: int) -> None:
        self._pause_s = SLOW_S * rank
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        time.sleep(self._pause_s)


def run_rank(rank: int, folder: str) -> tuple[list[int], int, Measurement]:
    context = make_context(rank, 2)
    with gloo(rank, 2, f"{folder}/store"):
        slowest = max_over_ranks([5, 9] if rank == 0 else [7, 3], CPU)
        assert gather_durations([5, rank], CPU) == [[5, 0], [5, 1]]
        decision = broadcast_from_rank_0(lambda: 40 + rank, CPU)
        settings = Measure(target_ci=0.5, min_seconds=0.2, breakdown=False)
        done = measure(lambda: Lagging(rank), context, settings)
    return slowest, decision, done


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_ranks(run_rank, 2, str(tmp_path_factory.mktemp("gloo")))


def test_the_longest_duration_of_each_step_and_what_rank_0_decides_are_known_to_all(answers):
    assert [slowest for slowest, _, _ in answers] == [[7, 9], [7, 9]]
    assert [decision for _, decision, _ in answers] == [40, 40]


def test_the_slowest_rank_sets_the_pace_of_all(answers):
    (fast,), (slow,) = (done.repetitions for _, _, done in answers)
    # By its own steps rank 0 would time loops of a thousand.
    assert fast.inner_iterations == slow.inner_iterations == 1
    assert len(fast.timed.step_ns) == len(slow.timed.step_ns) >= 30
    assert len(fast.warmup.step_ns) == len(slow.warmup.step_ns)
    assert fast.settled == slow.settled
    assert sorted(slow.timed.step_ns)[15] >= SLOW_S * 1e9
