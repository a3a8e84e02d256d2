"""Models that only run: the same answers as a whole pass, nothing of training, replicas."""

from typing import Any

import builders
import pytest
import torch
from torch import Tensor

from raybench.job.point import Precision
from raybench.workloads import transformer
from raybench.workloads.base import Context, parameter_count
from raybench.workloads.language_models import KeyValueCache, LanguageModel
from raybench.workloads.networks import Linear, Mlp
from raybench.workloads.shapes import DECODER_PRESETS, LANGUAGE_PRESETS
from raybench.workloads.training import Model
from raybench.workloads.transformer import Transformer

TINY = DECODER_PRESETS["tiny"]
SMALL: dict[type[Model], dict[str, Any]] = {
    Linear: {"rows": 8},
    Mlp: {"hidden": 16, "layers": 2},
    Transformer: {"preset": "tiny", "seq_len": 12},
}


@pytest.fixture(autouse=True)
def _a_memory_of_10_gb_s(monkeypatch):
    monkeypatch.setattr(transformer, "memory_gb_s", lambda context: 10.0)


def make_context(**changes: Any) -> Context:
    return builders.make_context(**{"batch_size": 3, **changes})


def make(
    phase: str | None, precision: Precision = Precision.FP32, *, batch_size: int = 3, **more: Any
) -> Any:
    context = make_context(precision=precision, batch_size=batch_size)
    return Transformer(context, **SMALL[Transformer], mode="inference", phase=phase, **more)


def answer_of(workload: Model) -> Tensor:
    """Return what the model gives in a step."""
    seen: list[Tensor] = []
    handle = workload.model.register_forward_hook(lambda *call: seen.append(call[2].clone()))
    workload.step()
    handle.remove()
    (answer,) = seen
    return answer


def decode(model: LanguageModel, tokens: Tensor, *, prompt: int) -> Tensor:
    """Logits after the prompt and after each token that follows."""
    batch_size, length = tokens.shape
    shape = LANGUAGE_PRESETS["llama-tiny" if model.positions is None else "tiny"]
    cache = KeyValueCache.make(shape, batch_size=batch_size, max_tokens=length, dtype=torch.float64)
    logits = [model(tokens[:, :prompt], cache)]
    for position in range(prompt, length):
        cache.position = position
        logits.append(model(tokens[:, position : position + 1], cache))
    return torch.cat(logits, dim=1)


@pytest.fixture(params=["tiny", "llama-tiny"])
def model(request):
    torch.manual_seed(0)
    made = LanguageModel(LANGUAGE_PRESETS[request.param], seq_len=10)
    return made.double().requires_grad_(False)


