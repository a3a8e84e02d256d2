"""`raybench init`, `schema`, `workloads` and `explain`: what jobs and reports are made of."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

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
from raybench.report.formatting import command, heading, printable, program

if TYPE_CHECKING:
    from raybench.records.metrics import Metric

SCHEMA_VERSION = 1  # of the JSON object that `workloads` prints
# Placeholder in the legend of a metric -> text that fits any run.
_PLACEHOLDERS = {
    "{ranks}": "ranks",
    "{baseline}": "the baseline point",
    "{of_rounds}": "",
    "{alike}": ", with the other settings alike",
    "{items}": "items",
}


def _complete_workload(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from raybench.job.registry import BUILTIN

    return [name for name in BUILTIN if name.startswith(incomplete)]


def _complete_template(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in templates() if name.startswith(incomplete)]


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
    shell_complete=_complete_template,
    help="Write the job NAME, which answers a question, to FILE (NAME.yaml).",
)
@click.option("--list", "is_list", is_flag=True, help="List the jobs, and what each of them asks.")
def init_command(file: Path | None, name: str | None, is_list: bool) -> None:
    """Write an annotated job, named after its new FILE (job.yaml), with job.schema.json beside it.

    \b
    raybench init my_job.yaml
    raybench init --list
    raybench init --template ddp_linear
    """
    from raybench.job.loading import job_from_text
    from raybench.job.plan import make_plan

    jobs = templates()
    if is_list:
        if file or name:
            raise UsageError("--list: lists the jobs; give neither FILE nor --template")
        rows = []
        for job_name, text in jobs.items():
            job = job_from_text(f"{job_name}.yaml", text)
            world_sizes = sorted({point.world_size for point in make_plan(job).points})
            rows.append([job_name, ", ".join(map(str, world_sizes)), job.question])
        table = table_text(["job", "devices", "what it asks"], rows)
        hint = f"Take one: {command('init', '--template', 'NAME')}"
        cpu_hint = "Without GPUs, the section cpu: of a job makes it small, or says why not."
        write_result(f"{table}\n{hint}\n{cpu_hint}\n")
        return
    if name is not None and name not in jobs:
        guess = did_you_mean(name, jobs)
        hint = " All of them: `raybench init --list`" if guess else "; see: `raybench init --list`"
        raise UsageError(f"--template: no job {quote(name)}{guess}{hint}")
    default_template = files("raybench").joinpath("job_template.yaml")
    text = jobs[name] if name is not None else default_template.read_text(encoding="utf-8")
    name = name or "job"
    file = file or Path(f"{name}.yaml")
    if os.path.lexists(file):
        raise UsageError(f"{file}: exists already; give another name, or remove it")
    text = re.sub(r"(?<=\$schema=)\S+", "job.schema.json", text, count=1)
    job_name = name_after(file, name)
    # Without quotes, YAML would read some names as a number or as a bool.
    is_plain = job_name[0].isalpha() and job_name.lower() not in ("true", "false", "null")
    name_line = f"name: {job_name if is_plain else json.dumps(job_name)}"
    text = re.sub(r"^name: \w+", name_line, text, count=1, flags=re.MULTILINE)
    write_file(file, text.encode())
    # The first line of the job tells editors that the schema is beside it.
    schema = file.parent / "job.schema.json"
    schema_text = ""
    if not schema.exists():
        write_file(schema, files("raybench").joinpath("job.schema.json").read_bytes())
        schema_text = f", with {schema} for editors"
    message = f"{file}: written{schema_text}"
    message += f"; look at its points with: {command('plan', str(file))}"
    write_result(f"{printable(message)}\n")


def templates() -> dict[str, str]:
    """Return name -> YAML text of each job of `raybench init --list`, sorted by name."""
    folder = files("raybench").joinpath("jobs")
    return {
        entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".yaml")
    }


def name_after(path: Path, default: str) -> str:
    """Return the stem of a file as a valid job name, or the default if no character is valid.

    Invalid characters become "-", leading _ . - are removed, and 64 characters are kept.
    """
    return re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem).lstrip("_.-")[:64] or default


@click.command("workloads")
@click.argument("name", required=False, shell_complete=_complete_workload)
@json_option
def workloads_command(name: str | None, as_json: bool) -> None:
    """List the built-in workloads, or the parameters of NAME (or of package.module:Class)."""
    import inspect

    from raybench.job import registry
    from raybench.job.settings import parameters_of_class

    # One entry per workload: name, doc, parameters.
    described: list[dict[str, Any]] = []
    for workload in registry.BUILTIN if name is None else [name]:
        workload_class = registry.load_workload(workload)
        doc = (inspect.getdoc(workload_class) or "no description").partition("\n")[0]
        fields = ("name", "type", "default", "is_required", "description")
        parameters = []
        for parameter in parameters_of_class(workload_class):
            parameters.append({field: getattr(parameter, field) for field in fields})
        described.append({"name": workload, "doc": doc, "parameters": parameters})
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


@click.command()
@click.argument("term", nargs=-1)
def explain_command(term: tuple[str, ...]) -> None:
    """Say what TERM means: a mark, status, word, column or heading of reports, or a parameter.

    TERM may also be a how-to page, which is printed.

    \b
    raybench explain busbw
    raybench explain comm_exposed_ms
    raybench explain marks
    raybench explain cluster    (a how-to page)
    raybench explain            (lists all terms and pages)
    """
    from raybench.analysis.rows import METRICS_BY_NAME
    from raybench.job.problems import say_unknown

    folder = files("raybench").joinpath("how-to")
    pages = {
        page.name.removesuffix(".md"): page.read_text(encoding="utf-8").rstrip()
        for page in sorted(folder.iterdir(), key=lambda page: page.name)
    }
    words = [entry.word for entry in load_glossary()]
    asked_term = " ".join(term).strip()
    if not asked_term:
        meanings = [
            f"{', '.join(words)}; marks; columns of points; parameters of workloads.",
            f"How-to pages: {', '.join(pages)}.",
        ]
    else:
        meanings = list(dict.fromkeys(_meanings(asked_term)))
    style = textwrap.TextWrapper(width=78, subsequent_indent="  ", break_on_hyphens=False)
    texts = [style.fill(text) for text in meanings]
    if page := pages.get(asked_term.lower()):
        texts.append(page)
    if not texts:
        matching = [name for name, page in pages.items() if asked_term.lower() in page.lower()]
        unknown = say_unknown("term", asked_term, [*words, *pages, *METRICS_BY_NAME])
        # The text may end with a question: "did you mean ...?"
        separator = " " if unknown.endswith("?") else "; "
        message = f"{unknown}{separator}`raybench explain` lists all, and the how-to pages"
        if matching:
            message += f"; how-to pages that have it: {', '.join(matching)}"
        raise UsageError(message)
    write_result("\n".join(texts) + "\n")


def _meanings(term: str) -> Iterator[str]:
    """Yield each meaning of a term: as a word, mark, heading, column or parameter."""
    # The term in lower case, with and without its unit.
    spellings = {term.lower(), _without_unit(term)} - {""}
    yield from _glossary_meanings(spellings)
    yield from _doubt_meanings(term, spellings)
    yield from _metric_meanings(spellings)
    if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", term):
        yield f"{term}: an environment variable, which the job sets for the workers of a point."
    yield from _parameter_meanings(spellings)


def _without_unit(title: str) -> str:
    """Return a heading in lower case, without unit and number of devices at its end."""
    return re.sub(r"( (s|ms|µs|GiB|GB/s|TFLOP/s))?(, %.*)?$", "", title).lower()


def _glossary_meanings(spellings: Set[str]) -> Iterator[str]:
    """Yield the meaning of each glossary entry with this word or synonym."""
    for entry in load_glossary():
        if any(word.lower() in spellings for word in (entry.word, *entry.also)):
            also = f" (also: {', '.join(entry.also)})" if entry.also else ""
            yield f"{entry.word}{also}: {entry.means}"


def _doubt_meanings(term: str, spellings: Set[str]) -> Iterator[str]:
    """Yield the meanings of marks in tables, such as n, and of kinds of doubts."""
    from raybench.report.words.doubts import MARKS, MEANINGS, mark_words

    for mark, (word, _) in MARKS.items():
        # "marks" asks for all marks. A mark is case-sensitive.
        if term == mark or not spellings.isdisjoint(("marks", "mark", "!", word)):
            yield f"{mark}: {mark_words(mark)}"
    for kind, meaning in MEANINGS.items():
        if kind in spellings:
            yield f"{kind}: a doubt; {meaning}."


def _metric_meanings(spellings: Set[str]) -> Iterator[str]:
    """Yield the meanings of columns and workloads' metrics with one of these names or titles."""
    from raybench.analysis.rows import METRICS_BY_NAME
    from raybench.job import registry
    from raybench.job.declarations import declared_entries

    for metric in METRICS_BY_NAME.values():
        names = {metric.name, metric.title.lower(), metric.heading.lower()}
        if names & spellings:
            shown = f' ("{metric.heading}" in reports)' if metric.heading else ""
            unit = f", in {metric.unit}" if metric.unit else ""
            yield f"{metric.name}{shown}{unit}: {_meaning_of(metric)}."
    for workload in registry.BUILTIN:
        for metric in declared_entries(
            registry.load_workload(workload), "metrics", "name", "title"
        ):
            if spellings & {metric.name, metric.title.lower()}:
                yield f"{metric.name}: {_meaning_of(metric)} (metric of {workload})."


