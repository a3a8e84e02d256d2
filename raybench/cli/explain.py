"""`raybench explain`: a heading, mark, status or word of the reports, and the how-to pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import click
from ruamel.yaml import YAML

from raybench.cli.output import write_result
from raybench.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A word with its meaning. also: other words for the same."""

    word: str
    means: str
    also: tuple[str, ...] = ()


@cache
def load_glossary() -> tuple[Entry, ...]:
    """Return the entries of glossary.yaml in alphabetical order."""
    text = files("raybench.report").joinpath("glossary.yaml").read_text(encoding="utf-8")
    found = YAML(typ="safe", pure=True).load(text)
    entries = [
        Entry(word=word, means=told)
        if isinstance(told, str)
        else Entry(word=word, means=told["means"], also=tuple(told.get("also", ())))
        for word, told in found.items()
    ]
    return tuple(sorted(entries, key=lambda entry: entry.word))


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
