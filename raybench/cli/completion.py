"""What a shell may complete: run ids and point ids, told by the names of files alone.

Reading the tables would import pyarrow, which takes longer than a Tab key may.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import CompletionItem

_LATEST = "latest"  # as raybench.store has it, which is slow to import


def complete_run(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Ids of the runs in the results, the newest first; folders where a path was begun."""
    if os.sep in incomplete:
        return [CompletionItem(incomplete, type="dir")]
    names = [name for name in (_LATEST, *_runs(ctx)) if name.startswith(incomplete)]
    return [CompletionItem(name) for name in names]


def complete_point(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Ids of the points of the run that was given, in the order of the plan."""
    given = str(ctx.params.get("run") or "")
    runs = _runs(ctx)
    found = [name for name in runs if name.startswith(given)] if given != _LATEST else runs[:1]
    run_id = given if given in runs else found[0] if len(found) == 1 else None
    if run_id is None:
        return []
    parts = sorted((_results(ctx) / "points" / run_id).glob("[!.]*-*-*.parquet"))
    ids = dict.fromkeys(part.stem.split("-")[1] for part in parts)
    return [CompletionItem(point_id) for point_id in ids if point_id.startswith(incomplete)]


def _runs(ctx: click.Context) -> list[str]:
    folder = _results(ctx) / "runs"
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        found = [(entry.stat().st_mtime, entry.name) for entry in entries if entry.is_dir()]
    return [name for _, name in sorted(found, reverse=True) if not name.startswith((".", "_"))]


def _results(ctx: click.Context) -> Path:
    """The folder that was given, or the default: `sweep` calls it its output."""
    name = "results" if "results" in ctx.params else "output"
    return Path(ctx.params.get(name) or "results")
