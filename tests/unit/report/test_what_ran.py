"""What a page says first: what was run, how large the model was, and the large figures."""

from dataclasses import replace

import torch
from builders import (
    make_device,
    make_measurement,
    make_record,
    make_row,
    make_summary,
    unscaled_point,
    write_run,
)
from commands import EXAMPLES

from raybench.analysis.answer import decide
from raybench.analysis.run_data import load_run_data
from raybench.job.point import Precision
from raybench.report.answer_table import answer_table
from raybench.report.words.run import model
from raybench.workloads.base import parameter_count
from raybench.workloads.language_models import LanguageModel
from raybench.workloads.networks import FEATURES, Mlp, linear_stack
from raybench.workloads.shapes import DECODER_PRESETS, LANGUAGE_PRESETS


def parameters(model):
    return sum(one.numel() for one in model.parameters())


def products():
    """Matrix products in two precisions."""
    work = {"items_per_step": None, "flops_per_step": 4e11, "gemm_tflops": 800.0}
    return [
        make_record(
            replace(unscaled_point("gemm", m=m, n=8, k=8), precision=precision),
            measurements=(make_measurement(0, [[1_000_000] * 6], **work),),
        )
        for precision in (Precision.FP32, Precision.BF16)
        for m in (64, 1024)
    ]


def test_products_on_cpu_do_not_mention_gpus():
    summary = make_summary(products())
    summary.__dict__["ranks"] = "workers"
    summary.__dict__["rows"] = [
        replace(row, world_size=1 + number % 2) for number, row in enumerate(summary.rows)
    ]
    table = answer_table(decide(summary)).table
    text = str((table.titles, table.texts))
    assert "worker" in text
    assert "GPU" not in text


def test_page_names_model_size_and_optimizer():
    summary = load_run_data(EXAMPLES, "mixed_precision")
    name, size, optimizer = model(summary)
    assert (name, size) == ("GPT-2 shaped transformer, 1,024 tokens a sequence", "124 M parameters")
    assert optimizer == "adamw"
    summary.__dict__["rows"] = [
        replace(row, params={**row.params, "mode": "inference"}) for row in summary.rows
    ]
    assert model(summary) == (name, size)
    summary.__dict__["rows"] = [make_row(workload="mlp", params={})]
    assert model(summary) == ("mlp",)


def test_reported_parameter_count_matches_the_built_model():
    with torch.device("meta"):
        for preset, shape in LANGUAGE_PRESETS.items():
            for layers, seq_len in ((1, 8), (2, 1024)):
                model = LanguageModel(replace(shape, layers=layers), seq_len=seq_len)
                params = {"preset": preset, "seq_len": str(seq_len), "layers": str(layers)}
                assert parameter_count("transformer", params) == parameters(model)
        whole = parameters(LanguageModel(DECODER_PRESETS["124m"], seq_len=1024))
        assert parameter_count("transformer", {"preset": "124m", "seq_len": "1024"}) == whole
        for hidden, layers in ((8, 1), (64, 3)):
            params = {"hidden": str(hidden), "layers": str(layers)}
            assert parameter_count("mlp", params) == parameters(linear_stack(hidden, layers))
        assert parameter_count("linear", {}) == parameters(torch.nn.Linear(FEATURES, 1))
    assert Mlp.describe({"hidden": "8", "layers": "1"}) == "MLP of 1 layer, 8 wide"
    assert parameter_count("gemm", {"m": "8"}) is None
    assert parameter_count("my.module:Model", {"hidden": "8", "layers": "2"}) is None


def test_a_report_names_the_nccl_of_each_node(command, tmp_path):
    devices = [
        make_device(rank, node_id=f"node-{rank}", versions={"nccl": version})
        for rank, version in enumerate(("2.28.9", "2.27.3"))
    ]
    write_run(tmp_path, "run-a", [make_record()], devices)
    shown = command("report", "run-a", "--full", "--format", "md")
    assert "nccl 2.27.3 and 2.28.9" in shown.out
