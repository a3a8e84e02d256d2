"""What a page says first: what was run, how large the model was, and the large figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raybench.cli.results import load_summary
from raybench.report.charts.figures import rows_of
from raybench.report.key_figures import key_figures
from raybench.report.what_ran import what_ran
from raybench.workloads.language_training import make_model
from raybench.workloads.layers import DECODER_PRESETS, Decoder
from raybench.workloads.mlp import linear_stack
from raybench.workloads.model_sizes import LANGUAGE_PRESETS, LINEAR_FEATURES, parameter_count

RESULTS = Path(__file__).parents[3] / "results" / "examples"
RUNS = {path.name.partition("-")[0]: path.name for path in sorted((RESULTS / "points").iterdir())}
WHAT = {
    "ddp_scaling": "MLP of 8 layers, 4,096 wide; 134 M parameters; Adam; "
    "batch 64 to 1,024 per device; fp32, tf32, fp16, bf16; 1, 2, 4 GPUs",
    "transformer_scaling": "GPT-2 shaped transformer, 1,024 tokens a sequence; "
    "124 M to 355 M parameters; AdamW; batch 8 to 32 per device; bf16; attention by cudnn; "
    "1, 2 GPUs",
    "layout_losses": "Llama shaped transformer, 4,096 tokens a sequence; 2.8 B parameters; AdamW; "
    "batch 4 per device; bf16; 2 GPUs; activation_checkpointing=full; compile=true; cp=1 to 2; "
    "fused_optimizer=true; optimizer_dtype=bf16; tp=1 to 2",
    "ddp_linear": "Linear layer; 1,025 parameters; batch 64 per device; fp32; 1, 2, 4 GPUs; "
    "data=dataloader, device; distributed_sampler=false, true; num_workers=0 to 8; "
    "pin_memory=false, true",
    "collectives": "Collectives; all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, "
    "sendrecv; 4 KiB to 1 GiB; float32; 2, 4 GPUs",
    "gemm": "Matrix products; fp32, tf32, fp16, bf16; 1 GPU; k=2048 to 8192; m=64 to 8192; "
    "n=2048 to 28672",
}
FIGURES = {
    "ddp_scaling": ["3.47×", "86.7%", "10–33%", "587,718"],
    "largest_batch": ["192", "139", "385.2"],
    "gemm": ["671.5", "646.0", "348.0", "51.81"],
    "collectives": ["359.5 GB/s", "353.7 GB/s", "5.572 µs"],
    "memory_bandwidth": ["4,372 GB/s", "91.1%", "3.172 µs"],
    "mixed_precision": ["6.68×", "71.8%", "369.7"],
}


def parameters(model: torch.nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("job", WHAT)
def test_a_line_tells_what_was_run(job: str) -> None:
    summary = load_summary(RESULTS, RUNS[job])
    assert "; ".join(what_ran(rows_of(summary), summary.ranks)) == WHAT[job]


@pytest.mark.parametrize("job", FIGURES)
def test_the_large_figures_answer_the_question_of_the_job_and_say_what_they_count(job: str) -> None:
    summary = load_summary(RESULTS, RUNS[job])
    found = key_figures(summary, rows_of(summary))
    assert [one.value for one in found] == FIGURES[job]
    assert all(len(one.counts.split()) > 1 for one in found)


def test_dtypes_and_precisions_are_told_whichever_workload_comes_first() -> None:
    summaries = [load_summary(RESULTS, RUNS[job]) for job in ("collectives", "gemm")]
    rows = [row for summary in summaries for row in rows_of(summary)]
    for ordered in (rows, rows[::-1]):
        words = what_ran(ordered, "GPUs")
        assert ("float32" in words, "fp32, tf32, fp16, bf16" in words) == (True, True)


def test_products_on_cpu_workers_are_told_as_those_of_workers() -> None:
    summary = replace(load_summary(RESULTS, RUNS["gemm"]), ranks="workers")
    rows = [{**row, "world_size": 1 + number % 2} for number, row in enumerate(rows_of(summary))]
    places = [one.where for one in key_figures(summary, rows)]
    assert any("worker" in where for where in places)
    assert not any("GPU" in where for where in places)


def test_a_model_that_only_runs_has_no_optimizer() -> None:
    summary = load_summary(RESULTS, RUNS["transformer_scaling"])
    rows = rows_of(summary)
    answering = [{**row, "params": {**row["params"], "mode": "inference"}} for row in rows]
    words = what_ran(answering, summary.ranks)
    assert "AdamW" in what_ran(rows, summary.ranks)
    assert "AdamW" not in words
    assert "mode=inference" in words


def test_the_parameters_that_are_told_are_those_of_the_models_that_are_built() -> None:
    with torch.device("meta"):
        for preset, shape in LANGUAGE_PRESETS.items():
            for layers, seq_len in ((1, 8), (2, 1024)):
                model = make_model(replace(shape, layers=layers), seq_len)
                params = {"preset": preset, "seq_len": str(seq_len), "layers": str(layers)}
                assert parameter_count("transformer", params) == parameters(model)
        whole = parameters(Decoder(DECODER_PRESETS["124m"], seq_len=1024))
        assert parameter_count("transformer", {"preset": "124m", "seq_len": "1024"}) == whole
        for hidden, layers in ((8, 1), (64, 3)):
            params = {"hidden": str(hidden), "layers": str(layers)}
            assert parameter_count("mlp", params) == parameters(linear_stack(hidden, layers))
        linear = torch.nn.Linear(LINEAR_FEATURES, 1)
        assert parameter_count("linear", {}) == parameters(linear)
    assert parameter_count("gemm", {"m": "8"}) is None
    assert parameter_count("my.module:Model", {"hidden": "8", "layers": "2"}) is None
