"""Layouts: what ranks compute together is what one device does, and what cannot be divided."""

import re
from typing import Any

import builders
import pytest
import torch
from forked import answers_of_ranks, run_ranks
from layout_ranks import COMPILED, LAYOUTS, run_rank, run_rank_compiled

from jobs import HEAD, plan, problems_of
from raybench.measure.profiling import step_flops
from raybench.workloads.base import Context
from raybench.workloads.shapes import LLAMA_PRESETS, Layout, llama_flops, model_flops
from raybench.workloads.transformer import Transformer

EXACT = 1e-12

of_two = answers_of_ranks(run_rank, 2, 2)


@pytest.mark.parametrize("name", LAYOUTS[2])
def test_two_ranks_compute_gradients_of_one_device(of_two, name):
    assert max(found[name] for found in of_two) < EXACT


def test_a_fault_in_what_ranks_share_shows(of_two):
    faults = {name: max(found[name] for found in of_two) for name in of_two[0] if "fault" in name}
    assert faults.pop("fault: nothing") < EXACT
    assert len(faults) == 3
    assert min(faults.values()) > 0.1


@pytest.mark.long
def test_four_ranks_compute_gradients_of_one_device(tmp_path):
    for found in run_ranks(run_rank, 4, 4, str(tmp_path / "store")):
        assert found.keys() == LAYOUTS[4].keys()
        assert max(found.values()) < EXACT


@pytest.mark.long
def test_two_compiled_ranks_compute_gradients_of_one_device(tmp_path):
    for found in run_ranks(run_rank_compiled, 2, 2, str(tmp_path / "store")):
        assert found.keys() == COMPILED.keys()
        assert max(found.values()) < EXACT


@pytest.mark.parametrize(
    ("world_size", "options", "degrees"),
    [
        (4, {}, (4, 1, 1)),
        (8, {"dp_shard": 2}, (4, 2, 1)),
        (8, {"dp_shard": -1}, (1, 8, 1)),
        (8, {"dp_shard": -1, "tp": 2}, (1, 4, 2)),
        (8, {"dp_shard": -1, "dp_replicate": 2, "tp": 2}, (2, 2, 2)),
    ],
)
def test_an_omitted_degree_is_derived_from_the_others(world_size, options, degrees):
    layout = Layout.make(world_size, options)
    assert (layout.dp_replicate, layout.dp_shard, layout.tp) == degrees


def job(world_size: int = 4, precision: str = "bf16", **workload: Any) -> str:
    settings = {"preset": "llama-tiny", "seq_len": 32, **workload}
    text = ", ".join(f"{name}: {value}" for name, value in settings.items())
    return (
        f"{HEAD}baseline: {{}}\nworkload: {{kind: transformer, {text}}}\n"
        f"matrix: {{world_size: {world_size}, precision: {precision}, batch_size: 6}}\n"
    )


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"dp_shard": 3}, "1 x dp_shard 3 x cp 1 x tp 1 is 3, and must be world_size 4"),
        ({"dp_shard": 2, "tp": 4}, "is 8, and must be world_size 4"),
        ({"tp": 4}, "tp 4 must divide the 4 heads and 2 heads of keys of llama-tiny"),
        ({"preset": "llama-3b", "tp": 4, "seq_len": 30}, "a multiple of 4, given 30"),
        ({"preset": "124m", "tp": 2}, "preset 124m is divided by dp_shard alone"),
        ({"dp_shard": 4, "precision": "fp16"}, "is not trained in fp16"),
        ({"optimizer_dtype": "bf16", "precision": "fp32"}, "precision bf16 or float8, given fp32"),
        ({"dp_shard": 2, "mode": "inference"}, "trains nothing, so dp_shard must be left out"),
        ({"cp": 4, "seq_len": 20}, "into 8 parts: seq_len must be a multiple of 8, given 20"),
        ({"dp_shard": 0}, "dp_shard must be at least 1"),
        ({"dp_shard": 4, "static_graph": True}, "leave out static_graph, given true"),
    ],
)  # fmt: skip
def test_indivisible_layouts_are_refused_with_a_suggestion(workload, message):
    assert re.search(message, problems_of(job(**workload))[0])


def test_ranks_of_a_tp_group_share_a_batch():
    for tp, whole in ((1, 24), (2, 12)):
        (point,) = plan(job(tp=tp)).points
        assert (point.batch_size, point.global_batch_size) == (6, whole)


def make_context(world_size: int = 1) -> Context:
    return builders.make_context(0, world_size, device=torch.device("meta"), batch_size=2)


# Of the larger ones only the sizes differ.
@pytest.mark.parametrize("preset", ["llama-tiny", "llama-1b"])
def test_operations_of_llama_match_its_formula(preset):
    parameters = {"preset": preset, "seq_len": 128, "activation_checkpointing": "full"}
    wanted = llama_flops(LLAMA_PRESETS[preset], tokens=256, seq_len=128)
    assert step_flops(Transformer, parameters, make_context()).flops == wanted


@pytest.mark.parametrize(("preset", "declares"), [("llama-tiny", True), ("tiny", False)])
def test_a_training_of_llama_declares_its_operations(preset, declares):
    # Counting them would build the model once more at each point.
    parameters = {"preset": preset, "seq_len": 32, "grad_accumulation": 3}
    built = Transformer(make_context(), **parameters)
    counted = step_flops(Transformer, parameters, make_context()).flops
    assert built.flops_per_step == (counted if declares else None)


def test_ranks_of_a_tp_group_divide_the_operations():
    parameters = {"preset": "llama-tiny", "seq_len": 32}
    whole = step_flops(Transformer, parameters, make_context()).flops
    part = step_flops(Transformer, {**parameters, "tp": 2}, make_context(world_size=2)).flops
    assert part == whole / 2


def test_mfu_matches_a_published_table():
    # KempnerForge: 10,471 tokens/s on an H200 of 989.5 TFLOP/s are 57.8 %.
    flops = model_flops(LLAMA_PRESETS["llama-8b"], tokens=10_471, seq_len=4096)
    assert flops / 989.5e12 == pytest.approx(0.578, abs=0.0005)
