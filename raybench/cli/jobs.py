"""`schema`, `init`, `workloads` and `explain`: what job files and reports are made of.

They need no cluster and no results.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from raybench.cli.options import complete_template, complete_workload, json_option
from raybench.cli.output import (
    json_text,
    scalar_text,
    table_text,
    text_width,
    write_file,
    write_result,
)
from raybench.errors import UsageError
from raybench.report.plain_text import printable
from raybench.sweep import command, program

SCHEMA_VERSION = 1  # of the JSON object that `workloads` prints


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of job files, for editors and other tools."""
    from raybench.job.model import job_schema

    write_result(json_text(job_schema()))


@click.command("init")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--template",
    "name",
    metavar="NAME",
    shell_complete=complete_template,
    help="Write the job NAME, which answers a question, to FILE (NAME.yaml).",
)
@click.option("--list", "is_list", is_flag=True, help="List the jobs, and what each of them asks.")
def init_command(file: Path | None, name: str | None, is_list: bool) -> None:
    """Write an annotated job file to FILE (job.yaml), to start from.

    \b
    raybench init my_job.yaml
    raybench init --list
    raybench init --template ddp_linear
    """
    from raybench.job.catalog import name_after, starter, template

    if is_list:
        if file or name:
            raise UsageError("--list: lists the jobs; give neither FILE nor --template")
        write_result(_list_of_templates())
        return
    job = starter() if name is None else template(name)
    file = file or Path(f"{job.name}.yaml")
    if os.path.lexists(file):
        raise UsageError(f"{file}: exists already; give another name, or remove it")
    write_file(file, job.text_for(file, name_after(file, job.name)).encode())
    # Its first line tells an editor that the schema lies beside it.
    schema = file.parent / "job.schema.json"
    if is_new := not schema.exists():
        write_file(schema, files("raybench").joinpath("job.schema.json").read_bytes())
    told = f"{file}: written{f', with {schema} for editors' if is_new else ''}"
    told += f"; look at its points with: {command('plan', str(file))}"
    write_result(f"{printable(told)}\n")


def _list_of_templates() -> str:
    """Return the table of the jobs that come with raybench, and how to take one."""
    from raybench.job.catalog import templates

    rows = [[one.name, ", ".join(map(str, one.device_counts)), one.question] for one in templates()]
    table = table_text(["job", "devices", "what it asks"], rows)
    take = command("init", "--template", "NAME")
    return f"{table}\nTake one: {take}\nWithout GPUs, cut it down by the command in its comment.\n"


@click.command("workloads")
@click.argument("name", required=False, shell_complete=complete_workload)
@json_option
def workloads_command(name: str | None, as_json: bool) -> None:
    """List the built-in workloads, or the parameters of NAME (or of package.module:Class)."""
    from raybench.job import registry

    names = list(registry.BUILTIN) if name is None else [name]
    described = [_workload(workload) for workload in names]
    if as_json:
        write_result(json_text({"schema_version": SCHEMA_VERSION, "workloads": described}))
    elif name is None:
        table = table_text(["name", "what is timed"], [[d["name"], d["doc"]] for d in described])
        write_result(
            f"{table}\nParameters: {program()} workloads NAME. Your own: package.module:Class.\n"
        )
    else:
        title = click.wrap_text(f"{name}: {described[0]['doc']}", text_width())
        rows = [
            [
                parameter["name"],
                parameter["type"],
                "required" if parameter["is_required"] else scalar_text(parameter["default"]),
                parameter["description"],
            ]
            for parameter in described[0]["parameters"]
        ]
        table = table_text(["parameter", "type", "default", "description"], rows)
        write_result(f"{title}\n\n{table}")


def _workload(name: str) -> dict[str, Any]:
    """Return the name, first sentence and parameters of a workload, for JSON and tables."""
    import inspect

    from raybench.job import registry

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


@click.command()
@click.argument("term", nargs=-1)
def explain_command(term: tuple[str, ...]) -> None:
    """Say what TERM means: a heading, mark, status, column or word of the reports.

    TERM may also be a how-to page, which is printed.

    \b
    raybench explain busbw
    raybench explain comm_exposed_ms
    raybench explain marks
    raybench explain cluster    (a how-to page)
    raybench explain            (lists all terms and pages)
    """
    from raybench.analysis.rows import BY_NAME
    from raybench.job.problems import say_unknown
    from raybench.report.glossary import load_glossary

    folder = files("raybench").joinpath("how-to")
    pages = {
        page.name.removesuffix(".md"): page
        for page in sorted(folder.iterdir(), key=lambda page: page.name)
    }
    words = [entry.word for entry in load_glossary()]
    wanted = " ".join(term).strip()
    if not wanted:
        found = [
            f"{', '.join(words)}; marks; and each column of the tables.",
            f"How-to pages: {', '.join(pages)}.",
        ]
    else:
        found = list(dict.fromkeys(_meanings(wanted)))
    texts = [click.wrap_text(text, width=78, subsequent_indent="  ") for text in found]
    if page := pages.get(wanted.lower()):
        texts.append(page.read_text(encoding="utf-8").rstrip())
    if not texts:
        unknown = say_unknown("term", wanted, [*words, *pages, *BY_NAME])
        message = f"{unknown}; `raybench explain` lists all, and the how-to pages"
        raise UsageError(message.replace("?;", "?"))
    write_result("\n".join(texts) + "\n")


def _meanings(wanted: str) -> Iterator[str]:
    """Yield what a term means, as a word, as marks, and as a heading or column."""
    from raybench.analysis.rows import BY_NAME
    from raybench.report.glossary import load_glossary
    from raybench.report.messages import MARKS

    key = wanted.lower()
    for entry in load_glossary():
        if key in (entry.word.lower(), *(word.lower() for word in entry.also)):
            also = f" (also: {', '.join(entry.also)})" if entry.also else ""
            yield f"{entry.word}{also}: {entry.means}"
    if key in ("marks", "mark", "!"):
        yield from (f"{mark}: {text}" for mark, text in MARKS.items())
    if wanted in MARKS:
        yield f"{wanted}: {MARKS[wanted]}"
    for metric in BY_NAME.values():
        if key in {metric.name, metric.title.lower(), metric.heading.lower()} - {""}:
            meaning = metric.meaning or metric.description
            meaning = meaning.replace("{ranks}", "ranks").replace(
                "{baseline}", "the baseline point"
            )
            heading = f' ("{metric.heading}" in reports)' if metric.heading else ""
            unit = f", in {metric.unit}" if metric.unit else ""
            yield f"{metric.name}{heading}{unit}: {meaning}."
