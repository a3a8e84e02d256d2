"""CONTRIBUTING.md lists each kind of doubt with its mark, its harm and where it is found."""

from pathlib import Path

import pytest

from raybench.records.doubts import DoubtKind

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def rows():
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: row for row in cells if len(row) == 4}


@pytest.mark.parametrize("kind", DoubtKind)
def test_explain_knows_each_kind(command, kind):
    assert f"{kind}: a doubt; " in command("explain", kind.value, results=None).out


@pytest.mark.parametrize("kind", DoubtKind)
def test_each_kind_has_a_row(rows, kind):
    _, mark, harm, modules = rows[kind.value]
    assert (mark, harm) == (kind.mark, kind.harm.name.lower())
    for module in modules.split("`,`"):
        assert f"DoubtKind.{kind.name}" in (ROOT / "raybench" / module).read_text(), module
