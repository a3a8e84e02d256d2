"""Equivalence: the interval of a ratio, its verdict, and how the two sides take turns."""

from __future__ import annotations

import math
import os
import sys

import numpy as np
import pytest
from fakes import make_cluster, make_device, make_measurement

from raybench.doctor import parity, torchrun
from raybench.doctor.facts import Verdict
from raybench.doctor.torchrun import BareAnswer, BareStep, TorchrunError, run_bare
from raybench.job.point import Point
from raybench.records import Answer, Failure, Status
from raybench.stats.equivalence import Agreement, Ratio, agreement, ratio
from raybench.stats.summary import Interval

GPU_STEP, _ = parity.steps(is_cuda=True)


def spread_by(log_spread: float) -> list[float]:
    """Three starts around 1 whose logarithms have this standard deviation."""
    return [math.exp(-log_spread), 1.0, math.exp(log_spread)]


@pytest.mark.parametrize(
    ("log_spreads", "t"),
    [
        ((0.01, 0.01), 2.776),  # as sure of both: 2 + 2 degrees of freedom
        ((0.01, 0.0), 4.303),  # all the scatter is on one side: 2
    ],
)
def test_the_interval_is_welchs(log_spreads: tuple[float, float], t: float) -> None:
    new, base = map(spread_by, log_spreads)
    found = ratio([2 * ms for ms in new], base)
    half_width = t * math.sqrt(sum(spread**2 for spread in log_spreads) / 3)
    assert found.value == pytest.approx(2.0)
    assert found.interval.low == pytest.approx(2.0 * math.exp(-half_width), rel=1e-4)
    assert found.interval.high == pytest.approx(2.0 * math.exp(half_width), rel=1e-4)


@pytest.mark.parametrize(("starts", "spread"), [(3, (0.01, 0.01)), (5, (0.01, 0.03))])
def test_the_interval_holds_the_true_ratio_in_95_of_100_trials(
    starts: int, spread: tuple[float, float]
) -> None:
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(1000):
        new = 1.02 * np.exp(spread[0] * rng.standard_normal(starts))
        base = np.exp(spread[1] * rng.standard_normal(starts))
        interval = ratio(list(new), list(base)).interval
        held += interval.low <= 1.02 <= interval.high
    assert held >= 930


def test_starts_that_do_not_scatter_give_the_ratio_itself() -> None:
    found = ratio([2.0, 2.0], [1.0, 1.0])
    assert (found.interval.low, found.interval.high) == (2.0, 2.0)


def test_a_single_start_is_our_bug() -> None:
    with pytest.raises(ValueError, match="2 starts needed"):
        ratio([1.0], [1.0] * 3)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.995, 1.005, Agreement.EQUAL),
        (0.99, 1.01, Agreement.EQUAL),
        (1.011, 1.02, Agreement.DIFFERS),
        (0.95, 0.98, Agreement.DIFFERS),
        (0.995, 1.02, Agreement.UNDECIDED),
        (0.5, 1.5, Agreement.UNDECIDED),
    ],
)
def test_sides_are_equal_only_where_the_whole_interval_is_inside_the_margin(
    low: float, high: float, expected: Agreement
) -> None:
    assert agreement(Ratio(value=1.0, interval=Interval(low=low, high=high)), 0.01) is expected


def test_the_sides_take_turns_in_going_first() -> None:
    assert list(parity.order(3)) == [
        "torchrun",
        "raybench",
        "raybench",
        "torchrun",
        "torchrun",
        "raybench",
    ]


def test_only_devices_of_one_node_of_this_host_are_compared() -> None:
    devices = [make_device("a", 0), make_device("b", 0), make_device("b", 1)]
    assert parity.local_worker_ids(devices, "host-b") == (1, 2)
    assert parity.local_worker_ids(devices, "elsewhere") == ()


def measured(torchrun_ms: tuple[float, ...], raybench_ms: tuple[float, ...]) -> parity.Parity:
    return parity.Parity(step=GPU_STEP, torchrun_ms=torchrun_ms, raybench_ms=raybench_ms)