@pytest.fixture
def tokens():
    return torch.randint(TINY.vocabulary, (2, 10), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("prompt", [1, 6])
def test_decoding_token_by_token_gives_the_same_logits(model, tokens, prompt):
    whole = model(tokens)[:, prompt - 1 :]
    assert (decode(model, tokens, prompt=prompt) - whole).abs().max() < 1e-12 * whole.abs().max()


def test_a_decoding_step_gives_logits_of_the_sequence():
    workload = make("decode")
    tokens = torch.randint(TINY.vocabulary, (3, 13), generator=make_context().generator())
    whole = workload.model(tokens)[:, -1:]
    first, *_, last = [answer_of(workload) for _ in range(4)]
    torch.testing.assert_close(first, whole)
    # Each step does the same work, at the same position.
    assert torch.equal(first, last)
    workload = make("prefill")
    tokens = torch.randint(TINY.vocabulary, (3, 12), generator=make_context().generator())
    torch.testing.assert_close(answer_of(workload), workload.model(tokens)[:, -1:])


@pytest.fixture
def graphs(monkeypatch):
    """What is compiled, which then runs as it is."""
    found: list[torch.fx.Graph] = []
    torch_compile = torch.compile

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        found.append(module.graph)
        return module.forward

    def without_code_generation(function: Any, *, dynamic: bool, options: Any) -> Any:
        return torch_compile(function, backend=backend, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", without_code_generation)
    yield found
    torch.compiler.reset()


@pytest.mark.parametrize(("phase", "batch_size"), [("decode", 1), ("decode", 3), ("prefill", 1)])
def test_all_layers_share_one_compiled_block(graphs, phase, batch_size):
    wanted = answer_of(make(phase, batch_size=batch_size))
    compiled = make(phase, batch_size=batch_size, compile=True)
    torch.testing.assert_close(answer_of(compiled), wanted)
    assert (len(graphs), len(compiled.model.blocks)) == (1, 2)


@pytest.mark.parametrize("kind", SMALL)
def test_inference_has_no_gradients_and_no_optimizer(kind):
    workload = kind(make_context(), mode="inference", **SMALL[kind])
    answer = answer_of(workload)
    assert answer.is_inference()
    assert not workload.model.training
    assert not any(p.requires_grad for p in workload.model.parameters())
    assert not hasattr(workload, "optimizer")
    assert (workload.items_per_step, workload.gradient_error) == (3, None)
    assert not torch.is_inference_mode_enabled()
    workload.close()


@pytest.mark.parametrize("kind", SMALL)
def test_replicas_have_the_same_weights_and_other_data(kind):
    replicas = [kind(make_context(rank=rank), mode="inference", **SMALL[kind]) for rank in (0, 1)]
    first, second = (list(replica.model.parameters()) for replica in replicas)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(*map(answer_of, replicas))


@pytest.mark.parametrize(
    ("cast_weights", "stored", "arithmetic"),
    [(False, torch.float32, torch.bfloat16), (True, torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("phase", [None, "prefill", "decode"])
def test_only_cast_weights_are_stored_in_half_precision(phase, cast_weights, stored, arithmetic):
    workload = make(phase, Precision.BF16, cast_weights=cast_weights)
    assert {p.dtype for p in workload.model.parameters()} == {stored}
    assert answer_of(workload).dtype == arithmetic


@pytest.mark.parametrize(
    ("precision", "cast_weights", "weight_bytes", "cache_bytes"),
    [(Precision.FP32, False, 4, 4), (Precision.BF16, False, 4, 2), (Precision.BF16, True, 2, 2)],
)
def test_decoding_must_read_the_weights_and_the_cache(
    precision, cast_weights, weight_bytes, cache_bytes
):
    workload = make("decode", precision, cast_weights=cast_weights)
    width, layers, batch_size, tokens = 64, 2, 3, 13
    block = 12 * width**2 + 13 * width
    weights = 512 * width + layers * block + 2 * width
    cache = 2 * layers * batch_size * tokens * width
    assert workload.memory_bytes == weights * weight_bytes + cache * cache_bytes
    # A percent of the time that a second has for these bytes.
    assert workload.triad_gb_s == 10.0
    assert workload.bandwidth_share_pct == pytest.approx(workload.memory_bytes / 10e9 * 100)


def test_each_phase_says_what_its_step_does():
    prefill, decoding, whole = make("prefill"), make("decode"), make(None)
    assert (prefill.prefill_ms, prefill.tokens_per_s) == (1, 3 * 12)
    assert (decoding.decode_ms_per_token, decoding.tokens_per_s) == (1, 3)
    assert whole.tokens_per_s == 3 * 12
    assert not hasattr(prefill, "decode_ms_per_token")
    assert not hasattr(whole, "prefill_ms")


# The larger one has one table for tokens and logits, all of which is read.
@pytest.mark.parametrize("preset", ["llama-tiny", "llama-1b"])
def test_decoding_reads_all_weights_except_the_token_table(preset):
    shape = LANGUAGE_PRESETS[preset]
    context = make_context(device=torch.device("meta"))
    workload = Transformer(context, preset=preset, seq_len=12, mode="inference", phase="decode")
    table = 0 if shape.is_tied else shape.vocabulary * shape.width
    read = shape.parameter_count(13) - table
    cache = shape.layers * 2 * 3 * shape.kv_heads * 13 * shape.head_width
    assert workload.memory_bytes == 4 * (read + cache)


def test_decoding_has_a_position_for_the_new_token():
    params = {"preset": "tiny", "seq_len": "12", "mode": "inference", "phase": "decode"}
    built = sum(p.numel() for p in make("decode").model.parameters())
    assert parameter_count("transformer", params) == built


SETTINGS = {"precision": "bf16", "world_size": 1, "batch_size": 1}
FIXED = {"mode": "inference", "seq_len": 12, "optimizer": "adamw", "grad_accumulation": 1}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, None),
        ({"phase": "decode", "cast_weights": True}, None),
        ({"mode": "train", "optimizer": "sgd", "bucket_cap_mb": 50}, None),
        ({"mode": "train", "phase": "prefill"}, "phase: prefill needs mode: inference"),
        ({"mode": "train", "cast_weights": True}, "cast_weights: true needs mode: inference"),
        ({"optimizer": "sgd"}, "mode: inference trains nothing, so optimizer must be left out"),
        ({"bucket_cap_mb": 50}, "so bucket_cap_mb must be left out"),
        ({"grad_accumulation": 2}, "so grad_accumulation must be left out"),
        ({"cast_weights": True, "precision": "tf32"}, "needs precision fp16 or bf16, given tf32"),
    ],
)
def test_incompatible_settings_are_refused(given, reason):
    found = Transformer.why_not({**SETTINGS, **FIXED, **given})
    assert (reason in found) if reason and found else (found or None) is reason
