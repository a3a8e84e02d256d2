"""README and docs say what the repository holds: links, committed runs, figures."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from raybench.cli import COMMANDS
from raybench.job.model import load_job
from raybench.job.plan import make_plan

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *REPOSITORY.glob("docs/*.md")]
# Jobs for which no GPU was free yet, as docs/results.md says.
WITHOUT_RUN = ("accumulation_or_batch", "layouts", "nccl_algorithms", "transformer_scaling")
RUN_ID = re.compile(r"`([a-z_]+-\d{8}-\d{6}-[0-9a-f]{4})`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_leads_to_one(page):
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)#]+)\)", text)
    missing = [
        link
        for link in links
        if not link.startswith("https://") and not (page.parent / link).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_run_that_is_named_is_committed_or_in_the_list_of_earlier_ones(page):
    earlier = RUN_ID.findall((REPOSITORY / "results" / "README.md").read_text())
    for run_id in set(RUN_ID.findall(page.read_text())) - set(earlier):
        assert list((REPOSITORY / "results" / "examples" / "points" / run_id).glob("*.parquet")), (
            run_id
        )


def test_the_table_of_the_readme_is_that_of_its_run():
    from raybench.cli.results import load_summary
    from raybench.report.documents import format_document
    from raybench.report.run_report import RunReport

    text = (REPOSITORY / "README.md").read_text()
    run_id = next(run for run in RUN_ID.findall(text) if run.startswith("ddp_scaling-"))
    summary = load_summary(REPOSITORY / "results" / "examples", run_id)
    reported = format_document(RunReport(summary=summary), "md").splitlines()
    result = text.partition("## A real result")[2].partition("## How to read it")[0]
    shown = [line for line in result.splitlines() if line[:2] == "| "]
    assert len(shown) > 3
    assert [line for line in shown if line not in reported] == []


def test_the_first_screen_of_the_readme_names_commands_and_jobs_that_there_are():
    text = (REPOSITORY / "README.md").read_text()
    lines = text.splitlines()
    table = [line.split(" | ") for line in lines if line.startswith("| ") and "`" in line]
    questions = [cells for cells in table if cells[0].endswith("?") or "question" in cells[0]]
    assert len(questions) >= 10
    assert lines.index("| question | command |") < 10
    spoken = [word for _, cell in questions for word in re.findall(r"`([^`]+)`", cell)]
    typed = [words.split() for words in spoken if words.startswith("raybench ")]
    assert {words[1] for words in typed} <= {*COMMANDS}
    for words in typed:
        command = importlib.import_module(COMMANDS[words[1]][0])
        known = {name for one in vars(command)[f"{words[1]}_command"].params for name in one.opts}
        assert {word for word in words if word.startswith("--")} <= known
    templates = re.findall(r"--template (\w+)(?:`, `(\w+))?", " ".join(map(" ".join, questions)))
    assert {name for names in templates for name in names if name} <= {
        path.stem for path in REPOSITORY.glob("jobs/*.yaml")
    }


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("jobs/*.yaml")), ids=lambda path: path.stem)
def test_every_job_of_the_repository_loads_and_was_run(path):
    job = load_job(path)
    planned = {point.point_id for point in make_plan(job).points}
    runs = list((REPOSITORY / "results" / "examples" / "points").glob(f"{job.name}-*"))
    assert bool(runs) == (job.name not in WITHOUT_RUN)
    if not runs:
        assert f"`{job.name}`" in (REPOSITORY / "docs" / "results.md").read_text()
        return
    parts = [part for run in runs for part in run.glob("*.parquet")]
    columns = [pq.read_table(part, columns=["point_id"], partitioning=None) for part in parts]
    assert planned <= {point_id for one in columns for point_id in one["point_id"].to_pylist()}


def test_the_python_of_the_readme_is_right_with_repeats_and_attempts(tmp_path, monkeypatch):
    from builders import (
        make_failed,
        make_measure,
        make_measurement,
        make_point,
        make_record,
        make_run,
    )

    from raybench.results.writer import RunStore

    store = RunStore.create(tmp_path / "results", make_run("run-a"), make_measure(repeats=2))
    point = make_point(world_size=2)
    steps = [[[8, 9, 7], [5, 6, 4]], [[7, 9, 8], [6, 6, 6]]]
    ranks = tuple(make_measurement(rank, repeats) for rank, repeats in enumerate(steps))
    store.write_records([(0, make_failed(point))])
    store.write_records([(0, make_record(point, attempt=2, measurements=ranks))])
    store.write_records([(1, make_record(count=3))])
    [sample] = re.findall(
        r"```python\n(import pandas.*?)```", (REPOSITORY / "README.md").read_text(), re.S
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(sample, "README.md", "exec"), names)
    assert len(names["points"]) == 3
    assert list(names["slowest"].xs(point.point_id, level="point_id")) == [8, 9, 8, 6, 6, 6]
    assert len(names["slowest"]) == 9
