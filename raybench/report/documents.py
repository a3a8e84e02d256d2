"""A document: anything that is shown as text for a terminal, as Markdown and as JSON.

The report of a run, a comparison, a history and predictions are documents. To add a kind, write a
class with these members and give it to `format_document`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from raybench.report.blocks import Block, Line, Tone
from raybench.report.text import markdown, terminal


class Document(Protocol):
    """What can be shown in every format. To be inherited from."""

    @property
    def title(self) -> str:
        """Return the heading: the answer in a sentence, or what the document is about.

        Empty for a table that speaks for itself.
        """

    @property
    def tone(self) -> Tone:
        """Return how a terminal shows the title."""
        return "strong"

    def blocks(self) -> Iterable[Block]:
        """Return what follows the title, in order."""

    def members(self) -> Mapping[str, Any]:
        """Return the members of its JSON object."""


def format_document(
    document: Document, kind: str, *, width: int = terminal.WIDTH, color: bool = False
) -> str:
    """Return the document in a format. width, color: of the terminal."""
    if kind == "json":
        from raybench.report.json_text import format_object

        return format_object(**document.members())
    if kind == "md":
        return markdown.render(document.title, document.blocks())
    head = [Line(text=document.title, tone=document.tone)] if document.title else []
    return terminal.render([*head, *document.blocks()], width=width, color=color)
