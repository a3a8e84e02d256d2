from __future__ import annotations

import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from raybench.errors import UsageError
from raybench.job.point import USUAL_PRECISIONS, Precision
from raybench.workloads import replicas, trained
from raybench.workloads.base import Context
from raybench.workloads.layers import DECODER_PRESETS, Decoder
from raybench.workloads.linear import Linear
from raybench.workloads.llama import Llama
from raybench.workloads.mlp import Mlp
from raybench.workloads.model_sizes import LANGUAGE_PRESETS, LLAMA_PRESETS
from raybench.workloads.trained import Trained, ddp_defaults
from raybench.workloads.transformer import Transformer

AnyBuiltIn = Linear | Mlp | Transformer
Build = Callable[[Context], AnyBuiltIn]

BUILDS: dict[str, Build] = {
    "linear": partial(Linear, rows=8),
    "linear with a loader": partial(Linear, rows=8, data="dataloader"),
    "mlp": partial(Mlp, hidden=32, layers=2),
    "mlp with sgd": partial(Mlp, hidden=32, layers=2, optimizer="sgd"),
    "transformer": partial(Transformer, preset="tiny", seq_len=16),
    "transformer with checkpointing": partial(
        Transformer, preset="tiny", seq_len=16, activation_checkpointing=True
    ),
    "transformer with selective checkpointing": partial(
        Transformer, preset="tiny", seq_len=16, activation_checkpointing="selective"
    ),
    "llama": partial(Transformer, preset="llama-tiny", seq_len=16),
}


def make_context(
    *, precision: Precision = Precision.FP32, batch_size: int = 4, seed: int = 0, rank: int = 0
) -> Context:
    return Context(
        device=torch.device("cpu"),
        rank=rank,
        world_size=1,
        local_rank=0,
        batch_size=batch_size,
        precision=precision,
        seed=seed,
    )


def small_mlp(context: Context, grad_accumulation: int = 1) -> Mlp:
    return Mlp(context, hidden=16, layers=2, optimizer="sgd", grad_accumulation=grad_accumulation)


def parameters(workload: AnyBuiltIn) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in workload.model.parameters()]


def gradients_of_one_step(workload: AnyBuiltIn) -> list[Tensor]:
    seen: list[Tensor] = []
    model = workload.model
    workload.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
    )
    workload.step()
    return seen


