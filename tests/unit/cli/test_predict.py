"""`raybench predict` on the committed runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from raybench import cli

RESULTS = Path(__file__).parents[3] / "results"
RUN = "examples/ddp_scaling-20261122-142621-6209"
OLD = "examples/transformer_scaling-20261120"


def predict(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    command = ["raybench", "predict", *arguments, "--results", str(RESULTS)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


def test_the_table_fits_a_terminal_and_says_what_it_assumes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(monkeypatch, RUN, "--world-size", "8,64,512", "--network", "45@30") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("512 GPUs would reach an efficiency of ")
    assert "with steps known to ±" in " ".join(lines[1:3])
    assert sum(" 512 " in line for line in lines[3:]) == 12
    assert any(line.startswith("Assumed: every GPU does the step") for line in lines)


def test_json_has_the_points_with_their_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(monkeypatch, RUN, "--world-size", "8", "--network", "45@30", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert "busbw of 45 GB/s" in found["assumptions"]
    (one, *_) = found["predictions"]
    assert one["step_ms_low"] < one["step_ms"] < one["step_ms_high"]
    assert (one["measured_world_size"], one["world_size"]) == (4, 8)


def test_markdown_has_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        predict(monkeypatch, RUN, "--world-size", "8", "--network", "45@30", "--format", "md") == 0
    )
    assert "| precision | batch\\_size | world\\_size | step ms | ± |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((RUN, "--world-size", "4"), "must be more than the 4 that"),
        (
            (RUN, "--world-size", "8,64"),
            "4 devices on 1 node of 4; 8, 64 devices need 2 to 16 nodes",
        ),
        ((RUN, "--world-size", "8,x"), "must be numbers from 2"),
        ((RUN, "--world-size", "8", "--network", "3@"), "must be GB/s@µs as in 45@30"),
        ((RUN, "--world-size", "8", "--network", "0@3"), "above 0 GB/s"),
        ((RUN, "--world-size", "8", "--network", "examples/gemm"), "has no all_reduce"),
        ((RUN, "--world-size", "8", "--network", "examples/collectives"), "of up to 4 devices"),
        (("examples/gemm", "--world-size", "8"), "no step of DistributedDataParallel"),
        # Of a time when steps were not taken apart so.
        ((OLD, "--world-size", "8", "--network", "9@9"), "no comm_ms"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    why: str,
) -> None:
    assert predict(monkeypatch, *arguments) == 2
    told = capsys.readouterr().err
    assert why in told
    assert told.count("\n") == 1
