import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import builders
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from raybench.errors import UsageError
from raybench.job.point import Precision
from raybench.workloads import training as trained
from raybench.workloads.base import Context, DdpOptions, option_defaults
from raybench.workloads.language_models import LanguageModel
from raybench.workloads.networks import Linear, Mlp
from raybench.workloads.shapes import DECODER_PRESETS, LLAMA_PRESETS
from raybench.workloads.transformer import Transformer

AnyBuiltIn = Linear | Mlp | Transformer
Build = Callable[[Context], AnyBuiltIn]

tiny = partial(Transformer, preset="tiny", seq_len=16)
BUILDS: dict[str, Build] = {
    "linear": partial(Linear, rows=8),
    "linear with a loader": partial(Linear, rows=8, data="dataloader"),
    "mlp": partial(Mlp, hidden=32, layers=2),
    "mlp with sgd": partial(Mlp, hidden=32, layers=2, optimizer="sgd"),
    "transformer": tiny,
    "transformer with checkpointing": partial(tiny, activation_checkpointing=True),
    "transformer with selective checkpointing": partial(tiny, activation_checkpointing="selective"),
    "llama": partial(tiny, preset="llama-tiny"),
}


def make_context(**changes: Any) -> Context:
    return builders.make_context(**{"batch_size": 4, **changes})


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


# On a CPU tf32 is fp32.
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16, Precision.BF16])
@pytest.mark.parametrize("name", BUILDS)
def test_training_lowers_the_loss_in_every_precision(name, precision, monkeypatch):
    monkeypatch.setattr(trained, "LEARNING_RATE", 1e-3)
    losses: list[float] = []
    workload = BUILDS[name](make_context(precision=precision))
    mean_loss = workload.loss

    def watched(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = mean_loss(outputs, targets)
        losses.append(loss.item())
        return loss

    workload.loss = watched
    for _ in range(12):
        workload.step()
    workload.close()
    assert all(math.isfinite(loss) for loss in losses)
    # Two batches take turns in `linear`, so compare sums over several steps.
    assert sum(losses[-4:]) < sum(losses[:4])


def condition(workload: AnyBuiltIn) -> tuple[float, float]:
    """The norm of the gradients of one more step, and the share of subnormal numbers after it."""
    gradients = gradients_of_one_step(workload)
    states = workload.optimizer.state.values()
    moments = [value for state in states for name, value in state.items() if name != "step"]
    numbers = torch.cat([t.flatten() for t in (*gradients, *moments, *parameters(workload))])
    is_subnormal = (numbers != 0) & (numbers.abs() < torch.finfo(torch.float32).tiny)
    norm = float(torch.cat([g.flatten() for g in gradients]).norm())
    return norm, float(is_subnormal.double().mean())


@pytest.mark.parametrize(("name", "steps"), [("linear", 902), ("mlp", 902), ("transformer", 152)])
def test_late_steps_compute_with_numbers_like_early_ones(name, steps):
    workload = BUILDS[name](make_context(batch_size=2))
    found = []
    # A multiple of four apart: `linear` has four batches that take turns.
    for number in range(steps + 1):
        if number in (50, steps):
            found.append(condition(workload))
        else:
            workload.step()
    early, late = found
    assert late[0] == pytest.approx(early[0], rel=0.05)
    assert late[1] == pytest.approx(early[1], abs=1e-3)


def test_one_rank_has_no_ddp_and_frees_gradients():
    workload = small_mlp(make_context(batch_size=2), grad_accumulation=4)
    assert workload.items_per_step == 8
    assert workload.replica is workload.model
    workload.step()
    assert all(parameter.grad is None for parameter in workload.model.parameters())
    workload.close()
    assert workload.model is None


def test_the_seed_alone_determines_the_parameters():
    first, same, other = (
        parameters(small_mlp(make_context(seed=seed, rank=rank)))
        for seed, rank in ((1, 0), (1, 3), (2, 0))
    )
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("name", ["linear", "mlp", "transformer"])
def test_ranks_draw_different_data_that_is_not_zero(name):
    batches = []
    for rank in (0, 1):
        workload = BUILDS[name](make_context(rank=rank))
        workload.model.register_forward_hook(
            lambda _module, inputs, _output: batches.append(inputs[0].clone())
        )
        workload.step()
    assert not torch.equal(*batches)
    assert batches[0].count_nonzero() > batches[0].numel() // 2


def test_autocast_reaches_the_layers_while_parameters_stay_fp32():
    workload = small_mlp(make_context(precision=Precision.BF16))
    dtypes: list[torch.dtype] = []
    for module in workload.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _i, output: dtypes.append(output.dtype))
    workload.step()
    assert dtypes == [torch.bfloat16] * 2
    assert {p.dtype for p in workload.model.parameters()} == {torch.float32}


