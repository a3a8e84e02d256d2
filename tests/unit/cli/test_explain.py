"""`raybench explain` knows every heading, mark, kind and status that is printed."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from raybench.analysis.answer import decide
from raybench.analysis.run_data import load_run_data
from raybench.records.doubts import DoubtKind
from raybench.records.status import Status
from raybench.report.documents import Listing, Table
from raybench.report.point_settings import setting_cell
from raybench.report.run_report import RunReport
from raybench.report.words.doubts import MARKS

RESULTS = Path("results/examples")
NOISY = Path("tests/unit/report/noisy_runs")
# Names of devices, hosts and settings with a value are data, and empty titles are none.
DATA = re.compile(
    r"|GPU \d+( to GPU \d+)?|(node )?vm|.*=.*|batch [\d,]+|\d+ (GPUs?|workers?)|[\d.]+ [KMG]iB"
)


def runs_of(folder):
    return sorted(path.name.removesuffix(".parquet") for path in (folder / "runs").iterdir())


def headings(folder, run):
    data = load_run_data(folder, run)
    report = RunReport(answer=decide(data))
    values = {setting_cell(row, name) for row in data.rows for name in data.settings}
    for block in report.blocks():
        if isinstance(block, Table):
            yield from (title for title in block.titles if title not in values)
        elif isinstance(block, Listing):
            yield block.title


@pytest.fixture(scope="module")
def printed_terms():
    terms = {*MARKS, *(word for word, _ in MARKS.values()), *DoubtKind}
    terms |= {status.value for status in Status} | {status.label for status in Status}
    for folder in (RESULTS, NOISY):
        for run in runs_of(folder):
            if not run.startswith("health"):
                terms |= {title for title in headings(folder, run) if not DATA.fullmatch(title)}
    return sorted(terms)


SCALING = ("ddp_scaling-20261121-132844-4b9a", "ddp_scaling-20261122-142621-6209")
COMMANDS = [
    ("compare", *SCALING, "--full"),
    ("report", "health-20261122-222544-c2db"),
    ("report", "health-20261122-193240-9d20"),
]


def heads(text):
    """The heads of tables in Markdown."""
    lines = text.splitlines()
    for head, line in pairwise(lines):
        if line.startswith("| ") and set(line) <= set("|:- "):
            yield from (cell.strip().replace("\\", "") for cell in head.strip("|").split("|"))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_each_head_of_a_command_is_explained(command, words):
    done = command(*words, "--format", "md", results=RESULTS)
    assert done.code == 0
    found = {head for head in heads(done.out) if not DATA.fullmatch(head)}
    assert found
    unknown = [head for head in found if command("explain", *head.split(), results=None).code]
    assert unknown == []


def test_each_printed_term_is_explained(command, printed_terms):
    assert len(printed_terms) > 100
    unknown = []
    for term in printed_terms:
        done = command("explain", *term.split(), results=None)
        if done.code != 0 or ": " not in done.out:
            unknown.append(term)
    assert unknown == []
