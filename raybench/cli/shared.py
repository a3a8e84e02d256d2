"""Shared by commands: options, completion, results on stdout, messages on stderr."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from raybench.api.files import write_file as write_file
from raybench.errors import ResultsError, ResultsWarning, UsageError
from raybench.report.console import make_console as make_console
from raybench.report.console import say as say

if TYPE_CHECKING:
    from raybench.analysis.references import ReferenceFile, References
    from raybench.report.documents import Document
    from raybench.sweep.run_state import RunTarget


_STAMP = re.compile(r"\d{8}-\d{6}(?=-[0-9a-f]+$)")
_LATEST = "latest"  # the same as in raybench.results.reader, which is slow to import

Option = Callable[[Callable[..., Any]], Callable[..., Any]]


class _Folder(click.Path):
    """A folder of this machine; a URL such as s3://bucket/runs is refused."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        """Return the path, or refuse a URL."""
        if "://" in str(value):
            self.fail(f"{value}: must be a folder of this machine, not a URL", param, ctx)
        return super().convert(value, param, ctx)


def _to_stdout(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Return None, which stands for stdout, if the path is `-`."""
    return None if path == Path("-") else path


results_option = click.option(
    "--results",
    type=_Folder(path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder of the result tables.",
)
output_option = click.option(
    "-o",
    "--output",
    type=_Folder(path_type=Path),
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
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    callback=_to_stdout,
    help="Write to this file, in the format of its ending (page.html) unless --format is given. "
    "- is stdout.",
)


def read_share(_: click.Context, option: click.Parameter, text: str) -> float:
    """Return 0.05 for "5%" and for "0.05"; refuse 100 % and more."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)", text.strip()):
        value = float(match[1]) / (100 if match[2] else 1)
        if value < 1:
            return value
    raise UsageError(
        f"{option.opts[0]}: must be from 0% to below 100%, as in 5% or 0.05, got {text!r}"
    )


def read_duration(_: click.Context, option: click.Parameter, text: str) -> float:
    """Return a time such as 90s, 30m, 2h or 7d in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise UsageError(f"{option.opts[0]} {text}: must be a time, as in 90s, 30m or 2h")
    return float(match[1]) * {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[match[2]]


# Partial options: the command adds the help.
threshold_option = partial(
    click.option, "--threshold", callback=read_share, default="1.5%", show_default=True
)


def _check_chart(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Return the path of --chart; refuse a file that is neither SVG nor PNG."""
    if path is not None and path.suffix.lower() not in (".svg", ".png"):
        raise UsageError(f"--chart: must end in .svg or .png, got {path}")
    return path


chart_option = partial(
    click.option,
    "--chart",
    type=click.Path(path_type=Path),
    callback=_check_chart,
    metavar="FILE.svg|.png",
)


def _load_references(
    ctx: click.Context, _: click.Parameter, path: Path | None
) -> References | None:
    """Return the references of a site and of raybench; None during shell completion."""
    if ctx.resilient_parsing:
        return None
    from raybench.analysis.references import References

    return References(read_reference_files(path) if path else ())


def read_reference_files(path: Path) -> list[ReferenceFile]:
    """Load reference values, with a ResultsWarning for each value above the peak of the device."""
    from raybench.analysis.references import load_files
    from raybench.report.words.references import above_peak

    files, impossible_entries = load_files(path)
    for entry in impossible_entries:
        warnings.warn(above_peak(entry), ResultsWarning, stacklevel=2)
    return files


