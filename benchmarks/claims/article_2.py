"""The raw latency of a model on one GPU."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.claims import runs
from benchmarks.claims.measured import (
    cell,
    count,
    memory,
    ratio,
    rows,
    samples,
    step,
    table,
)
from benchmarks.claims.model import Article, Case, Claim, at_most, near

_POINT_COST = Path(__file__).parents[2] / "docs" / "benchmarks" / "point-cost-2cores.json"
_SIZES = ("1.3b", "6.7b", "175b")


def _alone() -> list[Case]:
    sent = [one for one in rows(runs.LATENCY) if one["comm_calls"] or one["backend"] is not None]
    return [
        Case(
            name="points with a process group, of one GPU",
            figure=count(len(sent), runs.LATENCY),
            rule=at_most(0),
        )
    ]


def _latency() -> list[Case]:
    return [
        Case(
            name=f"{phase}, {size}",
            figure=step(runs.LATENCY, phase=phase, preset=size, cuda_graph=fast, compile=fast),
        )
        for phase, fast in (("decode", True), ("prefill", False))
        for size in _SIZES
    ]


def _of_the_peak() -> list[Case]:
    return [
        Case(
            name=f"prefill, {size}",
            figure=cell(runs.LATENCY, "mfu_pct", "%", phase="prefill", preset=size),
        )
        for size in _SIZES
    ]


def _layers() -> list[Case]:
    regions = table("regions", runs.LATENCY)
    chosen = samples(runs.LATENCY, phase="prefill", preset="6.7b").point_id.iloc[0]
    regions = regions[regions.point_id == chosen]
    return [
        Case(
            name=f"{one.region}, {one.calls} calls",
            figure=count(round(one.region_ms, 3), runs.LATENCY, unit="ms"),
        )
        for one in regions.itertuples()
    ]


def _again() -> list[Case]:
    return [
        Case(
            name=f"{precision}, {count_} GPUs, batch 1024",
            figure=ratio(
                step(runs.DDP, precision=precision, world_size=count_, batch_size=1024),
                step(runs.DDP_ELSEWHERE, precision=precision, world_size=count_, batch_size=1024),
            ),
            rule=near(1),
        )
        for precision in ("fp32", "bf16")
        for count_ in (1, 4)
    ]


def _fits() -> list[Case]:
    largest = {"phase": "prefill", "preset": "175b"}
    device = table("devices", runs.LATENCY).memory_bytes.iloc[0] / 2**30
    return [
        Case(name="8 layers of 175B, at the peak", figure=memory(runs.LATENCY, **largest)),
        Case(name="the device", figure=count(round(device, 1), runs.LATENCY, unit="GiB")),
    ]


def _small() -> list[Case]:
    """Read what a point costs on two cores beyond its own iterations."""
    found = json.loads(_POINT_COST.read_text())["result"]
    seconds = {"raybench": "sweep_s_per_point", "torchrun": "torchrun_s_per_point"}
    return [
        Case(name=name, figure=count(found[key], _POINT_COST.name, unit="s"))
        for name, key in seconds.items()
    ]


ARTICLE = Article(
    number=2,
    title="raw latency on one GPU",
    claims=(
        Claim(
            id="2.1",
            text="on one GPU there is no NCCL and nothing is synchronised",
            published="none",
            ask="jobs/raw_latency.yaml",
            measure=_alone,
        ),
        Claim(
            id="2.2",
            text="the latency of a model on one card",
            published="no figure",
            ask="jobs/raw_latency.yaml",
            measure=_latency,
            says="decode: one token, compiled, in a CUDA graph; prefill: 1024 tokens",
        ),
        Claim(
            id="2.3",
            text="compare with the operations in theory",
            published="no figure",
            ask="`mfu_pct`",
            measure=_of_the_peak,
            says="of the datasheet's dense peak",
        ),
        Claim(
            id="2.4",
            text="the time of each layer",
            published="no figure",
            ask="regions; `--profile` for each module",
            measure=_layers,
            says="of a prefill of 6.7B",
        ),
        Claim(
            id="2.5",
            text="a run serves as the baseline for later ones",
            published="no figure",
            ask="`raybench compare`, `history`",
            measure=_again,
            says="the step of one run over that of another on other H200s, a day apart",
        ),
        Claim(
            id="2.6",
            text="does the model fit into the memory?",
            published="no figure",
            ask="`raybench plan --device-memory SIZE`; `peak_mem_allocated_bytes`",
            measure=_fits,
            says="after the run; before it, `plan` estimates models that train",
        ),
        Claim(
            id="2.7",
            text="debug on small machines",
            published="no figure",
            ask="any job with `--address local` on CPU workers, by gloo",
            measure=_small,
            says="a point on two cores, beside a fresh torchrun of it",
        ),
    ),
)
