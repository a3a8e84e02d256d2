"""Timing on several GPUs."""

from __future__ import annotations

from benchmarks.claims import runs
from benchmarks.claims.measured import (
    cell,
    count,
    first_steps,
    health,
    host_time,
    rank_spread,
    rate,
    ratio,
    row,
    spread,
    step,
    table,
    wall_clock,
)
from benchmarks.claims.model import Article, Case, Claim, Figure, Within, at_least, near

_LARGE = {"world_size": 4, "precision": "bf16", "batch_size": 1024}
_LOOP = {"scope": "loop", "world_size": 2}
_PASS = {"world_size": 2, "ulysses": 2, "compile": False}
_WIDE = {"phase": "prefill", "preset": "175b"}


def _spread_of_ranks() -> list[Case]:
    rule = at_least(1000)
    return [
        Case(
            name=f"{name}, {when}",
            figure=rank_spread(run, is_first=is_first, **settings),
            rule=rule,
        )
        for name, run, settings in (
            ("DDP, 4 GPUs", runs.DDP, _LARGE),
            ("image on 2 GPUs", runs.DIT, _LOOP),
        )
        for when, is_first in (("mean step", False), ("first step", True))
    ]


def _unawaited() -> list[Case]:
    off = Within(most=0.9)
    return [
        *(
            Case(
                name=f"one step alone, training, batch {batch}",
                figure=wall_clock(runs.TIMING, "unsynced", world_size=1, batch_size=batch),
                rule=off,
            )
            for batch in (1, 32)
        ),
        Case(name="prefill of 175B layers", figure=host_time(runs.LATENCY, **_WIDE), rule=off),
        Case(name="DDP, 4 GPUs", figure=host_time(runs.DDP, **_LARGE), rule=off),
        Case(name="image on 2 GPUs", figure=host_time(runs.DIT, **_LOOP), rule=off),
    ]


def _awaited() -> list[Case]:
    return [
        Case(
            name=f"one step alone, batch {batch}, {gpus} GPU{'s' * (gpus > 1)}",
            figure=wall_clock(runs.TIMING, "synced", world_size=gpus, batch_size=batch),
            rule=near(1),
        )
        for batch, gpus in ((1, 1), (1, 2), (32, 1))
    ]


def _events() -> list[Case]:
    return [
        Case(name="prefill of 175B layers", figure=step(runs.LATENCY, **_WIDE)),
        Case(name="DDP, 4 GPUs", figure=step(runs.DDP, **_LARGE)),
    ]


def _five() -> list[Case]:
    return [
        Case(
            name=f"{start}, {name}",
            figure=first_steps(run, 5, is_warm=is_warm, **settings),
            rule=near(1),
        )
        for start, is_warm in (("after the warm-up", True), ("from the first call", False))
        for name, run, settings in (
            ("DDP, 4 GPUs", runs.DDP, _LARGE),
            ("image on 2 GPUs", runs.DIT_APART, _PASS),
        )
    ]


def _rank_0() -> list[Case]:
    def own(run: str, **settings: object) -> Figure:
        steps = row(run, **settings)["local_step_ms_by_rank"]
        return Figure(value=steps[0] / max(steps), runs=(run,), unit="x")

    uneven = {"shares": "equal", "slow_ratio": 0.5}
    return [
        Case(name="DDP, 4 like GPUs", figure=own(runs.DDP, **_LARGE), rule=near(1)),
        Case(name="1 of 2 GPUs at half speed", figure=own(runs.UNEVEN, **uneven), rule=near(1)),
    ]


def _stages() -> list[Case]:
    regions = table("regions", runs.LATENCY)
    regions = regions[regions.point_id == row(runs.LATENCY, **_WIDE)["point_id"]]
    return [
        Case(name=one.region, figure=count(one.share_pct, runs.LATENCY, unit="%"))
        for one in regions.itertuples()
    ]


