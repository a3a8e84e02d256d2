"""Iterations on a clock that the test winds, what torch's allocator says, values of two ranks."""

import gc
import time

import pytest
import torch
from builders import make_context
from forked import answers_of_ranks, gloo

from raybench.job.model import Measure
from raybench.measure import instruments
from raybench.measure.phases import measure
from raybench.records.measurement import Measurement, Samples
from raybench.workloads.base import PartTimes, Workload

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SLOW_S = 0.004


class Clock:
    """perf_counter_ns, for steps that take what the test says."""

    now_ns = 1_000

    def spend(self, ns: int) -> None:
        self.now_ns += ns


@pytest.fixture
def clock(monkeypatch):
    wound = Clock()
    for module in (time, instruments):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: wound.now_ns)
    return wound


def test_each_iteration_has_its_own_duration_and_start(clock):
    durations = iter([5, 7, 11])
    timer = instruments.Timer(CPU)
    clock.spend(100)
    samples = timer.time_block(lambda: clock.spend(next(durations)), 3, PartTimes())
    assert samples == Samples(start_ns=(100, 105, 112), step_ns=(5, 7, 11), host_ns=(5, 7, 11))
    # A second block goes on from the same origin.
    clock.spend(1_000)
    assert timer.time_block(lambda: clock.spend(10), 1, PartTimes()).start_ns == (1_123,)


def test_garbage_collection_resumes_even_after_an_error():
    def block() -> None:
        with instruments.no_garbage_collection():
            with instruments.no_garbage_collection():
                pass
            assert not gc.isenabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert gc.isenabled()


def test_a_loop_of_steps_becomes_one_mean_sample(clock):
    durations = iter([*[90] * 4, *[3] * 8])
    parts = PartTimes()

    def step() -> None:
        with parts.part("data"):
            clock.spend(next(durations))
        clock.spend(7)

    loop = instruments.loop_step(step, 4)
    block = instruments.Timer(CPU).time_block(loop, 2, parts, lead_in=1)
    assert instruments.per_step(block, 4) == Samples(
        start_ns=(388, 428), step_ns=(10, 10), host_ns=(10, 10), part_ns={"data": (3, 3)}
    )
    assert instruments.loop_step(step, 1) is step


def test_blocks_join_to_one_row_of_iterations():
    first = Samples(start_ns=(0,), step_ns=(5,), host_ns=(4,), part_ns={"data": (1,)})
    second = Samples(start_ns=(9, 12), step_ns=(3, 3), host_ns=(2, 2))
    assert instruments.join_blocks([first, second]) == Samples(
        start_ns=(0, 9, 12), step_ns=(5, 3, 3), host_ns=(4, 2, 2), part_ns={"data": (1, 0, 0)}
    )
    assert instruments.join_blocks([]) == Samples()
    # Throttling is known of a phase when it is of all its blocks.
    marked = Samples(start_ns=(0,), step_ns=(5,), host_ns=(4,), throttled=(True,))
    assert instruments.join_blocks([marked, marked]).throttled == (True, True)
    assert instruments.join_blocks([marked, first]).throttled == ()


class TorchAllocator:
    """torch's counters: what is allocated and reserved now, and the peaks since the last reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = {"allocated": 0, "reserved": 0}
        self._peak = dict(self._now)
        for kind in self._now:
            monkeypatch.setattr(
                torch.cuda, f"max_memory_{kind}", lambda device, kind=kind: self._peak[kind]
            )
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset)

    def use(self, *allocated_gib: int) -> None:
        for gib in allocated_gib:
            self._now = {"allocated": gib, "reserved": max(gib, self._now["reserved"])}
            self._peak = {kind: max(self._peak[kind], self._now[kind]) for kind in self._now}

    def _reset(self, device: torch.device) -> None:
        self._peak = dict(self._now)


def test_paused_allocations_count_as_reserved_only(monkeypatch):
    memory, peak = TorchAllocator(monkeypatch), instruments.MemoryUse(CUDA)
    for timed in (6, 5):  # two repeats
        memory.use(8, 2)
        peak.restart()
        memory.use(timed)
        with peak.paused():
            memory.use(9, 2)
        with peak.paused():
            pass
    assert (peak.allocated_bytes, peak.reserved_bytes) == (6, 9)


def test_allocator_calls_count_only_inside_blocks(monkeypatch):
    counts = {"num_alloc_retries": 3, "num_device_alloc": 40}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: dict(counts))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    calls = instruments.MemoryUse(CUDA)
    for retries, allocs in ((1, 2), (0, 5)):
        with calls.counting():
            counts["num_alloc_retries"] += retries
            counts["num_device_alloc"] += allocs
        counts["num_device_alloc"] += 100
    assert (calls.retries, calls.device_allocs) == (1, 7)


class Lagging(Workload):
    """Rank 1 needs 4 ms for a step, rank 0 next to nothing, and they do not wait for each other."""

    def __init__(self, rank: int) -> None:
        self._pause_s = SLOW_S * rank

    def step(self) -> None:
        time.sleep(self._pause_s)


def run_rank(rank: int, store: str) -> tuple[list[int], int, Measurement]:
    context = make_context(rank, 2)
    with gloo(rank, 2, store):
        slowest = instruments.max_over_ranks([5, 9] if rank == 0 else [7, 3], CPU)
        assert instruments.gather_durations([5, rank], CPU) == [[5, 0], [5, 1]]
        decision = instruments.broadcast_from_rank_0(lambda: 40 + rank, CPU)
        settings = Measure(seconds=0.3, breakdown=False)
        done = measure(lambda: Lagging(rank), context, settings)
    return slowest, decision, done


answers = answers_of_ranks(run_rank, 2)


@pytest.mark.alone
def test_ranks_share_slowest_durations_and_rank_0_decisions(answers):
    assert [slowest for slowest, _, _ in answers] == [[7, 9], [7, 9]]
    assert [decision for _, decision, _ in answers] == [40, 40]


@pytest.mark.alone
def test_the_slowest_rank_sets_the_pace_of_all(answers):
    (fast,), (slow,) = (done.repetitions for _, _, done in answers)
    # By its own steps rank 0 would time loops of a thousand.
    assert fast.inner_iterations == slow.inner_iterations == 1
    assert len(fast.timed.step_ns) == len(slow.timed.step_ns) >= 30
    assert len(fast.warmup.step_ns) == len(slow.warmup.step_ns)
    assert fast.settled == slow.settled
    assert sorted(slow.timed.step_ns)[15] >= SLOW_S * 1e9
