"""The diffusion transformer: its sizes, what its ranks compute together, what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dit_ranks import DEGREES, SHAPE, cases, run_rank
from forked import run_ranks

from raybench.errors import JobError, UsageError
from raybench.job.model import load_job
from raybench.job.plan import make_plan
from raybench.job.point import Precision
from raybench.measure.flops import step_flops
from raybench.workloads.attention import attention_part, choose_kernel, merge
from raybench.workloads.attention_operator import AttentionOperator
from raybench.workloads.base import Context, WrongResultError
from raybench.workloads.dit import Dit
from raybench.workloads.dit_model import Dit as Model
from raybench.workloads.dit_model import SingleBlock, rotation
from raybench.workloads.model_sizes import DIT_PRESETS, dit_flops, parameter_count
from raybench.workloads.sequence_parallel import attend_whole

TINY: dict[str, Any] = {"preset": "tiny", "height": 64, "width": 64, "text_tokens": 8}


def context(**changes: Any) -> Context:
    settings: dict[str, Any] = {
        "device": torch.device("cpu"), "rank": 0, "world_size": 1, "local_rank": 0,
        "batch_size": 1, "precision": Precision.FP32, "seed": 3, **changes,
    }  # fmt: skip
    return Context(**settings)


def count_on_meta(**params: Any) -> float | None:
    """Count the operations of a step as torch executes it, whatever the class declares."""
    return step_flops(Dit, params, context()).flops


@pytest.mark.parametrize("scope", ["double_block", "single_block", "forward"])
def test_the_operations_of_a_step_are_those_that_are_counted(scope: str) -> None:
    shape = replace(DIT_PRESETS["flux"], double_blocks=2, single_blocks=3)
    flops = dit_flops(shape, scope, text=512, image=4096)
    assert count_on_meta(scope=scope, double_blocks=2, single_blocks=3) == flops


def test_flux_has_the_sizes_that_it_is_known_by() -> None:
    shape = DIT_PRESETS["flux"]
    assert (shape.width, shape.head) == (3072, 128)
    with torch.device("meta"):
        model = Model(shape, attend=lambda query, key, value: value)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == parameter_count("dit", {"preset": "flux", "scope": "forward"})
    assert round(count / 1e9, 2) == 11.90
    assert round(dit_flops(shape, "forward", text=512, image=4096) / 1e12, 1) == 74.4
    for scope in ("double_block", "single_block"):
        tflop = dit_flops(shape, scope, text=512, image=4096) / 1e12
        assert tflop == pytest.approx(1.3046, abs=3e-4)


@pytest.mark.parametrize("scope", ["double_block", "single_block"])
def test_the_parameters_of_a_block_are_counted(scope: str) -> None:
    with torch.device("meta"):
        model = Model(DIT_PRESETS["tiny"], attend=lambda query, key, value: value)
    block = getattr(model, f"{scope}s")[0]
    count = sum(parameter.numel() for parameter in block.parameters())
    assert count == parameter_count("dit", {"preset": "tiny", "scope": scope})


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    answers = run_ranks(run_rank, max(DEGREES), str(tmp_path_factory.mktemp("group") / "store"))
    return {
        world_size: [answer[world_size] for answer in answers if world_size in answer]
        for world_size in DEGREES
    }


ALL_CASES = [(world_size, name) for world_size in DEGREES for name, _ in cases(world_size)]


@pytest.mark.parametrize(("world_size", "case"), ALL_CASES)
def test_ranks_compute_together_what_one_computes_alone(
    world_size: int, case: str, ranks: dict[int, list[Any]]
) -> None:
    assert all(rank["differences"][case] <= 1e-10 for rank in ranks[world_size])


def bytes_of_a_block(
    ulysses: int, ring: int, ring_kind: str, split_text: bool
) -> tuple[dict[str, int], int]:
    """What a rank sends in one block, by the closed formulas; and the bytes of the whole output."""
    width, size, image, text = SHAPE.width, 8, 24, 12
    ranks = ulysses * ring
    own = (image + text * split_text) // ranks
    # Four times: query, key, value and output.
    exchanged = 4 * own * width * size * (ulysses - 1) // ulysses
    # Key and value, of the tokens of the ulysses group and its heads of a rank.
    passed_on = 2 * (own * ulysses) * (width // ulysses) * size * (ring - 1)
    gathered = 0 if split_text else text * (width // ulysses) * size * (ulysses - 1)
    is_p2p = ring_kind == "p2p"
    return {
        "all_to_all": exchanged,
        "batch_isend": passed_on if is_p2p else 0,
        "all_gather": gathered + (0 if is_p2p else passed_on),
    }, image // ranks * SHAPE.channels * size * (ranks - 1)


@pytest.mark.parametrize(("world_size", "case"), ALL_CASES)
def test_each_collective_moves_the_bytes_of_the_closed_formulas(
    world_size: int, case: str, ranks: dict[int, list[Any]]
) -> None:
    settings = dict(cases(world_size))[case]
    expected, output = bytes_of_a_block(**settings)
    counted = ranks[world_size][-1]["bytes"][case]
    for scope, blocks, of_output in (
        ("double_block", 1, 0), ("single_block", 1, 0), ("forward", 2, output),
    ):  # fmt: skip
        found = {
            name: sum(
                sent for call, sent in counted[scope].items()
                if call.startswith(name) and "calls" not in call
            )
            for name in expected
        }  # fmt: skip
        gathered = blocks * expected["all_gather"] + of_output
        assert found == {n: blocks * b for n, b in expected.items()} | {"all_gather": gathered}
    if settings["ulysses"] > 1:
        assert counted["double_block"]["all_to_all_single calls"] == 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_check_tells_right_from_wrong(precision: str, ranks: dict[int, list[Any]]) -> None:
    for told in (rank["faults"] for rank in ranks[2]):
        found = {name: text for name, text in told.items() if name.endswith(precision)}
        right = {f"ulysses, {precision}", f"ring, {precision}"}
        assert {name for name, text in found.items() if text == "right"} == right
        assert all(
            f"dit in {precision}, divided over 2 ranks, differs from the whole by" in text
            for name, text in found.items()
            if name not in right
        )
        assert len(found) == 5


def test_parts_are_merged_to_the_whole() -> None:
    query, key, value = torch.randn(3, 1, 2, 12, 8, dtype=torch.float64).unbind()
    attention = attention_part("flash")
    parts = [attention(query, key[:, :, own], value[:, :, own]) for own in (
        slice(0, 1), slice(1, 7), slice(7, 12),
    )]  # fmt: skip
    torch.testing.assert_close(merge(parts), attention(query, key, value)[0])
    assert merge([(out.float(), one.float()) for out, one in parts]).dtype is torch.float32


def test_a_kernel_that_the_device_lacks_is_refused_in_one_line() -> None:
    tokens = torch.randn(1, 2, 8, 8)
    assert choose_kernel("auto", tokens) == "flash"
    with pytest.raises(UsageError, match="attention cudnn is for CUDA devices; on a CPU take"):
        choose_kernel("cudnn", tokens)


def test_all_kernels_compute_the_same() -> None:
    outputs = []
    for changes in ({}, {"attention": "math"}):
        workload = Dit(context(), **TINY, **changes)
        workload.step()
        outputs.append(workload.output)
    torch.testing.assert_close(outputs[0], outputs[1])


@pytest.mark.long
def test_attention_over_ranks_is_one_operator_of_a_compiled_block() -> None:
    shape = DIT_PRESETS["tiny"]
    whole = partial(attend_whole, "flash")
    blocks = [SingleBlock(shape, attend) for attend in (whole, AttentionOperator(whole))]
    blocks[1].load_state_dict(blocks[0].state_dict())
    # In one graph, or this raises.
    compiled = torch.compile(blocks[1], backend="aot_eager", fullgraph=True)
    tokens, time = torch.randn(6, shape.width), torch.randn(1, shape.width)
    places = rotation(shape, text_tokens=2, rows=2, columns=2, like=tokens)
    with torch.inference_mode():
        expected, found = (block(tokens, time, *places) for block in (blocks[0], compiled))
    torch.testing.assert_close(found, expected)


def test_a_loop_takes_steps_along_the_velocities() -> None:
    once, thrice = (Dit(context(), **TINY, scope="loop", steps=steps) for steps in (1, 3))
    forward = Dit(context(), **TINY)
    for workload in (once, thrice, forward):
        workload.step()
    assert thrice.flops_per_step == 3 * forward.flops_per_step
    assert once.output is not None
    assert thrice.output is not None
    assert not torch.allclose(once.output, thrice.output)


def test_an_output_without_numbers_fails_the_check() -> None:
    workload = Dit(context(), **TINY)
    workload.step()
    workload.check()
    assert workload.output is not None
    workload.output = workload.output.new_full(workload.output.shape, torch.nan)
    with pytest.raises(WrongResultError, match="left an output that is not finite"):
        workload.check()


def refusals(tmp_path: Path, **given: Any) -> str:
    settings = {"kind": "dit", "world_size": 1, **given}
    fixed = ", ".join(f"{n}: {v}" for n, v in settings.items() if n not in ("world_size",))
    job = tmp_path / "job.yaml"
    job.write_text(
        f"version: 1\nname: one\nworkload: {{{fixed}}}\n"
        f"matrix: {{world_size: {settings['world_size']}}}\nbaseline: {{}}\n"
    )
    try:
        plan = make_plan(load_job(job))
    except JobError as error:
        return str(error)
    return f"{len(plan.points)} point, {plan.points[0].scaling}"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"world_size": 2}, "1 point, strong"),
        ({"world_size": 4, "ring": 2}, "1 point, strong"),
        ({"world_size": 4, "ulysses": 2, "ring": 2}, "1 point, strong"),
        ({"world_size": 4, "ulysses": 2, "ring": 1}, "ulysses 2 x ring 1 must be world_size 4"),
        ({"world_size": 2, "ring": 4}, "ulysses 1 x ring 4 must be world_size 2"),
        (
            {"world_size": 16, "split_text": "false"},
            "24 heads cannot be divided by ulysses 16; the next that can is 24",
        ),
        ({"world_size": 32}, "24 heads cannot be divided by ulysses 32; the next that can is 24"),
        ({"width": 1000}, "width 1000 is no multiple of 16 pixels; the next is 1008"),
        (
            {"world_size": 3, "text_tokens": 513},
            "4096 tokens of height 1024 x width 1024 cannot be divided by 3 ranks; the next "
            "height that can is 1056",
        ),
        (
            {"world_size": 2, "text_tokens": 77},
            "text_tokens 77 cannot be divided by 2 ranks; the next that can is 78, or "
            "split_text: false",
        ),
        ({"world_size": 2, "text_tokens": 77, "split_text": "false"}, "1 point, strong"),
        (
            {"world_size": 2, "ring": 2, "attention": "math"},
            "attention math gives no log-sum-exp, by which a ring merges its parts",
        ),
        (
            {"world_size": 2, "ring": 2, "attention": "math", "ring_kind": "allgather"},
            "1 point, strong",
        ),
    ],
)
def test_the_plan_refuses_what_cannot_be_divided(
    given: dict[str, Any], told: str, tmp_path: Path
) -> None:
    assert told in refusals(tmp_path, **given)
