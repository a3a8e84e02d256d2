"""The long article: distributed training from memory to uneven GPUs, sections 1 to 8."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.claims import runs
from benchmarks.claims.article_3 import without_sampler
from benchmarks.claims.measured import (
    cell,
    count,
    memory,
    own_metric,
    percent_more,
    percent_of,
    rate,
    ratio,
    row,
    rows,
    select,
    speed_up,
    step,
    table,
)
from benchmarks.claims.model import Article, Case, Claim, Figure, Within, at_least, at_most, near

_FAULTS = Path(__file__).parents[2] / "docs" / "benchmarks" / "faults-2xh200.json"
_HALVES = ("fp16", "bf16")
_MODES = {"forward pass": "inference", "training step": "train"}


def _gradients() -> list[Case]:
    equal = {"shares": "equal", "slow_ratio": 0.5}
    precision = row(runs.UNEVEN, **equal)["precision"]
    return [
        Case(
            name=f"equal shares, {precision}: to one process over all samples",
            figure=cell(runs.UNEVEN, "gradient_error", **equal),
            rule=at_most(1e-4),
        )
    ]


_PARTS = ("parameters", "gradients", "optimizer", "activations")


def _composition() -> list[Case]:
    one = row(runs.MEMORY, optimizer="adamw", precision="tf32", batch_size=1)
    sizes = {part: int(one[f"mem_{part}_bytes"]) for part in _PARTS}
    kept = sum(sizes[part] for part in _PARTS[:3])
    return [
        *(
            Case(name=part, figure=count(size / 1e9, runs.MEMORY, unit="GB"))
            for part, size in sizes.items()
        ),
        Case(
            name="all but activations over parameters",
            figure=count(kept / sizes["parameters"], runs.MEMORY, unit="x"),
            rule=near(4),
        ),
    ]


def _master_weights() -> list[Case]:
    full, half = (
        memory(runs.RESNET, "mem_parameters_bytes", mode="train", precision=p, channels_last=False)
        for p in ("fp32", "fp16")
    )
    return [
        Case(name="weights in fp16 over fp32, bytes", figure=_plain(half, full), rule=near(1)),
    ]


def _plain(one: Figure, other: Figure) -> Figure:
    """Divide two sizes."""
    return count(one.value / other.value, *one.runs, unit="x")


def _resnet_speed() -> list[Case]:
    return [
        Case(
            name=f"{name}, {precision}{', channels last' * last}",
            figure=speed_up(runs.RESNET, mode=mode, precision=precision, channels_last=last),
            rule=Within(least=1.5, most=3),
        )
        for name, mode in _MODES.items()
        for precision, last in (("fp16", False), ("fp16", True), ("bf16", False))
    ]


def _transformer_speed() -> list[Case]:
    return [
        Case(
            name=f"{precision}, batch {batch}, {gpus} GPU{'s' * (gpus > 1)}",
            figure=speed_up(run, precision=precision, batch_size=batch, world_size=gpus),
            rule=Within(least=1.5, most=3),
        )
        for precision in ("tf32", *_HALVES)
        for run, batch, gpus in ((runs.MIXED, 4, 1), (runs.MIXED, 32, 1), (runs.MIXED_ON_4, 32, 4))
    ]


def _saved(rule: Within) -> list[Case]:
    resnet = [
        (f"ResNet-50 {name}", runs.RESNET, {"mode": mode, "channels_last": False})
        for name, mode in _MODES.items()
    ]
    transformer = [
        (f"transformer, batch {batch}", runs.MIXED, {"batch_size": batch, "world_size": 1})
        for batch in (4, 32)
    ]
    return [
        Case(
            name=name,
            figure=percent_of(
                memory(run, precision="bf16", **settings), memory(run, precision="fp32", **settings)
            ),
            rule=rule,
        )
        for name, run, settings in (*resnet, *transformer)
    ]


def _outputs() -> list[Case]:
    resnet = {"mode": "inference", "channels_last": False}
    training = {"batch_size": 4, "world_size": 1}
    return [
        Case(
            name=f"{name}, {precision}",
            figure=own_metric(run, "output_error", precision=precision, **settings),
            rule=at_most(0.01),
        )
        for name, run, settings in (
            ("ResNet-50", runs.RESNET, resnet),
            ("transformer that trains", runs.MIXED, training),
        )
        for precision in ("tf32", *_HALVES)
    ]


def _single_and_many() -> list[Case]:
    return [
        Case(
            name=f"speed-up, {gpus} GPUs, {precision}, batch {batch}",
            figure=speed_up(runs.DDP, world_size=gpus, precision=precision, batch_size=batch),
            rule=near(gpus),
        )
        for gpus in (2, 4)
        for precision, batch in (("fp32", 1024), ("bf16", 64))
    ]


def _waiting() -> list[Case]:
    """Rank 0 is fast: its own step, its wait, the exchange, as parts of the step."""
    one = row(runs.UNEVEN, shares="equal", slow_ratio=0.5)
    own, step_ms = one["local_step_ms_by_rank"], one["step_ms_p50"]
    last = max(own)
    run = runs.UNEVEN
    parts = {"fast: computes": own[0], "waits": last - own[0], "exchanges": step_ms - last}
    return [
        *(
            Case(name=name, figure=Figure(value=ms, unit="ms", runs=(run,)))
            for name, ms in parts.items()
        ),
        Case(name="slow: computes", figure=Figure(value=last, unit="ms", runs=(run,))),
        Case(
            name="fast GPU waits, over what it computes",
            figure=Figure(value=(last - own[0]) / own[0], unit="x", runs=(run,)),
            rule=near(1),
        ),
    ]


def _barrier() -> list[Case]:
    large = {"world_size": 4, "precision": "bf16", "batch_size": 1024}
    return [
        Case(name="skew of 4 ranks in a step", figure=cell(runs.DDP, "skew_ms_p50", "ms", **large))
    ]


def _script() -> list[Case]:
    return [
        Case(name=f"{gpus} GPU{'s' * (gpus > 1)}", figure=step(runs.SCRIPT, world_size=gpus))
        for gpus in (1, 2)
    ]


def _utilisation() -> list[Case]:
    busy = table("telemetry", runs.DDP).gpu_utilization_pct
    sent = row(runs.DIT_APART, world_size=2, ulysses=2, compile=False)["comm_calls"]
    text = ", ".join(f"{calls} {kind}" for kind, calls in sorted(sent.items()))
    return [
        Case(name="NVML's utilisation, most", figure=count(busy.max(), runs.DDP, unit="%")),
        Case(
            name="collectives in a pass",
            figure=count(sum(sent.values()), runs.DIT_APART, text=text),
        ),
    ]


def _hangs() -> list[Case]:
    """Faults that were injected on two H200s: how many ended as they should, in time."""
    faults = json.loads(_FAULTS.read_text())["faults"]
    right = sum(bool(fault["as_wanted"]) for fault in faults)
    run = _FAULTS.name
    return [
        Case(name="faults injected", figure=count(len(faults), run)),
        Case(name="wrong in their row", figure=count(len(faults) - right, run), rule=at_most(0)),
    ]


def _remedies() -> list[Case]:
    plain, again = (
        max(int(one["batch_size"]) for one in select(runs.LARGEST, activation_checkpointing=name))
        for name in (False, True)
    )
    half, full = (
        memory(runs.MIXED, precision=p, batch_size=32, world_size=1) for p in ("bf16", "fp32")
    )
    more = at_least(1)
    return [
        Case(
            name="largest batch, checkpointing over none",
            figure=count(again / plain, runs.LARGEST, unit="x"),
            rule=more,
        ),
        Case(name="memory, fp32 over bf16", figure=_plain(full, half), rule=more),
    ]


def _accumulated() -> list[Case]:
    """Compare what 4 GPUs take beyond one, for each pass, with one pass a step."""
    fell = Within(least=30, most=50)
    per_pass = {passes: _exchange_of_a_pass(passes) for passes in (1, 2, 4, 8)}
    return [
        Case(
            name=f"{passes} passes over 1",
            figure=percent_of(per_pass[passes], per_pass[1]),
            rule=fell,
        )
        for passes in (2, 4, 8)
    ]


def _exchange_of_a_pass(passes: int) -> Figure:
    one, four = (
        step(runs.ACCUMULATION, world_size=gpus, grad_accumulation=passes) for gpus in (1, 4)
    )
    value = (four.value - one.value) / passes
    half = sum(((end[1] - end[0]) / 2) ** 2 for end in (one.ends, four.ends)) ** 0.5 / passes
    is_known = one.low is not None and four.low is not None
    ends = {"low": value - half, "high": value + half} if is_known else {}
    return Figure(value=value, **ends, unit="ms", runs=(runs.ACCUMULATION,))


def _accumulation_gain() -> list[Case]:
    large = {"world_size": 4, "batch_size": 4096}
    eight, one = (rate(runs.ACCUMULATION, grad_accumulation=passes, **large) for passes in (8, 1))
    return [
        *_gradients(),
        Case(name="samples/s, 8 passes over 1, 4 GPUs", figure=ratio(eight, one)),
    ]


def _dynamic() -> list[Case]:
    found = [
        (run, one["slow_ratio"])
        for run in (runs.UNEVEN, runs.UNEVEN_AT_0_6)
        for one in rows(run)
        if one["shares"] == "by_speed" and one["status"] == "ok"
    ]
    return [
        Case(
            name=f"slow GPU asked to do {slow:g}",
            figure=percent_more(speed_up(run, shares="by_speed", slow_ratio=slow)),
            rule=Within(least=20, most=40),
        )
        for run, slow in sorted(found, key=lambda one: -one[1])
    ]


TRAINING = Article(
    number=5,
    title="distributed training, from memory to trouble (sections 1 to 7, 11)",
    claims=(
        Claim(
            id="5.1",
            text="gradients are averaged over the ranks, as if one had all samples",
            published="equal",
            ask="`gradient_error`",
            measure=_gradients,
            says="largest relative difference of a parameter's gradient",
        ),
        Claim(
            id="5.2",
            text="500M parameters are 2 GB, with gradients and Adam more than 8 GB",
            published="4x the parameters",
            ask="`mem_parameters_bytes` to `mem_other_bytes`",
            measure=_composition,
            says="508M parameters, AdamW, tf32, one sequence",
        ),
        Claim(
            id="5.3",
            text="8 passes of 1 are 1 pass of 8",
            published="equal",
            ask="jobs/grad_accumulation.yaml",
            measure=_accumulation_gain,
            says="gradients of 8 passes on 2 GPUs against one process; the time is another",
        ),
        Claim(
            id="5.4",
            text="autocast keeps the weights in fp32",
            published="fp32",
            ask="`mem_parameters_bytes`",
            measure=_master_weights,
        ),
        Claim(
            id="5.5",
            text="autocast is 1.5 to 3 times as fast, ResNet-50, 32 images",
            published="1.5x to 3x",
            ask="jobs/resnet50_amp.yaml",
            measure=_resnet_speed,
            says="over fp32 without TF32; under autocast these steps wait for Python",
        ),
        Claim(
            id="5.6a",
            text="mixed precision trains 1.5 to 3 times as fast",
            published="1.5x to 3x",
            ask="jobs/mixed_precision.yaml",
            measure=_transformer_speed,
            says="transformer of 124M over fp32 without TF32; autocast gains more than published",
        ),
        Claim(
            id="5.6b",
            text="with 30 to 50 % less memory",
            published="30 to 50 %",
            ask="jobs/mixed_precision.yaml, resnet50_amp.yaml",
            measure=lambda: _saved(Within(least=30, most=50)),
            says="bf16 against fp32; only activations get smaller",
        ),
        Claim(
            id="5.6c",
            text="and practically the same outputs",
            published="within 1 %",
            ask="`output_error`; jobs/resnet50_amp.yaml, mixed_precision.yaml",
            measure=_outputs,
            says="largest difference over the largest output, random weights; 1 % is our reading",
        ),
        Claim(
            id="5.7",
            text="data is divided, not repeated",
            published="0.53 of the time",
            ask="jobs/ddp_linear.yaml; `distributed_sampler: [true, false]`",
            measure=without_sampler,
            says="published: half the time on twice the GPUs, by code that has no sampler",
        ),
        Claim(
            id="5.8",
            text="N GPUs are nearly N times as fast",
            published="Nx",
            ask="jobs/ddp_scaling.yaml",
            measure=_single_and_many,
            says="an MLP with much to exchange for what it computes; cost and convergence are not "
            "measured",
        ),
        Claim(
            id="5.9",
            text="a fast GPU computes 10 s, waits 10 s, exchanges 5 s; a slow one 20 and 5",
            published="10 s, 10 s",
            ask="jobs/uneven_gpus.yaml",
            measure=_waiting,
            says="one of two H200s made slow, equal shares",
        ),
        Claim(
            id="5.10",
            text="ranks, world size and a barrier keep processes together",
            published="no figure",
            ask="`skew_ms_p50`",
            measure=_barrier,
        ),
        Claim(
            id="5.11",
            text="the sampler shuffles anew in each epoch",
            published="set_epoch",
            ask="tests/unit/workloads/test_data.py",
            untested="no matter of time; a unit test holds it",
        ),
        Claim(
            id="5.12",
            text="a whole training loop, with checkpoints by rank 0",
            published="no figure",
            ask="`raybench sweep --script`",
            measure=_script,
            says="a script of one's own; what a checkpoint costs is not measured",
        ),
        Claim(
            id="5.13",
            text="learning rate = base x effective batch / 256",
            published="the formula",
            ask="`raybench advise` says what the formula gives",
            untested="steps are timed with a learning rate of next to nothing; nothing converges",
        ),
        Claim(
            id="5.14",
            text="see utilisation and communication by nvidia-smi and NCCL_DEBUG",
            published="no figure",
            ask="table `telemetry`; `comm_calls`",
            measure=_utilisation,
        ),
        Claim(
            id="5.15",
            text="a hang at a barrier: has a process crashed?",
            published="no figure",
            ask="`error_rank`; docs/reliability.md",
            measure=_hangs,
        ),
        Claim(
            id="5.16",
            text="out of memory: checkpointing and mixed precision help",
            published="help",
            ask="jobs/largest_batch.yaml",
            measure=_remedies,
        ),
        Claim(
            id="5.17",
            text="training is unstable: are gradients the same on all ranks?",
            published="no figure",
            ask="`measure: {check_gradients: true}`",
            measure=_gradients,
            says="of a run that probed its devices, which looks at it too",
        ),
        Claim(
            id="5.34a",
            text="accumulation: 30 to 50 % less communication",
            published="30 to 50 %",
            ask="jobs/grad_accumulation.yaml",
            measure=_accumulated,
            says="what 4 GPUs take beyond one, for each pass; it halves with each doubling",
        ),
        Claim(
            id="5.34b",
            text="mixed precision: 40 to 60 % less memory",
            published="40 to 60 %",
            ask="jobs/mixed_precision.yaml, resnet50_amp.yaml",
            measure=lambda: _saved(Within(least=40, most=60)),
        ),
        Claim(
            id="5.34c",
            text="shares by speed: 20 to 40 % more throughput",
            published="20 to 40 %",
            ask="jobs/uneven_gpus.yaml",
            measure=_dynamic,
            says="over equal shares, 1 of 2 GPUs slow",
        ),
    ),
)
