"""Committed runs, three of them in every format, and what other commands say, word for word.

To accept other words, run `RAYBENCH_WRITE_SNAPSHOTS=1 pytest tests/unit/report/test_snapshots.py`
and read `git diff`.
"""

import html
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from commands import EXAMPLES

from raybench.cli import raybench

RUNS = (
    "ddp_scaling-20261122-142621-6209",
    "uneven_gpus-20261123-101038-7c4b",
    "health-20261122-222544-c2db",
)
# README.md of the folder says how each was made.
NOISY_FOLDER = Path("tests/unit/report/noisy_runs")
NOISY = {
    "noisy_scaling": "ddp_scaling-20261129-162012-b1f2",
    "noisy_interrupted": "ddp_scaling-20261129-161811-272f",
    "noisy_script": "ddp-20261129-161041-772d",
    "noisy_ranking": "accumulation_or_batch-20261129-161446-3417",
}
COMPARED = ("ddp_scaling-20261121-132844-4b9a", "ddp_scaling-20261122-142621-6209")


def marks(svg):
    """Return how many marks a chart has, and what the last of them stands for."""
    labels = re.findall(r'aria-label="([^"]*)"', svg[0])
    return f"<p>(chart of {len(labels)} marks, the last: {labels[-1]})</p>" if labels else ""


def visible(page):
    """Return the words of a page, a line for each paragraph, table row and chart."""
    page = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    page = re.sub(r"<svg\b.*?</svg>", marks, page, flags=re.DOTALL)
    page = re.sub(r"\s+", " ", page.replace("<wbr>", ""))
    page = re.sub(r"</?(p|tr|li|h\d|dd|figcaption|summary|div)\b", r"\n<\1", page)
    words = html.unescape(re.sub(r"<[^>]*>", " ", page))
    return "\n".join(" ".join(line.split()) for line in words.splitlines() if line.strip()) + "\n"


def ends(text):
    """Return the first and the last 6,000 characters of a text that is written for programs."""
    if len(text) <= 12_000:
        return text
    return f"{text[:6000]}\n({len(text) - 12_000} characters)\n{text[-6000:]}"


# Format -> the command, its width in columns, and what is kept of what it prints.
FORMATS: dict[str, tuple[list[str], int, Callable[[str], str]]] = {
    "80.txt": (["report"], 80, str),
    "120.txt": (["report", "--full"], 120, str),
    "md": (["report", "--format", "md"], 80, str),
    "html.txt": (["report", "--format", "html"], 80, visible),
    "json": (["report", "--format", "json"], 80, ends),
    "csv": (["export", "--format", "csv"], 80, ends),
    "junit.xml": (["export", "--format", "junit"], 80, ends),
}
COMMANDS = {
    **{
        f"{run.partition('-')[0]}.{name}": ([words[0], run, *words[1:]], width, kept)
        for run in RUNS
        for name, (words, width, kept) in FORMATS.items()
    },
    **{
        f"{run.partition('-')[0]}.issue.md": (["report", run, "--format", "issue"], 80, str)
        for run in RUNS[:2]
    },
    "compare.80.txt": (["compare", *COMPARED], 80, str),
    "compare.full.80.txt": (["compare", *COMPARED, "--full"], 80, str),
    "compare.html.txt": (["compare", *COMPARED, "--format", "html"], 80, visible),
    "compare.json": (["compare", *COMPARED, "--json"], 80, ends),
    "show.80.txt": (["show", RUNS[0]], 80, str),
    "show_point.80.txt": (["show", RUNS[1], "465121ca76d7"], 80, str),
}


def check(name, words, width, kept):
    """Hold what a command prints against the snapshot of this name, or write that."""
    done = CliRunner().invoke(raybench, words, env={"COLUMNS": str(width)})
    assert done.exit_code == 0, done.output
    path = Path(__file__).parent / "snapshots" / name
    if os.environ.get("RAYBENCH_WRITE_SNAPSHOTS"):
        path.write_text(kept(done.stdout))
    assert kept(done.stdout) == path.read_text(), __doc__


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_its_snapshot_holds(name, monkeypatch):
    words, width, kept = COMMANDS[name]
    monkeypatch.chdir(EXAMPLES.parents[1])
    check(name, [*words, "--results", "results/examples"], width, kept)


@pytest.mark.parametrize("kind", ["80.txt", "120.txt"])
@pytest.mark.parametrize("name", NOISY)
def test_noisy_run_matches_its_snapshot(name, kind, monkeypatch):
    words, width, kept = FORMATS[kind]
    monkeypatch.chdir(EXAMPLES.parents[1])
    words = [words[0], NOISY[name], *words[1:], "--results", str(NOISY_FOLDER)]
    check(f"{name}.{kind}", words, width, kept)


@pytest.mark.parametrize(("kind", "name"), [("md", "predict.md"), ("json", "predict.json")])
def test_prediction_from_two_devices_matches_its_snapshot(kind, name, tmp_path):
    for table in ("runs", "devices", "points"):
        shutil.copytree(EXAMPLES / table / RUNS[0], tmp_path / table / RUNS[0])
    for part in (tmp_path / "points" / RUNS[0]).glob("*.parquet"):
        rows = pq.read_table(part)
        pq.write_table(rows.filter(pc.field("world_size") < 4), part)
    words = ["predict", RUNS[0], "--world-size", "3,4", "--format", kind]
    check(name, [*words, "--results", str(tmp_path)], 80, ends)
