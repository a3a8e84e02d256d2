"""The long article, sections 9 and 10: slow GPUs among fast ones, and the test of all GPUs."""

from __future__ import annotations

from functools import cache

from benchmarks.claims import runs
from benchmarks.claims.measured import (
    cell,
    count,
    health,
    percent_more,
    rate,
    ratio,
    row,
    rows,
    spread,
    table,
)
from benchmarks.claims.model import Article, Case, Claim, Figure, at_least, near
from raybench.analysis.uneven import Fleet, fleets

_SHARES = {"equal": "equal shares", "fast": "the fast GPU alone"}
_FEW = "10 GPUs of two speeds could not be had; 1 of 2 made slow is shown"


@cache
def _fleets() -> tuple[Fleet, ...]:
    return tuple(fleets(rows(runs.UNEVEN)))


def _measured_gain(name: str, over: str, fleet: Fleet) -> Figure:
    """Samples/s of some shares over others', in % more."""
    one, other = (
        rate(runs.UNEVEN, shares=shares, slow_ratio=fleet.slow_ratio) for shares in (name, over)
    )
    return percent_more(ratio(one, other))


def _scenarios() -> list[Case]:
    slowest = _fleets()[-1]
    at = f"slow GPU at {slowest.probe_ratio:.2f}"
    waits = 100 * (slowest.scenarios["equal"].idle_share_of_fast or 0.0)
    return [
        Case(
            name=f"A, equal: fast GPU waits, {at}",
            figure=Figure(value=waits, unit="%", runs=(runs.UNEVEN,)),
        ),
        Case(name="B, fast only, over A", figure=_measured_gain("fast", "equal", slowest)),
        Case(name="C, by speed, over A", figure=_measured_gain("by_speed", "equal", slowest)),
    ]


def _predicted() -> list[Case]:
    return [
        Case(
            name=f"slow GPU at {fleet.probe_ratio:.2f}",
            figure=Figure(
                value=1 + (fleet.scenarios["by_speed"].prediction_error or 0.0),
                unit="x",
                runs=(runs.UNEVEN,),
            ),
            rule=near(1),
        )
        for fleet in _fleets()
    ]


