"""`plan`, `schema`, `init` and `workloads`: all about jobs that needs no cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from raybench.cli.output import write_result

if TYPE_CHECKING:
    from raybench.job import Job
    from raybench.plan import Plan

SCHEMA_VERSION = 1  # of the JSON objects that `plan` and `workloads` print
_COLUMNS_OF_TABLES = 80


def load_plan(
    path: Path, overrides: Sequence[str] = (), expression: str | None = None
) -> tuple[Job, Plan]:
    """The job at `path` and those of its points that `expression` keeps.

    Raises JobError and UsageError.
    """
    from dataclasses import replace

    from raybench.job import load_job
    from raybench.plan import make_plan

    job = load_job(path, overrides)
    plan = make_plan(job)
    if expression is not None:
        from raybench.select import select_points

        plan = replace(plan, points=select_points(plan.points, expression))
    return job, plan


def print_plan(job: Job, plan: Plan, as_json: bool) -> None:
    """The plan on stdout, its warnings on stderr."""
    for warning in plan.warnings:
        click.echo(f"{warning} (warning)", err=True)
    write_result(_json(plan_as_json(job, plan)) if as_json else plan_as_text(job, plan))


@click.command("plan", short_help="Check a job and list its points; needs no cluster.")
@click.argument("job_file", metavar="JOB", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a job setting; may be repeated.",
)
@click.option(
    "--filter", "expression", metavar="EXPR", help="Keep only the points for which EXPR holds."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(
    job_file: Path, overrides: tuple[str, ...], expression: str | None, as_json: bool
) -> None:
    """Check JOB and print its points, the devices they need and how long they may take.

    \b
    raybench plan jobs/ddp_scaling.yaml --set matrix.world_size=1,2
    raybench plan jobs/ddp_scaling.yaml --filter "precision == 'bf16' and batch_size >= 256"
    """
    job, plan = load_plan(job_file, overrides, expression)
    print_plan(job, plan, as_json)


@click.command("schema", short_help="Print the JSON Schema of job files.")
def schema_command() -> None:
    """Print the JSON Schema of job files, for editors and other tools."""
    from raybench.job import job_schema

    write_result(_json(job_schema()))


@click.command("init", short_help="Write an annotated job file to start from.")
@click.argument("file", type=click.Path(path_type=Path), default=Path("job.yaml"))
def init_command(file: Path) -> None:
    """Write an annotated job file to FILE (job.yaml), to start from."""
    from raybench.errors import UsageError

    text = files("raybench").joinpath("job_template.yaml").read_text(encoding="utf-8")
    try:
        with file.open("x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError as error:
        message = f"{file}: exists already; give another name, or remove it"
        raise UsageError(message) from error
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from error
    write_result(f"{file}: written; look at its points with: raybench plan {file}\n")


@click.command("workloads", short_help="List what can be timed, and with which parameters.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def workloads_command(name: str | None, as_json: bool) -> None:
    """List the built-in workloads, or the parameters of NAME (or of package.module:Class)."""
    from raybench import registry

    names = list(registry.BUILTIN) if name is None else [name]
    described = [_workload(workload) for workload in names]
    if as_json:
        write_result(_json({"schema_version": SCHEMA_VERSION, "workloads": described}))
    elif name is None:
        table = _table(["name", "what is timed"], [[d["name"], d["doc"]] for d in described])
        write_result(
            f"{table}\nParameters: raybench workloads NAME. Your own: package.module:Class.\n"
        )
    else:
        title = click.wrap_text(f"{name}: {described[0]['doc']}", _COLUMNS_OF_TABLES)
        write_result(f"{title}\n\n{_parameter_table(described[0]['parameters'])}")


def _workload(name: str) -> dict[str, Any]:
    import inspect

    from raybench import registry

    workload_class = registry.load(name)
    parameters = [
        {
            "name": parameter.name,
            "type": parameter.type,
            "default": parameter.default,
            "is_required": parameter.is_required,
            "description": parameter.description,
        }
        for parameter in registry.parameters(workload_class)
    ]
    doc = (inspect.getdoc(workload_class) or "no description").partition("\n")[0]
    return {"name": name, "doc": doc, "parameters": parameters}


def _parameter_table(parameters: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            parameter["name"],
            parameter["type"],
            "required" if parameter["is_required"] else _text(parameter["default"]),
            parameter["description"],
        ]
        for parameter in parameters
    ]
    return _table(["parameter", "type", "default", "description"], rows)


def plan_as_json(job: Job, plan: Plan) -> dict[str, Any]:
    """The plan as `raybench plan --json` prints it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "job": job.name,
        "workload": job.workload.kind,
        "points": [{"point_id": point.point_id, **point.settings} for point in plan.points],
        "devices_needed": max(point.world_size for point in plan.points),
        "time_at_most_s": time_at_most_s(job, plan),
        "warnings": list(plan.warnings),
    }


def time_at_most_s(job: Job, plan: Plan) -> float:
    """The budget of all iterations in seconds; building workloads and groups is not in it."""
    budget_s = min(job.measure.repeats * job.measure.max_seconds, job.measure.timeout_s)
    return len(plan.points) * budget_s


def plan_as_text(job: Job, plan: Plan) -> str:
    """The plan as a table of what varies, below what does not, above what it needs."""
    from raybench.plan import varying_settings

    varying = varying_settings(plan.points)
    told = plan.points[0].told_settings
    same = " ".join(f"{n}={_text(value)}" for n, value in told.items() if n not in varying)
    rows = [
        [str(number), point.point_id, *(_text(point.settings[name]) for name in varying)]
        for number, point in enumerate(plan.points, start=1)
    ]
    paragraphs = [
        f"{job.name}: workload {job.workload.kind}",
        click.wrap_text(f"in all points: {same}", _COLUMNS_OF_TABLES, subsequent_indent="  "),
        "",
        _table(["#", "point_id", *varying], rows),
        _needs(job, plan),
    ]
    return "\n".join(paragraphs) + "\n"


def _needs(job: Job, plan: Plan) -> str:
    measure, count = job.measure, len(plan.points)
    devices = max(point.world_size for point in plan.points)
    parts = f"{_counted(count, 'point')} x {_counted(measure.repeats, 'repeat')}"
    parts += f" x {measure.max_seconds:g} s budget"
    return (
        f"{_counted(count, 'point')}; the largest needs {_counted(devices, 'device')}\n"
        f"at most {_duration(time_at_most_s(job, plan))} of iterations: {parts}\n"
        f"building and the first step of each point come on top; "
        f"a point stops at {measure.timeout_s:g} s"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = seconds / 60
    return f"{minutes:.3g} min" if minutes < 100 else f"{minutes / 60:.3g} h"


def _text(value: object) -> str:
    return (
        str(value).lower() if isinstance(value, bool) else str("none" if value is None else value)
    )


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, at most 80 characters wide, plain where it is piped."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        is_whole = column in ("parameter", "point_id")
        table.add_column(column, overflow="fold", no_wrap=is_whole)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console(width=_COLUMNS_OF_TABLES)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
