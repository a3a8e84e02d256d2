"""Documents as the output of a notebook's cell: a piece of HTML without style and script."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence

from raybench.report.documents import Block, Document, Line
from raybench.report.page import render_template


def format_output(document: Document, svg: str = "") -> str:
    """Return the title and the blocks of a document as HTML, with a picture below them.

    Args:
        document: the document.
        svg: the picture, shown as an image, so that its style cannot affect the notebook.
    """
    return _format(document.title, document.blocks(), svg)


def _format(title: str, blocks: Iterable[Block], svg: str = "") -> str:
    return render_template(
        "notebook.html",
        title=title,
        blocks=[(type(block).__name__, block) for block in blocks],
        picture=base64.b64encode(svg.encode()).decode(),
        picture_name=title,
    )


def format_lines(strong: Sequence[str], plain: Sequence[str]) -> str:
    """Return lines as HTML, the first ones in bold."""
    blocks = [Line(text=text, tone="strong") for text in strong]
    blocks += [Line(text=text) for text in plain]
    return _format("", blocks)