def test_only_fp16_scales_gradients_and_never_grows_scales():
    for precision in Precision:
        scaler = small_mlp(make_context(precision=precision)).scaler
        assert scaler.is_enabled() == (precision == "fp16")
        # Torch's own grows every 2000 steps.
        assert not scaler.is_enabled() or scaler.get_growth_interval() > 10**9


def test_an_fp16_overflow_skips_updates_and_halves_scales():
    workload = small_mlp(make_context(precision=Precision.FP16))
    with torch.no_grad():
        for parameter in workload.model.parameters():
            parameter.fill_(1e4)
    scale = workload.scaler.get_scale()
    before = parameters(workload)
    workload.step()
    assert workload.scaler.get_scale() == scale / 2
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(workload), strict=True))


def test_the_transformer_is_causal():
    model = LanguageModel(DECODER_PRESETS["tiny"], seq_len=8)
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 99
    with torch.no_grad():
        logits, others = model(tokens), model(changed)
    torch.testing.assert_close(logits[:, :5], others[:, :5])
    assert not torch.allclose(logits[:, 5:], others[:, 5:])


def test_targets_are_the_tokens_that_follow():
    seen: list[Tensor] = []
    workload = Transformer(make_context(batch_size=3), preset="tiny", seq_len=16)
    workload.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    workload.loss = lambda logits, targets: (seen.append(targets), logits.sum())[1]
    workload.step()
    inputs, targets = seen
    assert inputs.shape == targets.shape == (3, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_checkpointing_gives_the_same_gradients():
    plain, *others = (
        gradients_of_one_step(BUILDS[f"transformer{how}"](make_context()))
        for how in ("", " with checkpointing", " with selective checkpointing")
    )
    for checkpointed in others:
        for one, other in zip(plain, checkpointed, strict=True):
            torch.testing.assert_close(one, other)


def test_a_block_with_checkpointing_is_compiled_as_one():
    shape = LLAMA_PRESETS["llama-tiny"]
    model = LanguageModel(shape, seq_len=8, checkpointing="selective")
    x, rotation = torch.ones(1, 8, shape.width), (model.cosines, model.sines)
    found = torch._dynamo.explain(model.blocks[0])(x, rotation)
    torch._dynamo.reset()
    assert (found.graph_count, found.break_reasons) == (1, [])


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
@pytest.mark.parametrize("name", BUILDS)
def test_operations_are_counted_on_the_meta_device(name, precision):
    context = replace(make_context(precision=precision), device=torch.device("meta"))
    workload = BUILDS[name](context)
    with FlopCounterMode(display=False) as counter:
        workload.step()
    assert counter.get_total_flops() > 0
    assert all(parameter.is_meta for parameter in workload.model.parameters())
    workload.close()


def test_fp16_training_is_refused_as_a_graph():
    in_graph = replace(make_context(precision=Precision.FP16), cuda_graph=True)
    with pytest.raises(UsageError, match="cuda_graph: true cannot be had in precision fp16"):
        small_mlp(in_graph)


def test_options_of_ddp_have_the_defaults_of_torch():
    arguments = inspect.signature(DistributedDataParallel).parameters
    for name, default in option_defaults(DdpOptions).items():
        # None stands for the 25 MiB of a bucket.
        assert arguments[name].default in (default, None)


def test_only_changed_options_of_ddp_reach_torch(monkeypatch):
    seen: list[dict[str, object]] = []

    class Noted(nn.Module):
        def __init__(self, model: nn.Module, **given: object) -> None:
            super().__init__()
            seen.append(given)

    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Noted)
    context = replace(make_context(), world_size=2)
    for options in ({}, {"bucket_cap_mb": 25}, {"bucket_cap_mb": 50, "static_graph": True}):
        context.ddp(nn.Linear(2, 2), **options)
    always: dict[str, object] = {"device_ids": None, "process_group": None}
    assert seen == [always, always, always | {"bucket_cap_mb": 50, "static_graph": True}]


# Of long sequences the first 256 tokens are compared.
@pytest.mark.parametrize("seq_len", [16, 300])
@pytest.mark.parametrize("preset", ["tiny", "llama-tiny"])
def test_bf16_training_has_a_logit_error_unlike_fp32(preset, seq_len):
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
