"""The command line: the only room that prints results and exits.

stdout carries results; stderr carries progress and errors. `raybench.errors` has the exit codes of
errors. Other exit codes are 1 (a point failed or is slower, or a check found something bad), 3 (a
check left something untested), 5 (`ab` or `compare --fail-on` could not decide all points) and 130
(interrupted).
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from click.shell_completion import CompletionItem

from raybench import __version__
from raybench.cli.shared import keep_stderr_usable
from raybench.errors import RaybenchError, ResultsWarning, UsageError, brief, how_to_install

# Name of a command -> its module, which is imported when the command is called, and its short help.
COMMANDS = {
    "sweep": ("raybench.cli.sweep", "Run a job on a cluster and report how it scales."),
    "plan": ("raybench.cli.sweep", "Check a job and list its points; needs no cluster."),
    "report": ("raybench.cli.results", "Report how a run scales."),
    "list": ("raybench.cli.results", "List the runs in the results."),
    "show": ("raybench.cli.results", "Show the points of a run, or all about one point."),
    "explain": ("raybench.cli.jobs", "Say what a heading, mark or status means."),
    "compare": ("raybench.cli.compare", "Compare two runs, point by point."),
    "ab": ("raybench.cli.ab", "Measure two versions in turns until each point is decided."),
    "history": ("raybench.cli.compare", "Show how points changed over many runs."),
    "predict": ("raybench.cli.compare", "Predict the steps of a run on more devices."),
    "export": ("raybench.cli.export", "Write the points of a run for other programs."),
    "compact": ("raybench.cli.results", "Put the parts of a run together, one file a table."),
    "health": ("raybench.cli.health", "Find out which device, link or node is bad."),
    "workloads": ("raybench.cli.jobs", "List what can be timed, and with which parameters."),
    "schema": ("raybench.cli.jobs", "Print the JSON Schema of job files."),
    "init": ("raybench.cli.jobs", "Write an annotated job file to start from."),
}

# Packages of the extra `run` in pyproject.toml, by the name under which they are imported.
_RUN_PACKAGES = frozenset({"pynvml", "ray", "torch"})


class _LazyGroup(click.Group):
    """A group that imports commands when they are needed, so that `--help` is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of the command and return it; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command = getattr(module, f"{cmd_name}_command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, short_help) for name, (_, short_help) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command as click does, but for an unknown name suggest the nearest name."""
        is_unknown = bool(args) and args[0] not in COMMANDS and not args[0].startswith("-")
        if is_unknown and not ctx.resilient_parsing:
            from raybench.job.problems import say_unknown

            raise click.UsageError(say_unknown("command", args[0], COMMANDS), ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names without help texts, because for these click would import all commands."""
        names = [CompletionItem(name) for name in COMMANDS if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="raybench %(version)s")
def raybench() -> None:
    """Sweep a GPU benchmark over batch sizes, world sizes and precisions, on Ray."""


def _print_on_stderr(text: str) -> None:
    """Print the lines of a text on stderr, without control characters."""
    from raybench.report.formatting import name_program, printable

    click.echo("\n".join(map(printable, name_program(text).split("\n"))), err=True)


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print each ResultsWarning once, as a line on stderr."""
    printed: set[str] = set()
    original = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if not issubclass(category, ResultsWarning):
            original(message, category, *rest, **named)
        elif str(message) not in printed:
            printed.add(str(message))
            _print_on_stderr(" ".join(str(message).split()))

    with warnings.catch_warnings():
        warnings.simplefilter("always", ResultsWarning)
        warnings.showwarning = show
        yield


def _check_arguments() -> None:
    """Raise UsageError for an argument that is not UTF-8, which Ray and Arrow require."""
    for argument in sys.argv[1:]:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            given_bytes = os.fsencode(argument)
            raise UsageError(
                f"arguments must be UTF-8 and the locale too, given {given_bytes!r} where Python "
                f"reads {sys.getfilesystemencoding()}; set PYTHONUTF8=1, or rename it"
            ) from error


def main() -> None:
    """Run the command of `sys.argv` and raise SystemExit.

    Every error is printed on stderr and has an exit code, see `raybench.cli`; a bug also has a
    traceback. Call this in the main thread only, because it replaces the handler of SIGINT and
    sys.stderr.
    """
    keep_stderr_usable()
    has_ended = False
    try:
        _check_arguments()
        with _warnings_as_lines():
            code = raybench.main(standalone_mode=False)
        has_ended = True
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = error.exit_code
    except click.ClickException as error:
        # Print one line only: the usage, which click would print first, hides the message.
        message = " ".join(error.format_message().split()).removesuffix(".")
        context = error.ctx if isinstance(error, click.UsageError) else None
        # A message that suggests the right name ("?") needs no hint to the help.
        if context is not None and not message.endswith("?"):
            message += f"; see: {context.command_path} --help"
        _print_on_stderr(message)
        code = error.exit_code
    except SystemExit as stop:
        # click raises SystemExit after a completion, or if the reader of a pipe ended (`| head`).
        # The last frame of the traceback has raised the exception.
        *_, (raiser, _) = traceback.walk_tb(stop.__traceback__)
        code = 0
        if not raiser.f_globals["__name__"].startswith("click."):
            _print_on_stderr(f"the code of a workload ended the command: {brief(stop)}")
            code = UsageError.exit_code
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = 130
    except RaybenchError as error:
        _print_on_stderr(str(error))
        code = error.exit_code
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing in _RUN_PACKAGES:
            _print_on_stderr(
                f"this command needs {missing}, which is not installed; {how_to_install('run')}"
            )
            code = UsageError.exit_code
        else:
            traceback.print_exc()
            _print_on_stderr("raybench: this is a bug of raybench; please report the lines above")
            code = 4
    if not has_ended:
        # A scheduler may have asked for other exit codes by `raybench health --exit-code`.
        from raybench.cli.node_reports import code_after_error

        code = code_after_error(sys.argv[1:], code)
    # Everything is printed, so an interrupt may now end the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code if isinstance(code, int) else 0)
