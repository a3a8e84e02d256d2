"""`raybench init`, `schema`, `workloads` and `explain`: what jobs and reports are made of."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from raybench.cli.shared import (
    json_option,
    json_text,
    scalar_text,
    table_text,
    text_width,
    write_file,
    write_result,
)
from raybench.errors import UsageError
from raybench.job.problems import did_you_mean, quote
from raybench.report.formatting import printable
from raybench.sweep import command, program

if TYPE_CHECKING:
    from raybench.job.model import Job

SCHEMA_VERSION = 1  # of the JSON object that `workloads` prints


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
    return [CompletionItem(one.name) for one in templates() if one.name.startswith(incomplete)]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GlossaryEntry:
    """A word with its meaning. also: other words for the same."""

    word: str
    means: str
    also: tuple[str, ...] = ()


@cache
def load_glossary() -> tuple[GlossaryEntry, ...]:
    """Return the entries of glossary.yaml in alphabetical order."""
    from ruamel.yaml import YAML

    text = files("raybench.report").joinpath("glossary.yaml").read_text(encoding="utf-8")
    found = YAML(typ="safe", pure=True).load(text)
    entries = [
        GlossaryEntry(word=word, means=told)
        if isinstance(told, str)
        else GlossaryEntry(word=word, means=told["means"], also=tuple(told.get("also", ())))
        for word, told in found.items()
    ]
    return tuple(sorted(entries, key=lambda entry: entry.word))


_NAME = re.compile(r"^name: \w+", re.MULTILINE)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_SCHEMA = re.compile(r"(?<=\$schema=)\S+")


@dataclass(frozen=True)
class Template:
    """A job file that comes with raybench. text: all of it."""

    name: str
    text: str

    @cached_property
    def job(self) -> Job:
        """Return the job as it is written."""
        from raybench.job.model import job_from_text

        return job_from_text(f"{self.name}.yaml", self.text)

    @property
    def question(self) -> str:
        """Return what the job asks."""
        return self.job.question

    @property
    def device_counts(self) -> list[int]:
        """Return the numbers of devices that its points need, in ascending order."""
        from raybench.job.plan import make_plan

        return sorted({point.world_size for point in make_plan(self.job).points})

    def text_for(self, path: Path, name: str) -> str:
        """Return the text of a file at `path`, whose job has this name.

        Its command names the path, and its schema is job.schema.json beside it.
        """
        text = _SCHEMA.sub("job.schema.json", self.text, count=1)
        # In quotes where YAML would take it for a number or for true.
        is_plain = name[0].isalpha() and name.lower() not in ("true", "false", "null")
        text = _NAME.sub(f"name: {name if is_plain else json.dumps(name)}", text, count=1)
        # It stands in a comment, which a line feed would end.
        here = shlex.quote(str(path)) if str(path).isprintable() else f"{self.name}.yaml"
        return text.replace(f"jobs/{self.name}.yaml", here)


def templates() -> list[Template]:
    """Return the jobs that come with raybench, sorted by name."""
    folder = files("raybench").joinpath("jobs")
    found = [entry for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return [
        Template(entry.name.removesuffix(".yaml"), entry.read_text(encoding="utf-8"))
        for entry in sorted(found, key=lambda entry: entry.name)
    ]


def name_after(path: Path, otherwise: str) -> str:
    """Return a name for a job, made of the name of a file; `otherwise` where nothing is left."""
    return _NOT_IN_NAMES.sub("-", path.stem)[:64].lstrip("_.-") or otherwise


def starter() -> Template:
    """Return the annotated job to start from, which is not one of `templates`."""
    file = files("raybench").joinpath("job_template.yaml")
    return Template("job", file.read_text(encoding="utf-8"))


def template(name: str) -> Template:
    """Return the job with this name. Raises UsageError, with the nearest one, where none has it."""
    known = {one.name: one for one in templates()}
    if name not in known:
        guess = did_you_mean(name, known)
        message = f"--template: no job {quote(name)}{guess}; see: `raybench init --list`"
        raise UsageError(message.replace("?;", "? All of them:"))
    return known[name]
