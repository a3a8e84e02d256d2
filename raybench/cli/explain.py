"""`raybench explain`: what a heading, a mark, a status or a word of the reports means."""

from __future__ import annotations

from collections.abc import Iterator

import click

from raybench.errors import UsageError


@click.command()
@click.argument("term", nargs=-1)
def explain_command(term: tuple[str, ...]) -> None:
    """Say what TERM means: a heading, mark, status, column or word of the reports.

    \b
    raybench explain busbw
    raybench explain comm_exposed_ms
    raybench explain marks
    raybench explain            (lists all terms)
    """
    from raybench.report.glossary import load_glossary

    wanted = " ".join(term).strip()
    if not wanted:
        words = ", ".join(entry.word for entry in load_glossary())
        click.echo(_wrapped(f"{words}; marks; and each column of the tables."))
        return
    found = list(dict.fromkeys(_meanings(wanted)))
    if not found:
        raise UsageError(_unknown(wanted))
    click.echo("\n".join(map(_wrapped, found)))


def _meanings(wanted: str) -> Iterator[str]:
    """Yield what a term means, as a word, as marks, and as a heading or column."""
    from raybench.analysis.rows import BY_NAME
    from raybench.report.glossary import load_glossary
    from raybench.report.marks import MARKS

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
        headings = {metric.name, metric.title.lower(), metric.heading.lower()}
        if key in headings - {""}:
            unit = f", in {metric.unit}" if metric.unit else ""
            ranks = {"{ranks}": "ranks", "{baseline}": "the baseline point"}
            meaning = metric.meaning or metric.description
            for name, word in ranks.items():
                meaning = meaning.replace(name, word)
            heading = f' ("{metric.heading}" in reports)' if metric.heading else ""
            yield f"{metric.name}{heading}{unit}: {meaning}."


def _unknown(wanted: str) -> str:
    from raybench.analysis.rows import BY_NAME
    from raybench.job.problems import say_unknown
    from raybench.report.glossary import load_glossary

    words = [entry.word for entry in load_glossary()]
    return say_unknown("term", wanted, [*words, *BY_NAME]) + "; `raybench explain` lists all"


def _wrapped(text: str) -> str:
    from click import wrap_text

    return wrap_text(text, width=78, subsequent_indent="  ")
