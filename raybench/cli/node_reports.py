"""What `raybench health` does for schedulers: reports of nodes, metrics, exit codes, collecting."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any, Literal, get_args

import click

from raybench.cli.shared import Option, read_duration, write_document, write_result
from raybench.errors import (
    ClusterError,
    DevicesInUseError,
    InstallationError,
    ResultsError,
    UsageError,
    message_of,
)
from raybench.records.node_report import (
    NodeReport,
    NodeState,
    UntestedKind,
    UntestedReason,
)
from raybench.version import __version__

ExitCodes = Literal["slurm", "nagios"]

_CODES: Mapping[ExitCodes | None, Mapping[NodeState, int]] = {
    None: {
        NodeState.DRAIN: 1,
        NodeState.SUSPECT: 1,
        NodeState.UNTESTED: 3,
        NodeState.HEALTHY: 0,
    },
    "slurm": {
        NodeState.DRAIN: 1,
        NodeState.SUSPECT: 0,
        NodeState.UNTESTED: 0,
        NodeState.HEALTHY: 0,
    },
    "nagios": {
        NodeState.DRAIN: 2,
        NodeState.SUSPECT: 1,
        NodeState.UNTESTED: 3,
        NodeState.HEALTHY: 0,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutputs:
    """What a check writes for schedulers and monitors."""

    # Folder of `HOST.json`.
    report_folder: Path | None = None
    # File for the textfile collector of node_exporter.
    textfile: Path | None = None
    # None: the usual exit codes.
    exit_codes: ExitCodes | None = None

    @property
    def has_files(self) -> bool:
        """Whether a file is to be written."""
        return self.report_folder is not None or self.textfile is not None


def _check_textfile(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Return the path of --textfile; refuse a name that node_exporter would not read."""
    if path is not None and not path.name.endswith(".prom"):
        raise UsageError(f"--textfile {path}: the textfile collector reads only files named *.prom")
    return path


_OPTIONS: Sequence[Option] = (
    click.option(
        "--report",
        "report_folder",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help="Write what was found on each node to DIR/HOST.json; DIR may be shared by all nodes.",
    ),
    click.option(
        "--textfile",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=_check_textfile,
        metavar="FILE.prom",
        help="Write the metrics of this host to FILE.prom, for the textfile collector of "
        "node_exporter.",
    ),
    click.option(
        "--exit-code",
        "exit_codes",
        type=click.Choice(get_args(ExitCodes)),
        help="slurm: 1 if a node must be drained, else 0, also after a mistake in the command. "
        "nagios: 0 healthy, 1 suspect, 2 drain, 3 not tested.",
    ),
    click.option(
        "--collect",
        "collected_folder",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help="Test nothing: read the reports in DIR and write passing.txt, failing.txt, silent.txt "
        "and untested.txt there. Exit code: 1 a node fails, 3 nodes are silent or untested, else "
        "0.",
    ),
    click.option(
        "--expect",
        "expected",
        metavar="NODES",
        help="The nodes that must have reported: a file with one a line, or a list such as "
        "gpu[01-12,15],login1.",
    ),
    click.option(
        "--max-age",
        "max_age_s",
        callback=read_duration,
        default="1h",
        show_default=True,
        metavar="TIME",
        help="With --collect: a node whose check ended longer ago is silent.",
    ),
)


