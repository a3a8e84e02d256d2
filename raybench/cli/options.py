"""Options that several commands have, and what a shell offers for them after Tab.

Run ids and point ids are told by the names of files alone: reading the tables would import pyarrow,
which takes longer than a Tab key may.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from raybench.errors import UsageError

if TYPE_CHECKING:
    from raybench.analysis.references import References
    from raybench.sweep.run_state import RunTarget

_LATEST = "latest"  # as raybench.results.reader has it, which is slow to import
_LONGEST_WAIT_S = 1_000_000.0

Option = Callable[[Callable[..., Any]], Callable[..., Any]]

results_option = click.option(
    "--results",
    type=click.Path(path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder of the result tables.",
)
output_option = click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder for the result tables.",
)
overrides_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a job setting; may be repeated. baseline.precision=fp32 sets one key beside "
    "those of the file, 'baseline={precision: fp32}' takes their place.",
)


file_option = click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write it to this file."
)


def read_share(_: click.Context, option: click.Parameter, text: str) -> float:
    """Return the share that the text of an option means, 0.05 for "5%" and for "0.05".

    Raises UsageError for any other text, and for 100% and more.
    """
    if re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*%?", text.strip()):
        value = float(text.rstrip("% ")) / (100 if "%" in text else 1)
        if value < 1:
            return value
    raise UsageError(
        f"{option.opts[0]}: must be from 0% up to 100%, as in 5% or 0.05, got {text!r}"
    )


def threshold_option(meaning: str) -> Option:
    """Return the option `--threshold`, whose value is a share. meaning: its help."""
    return click.option(
        "--threshold", callback=read_share, default="1.5%", show_default=True, help=meaning
    )


def _check_chart(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and path.suffix.lower() not in (".svg", ".png"):
        raise UsageError(f"--chart: must end in .svg or .png, got {path}")
    return path


def chart_option(meaning: str) -> Option:
    """Return the option `--chart`, a path that ends in .svg or .png. meaning: its help."""
    return click.option(
        "--chart",
        type=click.Path(path_type=Path),
        callback=_check_chart,
        metavar="FILE.svg|.png",
        help=meaning,
    )


def _load_references(
    ctx: click.Context, _: click.Parameter, path: Path | None
) -> References | None:
    """Return the references of a site and of raybench; None while the Tab key completes.

    Raises UsageError for a file that cannot be read or breaks the schema.
    """
    if ctx.resilient_parsing:
        # The Tab key must not wait for it.
        return None
    from raybench.analysis.references import References, load_files

    return References(load_files(path) if path else ())


references_option = click.option(
    "--references",
    type=click.Path(path_type=Path, exists=True),
    callback=_load_references,
    metavar="FILE|FOLDER",
    help="Reference values of your own site, which go before those of raybench.",
)
text_format_option = click.option(
    "--format",
    "kind",
    type=click.Choice(["terminal", "md", "json"]),
    show_default="terminal",
    help="For a terminal, for a pull request, or for another program.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
json_format_option = click.option(
    "--json", "as_json", is_flag=True, help="The same as --format json."
)


def address_option(meaning: str = "The Ray cluster, as for `raybench sweep`.") -> Option:
    """Return the option that names the cluster."""
    return click.option(
        "--address",
        default="auto",
        show_default=True,
        metavar="auto|local|HOST:PORT",
        help=meaning,
    )


def device_option(meaning: str) -> Option:
    """Return the option that chooses the kind of the devices."""
    return click.option(
        "--device",
        type=click.Choice(["auto", "cuda", "cpu"]),
        default="auto",
        show_default=True,
        help=meaning,
    )


def _check_wait(_: click.Context, __: click.Parameter, wait_s: float) -> float:
    """Return the seconds to wait. Raises UsageError outside of 0 to 1,000,000."""
    # Nothing is above or below NaN: it fails this test, and passes that of click's ranges.
    if not 0 <= wait_s <= _LONGEST_WAIT_S:
        raise UsageError(f"--wait {wait_s:g}: must be from 0 to {_LONGEST_WAIT_S:,.0f} seconds")
    return wait_s


wait_option = click.option(
    "--wait",
    "wait_s",
    type=float,
    callback=_check_wait,
    default=0.0,
    metavar="SECONDS",
    help="How long to wait for devices: for other sweeps that use them to end, and for nodes that "
    "join late. Points that fit run meanwhile.",
)
shared_option = click.option(
    "--shared",
    is_flag=True,
    help="Measure beside other sweeps on the same devices; each row says who was there.",
)


def devices_option(more: str = "") -> Option:
    """Return the option that names the devices. more: the end of its help."""
    return click.option(
        "--devices",
        "devices_file",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Use only the devices that FILE names, one a line: the UUID of a GPU, or HOST:NUMBER "
        f"of a CPU worker.{more}",
    )


def make_target(given: Mapping[str, Any], profiled: frozenset[str] = frozenset()) -> RunTarget:
    """Return where a command runs its points, by the options of this module that it was given.

    profiled: ids of the points to profile. Raises UsageError where the file of --devices is wrong.
    """
    from raybench.records.devices import read_device_list
    from raybench.sweep.run_state import RunTarget

    file = given["devices_file"]
    return RunTarget(
        address=given["address"],
        device=given["device"],
        output=given["output"],
        profiled=profiled,
        wait_s=given["wait_s"],
        shared=given["shared"],
        only=read_device_list(file) if file else None,
    )


class Size(click.ParamType[int]):
    """A number of bytes with its unit."""

    name = "SIZE"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes. Raises BadParameter for a text that is no size."""
        from raybench.job.sections import read_bytes

        count = None if value.replace(".", "").isdecimal() else read_bytes(value)
        if count is None:
            rule = "must be a size with its unit, as in 141GB or 80GiB"
            raise click.BadParameter(f"{rule}, given {value!r}", ctx, param)
        return round(count)


