"""The recipes of docs/how-to/query.md run on the committed results and agree with each other."""

import io
import re
from contextlib import redirect_stdout
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pytest
from commands import REPOSITORY

PAGE = (REPOSITORY / "docs" / "how-to" / "query.md").read_text()
TOOLS = ("pandas", "DuckDB", "Polars")
# Recipe -> what tells its rows apart.
RECIPES = {
    "efficiency": ["precision", "batch_size", "world_size"],
    "slowest": ["point_id"],
    "memory": ["checkpointing", "batch_size"],
    "power": ["point_id"],
}


def blocks(tool):
    """Language and text of the code blocks of one section."""
    section = PAGE.split(f"\n## {tool}\n")[1].split("\n## ")[0]
    return re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)


def executed(tool):
    """What the recipes of a tool leave, and pairs of what one prints and what the page shows."""
    left: dict[str, Any] = {}
    compared: list[tuple[str, str]] = []
    printed = io.StringIO()
    for language, text in blocks(tool):
        if language == "text":
            compared.append((printed.getvalue(), text))
            continue
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(text, f"docs/how-to/query.md: {tool}", "exec"), left)
    return left, compared


def as_frame(found, keys):
    """The same for all three: sorted by keys, columns in one order."""
    if isinstance(found, pl.DataFrame):
        found = pd.DataFrame(found.to_dict(as_series=False))
    elif isinstance(found, duckdb.DuckDBPyRelation):
        found = pd.DataFrame(found.fetchall(), columns=found.columns)
    return found.sort_values(keys)[sorted(found.columns)].reset_index(drop=True)


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        return {tool: executed(tool)[0] for tool in TOOLS}


def test_page_shows_what_its_recipes_print(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    _, compared = executed("pandas")
    assert len(compared) >= len(RECIPES)
    for printed, shown in compared:
        assert printed == shown


def test_raybench_load_agrees_with_the_recipes(found, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    left, _ = executed("raybench.load")
    assert len(left["large"]) >= 12
    keys = RECIPES["efficiency"]
    mine = left["scaling"].dropna(subset=["speed_up"])[[*keys, "speed_up"]]
    wanted = as_frame(found["pandas"]["efficiency"], keys)[[*keys, "speed_up"]]
    merged = mine.merge(wanted, on=keys)
    assert len(merged) == len(mine) >= 24
    assert ((merged["speed_up_x"] - merged["speed_up_y"]).abs() < 1e-9).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tool", TOOLS[1:])
def test_all_tools_find_the_same(found, tool, recipe):
    keys = RECIPES[recipe]
    wanted, mine = (as_frame(found[name][recipe], keys) for name in ("pandas", tool))
    assert len(wanted) > 3
    pd.testing.assert_frame_equal(mine, wanted, check_dtype=False, rtol=1e-9)
