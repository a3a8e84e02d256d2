"""Functions timed in this process: what is told of them, and which arguments are refused."""

import gc
import re
import time

import pytest
import torch
from commands import refusal_of, run_python
from forked import answers_of_ranks, gloo

import raybench
from raybench.errors import UsageError

QUICK = {"seconds": 0.2, "device": "cpu"}


def test_a_sleeping_step_takes_its_sleep():
    timing = raybench.measure(lambda: time.sleep(0.01), items=64, **QUICK)
    assert 10 <= timing.median_ms < 15
    low, high = timing.interval_ms
    assert low <= timing.median_ms <= high
    assert timing.items_per_s == pytest.approx(64 / timing.mean_ms * 1000)
    assert list(timing.samples.columns) == ["rank", "iteration", "step_ms"]
    assert timing.samples["step_ms"].median() == pytest.approx(timing.median_ms)
    assert set(timing.samples["rank"]) == {0}
    assert any("timed for a moment" in doubt for doubt in timing.doubts)
    assert re.match(
        r"\d+ samples of a step by time.perf_counter_ns on 1 rank of .+, after \d+ steps of "
        r"warm-up\.$",
        timing.method,
    )


def test_short_steps_are_timed_in_loops():
    timing = raybench.measure(int, **QUICK)
    steps = int(re.search(r"samples of (\d+) steps", timing.method)[1])
    assert 100 < steps <= 1000
    assert timing.name == "int"


def test_the_step_gets_what_the_setup_returns():
    seen = []

    def build(context):
        seen.append((context.device.type, context.rank, context.world_size))
        return torch.ones(4)

    timing = raybench.measure(torch.Tensor.sum, setup=build, **QUICK)
    assert seen == [("cpu", 0, 1)]
    assert timing.name.endswith("sum")
    # A set-up without a parameter gets nothing.
    raybench.measure(len, setup=lambda size=3: [size], **QUICK)


def test_errors_of_the_step_are_its_own():
    def fails():
        raise LookupError("mine")

    with pytest.raises(LookupError, match=r"^mine$"):
        raybench.measure(fails, **QUICK)


def test_repr_and_html_tell_the_same():
    timing = raybench.measure(lambda: time.sleep(0.005), items=2, **QUICK)
    head, method, *doubts = repr(timing).split("\n")
    assert re.fullmatch(
        r"<StepTiming of \S+<lambda>: [\d.]+ ms \(95 % interval [\d.]+ ms to [\d.]+ ms\), "
        r"[\d.,]+ items/s>",
        head,
    )
    assert method == timing.method
    assert doubts == [f"Doubt: {doubt[0].upper()}{doubt[1:]}." for doubt in timing.doubts]
    assert timing.method in timing._repr_html_()
    assert "<lambda>" not in timing._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"step": 3}, "step: must be a function, given 3"),
        ({"setup": 3}, "setup: must be a function, given 3"),
        ({"items": 0}, "items: must be a number above 0, given 0"),
        ({"items": float("nan")}, "items: must be a number above 0, given nan"),
        ({"seconds": 0}, "seconds: must be from above 0 to 100,000, given 0"),
        ({"workers": 0}, "workers: must be a count from 1, given 0"),
        ({"workers": True}, "workers: must be a count from 1, given true"),
        ({"device": "gpu"}, "device: must be auto, cuda or cpu, given 'gpu'"),
        ({"address": "local"}, "address: goes with workers=N; this process needs no cluster"),
        ({"flush_l2": True, "workers": 1}, "flush_l2: goes without workers"),
        ({"flush_l2": True, "device": "cpu"}, "flush_l2: needs a GPU, and the step runs on the"),
    ],
)
def test_wrong_arguments_are_refused(arguments, expected):
    told = refusal_of(UsageError, lambda: raybench.measure(**{"step": int, **arguments}))
    assert told.startswith(expected)


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'devise'"):
        raybench.measure(int, devise="cpu")
    with pytest.raises(TypeError, match="unexpected keyword argument 'wait'"):
        raybench.sweep({}, wait=3)


def test_measuring_needs_neither_ray_nor_stdout():
    told = run_python(
        "import sys, raybench\n"
        "raybench.measure(int, seconds=0.05, device='cpu')\n"
        "assert 'ray' not in sys.modules, 'ray was imported'\n"
    )
    assert (told.returncode, told.stdout, told.stderr) == (0, "", "")


def test_an_interrupt_ends_the_measurement():
    steps = iter(range(100))

    def step():
        if next(steps) == 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        raybench.measure(step, **QUICK)
    assert gc.isenabled()


def run_rank(rank, store):
    """Measure with another rank, as under torchrun; rank 1 sleeps longer."""
    import raybench

    with gloo(rank, 2, store):
        timing = raybench.measure(
            lambda context_rank: time.sleep(0.004 * (1 + context_rank)),
            setup=lambda context: context.rank,
            items=8,
            **QUICK,
        )
    return timing.median_ms, timing.items_per_s, set(timing.samples["rank"]), timing.method


answers = answers_of_ranks(run_rank, 2)


@pytest.mark.long
def test_ranks_of_torchrun_measure_together(answers):
    medians_ms, rates, ranks, methods = zip(*answers, strict=True)
    assert min(medians_ms) >= 8, "the slowest rank sets the pace"
    assert set(map(frozenset, ranks)) == {frozenset({0, 1})}
    assert all("on 2 ranks of" in method for method in methods)
    # The items of both ranks.
    assert rates[0] == pytest.approx(16 / medians_ms[0] * 1000, rel=0.3)
