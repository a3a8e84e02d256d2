"""What a shell may complete: run ids and point ids, told by the names of files alone.

Reading the tables would import pyarrow, which takes longer than a Tab key may.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import CompletionItem

_LATEST = "latest"  # as raybench.results.run has it, which is slow to import


def complete_run(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """List ids of the runs in the results, the newest first, then of folders of results inside.

    Paths where a path was begun.
    """
    inside = [f"{folder}/{name}" for folder in _inside(ctx) for name in _runs(ctx, folder)]
    names = [name for name in (_LATEST, *_runs(ctx), *inside) if name.startswith(incomplete)]
    if os.sep in incomplete and not names:
        return [CompletionItem(incomplete, type="dir")]
    return [CompletionItem(name) for name in names]


def complete_point(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """List ids of the points of the run that was given, in the order of the plan."""
    folder, _, given = str(ctx.params.get("run") or "").rpartition(os.sep)
    if folder not in ("", *_inside(ctx)):
        return []
    runs = _runs(ctx, folder)
    found = [name for name in runs if name.startswith(given)] if given != _LATEST else runs[:1]
    run_id = given if given in runs else found[0] if len(found) == 1 else None
    if run_id is None:
        return []
    parts = sorted((_results(ctx) / folder / "points" / run_id).glob("[!.]*-*-*.parquet"))
    ids = dict.fromkeys(part.stem.split("-")[1] for part in parts)
    return [CompletionItem(point_id) for point_id in ids if point_id.startswith(incomplete)]


def complete_any_point(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """List ids of the points of all runs in the results, those of the newest run first."""
    points = _results(ctx) / "points"
    ids = dict.fromkeys(
        part.stem.split("-")[1]
        for run_id in _runs(ctx)
        for part in sorted((points / run_id).glob("[!.]*-*-*.parquet"))
    )
    return [CompletionItem(point_id) for point_id in ids if point_id.startswith(incomplete)]


def complete_workload(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """List the built-in workloads; the user's own cannot be told without importing."""
    from raybench.job.registry import BUILTIN

    return [CompletionItem(name) for name in BUILTIN if name.startswith(incomplete)]


def complete_template(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """List the jobs that come with raybench."""
    from raybench.job.catalog import templates

    return [CompletionItem(one.name) for one in templates() if one.name.startswith(incomplete)]


def _runs(ctx: click.Context, inside: str = "") -> list[str]:
    """List ids of the runs in the results, or in a results folder inside them, the newest first."""
    found = [
        (entry.stat().st_mtime, entry.name) for entry in _folders(_results(ctx) / inside / "runs")
    ]
    return [name for _, name in sorted(found, reverse=True)]


def _inside(ctx: click.Context) -> list[str]:
    """List the results folders inside the results, such as `examples`."""
    folders = _folders(_results(ctx))
    return sorted(entry.name for entry in folders if Path(entry.path, "runs").is_dir())


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [e for e in entries if e.is_dir() and not e.name.startswith((".", "_"))]


def _results(ctx: click.Context) -> Path:
    """Return the folder that was given, or the default: `sweep` calls it its output."""
    name = "results" if "results" in ctx.params else "output"
    return Path(ctx.params.get(name) or "results")