def _meaning_of(metric: Metric) -> str:
    """Return the legend of a metric, with its placeholders replaced by text that fits any run."""
    meaning = metric.meaning or metric.description
    for placeholder, text in _PLACEHOLDERS.items():
        meaning = meaning.replace(placeholder, text)
    return meaning.removesuffix(".")


def _parameter_meanings(spellings: Set[str]) -> Iterator[str]:
    """Yield the meanings of a parameter, each with the built-in workloads that have it."""
    from raybench.job import registry
    from raybench.job.settings import parameters_of_class

    # Text of a parameter -> the workloads that have it.
    workloads_of: dict[str, list[str]] = {}
    for workload in registry.BUILTIN:
        for parameter in parameters_of_class(registry.load_workload(workload)):
            name = parameter.name
            if spellings & {name, heading(name), name.replace("_", " ")}:
                text = f"{name}: {parameter.description}"
                workloads_of.setdefault(text, []).append(workload)
    for text, workloads in workloads_of.items():
        yield f"{text.rstrip('.')} (parameter of {', '.join(workloads)})."


@dataclass(frozen=True, slots=True, kw_only=True)
class GlossaryEntry:
    """A word with its meaning."""

    word: str
    means: str
    # Synonyms.
    also: Sequence[str] = ()


@cache
def load_glossary() -> tuple[GlossaryEntry, ...]:
    """Return the entries of the glossary, sorted by word."""
    from ruamel.yaml import YAML

    text = files("raybench.report").joinpath("glossary.yaml").read_text(encoding="utf-8")
    entries = []
    for word, fields in YAML(typ="safe", pure=True).load(text).items():
        if isinstance(fields, str):
            entries.append(GlossaryEntry(word=word, means=fields))
        else:
            entries.append(GlossaryEntry(word=word, **fields))
    return tuple(sorted(entries, key=lambda entry: entry.word))
