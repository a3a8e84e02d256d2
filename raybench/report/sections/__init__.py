"""The sections of a run's report. Each module in this folder declares one as `SECTION`.

To add a section, add a module here: terminal, Markdown and page show it where it applies.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from raybench.report.blocks import Listing, Table

if TYPE_CHECKING:
    from raybench.report.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the report of a run.

    anchor: its id in the page. title: its heading there. order: sections with a lower one come
    first.
    applies: whether the run has what the section is about; nothing else of it is called if not.
    blocks: its listings, which stand among the findings, and its tables.
    lead: the sentence that the report begins with, where this section answers the question of the
    job; empty where it does not. None: it never does.
    """

    anchor: str
    title: str
    order: int
    applies: Callable[[Summary], bool]
    blocks: Callable[[Summary], Iterable[Listing | Table]]
    lead: Callable[[Summary], str] | None = None


@cache
def all_sections() -> tuple[Section, ...]:
    """Return the sections that the modules of this folder declare, in order."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    found = [import_module(f"{__name__}.{name}").SECTION for name in names]
    return tuple(sorted(found, key=lambda section: section.order))