def _by_passes() -> list[Case]:
    """Set shares in whole passes over equal ones and over the fast GPU alone."""
    run = runs.UNEVEN_PASSES
    rates = {
        shares: rate(run, shares=shares) for shares in ("by_speed_accumulation", "equal", "fast")
    }
    by_passes = rates.pop("by_speed_accumulation")
    one = row(run, shares="by_speed_accumulation")
    passes = [int(items // one["batch_size"]) for items in one["share_by_rank"]]
    done = " and ".join(map(str, passes))
    return [
        Case(name="passes of the fast and the slow GPU", figure=count(sum(passes), run, text=done)),
        *(
            Case(name=f"samples/s over {_SHARES[shares]}", figure=ratio(by_passes, other))
            for shares, other in rates.items()
        ),
        Case(
            name="gradients, to one process over all samples",
            figure=cell(run, "gradient_error", shares="by_speed_accumulation"),
        ),
    ]


def _matrix() -> list[Case]:
    """Each rule of the matrix where a fleet was measured that it speaks of."""
    better = at_least(0)
    return [
        Case(name=f"at {fleet.probe_ratio:.2f}, {text}", figure=figure, rule=better)
        for fleet in _fleets()
        for text, figure in _ruled(fleet)
    ]


def _ruled(fleet: Fleet) -> list[tuple[str, Figure]]:
    """Set what the rule for the gap says is best over the best of the others."""
    if fleet.probe_ratio >= 0.8:
        name, others = "equal", ("fast", "by_speed")
    elif fleet.probe_ratio >= 0.5:
        name, others = "by_speed", ("equal", "fast")
    else:
        name, others = "fast", ("equal", "by_speed")
    best = max(others, key=lambda shares: fleet.scenarios[shares].throughput)
    return [(f"{name} over {best}", _measured_gain(name, best, fleet))]


def _left_out() -> list[Case]:
    return [
        Case(
            name=f"slow GPU at {fleet.probe_ratio:.2f}",
            figure=_measured_gain("fast", "equal", fleet),
            rule=at_least(0),
        )
        for fleet in _fleets()
    ]


def _environment() -> list[Case]:
    found = table("devices", runs.HEALTH)
    return [
        Case(name="GPUs", figure=count(len(found), runs.HEALTH)),
        Case(
            name="memory of each",
            figure=count(found.memory_bytes.min() / 2**30, runs.HEALTH, unit="GiB"),
        ),
        Case(name="free before", figure=spread(health(runs.HEALTH, "free memory"))),
        Case(
            name="temperature",
            figure=count(found.temperature_c.max(), runs.HEALTH, unit="degC, at most"),
        ),
    ]


def _each(*tests: str) -> list[Case]:
    return [Case(name=test, figure=spread(health(runs.HEALTH, test))) for test in tests]


def _all_reduces() -> list[Case]:
    small = [
        Case(
            name=f"{size // 1024} KiB, 4 GPUs",
            figure=rate(
                runs.COLLECTIVES,
                "busbw_gb_s",
                "GB/s",
                operation="all_reduce",
                world_size=4,
                size_bytes=size,
            ),
        )
        for size in (32 * 1024, 256 * 1024)
    ]
    return [*small, *_each("all_reduce 32 KiB", "all_reduce 1 MiB")]


def _one_command() -> list[Case]:
    found = table("runs", runs.HEALTH).iloc[0]
    took_s = (found.finished_at - found.started_at).total_seconds()
    tests = table("health", runs.HEALTH).test.nunique()
    return [
        Case(name="took", figure=count(round(took_s), runs.HEALTH, unit="s")),
        Case(name="tests", figure=count(tests, runs.HEALTH)),
    ]


def _slower_than_the_first() -> list[Case]:
    values = [figure.value for figure in health(runs.HEALTH, "gemm fp32 1024")]
    return [
        Case(
            name="GPU 0's rate over the slowest one's",
            figure=count(values[0] / min(values), runs.HEALTH, unit="x"),
        )
    ]


def _advice() -> list[Case]:
    found = table("health", runs.HEALTH)
    devices = found[found.kind == "device"]
    return [
        Case(
            name=f"devices that are {verdict}",
            figure=count(devices[devices.verdict == verdict].subject.nunique(), runs.HEALTH),
        )
        for verdict in ("bad", "suspect")
    ]


def _baseline() -> list[Case]:
    names = ("gemm fp32 1024", "gemm bf16 8192", "memory 1000 MB")

    def mean(run: str, test: str) -> float:
        values = [figure.value for figure in health(run, test)]
        return sum(values) / len(values)

    return [
        Case(
            name=test,
            figure=Figure(
                value=mean(runs.HEALTH, test) / mean(runs.HEALTH_ELSEWHERE, test),
                unit="x",
                runs=(runs.HEALTH, runs.HEALTH_ELSEWHERE),
            ),
            rule=near(1),
        )
        for test in names
    ]


FLEET = Article(
    number=5,
    title="slow GPUs among fast ones, and the test of all GPUs (sections 9 to 11)",
    claims=(
        Claim(
            id="5.18",
            text="8 fast and 2 slow GPUs, 10,000 samples",
            published="10 GPUs",
            ask="jobs/uneven_gpus.yaml",
            untested=_FEW,
        ),
        Claim(
            id="5.19",
            text="equal shares wait 66 %; fast ones only and shares by speed take 58 % less time",
            published="66 %, 58 %",
            ask="jobs/uneven_gpus.yaml",
            measure=_scenarios,
            untested=_FEW,
            says="samples/s over equal shares",
        ),
        Claim(
            id="5.20",
            text="weights by speed balance the step",
            published="balanced",
            ask="`shares: by_speed`",
            measure=_predicted,
            says="the step that was foreseen from each device alone over the measured one",
        ),
        Claim(
            id="5.21",
            text="other accumulation on each GPU",
            published="no figure",
            ask="`shares: by_speed_accumulation`",
            measure=_by_passes,
            says="slow ones do fewer passes, not more as the article has it; a GPU at half speed",
        ),
        Claim(
            id="5.22",
            text="gap below 20 %: all alike; 20 to 50 %: by speed; above: fast only",
            published="the matrix",
            ask="jobs/uneven_gpus.yaml; `raybench advise`",
            measure=_matrix,
            says="samples/s of what the rule says over the best of the others",
        ),
        Claim(
            id="5.34d",
            text="leaving slow GPUs out gains",
            published="gains",
            ask="`shares: fast`",
            measure=_left_out,
            says="samples/s of the fast GPU alone over equal shares of both",
        ),
        Claim(
            id="5.23",
            text="a report of the environment",
            published="no figure",
            ask="`raybench health`, `doctor`",
            measure=_environment,
        ),
        Claim(
            id="5.24",
            text="matrix products of 256 to 2048 on each GPU",
            published="no figure",
            ask="`raybench health`",
            measure=lambda: _each(*(f"gemm fp32 {n}" for n in (256, 512, 1024, 2048))),
            says="from the slowest to the fastest of two",
        ),
        Claim(
            id="5.25",
            text="bandwidth of memory at 100, 500, 1000 MB on each GPU",
            published="no figure",
            ask="`raybench health`",
            measure=lambda: _each(*(f"memory {n} MB" for n in (100, 500, 1000))),
        ),
        Claim(
            id="5.26",
            text="copies between all pairs of GPUs",
            published="no figure",
            ask="`raybench health --only pairs`",
            measure=lambda: _each("copy 256 MiB", "send 256 MiB", "send latency 8 B"),
            says="both ways",
        ),
        Claim(
            id="5.27",
            text="all_reduce from 32 KiB to 2 MiB",
            published="no figure",
            ask="jobs/collectives.yaml; `raybench health`",
            measure=_all_reduces,
            says="bus bandwidth of 4 GPUs; below of 2",
        ),
        Claim(
            id="5.28",
            text="a small model trains on all GPUs: the environment is normal",
            published="no figure",
            ask="`raybench health`",
            measure=lambda: _each("smoke 784-256-10"),
        ),
        Claim(
            id="5.29",
            text="one command runs all of it, and says what to do",
            published="no figure",
            ask="`raybench health`",
            measure=_one_command,
        ),
        Claim(
            id="5.30",
            text="more than 1.5 times as slow as GPU 0 is clearly slow",
            published="1.5x",
            ask="`raybench health`",
            measure=_slower_than_the_first,
            says="at 1024 x 1024 in fp32, of two like GPUs",
        ),
        Claim(
            id="5.31",
            text="advice: leave slow ones out, or use all",
            published="no figure",
            ask="`raybench health`, `advise`",
            measure=_advice,
        ),
        Claim(
            id="5.32",
            text="the same command on many nodes",
            published="no figure",
            ask="`raybench health --address auto`",
            untested="GPUs of several hosts could not be had",
        ),
        Claim(
            id="5.33",
            text="test monthly, to notice a decline",
            published="no figure",
            ask="`raybench history --health`, `compare`",
            measure=_baseline,
            says="two checks of the same GPUs, one over the other",
        ),
    ),
)
