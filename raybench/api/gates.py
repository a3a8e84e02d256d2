"""A gate in Python: its verdict, its points and its reports."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, get_args

from raybench.api.run_comparison import ReportFormat, check_format
from raybench.api.sweeps import DeviceChoice
from raybench.errors import UsageError
from raybench.job.problems import quote

if TYPE_CHECKING:
    import pandas as pd

    from raybench.ab.plan import Settings, Version
    from raybench.ab.verdict import GateVerdict
    from raybench.report.gate_report import GateReport


class GateOptions(TypedDict, total=False):
    """Further options of `raybench.ab`; the command has the same options."""

    # Dotted key -> value, in place of the settings of the job.
    set: Mapping[str, Any]
    old_set: Mapping[str, Any]
    new_set: Mapping[str, Any]
    # Another job for the old side.
    old_job: str | os.PathLike[str]
    # Environment variables of a side.
    old_env: Mapping[str, str]
    new_env: Mapping[str, str]
    # Interpreter of both sides, and of one side.
    python: str | os.PathLike[str]
    old_python: str | os.PathLike[str]
    new_python: str | os.PathLike[str]
    # Shell command to run in each worktree before it is measured.
    setup: str
    # Smallest change that counts, as a share.
    threshold: float
    # Start no pair that would end later.
    max_minutes: float
    address: str
    device: DeviceChoice
    # File with the devices to use.
    devices: str | os.PathLike[str]
    # How long to wait for devices.
    wait_s: float


def ab(
    job: str | os.PathLike[str],
    *,
    old: str | None = None,
    new: str | None = None,
    results: str | os.PathLike[str] = "results",
    **options: Unpack[GateOptions],
) -> GateResult:
    """Measure two versions in turns until each point is decided, as `raybench ab` does.

    Example: `raybench.ab("ci.yaml", old="main", new="WORKTREE", max_minutes=30)`.

    Progress goes to stderr, or to the output of a notebook's cell.

    Args:
        job: path of a job file.
        old, new: git revisions; WORKTREE is the files as they are now. Without any revision both
            sides measure the current folder; a single revision is compared with WORKTREE.
        results: the results folder; the gate has a folder `ab/<gate id>` of its own in it.
        options: see `GateOptions`.

    Raises:
        UsageError: a revision, a job file or an option is wrong.
        JobError: a job file is no YAML.
        ResultsError: the results cannot be written.
        KeyboardInterrupt: `raybench ab --resume latest` goes on.
    """
    from raybench.ab.gate import run_gate
    from raybench.api.files import check_outlives_job
    from raybench.api.progress_line import listener_here
    from raybench.report.words.ab import progress

    for name in options:
        if name not in GateOptions.__annotations__:
            raise TypeError(f"ab() got an unexpected keyword argument {name!r}")
    output = _path("results", results)
    check_outlives_job(output, "results")
    listener = listener_here()
    verdict = run_gate(
        _path("job", job),
        _version(old, "old", options),
        _version(new, "new", options),
        _settings(options),
        output=output,
        listener=lambda event: listener.tell(progress(event)),
    )
    result = GateResult(verdict=verdict)
    write_reports(result)
    return result


def _path(name: str, value: Any) -> Path:
    """Return the path that an argument names; raise UsageError if it names none."""
    if not isinstance(value, str | os.PathLike) or "://" in os.fspath(value):
        raise UsageError(f"{name}: must be a path of this machine, given {quote(value)}")
    return Path(value)


def _version(revision: str | None, side: str, options: Mapping[str, Any]) -> Version:
    """Return what the options say about a side, "old" or "new"."""
    from raybench.ab.plan import Version
    from raybench.api.jobs import override_texts

    # In a script, an empty variable would otherwise compare the current files with themselves.
    if revision is not None and (not isinstance(revision, str) or not revision.strip()):
        raise UsageError(f"{side}: must be a git revision, given {quote(revision)}")
    old_job = options.get("old_job") if side == "old" else None
    variables = options.get(f"{side}_env") or {}
    if not isinstance(variables, Mapping):
        raise UsageError(
            f"{side}_env: must be a dict, as in {{'NCCL_ALGO': 'Tree'}}, given {quote(variables)}"
        )
    return Version(
        revision=revision or "",
        job=None if old_job is None else _path("old_job", old_job),
        python=os.fspath(options.get(f"{side}_python") or options.get("python") or ""),
        env={str(name): str(value) for name, value in variables.items()},
        overrides=override_texts(options.get(f"{side}_set"), f"{side}_set"),
    )


def _settings(options: GateOptions) -> Settings:
    """Return the settings of a gate from its options."""
    from raybench.ab.plan import Settings
    from raybench.api.jobs import override_texts

    device = options.get("device", "auto")
    if device not in get_args(DeviceChoice):
        raise UsageError(f"device: must be auto, cuda or cpu, given {quote(device)}")
    for name in ("threshold", "max_minutes", "wait_s"):
        number = options.get(name)
        if number is not None and not isinstance(number, Real):
            raise UsageError(f"{name}: must be a number, given {quote(number)}")
    # Options that are not given, or are None, have the defaults of `Settings`.
    names = ("threshold", "max_minutes", "setup", "address", "wait_s")
    given: dict[str, Any] = {
        name: options.get(name) for name in names if options.get(name) is not None
    }
    devices = options.get("devices")
    return Settings(
        overrides=override_texts(options.get("set")),
        device=device,
        devices_file=None if devices is None else _path("devices", devices),
        **given,
    )


@dataclass(frozen=True, kw_only=True)  # no slots, which cached_property needs
class GateResult:
    """The verdict of a gate, with its points and reports."""

    verdict: GateVerdict

    @property
    def outcome(self) -> str:
        """The most urgent outcome: slower, not_measured, undecided, faster or same."""
        return self.verdict.outcome.value

    @property
    def exit_code(self) -> int:
        """Exit code of `raybench ab`: 0 not slower, 1 slower, 5 undecided or not measured."""
        return self.verdict.exit_code

    @property
    def folder(self) -> Path:
        """Folder of the gate, with the tables of all starts."""
        return self.verdict.folder

    @cached_property
    def points(self) -> pd.DataFrame:
        """One row per point, the most urgent first: settings, verdict, both rates and the change.

        `change` is relative, -0.05 for 5 % fewer samples/s than OLD, with its interval `low` to
        `high`. `verdict` is as in `outcome`; `reason` says why a point is open, else "".
        """
        from raybench.analysis.frames import frame_of_gate

        return frame_of_gate(self.document.point_members)

    def report(self, format: ReportFormat = "text") -> str:
        """Return the report of `raybench ab`.

        Args:
            format: text for reading, md for a pull request, html for a page, json for programs.
        """
        from raybench.report.documents import format_document
        from raybench.report.page import format_gate

        check_format(format)
        if format == "html":
            return format_gate(self.document)
        return format_document(self.document, "terminal" if format == "text" else format)

    def __repr__(self) -> str:
        """Return id and outcome of the gate, then its answer, and why it stopped."""
        from raybench.report.words.ab import log_line

        head = f"<GateResult {self.verdict.gate.gate_id}: {self.outcome}>"
        sentences = filter(None, [*self.document.answer, self.document.why_stopped])
        # Paths stay whole, so that they can be copied.
        lines = textwrap.wrap(
            " ".join(sentences), 80, break_long_words=False, break_on_hyphens=False
        )
        return "\n".join(filter(None, [head, *lines, log_line(self.verdict)]))

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        from raybench.report.notebook import format_output

        return format_output(self.document)

    @cached_property
    def document(self) -> GateReport:
        """The report as a document (see `raybench.report.documents`)."""
        from raybench.report.gate_report import GateReport

        return GateReport(verdict=self.verdict)


def write_reports(result: GateResult) -> None:
    """Write report.md, report.html and verdict.json into the folder of the gate.

    Raises:
        ResultsError: a file cannot be written.
    """
    from raybench.api.files import write_file

    write_file(result.folder / "verdict.json", result.report("json").encode())
    write_file(result.folder / "report.md", result.report("md").encode())
    write_file(result.folder / "report.html", result.report("html").encode())
