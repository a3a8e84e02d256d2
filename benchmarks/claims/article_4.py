"""Flux with its sequence divided over GPUs."""

from __future__ import annotations

from benchmarks.claims import runs
from benchmarks.claims.measured import (
    count,
    first_steps,
    host_time,
    memory,
    ratio,
    row,
    rows,
    samples,
    scale,
    speed_up,
    step,
    wall_clock,
)
from benchmarks.claims.model import Article, Case, Claim, Figure, Within, at_least, at_most, near

_FOUR = "4 GPUs of one host could not be had; 2 are shown"
_BLOCKS = {"double block": ("double_block", 19), "single block": ("single_block", 38)}


def _blocks() -> list[Case]:
    return [
        Case(name=f"{name}, 2 GPUs", figure=speed_up(runs.DIT, scope=scope, world_size=2))
        for name, (scope, _) in _BLOCKS.items()
    ]


def _cold(scope: str, gpus: int) -> Figure:
    """Take the first step after the build in new processes, the median over the rounds."""
    run = runs.DIT_COLD_PASS if scope == "forward" else runs.DIT_COLD
    found = row(run, scope=scope, world_size=gpus)
    assert found["new_processes"], "elsewhere something is loaded already"
    return Figure(value=found["first_step_ms"], unit="ms", runs=(run,))


def _pipeline() -> list[Case]:
    slower = at_most(1)
    return [
        *(
            Case(name=f"cold: {name}", figure=ratio(_cold(scope, 1), _cold(scope, 2)), rule=slower)
            for name, scope in (("a pass", "forward"), ("a loop of two passes", "loop"))
        ),
        Case(
            name="warm: later loops",
            figure=speed_up(runs.DIT, scope="loop", world_size=2),
            rule=slower,
        ),
    ]


def _more_memory() -> list[Case]:
    one, two = (memory(runs.DIT, scope="loop", world_size=gpus) for gpus in (1, 2))
    grown = count(two.value / one.value, runs.DIT, unit="x")
    return [Case(name="2 GPUs over 1, a device", figure=grown, rule=at_least(1.01))]


def _cold_start() -> list[Case]:
    return [
        Case(
            name=f"first loop over later ones, {gpus} GPU{'s' * (gpus > 1)}",
            figure=ratio(_cold("loop", gpus), step(runs.DIT_COLD, scope="loop", world_size=gpus)),
            rule=at_least(1.1),
        )
        for gpus in (1, 2)
    ]


def _remedies() -> list[Case]:
    retries = [one for one in rows(runs.DIT) if one["status"] == "ok"]
    return [
        Case(
            name="warm-up: 5 steps after it over the step",
            figure=first_steps(runs.DIT, 5, is_warm=True, scope="forward", world_size=2),
            rule=near(1),
        ),
        Case(
            name="memory taken from the device in timed steps",
            figure=count(sum(int(one["device_allocs"]) for one in retries), runs.DIT),
            rule=at_most(0),
        ),
    ]


def _lost() -> list[Case]:
    loop = speed_up(runs.DIT, scope="loop", world_size=2)
    block = speed_up(runs.DIT, scope="single_block", world_size=2)
    return [
        Case(name="gain of the loop over the block's", figure=ratio(loop, block), rule=at_most(1))
    ]


def _costs() -> list[Case]:
    ulysses = {"world_size": 2, "ulysses": 2, "compile": False}
    found = row(runs.DIT_APART, **ulysses)
    share = 100 * found["comm_exposed_ms"] / found["step_ms_p50"]
    sent = sum(found["comm_bytes"].values()) / 2**30
    one = {"world_size": 1, "compile": False}
    return [
        Case(
            name="communication, of the step",
            figure=Figure(value=share, unit="%", runs=(runs.DIT_APART,)),
        ),
        Case(name="messages in a pass", figure=count(sent, runs.DIT_APART, unit="GiB")),
        Case(name="memory on 1", figure=memory(runs.DIT_APART, **one)),
        Case(name="memory on 2", figure=memory(runs.DIT_APART, **ulysses)),
    ]


def _warm_ups() -> list[Case]:
    return [
        Case(name=name, figure=_needed(run, **settings), rule=at_most(10))
        for name, run, settings in (
            (
                "DDP, 4 GPUs, fp32",
                runs.DDP,
                {"world_size": 4, "precision": "fp32", "batch_size": 1024},
            ),
            (
                "DDP, 4 GPUs, bf16",
                runs.DDP,
                {"world_size": 4, "precision": "bf16", "batch_size": 1024},
            ),
            (
                "transformer, 4 GPUs, batch 4",
                runs.MIXED_ON_4,
                {"world_size": 4, "precision": "bf16", "batch_size": 4},
            ),
            ("a block on 1 GPU", runs.DIT, {"scope": "single_block", "world_size": 1}),
            ("a loop on 2 GPUs", runs.DIT, {"scope": "loop", "world_size": 2}),
        )
    ]