def format_asked(kind: str | None, as_json: bool) -> str | None:
    """Return the format that --format or --json asks for; None where neither is given.

    Raises UsageError where both are given and differ.
    """
    if as_json and kind not in (None, "json"):
        raise UsageError(f"--json: means --format json, got --format {kind}")
    return "json" if as_json else kind


def complete_run(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return ids of the runs in the results, the newest first, then of folders of results inside.

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
    """Return ids of the points of the run that was given, in the order of the plan."""
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
    """Return ids of the points of all runs in the results, those of the newest run first."""
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
    """Return the built-in workloads; those of the user cannot be found without importing."""
    from raybench.job.registry import BUILTIN

    return [CompletionItem(name) for name in BUILTIN if name.startswith(incomplete)]


def complete_template(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the jobs that come with raybench."""
    from raybench.job.catalog import templates

    return [CompletionItem(one.name) for one in templates() if one.name.startswith(incomplete)]


def _runs(ctx: click.Context, inside: str = "") -> list[str]:
    """Return ids of the runs in the results, or in the folder `inside`, the newest first."""
    found = [
        (entry.stat().st_mtime, entry.name) for entry in _folders(_results(ctx) / inside / "runs")
    ]
    return [name for _, name in sorted(found, reverse=True)]


def _inside(ctx: click.Context) -> list[str]:
    """Return the names of results folders inside the results, such as `examples`."""
    folders = _folders(_results(ctx))
    return sorted(entry.name for entry in folders if Path(entry.path, "runs").is_dir())


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    """Return the folders inside a folder but hidden ones; empty where it is no folder."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [e for e in entries if e.is_dir() and not e.name.startswith((".", "_"))]


def _results(ctx: click.Context) -> Path:
    """Return the folder that was given, or the default: `sweep` calls it its output."""
    name = "results" if "results" in ctx.params else "output"
    return Path(ctx.params.get(name) or "results")
