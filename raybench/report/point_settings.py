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
    setting_of,
    used_settings,
    varying,
)
from raybench.report import formatting
from raybench.report.documents import SETTING_CHARS, ColumnOf, TableColumn
from raybench.workloads.base import builtin_class

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
        if name == "preset":
            value = _preset_words(row)
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
    given = known_settings(row, names)
    if "preset" in given:
        given["preset"] = _preset_words(row)
    return formatting.words_of_settings(given, ranks)


def _preset_words(row: HasSettings) -> str:
    """Return a model's preset with what other parameters change of it: `175b (8 layers)`."""
    built_in = builtin_class(str(setting_of(row, "workload")))
    return built_in.preset_words(row.params) if built_in else row.params["preset"]


def setting_text(row: HasSettings, name: str) -> str:
    """Return the value of a setting as a table shows it, such as `175b (8 layers)`."""
    if name == "preset" and name in row.params:
        return _preset_words(row)
    return formatting.setting(name, setting_of(row, name))


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
            names = of_workload[row.workload]
            texts = {formatting.heading(name): setting_text(row, name) for name in names}
            return formatting.settings({name: text for name, text in texts.items() if text})

        # A workload is never folded.
        workload = TableColumn(title="workload", is_text=True, is_setting=True)
        others = replace(workload, title="settings", min_chars=SETTING_CHARS)
        return [(workload, lambda row: str(row.workload)), (others, own)]
    chosen = varying(rows, params_first=True) if names is None else names
    return [
        (
            TableColumn(
                title=ranks if ranks and name == "world_size" else formatting.heading(name),
                is_text=not is_numeric(rows, name),
                is_setting=True,
                # A preset is short, and hard to read in two lines.
                min_chars=None if name == "preset" else SETTING_CHARS,
            ),
            lambda row, name=name: setting_text(row, name),  # type: ignore[misc]
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
