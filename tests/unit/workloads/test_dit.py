"""The diffusion transformer: its sizes, its kernels of attention, what its ranks compute."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.compiler.config
from builders import make_context
from dit_ranks import DEGREES, cases, run_rank
from forked import run_ranks
from torch.nn import functional

from jobs import HEAD, plan
from raybench.errors import JobError, UsageError
from raybench.measure.profiling import attention_kernels, step_flops
from raybench.worker.state import process_settings
from raybench.workloads.attention import (
    KernelOrAuto,
    attend_whole,
    attend_with_logsumexp,
    choose_kernel,
    merge,
    use_kernel,
)
from raybench.workloads.base import WrongResultError, parameter_count
from raybench.workloads.dit import Dit
from raybench.workloads.dit_model import AttentionOperator, SingleBlock, rotation
from raybench.workloads.dit_model import DitModel as Model
from raybench.workloads.shapes import DIT_PRESETS

TINY: dict[str, Any] = {"preset": "tiny", "height": 64, "width": 64, "text_tokens": 8}

RING = {"world_size": 2, "ring": 2}


@pytest.mark.parametrize("scope", ["double_block", "single_block", "forward"])
def test_declared_operations_match_those_torch_counts(scope):
    flops = DIT_PRESETS["tiny"].flops(scope, text=512, image=4096)
    params = {"preset": "tiny", "scope": scope}
    # As torch executes them, whatever the class declares.
    assert step_flops(Dit, params, make_context(seed=3)).flops == flops


def test_flux_has_its_published_sizes():
    shape = DIT_PRESETS["flux"]
    assert (shape.width, shape.head_width) == (3072, 128)
    with torch.device("meta"):
        model = Model(shape, attend=lambda query, key, value: value)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == parameter_count("dit", {"preset": "flux", "scope": "forward"})
    assert round(count / 1e9, 2) == 11.90
    assert round(shape.flops("forward", text=512, image=4096) / 1e12, 1) == 74.4
    for scope in ("double_block", "single_block"):
        tflop = shape.flops(scope, text=512, image=4096) / 1e12
        assert tflop == pytest.approx(1.3046, abs=3e-4)
        count = sum(p.numel() for p in getattr(model, f"{scope}s")[0].parameters())
        assert count == parameter_count("dit", {"preset": "flux", "scope": scope})


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    answers = run_ranks(run_rank, max(DEGREES), str(tmp_path_factory.mktemp("group") / "store"))
    return {
        world_size: [answer[world_size] for answer in answers if world_size in answer]
        for world_size in DEGREES
    }


ALL_CASES = [(world_size, name) for world_size in DEGREES for name, _ in cases(world_size)]


@pytest.mark.parametrize(("world_size", "case"), ALL_CASES)
def test_ranks_compute_together_what_one_computes_alone(world_size, case, ranks):
    assert all(rank["differences"][case] <= 1e-10 for rank in ranks[world_size])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_check_tells_right_from_wrong(precision, ranks):
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


def test_parts_are_merged_to_the_whole():
    query, key, value = torch.randn(3, 1, 2, 12, 8, dtype=torch.float64).unbind()
    attention = partial(attend_with_logsumexp, "flash")
    parts = [attention(query, key[:, :, own], value[:, :, own]) for own in (
        slice(0, 1), slice(1, 7), slice(7, 12),
    )]  # fmt: skip
    torch.testing.assert_close(merge(parts), attention(query, key, value)[0])
    assert merge([(out.float(), one.float()) for out, one in parts]).dtype is torch.float32


def test_an_unsupported_kernel_is_refused():
    tokens = torch.randn(1, 2, 8, 8)
    assert choose_kernel("auto", tokens) == "flash"
    with pytest.raises(UsageError, match="attention cudnn is for CUDA devices; on a CPU take"):
        choose_kernel("cudnn", tokens)
    with pytest.raises(RuntimeError, match=r"cudnn computes fp16 and bf16, given torch.float32"):
        attend_with_logsumexp("cudnn", *[tokens.float()] * 3)


def test_all_kernels_compute_the_same():
    outputs = []
    for changes in ({}, {"attention": "math"}):
        workload = Dit(make_context(seed=3), **TINY, **changes)
        workload.step()
        outputs.append(workload.output)
    torch.testing.assert_close(outputs[0], outputs[1])


@pytest.mark.long
def test_attention_over_ranks_compiles_as_one_operator():
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


def test_a_loop_takes_steps_along_the_velocities(monkeypatch):
    once, thrice = (Dit(make_context(seed=3), **TINY, scope="loop", steps=n) for n in (1, 3))
    forward = Dit(make_context(seed=3), **TINY)
    for workload in (once, thrice, forward):
        workload.step()
    assert thrice.flops_per_step == 3 * forward.flops_per_step
    assert thrice.items_per_step == 3 * forward.items_per_step == 3  # passes, as the headings say
    assert not torch.allclose(once.output, thrice.output)
    forward.check()
    forward.output = torch.full_like(forward.output, torch.nan)
    compared: list[Any] = []
    monkeypatch.setattr("raybench.workloads.dit_model.difference_to_whole", compared.append)
    with pytest.raises(WrongResultError, match="left an output that is not finite"):
        forward.check()
    assert compared  # or other ranks, whose output is right, would wait for this one


def plan_of(**given: Any) -> str:
    world_size = given.pop("world_size", 1)
    params = ", ".join(f"{name}: {value}" for name, value in {"kind": "dit", **given}.items())
    text = f"{HEAD}workload: {{{params}}}\nmatrix: {{world_size: {world_size}}}\nbaseline: {{}}\n"
    try:
        made = plan(text)
    except JobError as error:
        return str(error)
    return f"{len(made.points)} point, {made.points[0].scaling}"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"world_size": 2}, "1 point, strong"),
        ({"world_size": 4, "ring": 2}, "1 point, strong"),
        ({"world_size": 4, "ulysses": 2, "ring": 2}, "1 point, strong"),
        ({"world_size": 4, "ulysses": 2, "ring": 1}, "ulysses 2 x ring 1 must be world_size 4"),
        ({"world_size": 2, "ring": 4}, "ulysses 1 x ring 4 must be world_size 2"),
        ({"world_size": 16}, "ulysses 16 must divide the 24 heads"),
        ({"width": 1000}, "width 1000 must be multiples of 16 pixels"),
        ({"world_size": 3, "text_tokens": 513}, "take a height of a multiple of 48"),
        ({"world_size": 2, "text_tokens": 77}, "text_tokens 77 must be a multiple of the 2 ranks"),
        (RING | {"attention": "math"}, "attention math gives no log-sum-exp"),
        (RING | {"attention": "math", "ring_kind": "allgather"}, "1 point, strong"),
    ],
)
def test_the_plan_refuses_what_cannot_be_divided(given, told):
    assert told in plan_of(**given)


CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_before():
    before = [(setting, setting.read()) for setting in process_settings()]
    yield
    for setting, value in before:
        setting.write(value)


def test_each_kernel_choice_has_its_own_cache_key():
    keys = set()
    asked: tuple[KernelOrAuto, ...] = ("auto", "flash", "math")
    for one in asked:
        use_kernel(one, CPU)
        keys.add(torch.compiler.config.cache_key_tag)
    use_kernel("auto", CPU)  # math alone is enabled now
    assert len(keys | {torch.compiler.config.cache_key_tag}) == len(asked)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")
def test_a_compiled_step_ignores_kernels_cached_for_others(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tokens = torch.ones(1, 2, 16, 8)
    found = []
    for asked in ("flash", "math", "flash"):
        torch._dynamo.reset()
        use_kernel(asked, CPU)
        compiled = torch.compile(
            lambda: functional.scaled_dot_product_attention(2 * tokens, tokens, tokens)
        )
        with torch.no_grad():
            compiled()
            found.append(attention_kernels(compiled))
    # What Inductor makes of math are other operators.
    assert found == [("flash",), (), ("flash",)]
