"""Write the generated pages of docs/reference: `python docs/generate.py`.

Commands come from click, the job file from its JSON Schema, columns from the schemas of the
tables, the glossary from raybench/report/glossary.yaml. A test holds the pages equal to them.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pyarrow as pa

from raybench.analysis.frames import units
from raybench.analysis.rows import ScaledRow
from raybench.cli import COMMANDS
from raybench.cli.jobs import load_glossary
from raybench.job.model import job_schema
from raybench.records.doubts import DoubtKind
from raybench.report.words.doubts import MARKS, MEANINGS, mark_words
from raybench.results.columns import columns_of
from raybench.results.tables import TABLES, schema

REFERENCE = Path(__file__).parent / "reference"
NOTE = "This page is generated: `python docs/generate.py`."
TABLES_HOLD = {
    "runs": "one row per run",
    "points": "one row per attempt at a point, in each round",
    "summary": "one row per point of a job, from all its attempts; written when the run ends",
    "samples": "one row per iteration and rank, warm-up included",
    "devices": "one row per device of a run",
    "telemetry": "one row per device and second",
    "regions": "parts of a step that the workload names, per rank",
    "modules": "times by module of profiled points, per rank",
    "health": "one row per test and subject of a health check",
}

# Columns of the derived table `scaling` that are no fields of its rows.
OF_SCALING = {
    "baseline_point_id": "the point that it is compared with",
    "why_not": "why an ok point has no speed-up",
}


def cell(text: str) -> str:
    """Return a text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def commands_page() -> str:
    """Return the page of all commands with their options."""
    lines = ["# Commands", "", NOTE, ""]
    for name, (module, what) in COMMANDS.items():
        command = getattr(importlib.import_module(module), f"{name}_command")
        with click.Context(command, info_name=f"raybench {name}") as context:
            usage = " ".join(command.collect_usage_pieces(context))
            options = [param for param in command.params if isinstance(param, click.Option)]
            lines += [f"## {name}", "", what, "", "```text", f"raybench {name} {usage}", "```", ""]
            lines += explanation(command)
            if options:
                lines += ["| option | meaning |", "|---|---|"]
                for option in options:
                    record = option.get_help_record(context)
                    if record is not None:
                        lines.append(f"| `{cell(record[0])}` | {cell(record[1])} |")
                lines.append("")
    return "\n".join(lines)


def explanation(command: click.Command) -> list[str]:
    """Return the help of a command after its first paragraph; examples are code."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n")[1:]:
        is_code = paragraph.startswith("\b")
        text = paragraph.removeprefix("\b\n")
        lines += ["```text", text, "```", ""] if is_code else [text, ""]
    return lines


def job_file_page() -> str:
    """Return the page of all keys of a job file."""
    whole = job_schema()
    lines = ["# Job file", "", NOTE, ""]
    lines += [
        "A job file is YAML 1.2. `raybench init` writes an annotated one, `raybench schema` prints",
        "the JSON Schema for your editor. Each parameter of the workload can be an axis too:",
        "`raybench workloads NAME` lists them.",
        "",
    ]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{key}` | {kind} | {default} | {text} |"
        for key, kind, default, text in keys(whole, whole, "")
    ]
    return "\n".join([*lines, ""])


def keys(
    node: Mapping[str, Any], whole: Mapping[str, Any], path: str
) -> Iterator[tuple[str, str, str, str]]:
    """Yield dotted key, type, default and meaning of each property below a node of the schema."""
    for name, found in node.get("properties", {}).items():
        entry = resolve(found, whole)
        below = [entry, *(resolve(one, whole) for one in entry.get("anyOf", ()))]
        has_keys = any("properties" in one for one in below)
        default = f"`{json.dumps(found['default'])}`" if "default" in found and not has_keys else ""
        text = found.get("description") or entry.get("description", "")
        yield f"{path}{name}", cell(kind_of(entry, whole)), cell(default), cell(text)
        # The sections inside of `cpu` have the keys of the sections that they replace.
        for one in below if path != "cpu." else ():
            yield from keys(one, whole, f"{path}{name}.")


def resolve(node: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow a reference of the schema."""
    if "$ref" not in node:
        return node
    found: Any = whole
    for part in node["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    return resolve(found, whole)


def kind_of(node: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """Name the type of a node of the schema."""
    node = resolve(node, whole)
    if "enum" in node:
        return " or ".join(f"`{value}`" for value in node["enum"])
    if "const" in node:
        return f"`{node['const']}`"
    choices = node.get("anyOf") or node.get("oneOf")
    if choices:
        return " or ".join(dict.fromkeys(kind_of(choice, whole) for choice in choices))
    kind = node.get("type", "any")
    if kind == "array" and "items" in node:
        return f"list of {kind_of(node['items'], whole)}"
    return str(kind)


def columns_page() -> str:
    """Return the page of all columns of all tables."""
    lines = ["# Columns and metrics", "", NOTE, ""]
    lines += [
        "`results/<table>/<run_id>/<part>.parquet`. A column is null where its value is not known",
        "or does not apply.",
        "",
    ]
    for table in TABLES:
        lines += [f"## {table}", "", f"{TABLES_HOLD[table].capitalize()}.", ""]
        lines += ["| column | unit | type | meaning |", "|---|---|---|---|"]
        lines += [column(field) for field in schema(table)]
        lines.append("")
    lines += ["## scaling", "", "Derived from `points` by `raybench.load`: one row per point.", ""]
    lines += ["| column | unit | meaning |", "|---|---|---|"]
    known = {one.name: one.about.description for one in columns_of(ScaledRow)} | OF_SCALING
    lines += [
        f"| `{name}` | {unit} | {cell(known[name])} |" for name, unit in units("scaling").items()
    ]
    return "\n".join(lines)


def column(field: pa.Field) -> str:
    """Return the row of a column."""
    facts = {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
    kind, meaning = cell(str(field.type)), cell(facts.get("description", ""))
    return f"| `{field.name}` | {facts.get('unit', '')} | {kind} | {meaning} |"


def glossary_page() -> str:
    """Return the page of the words of raybench."""
    lines = ["# Glossary", "", NOTE, "", "`raybench explain WORD` prints an entry.", ""]
    lines += ["## Marks", "", "Letters beside a number that is doubtful.", ""]
    lines += ["| mark | meaning |", "|---|---|"]
    lines += [f"| `{letter}` | {cell(mark_words(letter))} |" for letter in MARKS]
    lines += ["", "## Doubts", "", "What `points.doubts` tells of a number.", ""]
    lines += ["| kind | mark | harm | unit | value or subject |", "|---|---|---|---|---|"]
    for kind in DoubtKind:
        cells = (f"`{kind}`", kind.mark, kind.harm.name.lower(), kind.unit, cell(MEANINGS[kind]))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Words", ""]
    for entry in load_glossary():
        also = f" (also: {', '.join(entry.also)})" if entry.also else ""
        lines += [f"**{entry.word}**{also}: {entry.means}", ""]
    return "\n".join(lines)


PAGES = {
    "commands.md": commands_page,
    "job-file.md": job_file_page,
    "columns.md": columns_page,
    "glossary.md": glossary_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page().rstrip() + "\n", encoding="utf-8")