def _transfers() -> list[Case]:
    large = {"operation": "all_reduce", "world_size": 4, "size_bytes": 2**30}
    return [
        Case(name="copy of a pair", figure=spread(health(runs.HEALTH, "copy 256 MiB"))),
        Case(name="NCCL send of a pair", figure=spread(health(runs.HEALTH, "send 256 MiB"))),
        Case(
            name="all_reduce of 1 GiB, 4 GPUs (bus)",
            figure=rate(runs.COLLECTIVES, "busbw_gb_s", "GB/s", **large),
        ),
    ]


def _batches() -> list[Case]:
    alone = {"world_size": 1, "precision": "bf16"}
    small, large = (rate(runs.DDP, **alone, batch_size=size) for size in (64, 1024))
    return [Case(name="batch 1024 over 64", figure=ratio(large, small), rule=at_least(1))]


def _utilisation() -> list[Case]:
    busy = table("telemetry", runs.LATENCY).gpu_utilization_pct
    return [
        Case(name="NVML's utilisation, most", figure=count(busy.max(), runs.LATENCY, unit="%")),
        Case(
            name="of the peak, decoding 175B layers eagerly",
            figure=cell(
                runs.LATENCY, "mfu_pct", "%", phase="decode", preset="175b", cuda_graph=False
            ),
        ),
    ]


ARTICLE = Article(
    number=1,
    title="timing on several GPUs",
    claims=(
        Claim(
            id="1.1",
            text="time.time() of the ranks differs by seconds",
            published="seconds",
            ask="`samples.host_ns`",
            measure=_spread_of_ranks,
            says="between the fastest and the slowest rank; collectives hold them together",
        ),
        Claim(
            id="1.2",
            text="time.time() without waiting is not the time of the step",
            published="wrong",
            ask="jobs/timing_ways.yaml; `wall_unsynced_ms_by_rank`, `samples.host_ns`",
            measure=_unawaited,
            says="over the step; of one step alone, then of steps back to back, where the driver "
            "makes the host wait once the queue of launches is full",
        ),
        Claim(
            id="1.3",
            text="CUDA events are the first choice",
            published="no figure",
            ask="`samples.step_ns`; docs/method.md",
            measure=_events,
            says="step by events, back to back",
        ),
        Claim(
            id="1.4",
            text="for a quick look, time.time() with synchronize is right",
            published="right",
            ask="jobs/timing_ways.yaml; `wall_synced_ms_by_rank`",
            measure=_awaited,
            says="over the step; with a small batch the wait for the launches is in it, and the "
            "host is what is measured",
        ),
        Claim(
            id="1.5",
            text="five measurements, averaged, are enough",
            published="5",
            ask="`samples` with `is_warmup`",
            measure=_five,
            says="mean of five over the median of the timed steps",
        ),
        Claim(
            id="1.6",
            text="rank 0 is the reference for all ranks",
            published="rank 0",
            ask="`local_step_ms_by_rank`",
            measure=_rank_0,
            says="its own step over the slowest rank's",
        ),
        Claim(
            id="1.7",
            text="find the stage that is the bottleneck",
            published="no figure",
            ask="regions, `--profile`; jobs/raw_latency.yaml",
            measure=_stages,
            says="of a prefill with layers of 175B",
        ),
        Claim(
            id="1.8",
            text="watch the transfers between GPUs",
            published="no figure",
            ask="`raybench health`; jobs/collectives.yaml",
            measure=_transfers,
        ),
        Claim(
            id="1.9",
            text="adapt the batch so that the GPU is used",
            published="no figure",
            ask="jobs/ddp_scaling.yaml",
            measure=_batches,
            says="samples/s on one GPU, bf16",
        ),
        Claim(
            id="1.10",
            text="watch the utilisation",
            published="no figure",
            ask="table `telemetry`, `raybench show`",
            measure=_utilisation,
            says="a GPU that is busy all the time may do next to nothing of what it could",
        ),
    ),
)