@pytest.mark.parametrize("precision", USUAL_PRECISIONS)
@pytest.mark.parametrize("name", BUILDS)
def test_steps_of_a_usual_learning_rate_lower_the_loss_in_every_precision(
    name: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained, "LEARNING_RATE", 1e-3)
    losses: list[float] = []
    real_loss = Trained._loss

    def watched(self: Trained, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = real_loss(self, inputs, targets)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(Trained, "_loss", watched)
    workload = BUILDS[name](make_context(precision=precision))
    for _ in range(20):
        workload.step()
    workload.close()
    assert all(math.isfinite(loss) for loss in losses)
    # Two batches take turns in `linear`, so compare sums over several steps.
    assert sum(losses[-4:]) < sum(losses[:4])


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What a step computes with: the norm of its gradients, and how many numbers are subnormal."""

    gradient_norm: float
    subnormal_share: float


def condition(workload: AnyBuiltIn) -> Condition:
    """Of the gradients of one more step, and of the parameters and moments then."""
    gradients = gradients_of_one_step(workload)
    moments = [
        value
        for state in workload.optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    numbers = torch.cat([t.flatten() for t in (*gradients, *moments, *parameters(workload))])
    tiny = torch.finfo(torch.float32).tiny
    is_subnormal = (numbers != 0) & (numbers.abs() < tiny)
    return Condition(
        gradient_norm=float(torch.cat([g.flatten() for g in gradients]).norm()),
        subnormal_share=float(is_subnormal.double().mean()),
    )


@pytest.mark.parametrize(
    ("name", "steps"), [("linear", 902), ("mlp", 3002), ("mlp with sgd", 902), ("transformer", 302)]
)
def test_late_steps_compute_with_the_same_kinds_of_numbers_as_early_ones(
    name: str, steps: int
) -> None:
    workload = BUILDS[name](make_context(batch_size=2))
    found = []
    # A multiple of four apart: `linear` has four batches that take turns.
    for number in range(steps + 1):
        if number in (50, steps):
            found.append(condition(workload))
        else:
            workload.step()
    early, late = found
    assert late.gradient_norm == pytest.approx(early.gradient_norm, rel=0.05)
    assert late.subnormal_share == pytest.approx(early.subnormal_share, abs=1e-3)


def test_the_scale_of_fp16_does_not_grow() -> None:
    scaler = make_context(precision=Precision.FP16).grad_scaler()
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    before = scaler.get_scale()
    # Torch's own grows every 2000 steps.
    for _ in range(2001):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == before


def test_a_step_leaves_no_gradients_behind() -> None:
    workload = small_mlp(make_context())
    workload.step()
    assert all(parameter.grad is None for parameter in workload.model.parameters())


def test_world_size_one_has_no_ddp() -> None:
    training = small_mlp(make_context())
    assert training.replica is training.model


def test_the_same_seed_gives_the_same_parameters_and_another_seed_others() -> None:
    first, same, other = (
        parameters(small_mlp(make_context(seed=seed, rank=rank)))
        for seed, rank in ((1, 0), (1, 3), (2, 0))
    )
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("name", ["linear", "mlp", "transformer"])
def test_ranks_draw_different_data_that_is_not_zero(name: str) -> None:
    batches = []
    for rank in (0, 1):
        workload = BUILDS[name](make_context(rank=rank))
        workload.model.register_forward_hook(
            lambda _module, inputs, _output: batches.append(inputs[0].clone())
        )
        workload.step()
    assert not torch.equal(*batches)
    assert batches[0].count_nonzero() > batches[0].numel() // 2


def test_a_step_of_accumulated_passes_equals_one_pass_over_the_same_rows() -> None:
    whole = gradients_of_one_step(small_mlp(make_context(batch_size=8)))
    parts = gradients_of_one_step(small_mlp(make_context(batch_size=2), grad_accumulation=4))
    assert len(whole) == len(parts) == 4
    for one, four in zip(whole, parts, strict=True):
        torch.testing.assert_close(four, one, rtol=1e-5, atol=1e-8)


def test_items_per_step_counts_the_accumulated_passes() -> None:
    assert small_mlp(make_context(batch_size=2), grad_accumulation=4).items_per_step == 8


@pytest.mark.parametrize(
    ("precision", "dtype"), [(Precision.BF16, torch.bfloat16), (Precision.FP16, torch.float16)]
)
def test_autocast_reaches_the_layers_while_parameters_stay_fp32(
    precision: Precision, dtype: torch.dtype
) -> None:
    workload = small_mlp(make_context(precision=precision))
    dtypes: list[torch.dtype] = []
    for module in workload.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _i, output: dtypes.append(output.dtype))
    workload.step()
    assert dtypes == [dtype, dtype]
    assert {p.dtype for p in workload.model.parameters()} == {torch.float32}


def test_only_fp16_scales_its_gradients() -> None:
    enabled = {
        precision: small_mlp(make_context(precision=precision)).scaler.is_enabled()
        for precision in Precision
    }
    assert {name for name, scales in enabled.items() if scales} == {"fp16"}


def test_an_fp16_overflow_skips_the_update_and_halves_the_scale() -> None:
    workload = small_mlp(make_context(precision=Precision.FP16))
    with torch.no_grad():
        for parameter in workload.model.parameters():
            parameter.fill_(1e4)
    scale = workload.scaler.get_scale()
    before = parameters(workload)
    workload.step()
    assert workload.scaler.get_scale() == scale / 2
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(workload), strict=True))


def test_compile_runs_the_step_through_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    torch_compile = torch.compile

    def without_code_generation(model: nn.Module) -> object:
        compiled.append(model)
        return torch_compile(model, backend="eager")

    monkeypatch.setattr(torch, "compile", without_code_generation)
    monkeypatch.setattr(trained, "LEARNING_RATE", 1e-3)
    workload = Mlp(make_context(), hidden=16, layers=2, compile=True)
    before = parameters(workload)
    workload.step()
    # Alone there is nothing around the model, which is compiled with and without that.
    assert set(compiled) == {workload.model}
    assert not torch.equal(before[0], parameters(workload)[0])
    assert Mlp(make_context(), hidden=16).model not in compiled


@pytest.mark.parametrize(
    ("preset", "millions"), [("tiny", 0.134), ("124m", 124.5), ("350m", 355), ("1.3b", 1314)]
)
def test_a_preset_has_about_as_many_parameters_as_its_name_says(
    preset: str, millions: float
) -> None:
    with torch.device("meta"):
        model = Decoder(DECODER_PRESETS[preset], seq_len=1024)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.5 if preset == "tiny" else 0.01)


def test_the_presets_of_the_parameter_are_those_of_the_model() -> None:
    hints = get_type_hints(Transformer.__init__, include_extras=True)
    literal = get_args(hints["preset"])[0]
    assert set(get_args(literal)) == set(LANGUAGE_PRESETS)


def test_the_transformer_is_causal() -> None:
    model = Decoder(DECODER_PRESETS["tiny"], seq_len=8)
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 99
    with torch.no_grad():
        logits, others = model(tokens), model(changed)
    torch.testing.assert_close(logits[:, :5], others[:, :5])
    assert not torch.allclose(logits[:, 5:], others[:, 5:])


def test_the_target_of_a_token_is_the_one_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    real_loss = Trained._loss

    def watched(self: Trained, inputs: Tensor, targets: Tensor) -> Tensor:
        seen.append((inputs, targets))
        return real_loss(self, inputs, targets)

    monkeypatch.setattr(Trained, "_loss", watched)
    Transformer(make_context(batch_size=3), preset="tiny", seq_len=16).step()
    ((inputs, targets),) = seen
    assert inputs.shape == targets.shape == (3, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_checkpointing_gives_the_same_gradients() -> None:
    plain, *others = (
        gradients_of_one_step(BUILDS[f"transformer{how}"](make_context()))
        for how in ("", " with checkpointing", " with selective checkpointing")
    )
    for checkpointed in others:
        for one, other in zip(plain, checkpointed, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("how", ["full", "selective"])
def test_a_block_with_checkpointing_is_compiled_as_one(how: Literal["full", "selective"]) -> None:
    shape = LLAMA_PRESETS["llama-tiny"]
    model = Llama(shape, seq_len=8, checkpointing=how)
    x, rotation = torch.ones(1, 8, shape.width), (model.cosines, model.sines)
    found = torch._dynamo.explain(model.blocks[0])(x, rotation)
    torch._dynamo.reset()
    assert (found.graph_count, found.break_reasons) == (1, [])


def test_checkpointing_runs_each_block_again_in_the_backward_pass() -> None:
    def passes_per_block(workload: AnyBuiltIn) -> float:
        runs: list[nn.Module] = []
        blocks = workload.model.blocks
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            first = block.get_submodule("attention_norm")
            first.register_forward_pre_hook(lambda module, _inputs: runs.append(module))
        workload.step()
        return len(runs) / len(blocks)

    assert passes_per_block(BUILDS["transformer"](make_context())) == 1
    assert passes_per_block(BUILDS["transformer with checkpointing"](make_context())) == 2


def test_close_drops_the_model() -> None:
    workload = small_mlp(make_context())
    workload.close()
    assert not hasattr(workload, "model")


def test_reading_the_signatures_loads_no_torch() -> None:
    script = (
        "import sys, typing\n"
        "from raybench.workloads import linear, mlp, transformer\n"
        "for c in (linear.Linear, mlp.Mlp, transformer.Transformer):\n"
        "    typing.get_type_hints(c.__init__, include_extras=True)\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("precision", USUAL_PRECISIONS)
@pytest.mark.parametrize("name", BUILDS)
def test_a_step_on_the_meta_device_counts_its_operations(name: str, precision: Precision) -> None:
    context = replace(make_context(precision=precision), device=torch.device("meta"))
    workload = BUILDS[name](context)
    with FlopCounterMode(display=False) as counter:
        workload.step()
    assert counter.get_total_flops() > 0
    assert all(parameter.is_meta for parameter in workload.model.parameters())
    workload.close()


def test_what_checkpointing_computes_again_is_not_counted_on_the_meta_device() -> None:
    counted = []
    for name in ("transformer", "transformer with checkpointing"):
        workload = BUILDS[name](replace(make_context(), device=torch.device("meta")))
        with FlopCounterMode(display=False) as counter:
            workload.step()
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1]


def test_nothing_is_compiled_on_the_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda _: pytest.fail("compiled"))
    context = replace(make_context(), device=torch.device("meta"))
    Mlp(context, hidden=16, layers=2, compile=True).step()


def test_a_step_that_waits_for_the_device_cannot_be_a_graph() -> None:
    in_graph = replace(make_context(precision=Precision.FP16), cuda_graph=True)
    with pytest.raises(UsageError, match="cuda_graph: true cannot be had in precision fp16"):
        small_mlp(in_graph)
    in_graph = replace(make_context(), cuda_graph=True)
    with pytest.raises(UsageError, match="needs data: device"):
        Linear(in_graph, rows=8, data="dataloader")


def test_the_model_of_a_workload_is_the_bare_one() -> None:
    workload = small_mlp(make_context())
    assert isinstance(workload.model, nn.Sequential)
    workload.close()
    assert not hasattr(workload, "model")


def test_each_option_of_ddp_is_an_argument_of_torch_whose_default_it_has() -> None:
    arguments = inspect.signature(DistributedDataParallel).parameters
    for name, default in ddp_defaults().items():
        # None stands for the 25 MiB of a bucket.
        assert arguments[name].default in (default, None)


def test_an_option_of_ddp_reaches_torch_only_where_it_is_not_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[dict[str, object]] = []

    class Noted(nn.Module):
        def __init__(self, model: nn.Module, **given: object) -> None:
            super().__init__()
            seen.append(given)

    monkeypatch.setattr(replicas, "DistributedDataParallel", Noted)
    context = replace(make_context(), world_size=2)
    for options in ({}, {"bucket_cap_mb": 25}, {"bucket_cap_mb": 50, "static_graph": True}):
        context.ddp(nn.Linear(2, 2), **options)
    always: dict[str, object] = {"device_ids": None, "process_group": None}
    assert seen == [always, always, always | {"bucket_cap_mb": 50, "static_graph": True}]


# Of long sequences the first 256 tokens are compared.
@pytest.mark.parametrize("seq_len", [16, 300])
@pytest.mark.parametrize("preset", ["tiny", "llama-tiny"])
def test_the_error_of_the_logits_in_training_is_none_in_fp32_and_some_in_bf16(
    preset, seq_len
) -> None:
    def error(precision: Precision, **settings) -> float | None:
        context = make_context(precision=precision)
        trained = Transformer(context, preset=preset, seq_len=seq_len, **settings)
        trained.step()
        trained.check()
        return getattr(trained, "output_error", None)

    assert error(Precision.FP32) == 0
    assert 1e-4 < error(Precision.BF16) < 0.1
    # Weights that are stored in bf16 have no answer in fp32.
    assert error(Precision.BF16, optimizer_dtype="bf16") is None
