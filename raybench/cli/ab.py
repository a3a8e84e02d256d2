"""`raybench ab`: measure two versions in turns until each point is decided."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from raybench.api.files import check_outlives_job
from raybench.cli.shared import (
    address_option,
    device_option,
    devices_option,
    format_options,
    make_console,
    output_option,
    overrides_option,
    say,
    threshold_option,
    write_document,
)
from raybench.errors import UsageError
from raybench.report.formatting import command

if TYPE_CHECKING:
    from raybench.ab.plan import Settings, Version

_INTERRUPTED = 130
# Options that --resume allows; a resumed gate has its own settings.
_WITH_RESUME = ("resumed", "output", "max_minutes", "kind", "as_json")


def _read_variables(
    _: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str]:
    """Return the environment variables of `NAME=VALUE` texts as a dict."""
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UsageError(f"{option.opts[0]} {text}: expected NAME=VALUE")
        variables[name] = value
    return variables


def _read_revision(_: click.Context, option: click.Parameter, revision: str | None) -> str:
    """Return a revision, "" if the option is not given."""
    # In a script, an empty variable would otherwise compare the current files with themselves.
    if revision == "":
        raise UsageError(f"{option.opts[0]}: the revision is empty")
    return revision or ""


def _side_options(function: Any) -> Any:
    """Add the options of each side to a command: --old, --old-python, ... and --new, ..."""
    # The help shows the options of the old side first, because click reverses the order.
    for side, other in (("new", "old"), ("old", "new")):
        for option in (
            click.option(
                f"--{side}",
                callback=_read_revision,
                metavar="REV",
                help=f"The {side} git revision; WORKTREE is the files as they are now, except "
                "ignored files. It has a worktree of its own. If only "
                f"--{other} is given, this side is WORKTREE.",
            ),
            click.option(
                f"--{side}-python",
                metavar="PYTHON",
                default="",
                help=f"The interpreter of the {side} side, in place of --python.",
            ),
            click.option(
                f"--{side}-env",
                multiple=True,
                callback=_read_variables,
                metavar="NAME=VALUE",
                help=f"An environment variable of the {side} side; may be repeated.",
            ),
            click.option(
                f"--{side}-set",
                multiple=True,
                metavar="KEY=VALUE",
                help=f"Override a job setting on the {side} side; may be repeated.",
            ),
        ):
            function = option(function)
    return function


@click.command("ab")
@click.argument("job", required=False, type=click.Path(path_type=Path))
@_side_options
@click.option(
    "--old-job",
    metavar="JOB",
    type=click.Path(path_type=Path),
    help="Another job for the old side.",
)
@click.option(
    "--python",
    metavar="PYTHON",
    default="",
    help="The interpreter of both sides, such as .venv/bin/python that --setup makes; a relative "
    "path is looked for in the worktree first. Without it: this one.",
)
@click.option(
    "--setup",
    metavar="CMD",
    default="",
    help="Shell command to run in each worktree before it is measured, such as a build.",
)
@overrides_option
@threshold_option(
    help="Smallest change that counts, of samples/s (or of steps/s if a step has no samples). A "
    "point is the same within twice as much."
)
@click.option(
    "--max-minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Start no pair that would end later; points without a verdict are then undecided.",
)
@address_option(help="The Ray cluster, as for `raybench sweep`.")
@device_option(help="The devices to measure, as for `raybench sweep`.")
@devices_option
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0, max=1_000_000),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for devices that other sweeps use.",
)
@output_option
@click.option(
    "--resume",
    "resumed",
    metavar="GATE",
    help="Go on with a gate of the output folder: its id or its folder, or latest.",
)
@format_options(
    ["terminal", "md", "html", "json"],
    "What to print. The folder of the gate gets report.md, report.html and verdict.json anyway.",
)
@click.pass_context
def ab_command(ctx: click.Context, /, **given: Any) -> None:
    """Measure two versions in turns, in pairs of fresh starts, until each point is decided.

    \b
    raybench ab ci.yaml --old main --new WORKTREE
    raybench ab ci.yaml --old v1.2 --new HEAD --setup 'make build' --max-minutes 30
    raybench ab ci.yaml --new-env NCCL_ALGO=Tree
    raybench ab ci.yaml --new-set workload.compile=true
    raybench ab ci.yaml --old HEAD --new HEAD     (what this machine can tell)
    raybench ab --resume latest

    JOB is read from here for both sides. After 3, 4, 5, 6, 8, 10 and 12 pairs a point is slower or
    faster where the interval of its change excludes 0 and the change is at least --threshold, and
    the same where the interval lies within twice --threshold; other points are measured again. A
    slower point must be slower again in 3 fresh pairs.

    Exit code: 0 all points are decided and none is slower, 1 a point is slower, 2 a bad command,
    5 a point is undecided or not measured, 130 interrupted (--resume goes on).
    """
    from raybench.ab.gate import resume_gate, run_gate
    from raybench.api.gates import GateResult, write_reports
    from raybench.report.words.ab import progress

    console = make_console()

    def listener(event: Any) -> None:
        say(console, progress(event))

    check_outlives_job(given["output"])
    # Set handlers, because a shell makes commands in the background ignore SIGINT.
    old_handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        old_handlers[number] = signal.signal(number, signal.default_int_handler)
    try:
        if given["resumed"] is not None:
            _check_resume(ctx)
            verdict = resume_gate(
                given["resumed"],
                output=given["output"],
                max_minutes=given["max_minutes"],
                listener=listener,
            )
        else:
            if given["job"] is None:
                raise click.MissingParameter(ctx=ctx, param_hint="'JOB'", param_type="argument")
            verdict = run_gate(
                given["job"],
                _version(given, "old"),
                _version(given, "new"),
                _settings(given),
                output=given["output"],
                listener=listener,
            )
    except KeyboardInterrupt:
        name = given["resumed"] or "latest"
        output = [] if given["output"] == Path("results") else ["-o", str(given["output"])]
        say(console, f"interrupted; go on with: {command('ab', '--resume', name, *output)}")
        ctx.exit(_INTERRUPTED)
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
    result = GateResult(verdict=verdict)
    try:
        write_document(result.document, given["kind"], make_page=lambda: result.report("html"))
    finally:
        # The folder has the reports also if stdout is closed or full.
        write_reports(result)
    say(console, f"report.md, report.html and verdict.json are in {result.folder}")
    ctx.exit(verdict.exit_code)


def _check_resume(ctx: click.Context) -> None:
    """Raise UsageError for an option that would change a gate."""
    for parameter in ctx.command.params:
        name = parameter.name or ""
        source = ctx.get_parameter_source(name)
        if name not in _WITH_RESUME and source is click.core.ParameterSource.COMMANDLINE:
            is_option = isinstance(parameter, click.Option)
            word = parameter.opts[-1] if is_option else parameter.human_readable_name
            raise UsageError(f"--resume: the gate has its own settings; leave out {word}")


def _version(given: dict[str, Any], side: str) -> Version:
    """Return what the options of the command say about a side, "old" or "new"."""
    from raybench.ab.plan import Version

    return Version(
        revision=given[side],
        job=given["old_job"] if side == "old" else None,
        python=given[f"{side}_python"] or given["python"],
        env=given[f"{side}_env"],
        overrides=given[f"{side}_set"],
    )


def _settings(given: dict[str, Any]) -> Settings:
    """Return the settings of the gate from the options of the command."""
    from raybench.ab.plan import Settings

    return Settings(
        threshold=given["threshold"],
        max_minutes=given["max_minutes"],
        setup=given["setup"],
        overrides=given["overrides"],
        address=given["address"],
        device=given["device"],
        devices_file=given["devices_file"],
        wait_s=given["wait_s"],
    )