def node_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of this module to a command, which gets `outputs: NodeOutputs`.

    With --collect the command is not called. If it cannot start its tests, this host gets a report
    that says so.
    """

    @wraps(command)
    def with_outputs(
        *,
        report_folder: Path | None,
        textfile: Path | None,
        exit_codes: ExitCodes | None,
        collected_folder: Path | None,
        expected: str | None,
        max_age_s: float,
        **given: Any,
    ) -> Any:
        outputs = NodeOutputs(report_folder=report_folder, textfile=textfile, exit_codes=exit_codes)
        if collected_folder is not None:
            if outputs != NodeOutputs():
                raise UsageError(
                    "--collect: tests nothing, so that --report, --textfile and --exit-code do "
                    "not go with it"
                )
            if expected is None:
                raise UsageError("--collect: add --expect NODES; silent nodes are found by it")
            form = "json" if given["as_json"] else "terminal"
            code = _collect(collected_folder, expected, max_age_s, form)
            click.get_current_context().exit(code)
        if expected is not None:
            raise UsageError("--expect: goes with --collect DIR")
        _check_writable(outputs)
        began = datetime.now(UTC)
        try:
            return command(outputs=outputs, **given)
        except (ClusterError, ImportError, KeyboardInterrupt) as error:
            # No test could start, or the check has no result. An older report must not stay.
            _write([untested_report(error, began)], outputs)
            raise

    with_options: Callable[..., Any] = with_outputs
    for option in reversed(_OPTIONS):
        with_options = option(with_options)
    return with_options


def untested_report(error: BaseException, began: datetime) -> NodeReport:
    """Return the report of this host, on which no test could start, or was interrupted."""
    match error:
        case KeyboardInterrupt():
            reason = UntestedReason(kind=UntestedKind.OUT_OF_TIME, detail="interrupted")
        case DevicesInUseError():
            reason = UntestedReason(kind=UntestedKind.BUSY, detail=message_of(error))
        case InstallationError() | ImportError():
            kind = UntestedKind.BROKEN_INSTALLATION
            reason = UntestedReason(kind=kind, detail=message_of(error))
        case _:
            reason = UntestedReason(kind=UntestedKind.NO_DEVICES, detail=message_of(error))
    return NodeReport(
        host=socket.gethostname(),
        state=NodeState.UNTESTED,
        began=began.isoformat(),
        seconds=round((datetime.now(UTC) - began).total_seconds(), 3),
        raybench_version=__version__,
        devices=(),
        untested=(reason,),
    )


def finish(
    reports: Sequence[NodeReport], outputs: NodeOutputs, usual_code: int, *, is_json: bool
) -> int:
    """Write the files that `outputs` asks for, and return the exit code of the check.

    Call it before the result is printed: Nagios reads the first line of stdout. A file that cannot
    be written is reported on stderr, and by the exit code, unless a scheduler reads the exit code.

    Args:
        reports: of all nodes that were checked.
        outputs: what to write.
        usual_code: the exit code without `--exit-code`.
        is_json: whether the result is printed as JSON, so that stdout must hold nothing else.
    """
    from raybench.report.words import nodes as words

    are_written = _write(reports, outputs)
    if outputs.exit_codes is None:
        return usual_code if are_written else ResultsError.exit_code
    if outputs.exit_codes == "nagios":
        if not is_json:
            write_result(words.nagios_line(reports) + "\n")
    else:
        for report in reports:
            if report.state is not NodeState.HEALTHY:
                _say(words.node_line(report))
    return exit_code(reports, outputs.exit_codes)


def exit_code(reports: Sequence[NodeReport], codes: ExitCodes | None) -> int:
    """Return the exit code of the worst node; without nodes, the exit code of an untested node."""
    states = {report.state for report in reports} or {NodeState.UNTESTED}
    # The members of NodeState are in the order of urgency.
    worst_state = min(states, key=list(NodeState).index)
    return _CODES[codes][worst_state]


def code_after_error(words: Sequence[str], code: int) -> int:
    """Return the exit code of a command that ended with an error.

    Slurm drains a node for each exit code but 0. A mistake in the command, a broken installation
    and a bug are no fault of the node.

    Args:
        words: the words after `raybench`.
        code: the usual exit code of the error.
    """
    codes = _asked_codes(words)
    if codes is None:
        return code
    from raybench.report.words import nodes as node_words

    if codes == "nagios":
        # Nagios reads the first line of stdout.
        if "--json" not in words:
            write_result(node_words.nagios_line([]) + "\n")
    else:
        # For Slurm, an untested node has the exit code 0.
        _say(node_words.ended_with_error(code=0))
    return exit_code([], codes)


def _asked_codes(words: Sequence[str]) -> ExitCodes | None:
    """Return the value of --exit-code, also if click refused the command line."""
    if "health" not in words[:1]:
        return None
    asked_codes: ExitCodes | None = None
    for word, next_word in itertools.zip_longest(words, words[1:], fillvalue=""):
        if not word.startswith("--exit-code"):
            continue
        value = next_word if word == "--exit-code" else word.removeprefix("--exit-code=")
        for codes in get_args(ExitCodes):
            if value == codes:
                asked_codes = codes
    return asked_codes


def _write(reports: Sequence[NodeReport], outputs: NodeOutputs) -> bool:
    """Write all files; say on stderr which file failed, and return whether none failed."""
    if not outputs.has_files:
        return True
    from raybench.health.node_files import write_node_report
    from raybench.health.node_metrics import write_metrics
    from raybench.report.words import nodes as words

    are_written = True
    if outputs.report_folder is not None:
        for report in reports:
            try:
                write_node_report(outputs.report_folder, report)
            except ResultsError as error:
                _say(str(error))
                are_written = False
    if outputs.textfile is not None:
        # The textfile collector of node_exporter knows only the host on which it runs.
        this_host = _without_domain(socket.gethostname())
        own_reports = [report for report in reports if _without_domain(report.host) == this_host]
        if not own_reports:
            _say(words.not_this_host([report.host for report in reports]))
        try:
            for report in own_reports:
                write_metrics(outputs.textfile, report)
        except ResultsError as error:
            _say(str(error))
            are_written = False
    return are_written


def _without_domain(host: str) -> str:
    """Return the name of a host without its domain."""
    return host.partition(".")[0]


def _check_writable(outputs: NodeOutputs) -> None:
    """Create the folders of the files, so that a wrong path ends the command before the check."""
    # A scheduler needs the verdict even if a disk is full, so `finish` reports such errors.
    if outputs.exit_codes is not None:
        return
    folders = [outputs.report_folder, outputs.textfile and outputs.textfile.parent]
    for option, folder in zip(("--report", "--textfile"), folders, strict=True):
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"{option} {folder}: {error.strerror}") from None


def _collect(folder: Path, expected: str, max_age_s: float, form: str) -> int:
    """Read the reports of all nodes, write the lists and a summary; return the exit code."""
    from raybench.cli.host_list import read_hosts
    from raybench.health.collection import collect_nodes, write_lists
    from raybench.health.collection_report import CollectionReport
    from raybench.health.node_files import read_node_reports

    expected_hosts = read_hosts(expected)
    stored = read_node_reports(folder)
    for unreadable in stored.unreadable:
        _say(f"{unreadable.path}: no report of a node: {unreadable.reason}")
    collection = collect_nodes(stored, expected_hosts, datetime.now(UTC), max_age_s)
    write_lists(folder, collection)
    write_document(CollectionReport(folder=folder, collection=collection), form)
    return collection.exit_code


def _say(text: str) -> None:
    """Print a line on stderr, without control characters."""
    from raybench.report.formatting import one_line

    click.echo(one_line(text), err=True)
