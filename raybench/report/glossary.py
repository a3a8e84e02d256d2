"""The words of raybench, and what `raybench explain` prints of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ruamel.yaml import YAML


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