def _needed(run: str, **settings: object) -> Figure:
    """How many steps it takes until three in a row are within 5 % of the timed ones' median."""
    found = samples(run, **settings)
    steps = found[found.is_warmup].groupby("iteration").step_ns.max() / 1e6
    is_near = (steps / row(run, **settings)["step_ms_p50"]).between(0.95, 1.05)
    three = is_near & is_near.shift(-1, fill_value=True) & is_near.shift(-2, fill_value=True)
    if not three.any():
        return count(len(steps) + 1, run, text=f"more than {len(steps)}")
    return count(int(three.to_numpy().argmax()), run)


def _host() -> list[Case]:
    off = Within(most=0.9)
    alone = wall_clock(runs.TIMING, "unsynced", world_size=1, batch_size=32)
    return [
        Case(name="one training step alone, batch 32", figure=alone, rule=off),
        Case(
            name="prefill with layers of 175B, back to back",
            figure=host_time(runs.LATENCY, phase="prefill", preset="175b"),
            rule=off,
        ),
    ]


def _layers() -> list[Case]:
    """Set the blocks of a pass on one GPU, each timed alone, beside the pass."""
    parts = [
        scale(step(runs.DIT, scope=scope, world_size=1), lambda ms, n=number: n * ms, "ms")
        for scope, number in _BLOCKS.values()
    ]
    summed = Figure(value=sum(part.value for part in parts), unit="ms", runs=(runs.DIT,))
    whole = step(runs.DIT, scope="forward", world_size=1)
    return [
        Case(name="19 double and 38 single blocks", figure=summed),
        Case(name="the forward pass", figure=whole),
        Case(name="one over the other", figure=ratio(summed, whole), rule=near(1)),
    ]


ARTICLE = Article(
    number=4,
    title="one image on several GPUs (Flux, sequence parallel)",
    claims=(
        Claim(
            id="4.1",
            text="on 4 GPUs a double block is 2.28 and a single one 2.21 times as fast",
            published="8.2 to 3.6, 7.5 to 3.4 ms",
            ask="jobs/dit_module_vs_pipeline.yaml",
            measure=_blocks,
            untested=_FOUR,
        ),
        Claim(
            id="4.2",
            text="the whole pipeline is slower on several GPUs than on one",
            published="2.57 to 6.30 s, 0.41x",
            ask="jobs/dit_module_vs_pipeline.yaml",
            measure=_pipeline,
            says="gain of 2 GPUs over 1; cold: the first of new processes, by medians of 2 to 4",
        ),
        Claim(
            id="4.3",
            text="a device needs more memory than one alone",
            published="36.3 to 38.5 GB, 1.06x",
            ask="jobs/dit_module_vs_pipeline.yaml",
            measure=_more_memory,
            untested=f"{_FOUR}, and what NCCL takes outside of torch's allocator is not in it",
        ),
        Claim(
            id="4.4",
            text="the cause is the cold start",
            published="no figure",
            ask="`first_step_ms`",
            measure=_cold_start,
        ),
        Claim(
            id="4.5",
            text="warm up, and allocate beforehand",
            published="no figure",
            ask="`device_allocs`, `alloc_retries`",
            measure=_remedies,
        ),
        Claim(
            id="4.6",
            text="what a module gains, the system need not gain",
            published="2.2x of blocks, 0.41x of all",
            ask="jobs/dit_module_vs_pipeline.yaml",
            measure=_lost,
            says="warm, 2 GPUs over 1",
        ),
        Claim(
            id="4.7",
            text="dividing the sequence costs communication and memory: watch both",
            published="no figure",
            ask="jobs/dit_sequence_parallel.yaml",
            measure=_costs,
            says="by Ulysses, eager",
        ),
        Claim(
            id="4.8",
            text="5 to 10 iterations of warm-up are needed",
            published="5 to 10",
            ask="`samples` with `is_warmup`",
            measure=_warm_ups,
            says="steps before three in a row are within 5 % of the timed ones",
        ),
        Claim(
            id="4.9",
            text="events, not the host's time",
            published="no figure",
            ask="`samples.host_ns` beside `step_ns`; jobs/timing_ways.yaml",
            measure=_host,
            says="over the step; of steps back to back the driver makes the host wait once the "
            "queue of launches is full",
        ),
        Claim(
            id="4.10",
            text="look at kernel, module, step and pipeline",
            published="no figure",
            ask="`scope`, regions, `--profile`",
            measure=_layers,
            says="blocks timed alone explain the pass",
        ),
    ),
)
