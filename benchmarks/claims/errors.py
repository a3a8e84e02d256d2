"""What the articles get wrong, shown by arithmetic or by a measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.claims import runs
from benchmarks.claims.article_3 import without_sampler
from benchmarks.claims.measured import count, health, percent_of, row, spread, step
from benchmarks.claims.model import Case, Figure


@dataclass(frozen=True, kw_only=True)
class Error:
    """A mistake of an article.

    said: what it says. found: why that is wrong. show: figures; those without runs are arithmetic
    on the article's own.
    """

    article: str
    said: str
    found: str
    show: Callable[[], Sequence[Case]]


def _computed(name: str, value: float, unit: str = "") -> Case:
    return Case(name=name, figure=count(value, unit=unit))


def _steps_of_an_epoch() -> list[Case]:
    """10,000 rows in batches of 64: without a sampler each rank takes them all."""
    return [
        _computed("steps of a rank on 1 GPU", -(-10_000 // 64)),
        _computed("on 4 GPUs, without the sampler", -(-10_000 // 64)),
        _computed("on 4 GPUs, with it", -(-2_500 // 64)),
    ]


def _by_speed_time() -> list[Case]:
    fast, slow = 8, 2
    rate = (fast + slow / 3) / 1.0  # samples/s of the article's GPUs: 1 and 1/3
    seconds = 10_000 / rate
    return [
        _computed("13,000 samples in 1500 s", 13_000 / 1500, "samples/s"),
        _computed("B, the fast ones alone", fast, "samples/s"),
        _computed("C for 10,000 samples", round(seconds), "s"),
        _computed("less than B takes", 100 * (1 - seconds / (10_000 / fast)), "%"),
    ]


def _one_slow_of_ten() -> list[Case]:
    return [
        _computed("A, all alike, in fast GPUs", 10 * 0.5),
        _computed("B, without the slow one", 9),
        _computed("C, by speed", 9.5),
    ]


def _weighted_draws() -> list[Case]:
    return [_computed("samples of each rank, whatever the weights", 10_000 / 10)]


def _accumulation() -> list[Case]:
    return [
        _computed("work of a slow rank for each of a fast one's", 3, "x"),
        _computed("its time, at 0.3 of the speed", 3 / 0.3, "x"),
        _computed("its all_reduces for each 3 of a fast one's", 1),
    ]


def _label() -> list[Case]:
    measured = health(runs.HEALTH, "memory 1000 MB")
    return [
        _computed("1000 MB, read and written in 0.5 ms, by it", 2 * 1e9 / (0.5 * 1e6), '"MB/s"'),
        Case(name="what a GPU does with 1000 MB", figure=spread(measured)),
    ]


def _copies() -> list[Case]:
    return [
        Case(name="copy of a pair", figure=spread(health(runs.HEALTH, "copy 256 MiB"))),
        Case(name="all_reduce of 1 GiB", figure=spread(health(runs.HEALTH, "all_reduce 1 GiB"))),
        Case(name="all_reduce of 1 MiB", figure=spread(health(runs.HEALTH, "all_reduce 1 MiB"))),
    ]


def _rate_of_256() -> list[Case]:
    return [
        _computed("factor of a batch of 1024 by the formula", 1024 / 256, "x"),
    ]


def _cold() -> list[Case]:
    """Tell how much of the slow pipeline was its first run."""
    found = row(runs.DIT_COLD, scope="loop", world_size=2)
    first = Figure(value=found["first_step_ms"], unit="ms", runs=(runs.DIT_COLD,))
    later = step(runs.DIT_COLD, scope="loop", world_size=2)
    return [
        Case(name="first loop of 2 GPUs", figure=first),
        Case(name="later ones", figure=later),
        Case(name="cold start, of the first", figure=percent_of(later, first)),
        _computed("published: 57 blocks at sp=1, four steps", 4 * (19 * 8.2 + 38 * 7.5), "ms"),
        _computed("the same at sp=4", 4 * (19 * 3.6 + 38 * 3.4), "ms"),
    ]


ERRORS = (
    Error(
        article="3",
        said="DDP over a DataLoader without a DistributedSampler takes 1.87 times less time",
        found="each rank reads all rows, so an epoch has as many steps on 4 GPUs as on one",
        show=lambda: [*_steps_of_an_epoch(), *without_sampler()],
    ),
    Error(
        article="4",
        said="with 4 GPUs the pipeline slows down",
        found="its author in the end: warm up before timing; so much of it was likely a cold start",
        show=_cold,
    ),
    Error(
        article="5, 7.1",
        said="a large batch needs a small learning rate",
        found="its own formula says the opposite",
        show=_rate_of_256,
    ),
    Error(
        article="5, 9.2",
        said="C, by speed, does 13,000 samples in 1500 s, in perfect balance",
        found="it is hardly more than the fast ones alone, and other work than the 10,000 of A",
        show=_by_speed_time,
    ),
    Error(
        article="5, 9.3",
        said="WeightedRandomSampler balances the GPUs",
        found="it changes which samples a rank draws, not how many",
        show=_weighted_draws,
    ),
    Error(
        article="5, 9.4",
        said="slow ranks accumulate 3 passes, fast ones 1",
        found="slow ranks get more work, not less; and all_reduces that do not pair hang",
        show=_accumulation,
    ),
    Error(
        article="5, 9.5",
        said="few slow GPUs: use all alike",
        found="one slow GPU of ten, at half speed, halves the fleet",
        show=_one_slow_of_ten,
    ),
    Error(
        article="5, 10.2",
        said="bandwidth in MB/s = 2 x bytes / (ms x 1e6)",
        found="that is GB/s: the label is wrong by a thousand",
        show=_label,
    ),
    Error(
        article="5, 10.3",
        said="an all_reduce by copies of one process, and one cold copy of each pair i < j",
        found="a copy is no all_reduce, and the way back is another; both were measured",
        show=_copies,
    ),
)