@pytest.mark.parametrize(
    ("raybench_ms", "is_cuda", "verdict", "word"),
    [
        ((20.01, 20.02, 20.0), True, Verdict.OK, "equal"),
        ((22.0, 22.1, 22.05), True, Verdict.FAIL, "differs"),
        ((22.0, 22.1, 22.05), False, Verdict.WARN, "differs"),
        ((20.0, 21.0, 19.9), True, Verdict.WARN, "undecided"),
    ],
)
def test_the_verdict_says_whether_the_sides_agree(
    raybench_ms: tuple[float, ...], is_cuda: bool, verdict: Verdict, word: str
) -> None:
    check = parity.judge(measured((20.0, 20.01, 20.02), raybench_ms), is_cuda=is_cuda)
    assert (check.verdict, check.details["agreement"]) == (verdict, word)
    assert check.found.startswith(f"{word}: raybench / torchrun = ")
    assert bool(check.advice) is (verdict is not Verdict.OK)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> list[tuple[BareStep, dict[str, str]]]:
    """torchrun is played; what it was asked is kept."""
    asked: list[tuple[BareStep, dict[str, str]]] = []

    def answer(step: BareStep, environment: dict[str, str]) -> BareAnswer:
        asked.append((step, environment))
        return BareAnswer(
            step_ms_p50=1.0,
            iterations_s=0.1,
            devices=[f"GPU-a{index}" for index in step.indexes],
            environment={"NCCL_DEBUG": "WARN", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
            niceness=0,
        )

    monkeypatch.setattr(parity, "run_bare", answer)
    return asked


def compare(script, devices=None) -> parity.Parity:
    chosen = devices or [
        make_device(index=index, environment={"NCCL_DEBUG": "WARN"}) for index in range(2)
    ]
    cluster = make_cluster(chosen, script)
    cluster.start(len(chosen), "pack")
    return parity.compare(cluster, range(len(chosen)), GPU_STEP, 3, lambda _: None)


def test_both_sides_run_the_same_step_on_the_same_devices_in_the_same_environment(
    bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")  # the driver's own, which the workers do not have
    points: list[Point] = []

    def script(point: Point, rank: int) -> Answer:
        points.append(point)
        return make_measurement(rank)

    done = compare(script)
    assert (done.torchrun_ms, done.raybench_ms) == ((1.0,) * 3, (1.0,) * 3)
    assert done.differing == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": ("1", None)}
    step, environment = bare[0]
    assert (step.indexes, step.batch_size, dict(step.params)) == (
        (0, 1),
        points[0].batch_size,
        dict(points[0].params),
    )
    assert environment["NCCL_DEBUG"] == "WARN"
    assert "NCCL_ALGO" not in environment
    assert environment["PATH"] == os.environ["PATH"]


def test_a_side_that_fails_is_a_failed_check_with_its_reason(bare) -> None:
    done = compare(
        lambda _, rank: Failure(
            rank=rank, status=Status.OOM, error_type="OutOfMemoryError", message="no room"
        )
    )
    check = parity.judge(done, is_cuda=True)
    assert check.verdict is Verdict.FAIL
    assert check.found == "raybench: rank 0: OutOfMemoryError: no room"


def test_torchrun_on_other_devices_is_no_comparison(bare) -> None:
    others = [make_device(index=index, uuid=f"GPU-x{index}") for index in range(2)]
    done = compare(lambda _, rank: make_measurement(rank), others)
    assert done.error == "torchrun ran on other devices than raybench"


STEP = BareStep(
    device="cpu",
    indexes=(0,),
    workload="mlp",
    params={"hidden": 8, "layers": 1},
    precision="fp32",
    batch_size=2,
    warmup=1,
    iterations=2,
)


def test_a_launcher_that_says_nothing_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(torchrun, "_command", lambda _: hanging)
    monkeypatch.setattr(torchrun, "_TIMEOUT_S", 0.5)
    with pytest.raises(TorchrunError, match="did not end within"):
        run_bare(STEP, os.environ)


def test_the_exception_of_a_rank_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    raising = [sys.executable, "-c", "raise ValueError('as hoped')"]
    monkeypatch.setattr(torchrun, "_command", lambda _: raising)
    with pytest.raises(TorchrunError, match=r"^ValueError: as hoped$"):
        run_bare(STEP, os.environ)
