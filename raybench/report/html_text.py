"""Parts of the page as HTML. All that is not HTML made here goes through `escaped`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from raybench.report import wording
from raybench.report.html_figure import Entry, Figure
from raybench.report.html_svg import drawn, key


def escaped(text: object) -> str:
    """Text as HTML: nothing in it is markup, and no character turns the direction of writing."""
    return html.escape(wording.printable(str(text)))


def section(anchor: str, title: str, content: Iterable[str]) -> str:
    """A part of the page that its navigation names."""
    body = "\n".join(content)
    return f'<section id="{anchor}">\n<h2>{escaped(title)}</h2>\n{body}\n</section>'


def paragraph(text: str) -> str:
    """Plain text."""
    return f"<p>{escaped(text)}</p>" if text else ""


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and what is said of each."""
    lines = (f"<dt>{escaped(name)}</dt><dd>{escaped(text)}</dd>" for name, text in pairs)
    body = "".join(lines)
    return f"<dl>{body}</dl>" if body else ""


def listed(title: str, items: Sequence[str]) -> str:
    """A list with a title; nothing where it is empty."""
    if not items:
        return ""
    body = "".join(f"<li>{escaped(item)}</li>" for item in items)
    return f"<h3>{escaped(title)}</h3><ul>{body}</ul>"


def folded(title: str, content: str) -> str:
    """What is seen when it is asked for."""
    return f"<details><summary>{escaped(title)}</summary>{content}</details>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> str:
    """texts: how many columns, from the first, are aligned as text. End tags that HTML does not
    need are left out: a page has thousands of cells."""
    head = "".join(f'<th scope="col">{escaped(column)}' for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escaped(cell)}" for cell in row) for row in rows)
    # Where numbers begin is a class: styles may not stand in the elements themselves.
    kind = f"texts{min(texts, 9)}"
    return (
        f'<div class="wide" tabindex="0"><table class="{kind}"><thead><tr>{head}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def figure(shown: Figure) -> str:
    """A section with the charts, their legend and their table."""
    legend = "".join(_entry(entry) for entry in shown.legend)
    title = f"Table: {shown.title.lower()}, {_counted(len(shown.rows), 'line')}"
    # One or two charts are drawn larger than many.
    kind = "charts few" if len(shown.panels) <= 2 else "charts"
    charts = "".join(
        f"<figure>{_caption(panel.title)}{drawn(panel.spec, panel.title or shown.title)}</figure>"
        for panel in shown.panels
    )
    return section(
        shown.anchor,
        shown.title,
        [
            paragraph(shown.note),
            f'<ul class="legend">{legend}</ul>' if legend else "",
            f'<div class="{kind}">{charts}</div>',
            folded(title, table(shown.columns, shown.rows, shown.texts)),
        ],
    )


def _caption(title: str) -> str:
    return f"<figcaption>{escaped(title)}</figcaption>" if title else ""


def _entry(entry: Entry) -> str:
    return f"<li>{key(entry.shape, entry.color)} {escaped(entry.label)}</li>"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun if count == 1 else noun + 's'}"