references_option = click.option(
    "--references",
    type=click.Path(path_type=Path, exists=True),
    callback=_load_references,
    metavar="FILE|FOLDER",
    help="Reference values of your own site; they take precedence over the values of raybench.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
address_option = partial(
    click.option, "--address", default="auto", show_default=True, metavar="auto|local|HOST:PORT"
)
device_option = partial(
    click.option,
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    show_default=True,
)


def format_options(kinds: Sequence[str], meaning: str, default: str | None = "terminal") -> Option:
    """Return a decorator that adds `--format` and `--json`; the command gets the argument `kind`.

    Without these options, the ending of `--output` chooses the kind, as in page.html.

    Args:
        kinds: the choices of `--format`; json must be one of them.
        meaning: the help of `--format`.
        default: the kind if neither an option nor an ending chooses one.
    """

    def add_options(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_kind(*, kind: str | None, as_json: bool, **given: Any) -> Any:
            if as_json and kind not in (None, "json"):
                raise UsageError(f"--json: means --format json, got --format {kind}")
            # The command may have an option --output, such as page.html.
            ending = given["output"].suffix[1:].lower() if given.get("output") else ""
            kind_of_ending = ending if ending in kinds else default
            return command(kind="json" if as_json else kind or kind_of_ending, **given)

        add_json = click.option(
            "--json", "as_json", is_flag=True, help="The same as --format json."
        )
        add_format = click.option(
            "--format",
            "kind",
            type=click.Choice(kinds),
            show_default=default or False,
            help=meaning,
        )
        return add_format(add_json(with_kind))

    return add_options


def _check_wait(_: click.Context, __: click.Parameter, wait_s: float) -> float:
    # Check here, because click's FloatRange accepts NaN.
    if not 0 <= wait_s <= 1_000_000:
        raise UsageError(f"--wait {wait_s:g}: must be from 0 to 1,000,000 seconds")
    return wait_s


wait_option = click.option(
    "--wait",
    "wait_s",
    type=float,
    callback=_check_wait,
    default=0.0,
    metavar="SECONDS",
    help="How long to wait for devices: for other sweeps that use them to end, and for nodes that "
    "join late or replace a lost one. Points that fit run meanwhile.",
)
shared_option = click.option(
    "--shared",
    is_flag=True,
    help="Measure beside other sweeps on the same devices; each row names the other users.",
)

devices_option = click.option(
    "--devices",
    "devices_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Use only the devices that FILE names, one a line: the UUID of a GPU, or HOST:NUMBER "
    "of a CPU worker.",
)


def make_target(given: Mapping[str, Any], profiled: frozenset[str] = frozenset()) -> RunTarget:
    """Make the target of a sweep from the arguments of a command.

    Args:
        profiled: ids of the points to profile.

    Raises:
        UsageError: the file of --devices cannot be read, is empty, or has a wrong line.
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


def complete_run(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete `latest` and run ids, the newest first, then runs in subfolders, as `examples/RUN`.

    A text with a slash that matches no run is completed as a path.
    """
    nested_runs = []
    for folder in _nested_results(ctx):
        nested_runs += [f"{folder}/{run_id}" for run_id in _run_ids(ctx, folder)]
    candidates = (_LATEST, *_run_ids(ctx), *nested_runs)
    names = [name for name in candidates if name.startswith(incomplete)]
    if os.sep in incomplete and not names:
        return [CompletionItem(incomplete, type="dir")]
    return [CompletionItem(name) for name in names]


def complete_point(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete ids of the stored points of the argument `run`, if it names exactly one run."""
    folder, _, run_name = str(ctx.params.get("run") or "").rpartition(os.sep)
    if folder not in ("", *_nested_results(ctx)):
        return []
    run_ids = _run_ids(ctx, folder)
    if run_name == _LATEST:
        matches = run_ids[:1]
    elif run_name in run_ids:
        matches = [run_name]
    else:
        matches = [run_id for run_id in run_ids if run_id.startswith(run_name)]
    if len(matches) != 1:
        return []
    return _complete_point_ids(_results_folder(ctx) / folder, matches, incomplete)


def complete_any_point(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete point ids of all runs, the newest run first."""
    return _complete_point_ids(_results_folder(ctx), _run_ids(ctx), incomplete)


def _complete_point_ids(
    folder: Path, run_ids: Sequence[str], incomplete: str
) -> list[CompletionItem]:
    """Complete the ids of points that these runs have stored."""
    # Take the ids from the file names if possible, because reading tables is slow.
    point_ids: dict[str, None] = {}
    for run_id in run_ids:
        # A file is named INDEX-POINT_ID-ATTEMPT, or INDEX-POINT_ID-ATTEMPT-and-3-more.
        files = sorted((folder / "points" / run_id).glob("[!.]*-*-*.parquet"))
        if not any("-and-" in file.stem for file in files):
            point_ids |= dict.fromkeys(file.stem.split("-")[1] for file in files)
            continue
        # The name of a file with several points has only the id of the first point.
        from raybench.results.reader import read_table

        with suppress(ResultsError):
            column = read_table(folder, "points", run_id, ["point_id"])["point_id"]
            point_ids |= dict.fromkeys(column.to_pylist())
    return [CompletionItem(point_id) for point_id in point_ids if point_id.startswith(incomplete)]


def _run_ids(ctx: click.Context, subfolder: str = "") -> list[str]:
    """Return the ids of runs in the results, or in a subfolder of them, the newest first."""
    # Sort by the time stamp in the id; without a stamp, by the time of the folder.
    stamped_ids = []
    for entry in _subfolders(_results_folder(ctx) / subfolder / "runs"):
        stamp_in_id = _STAMP.search(entry.name)
        changed = time.strftime("%Y%m%d-%H%M%S", time.gmtime(entry.stat().st_mtime))
        stamped_ids.append((stamp_in_id[0] if stamp_in_id else changed, entry.name))
    return [run_id for _, run_id in sorted(stamped_ids, reverse=True)]


def _nested_results(ctx: click.Context) -> list[str]:
    """Return the names of subfolders that are results folders themselves, such as `examples`."""
    folders = _subfolders(_results_folder(ctx))
    return sorted(folder.name for folder in folders if Path(folder.path, "runs").is_dir())


def _subfolders(folder: Path) -> list[os.DirEntry[str]]:
    """Return the visible folders inside a folder; empty if the folder cannot be listed."""
    with suppress(OSError), os.scandir(folder) as entries:
        visible = (entry for entry in entries if not entry.name.startswith((".", "_")))
        # Not DirEntry.is_dir, which raises for circular links.
        return [entry for entry in visible if os.path.isdir(entry)]  # noqa: PTH112
    return []


def _results_folder(ctx: click.Context) -> Path:
    """Return the folder of --results, or of --output of `sweep`."""
    name = "results" if "results" in ctx.params else "output"
    return Path(ctx.params.get(name) or "results")


_STDERR = 2


def write_result(text: str) -> None:
    """Write the text to stdout; ANSI codes are removed unless stdout is a terminal.

    Characters that stdout cannot encode become "?". A closed pipe is no error.

    Raises:
        ResultsError: stdout cannot be written, as on a full disk.
    """
    try:
        try:
            click.echo(text, nl=False)
        except UnicodeEncodeError:  # its attribute `encoding` is mostly "charmap"
            name = sys.stdout.encoding
            click.echo(text.encode(name, "replace").decode(name), nl=False)
    except BrokenPipeError:
        # Otherwise the interpreter would flush the rest of stdout at its exit, and fail again.
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device, not a path
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    except OSError as error:
        raise ResultsError(f"stdout: cannot be written: {error.strerror}") from error


def append_to_github_summary(markdown: str) -> None:
    """Append to the summary of a step of GitHub Actions, which shows at most 1 MiB.

    Raises:
        UsageError: GITHUB_STEP_SUMMARY is not set.
        ResultsError: the file cannot be written.
    """
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        raise UsageError("--github: GITHUB_STEP_SUMMARY is not set; GitHub Actions sets it")
    try:
        with Path(name).open("a", encoding="utf-8") as summary:
            summary.write(markdown)
    except OSError as error:
        raise ResultsError(f"{name}: cannot be written: {error.strerror}") from error


def color() -> bool:
    """Return whether stdout is a terminal that shows colours, and NO_COLOR is unset or empty."""
    has_no_colors = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    # sys.stdout is None if the shell closed it (`>&-`).
    return sys.stdout is not None and sys.stdout.isatty() and not has_no_colors


def width() -> int:
    """Return the width of stdout in characters; COLUMNS overrides it."""
    return shutil.get_terminal_size((80, 24)).columns


def text_width() -> int:
    """Return the width for running text: `width()`, at most 100 characters."""
    return min(width(), 100)


def scalar_text(value: object) -> str:
    """Return a scalar as text, unquoted and `printable`: `true`, `64`, `none` for None."""
    from raybench.report.formatting import printable

    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else printable(str(value))


def json_text(value: object) -> str:
    """Return an object as indented ASCII JSON and a line break; it must not contain NaN."""
    return json.dumps(value, indent=2) + "\n"


def write_document(
    document: Document,
    kind: str = "terminal",
    path: Path | None = None,
    make_page: Callable[[], str] | None = None,
) -> None:
    """Write a document to a file or to stdout.

    Args:
        kind: terminal, md, json or html.
        path: None for stdout.
        make_page: returns the page; required for html.
    """
    from raybench.report.documents import format_document

    if kind == "html" and make_page is not None:
        text = make_page()
    else:
        text = format_document(document, kind, width=width(), color=path is None and color())
    write_text(text, path)
    if path is not None and kind == "html":
        click.echo(f"{path}: open it in a browser", err=True)


def write_text(text: str, path: Path | None) -> None:
    """Write a text to a file; without a path, to stdout."""
    if path is None:
        write_result(text)
    else:
        write_file(path, text.encode())


def table_text(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text that ends in a line break, in colour if `color()`.

    Cells are folded to fit `width()`, except in the columns `parameter` and `point_id`.
    """
    from raybench.report.documents import SETTING_CHARS, ShownColumn, Table, render_text

    # A column without `min_chars` is never folded.
    columns = (
        ShownColumn(
            title=title,
            is_text=True,
            min_chars=None if title in ("parameter", "point_id") else SETTING_CHARS,
        )
        for title in titles
    )
    table = Table(columns=tuple(columns), rows=tuple(map(tuple, rows)))
    return render_text([table], width=width(), color=color())


class _LossyFile(io.FileIO):
    """A file that never raises: data that cannot be written is lost."""

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Write `data` up to the first OSError, and always return the size of `data`."""
        remaining = memoryview(data).cast("B")
        size = len(remaining)
        with suppress(OSError):
            while remaining:
                written = super().write(remaining) or 0
                remaining = remaining[written:]
        return size


def keep_stderr_usable() -> None:
    """Replace sys.stderr by a stream that never raises, unless a program has replaced it already.

    Also open /dev/null on the descriptors 0, 1 and 2 that are closed.
    """
    # Otherwise the next file that is opened would get the number of a closed descriptor, and output
    # to stdout or stderr would go into this file.
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= _STDERR:
        os.set_inheritable(descriptor, True)
        descriptor = os.dup(descriptor)
    os.close(descriptor)
    old_stderr = sys.stderr
    if old_stderr is not sys.__stderr__:  # a program has replaced it
        return
    sys.stderr = io.TextIOWrapper(
        _LossyFile(_STDERR, "wb", closefd=False),
        encoding=old_stderr.encoding if old_stderr else "utf-8",
        errors="backslashreplace",
        line_buffering=True,
        write_through=True,
    )
