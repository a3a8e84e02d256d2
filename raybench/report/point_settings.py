"""The settings that tell points from each other, as columns and as names. Pure.

Points of one workload have a column for each setting that varies. Those of several workloads, as
of a health check, differ in most settings: one column holds all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from raybench.analysis.rows import (
    DEGREES,
    HasSettings,
    is_numeric,
    known_settings,
    setting,
    used_settings,
    varying,
)
from raybench.report import formatting
from raybench.report.documents import SETTING_CHARS, Column, ColumnOf

_WORDS = {"compile": "compiled", "activation_checkpointing": "checkpointing"}


class _Row(HasSettings, Protocol):
    """A point of a run, or of two runs."""

    @property
    def point_id(self) -> str:
        """Return the id of the point."""

    @property
    def workload(self) -> str:
        """Return the name or the class of the workload."""


def short_name(row: HasSettings, names: Sequence[str], ranks: str) -> str:
    """Return `used_settings` in short, as `FSDP 2, full checkpointing`.

    True is `compiled`, `checkpointing` or the name. `plain` if nothing is left; "" for no names.
    ranks: as for `settings_words`.
    """
    words = []
    for name, value in used_settings(row, names).items():
        text = str(value)
        if name in DEGREES:
            words.append(f"{DEGREES[name]} {value}")
        elif text.lower() == "true" or (name in _WORDS and text == "1"):
            words.append(_WORDS.get(name, name))
        elif name in _WORDS:
            words.append(f"{value} {_WORDS[name]}")
        else:
            words.append(formatting.setting_words(name, value, ranks))
    return ", ".join(filter(None, words)) or ("plain" if names else "")


def settings_words(row: HasSettings, names: Iterable[str], ranks: str) -> str:
    """Return known settings as `fp32, batch 64, 4 GPUs, hidden=8`, or "". ranks: plural, `GPUs`."""
    return formatting.words_of_settings(known_settings(row, names), ranks)


def setting_columns(
    rows: Sequence[_Row], names: Sequence[str] | None = None, ranks: str = ""
) -> list[ColumnOf[Any]]:
    """Return a column for each setting in which the rows differ, the parameters first; or [].

    For rows of several workloads there are two: the workload, and the settings that vary in it.
    names: these settings instead, in this order. ranks: the head of world_size; "" for its name.
    """
    if names is None and _are_of_several(rows):
        of_workload = {
            workload: varying([row for row in rows if row.workload == workload], params_first=True)
            for workload in {row.workload for row in rows}
        }

        def own(row: _Row) -> str:
            given = {name: setting(row, name) for name in of_workload[row.workload]}
            texts = {formatting.heading(n): formatting.setting(n, v) for n, v in given.items()}
            return formatting.settings({name: text for name, text in texts.items() if text})

        # A workload is never folded.
        workload = Column(title="workload", is_text=True, is_setting=True)
        others = replace(workload, title="settings", min_chars=SETTING_CHARS)
        return [(workload, lambda row: str(row.workload)), (others, own)]
    chosen = varying(rows, params_first=True) if names is None else names
    return [
        (
            Column(
                title=ranks if ranks and name == "world_size" else formatting.heading(name),
                is_text=not is_numeric(rows, name),
                is_setting=True,
                min_chars=SETTING_CHARS,
            ),
            lambda row, name=name: formatting.setting(name, setting(row, name)),  # type: ignore[misc]
        )
        for name in chosen
    ]


def point_names(rows: Sequence[_Row]) -> list[str]:
    """Return for each row the settings that vary, `k=256` or `gemm k=256`; its id if none does."""
    columns = setting_columns(rows)
    if _are_of_several(rows):
        return [" ".join(filter(None, (str(cell(row)) for _, cell in columns))) for row in rows]
    return [
        formatting.settings({column.title: cell(row) for column, cell in columns}) or row.point_id
        for row in rows
    ]


def _are_of_several(rows: Sequence[_Row]) -> bool:
    return len({row.workload for row in rows}) > 1
