"""The settings that distinguish points, as columns and as names. Pure.

Points of one workload have a column for each setting that varies. Points of several workloads, as
in a health check, differ in most settings, so one column holds all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
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
from raybench.report.documents import SETTING_CHARS, ColumnOf, ShownColumn, text_of
from raybench.workloads.base import builtin_class

# Setting -> word that short names show instead of `name=value`.
_WORDS = {"compile": "compiled", "activation_checkpointing": "checkpointing"}


class _Row(HasSettings, Protocol):
    """A point of a run, or of two runs."""

    @property
    def point_id(self) -> str:
        """Return the id of the point."""

    @property
    def workload(self) -> str:
        """Return the name or the class of the workload."""


def short_name(row: HasSettings, names: Sequence[str], ranks_noun: str) -> str:
    """Return the settings in use, as `FSDP 2, full checkpointing`; `plain` if none is in use.

    Args:
        row: the point.
        names: names of settings; [] returns "".
        ranks_noun: `GPUs` or `workers`.
    """
    words = []
    for name, value in used_settings(row, names).items():
        if name == "preset":
            value = _preset_words(row)
        text = str(value)
        is_switched_on = text.lower() == "true" or (name in _WORDS and text == "1")
        if name in DEGREES:
            words.append(f"{DEGREES[name]} {value}")  # FSDP 2
        elif is_switched_on:
            words.append(_WORDS.get(name, name))  # compiled
        elif name in _WORDS:
            words.append(f"{value} {_WORDS[name]}")  # full checkpointing
        else:
            words.append(formatting.setting_words(name, value, ranks_noun))
    return ", ".join(filter(None, words)) or ("plain" if names else "")


def settings_words(row: HasSettings, names: Iterable[str], ranks_noun: str) -> str:
    """Return settings as `fp32, batch 64, 4 GPUs, hidden=8`; `ranks_noun`: `GPUs` or `workers`."""
    settings = known_settings(row, names)
    if "preset" in settings:
        settings["preset"] = _preset_words(row)
    return formatting.words_of_settings(settings, ranks_noun)


def _preset_words(row: HasSettings) -> str:
    """Return the preset of a model and the parameters that change it: `175b (8 layers)`."""
    built_in = builtin_class(str(setting_of(row, "workload")))
    return built_in.preset_words(row.params) if built_in else row.params["preset"]


def setting_cell(row: HasSettings, name: str) -> str:
    """Return the value of a setting as a table shows it, such as `175b (8 layers)`."""
    if name == "preset" and name in row.params:
        return _preset_words(row)
    return formatting.setting(name, setting_of(row, name))


def setting_columns(
    rows: Sequence[_Row], names: Sequence[str] | None = None, ranks_noun: str = ""
) -> list[ColumnOf[Any]]:
    """Return a column for each setting; rows of several workloads have two columns in all.

    Args:
        rows: the points.
        names: the settings in order; None: the settings that differ, parameters first.
        ranks_noun: heading of the column of world_size; "" uses the name.
    """
    if names is None and _have_several_workloads(rows):
        return _workload_and_settings_columns(rows)
    if names is None:
        names = varying(rows, params_first=True)
    columns: list[ColumnOf[Any]] = []
    for name in names:
        is_of_ranks = ranks_noun and name == "world_size"
        shown_column = ShownColumn(
            title=ranks_noun if is_of_ranks else formatting.heading(name),
            is_text=not is_numeric(rows, name),
            is_setting=True,
            # A preset is short, and hard to read in two lines.
            min_chars=None if name == "preset" else SETTING_CHARS,
        )
        columns.append((shown_column, partial(setting_cell, name=name)))
    return columns


def _workload_and_settings_columns(rows: Sequence[_Row]) -> list[ColumnOf[Any]]:
    """Return the column of workloads, and one column for the settings that differ in each."""
    rows_of_workload: dict[str, list[_Row]] = {}
    for row in rows:
        rows_of_workload.setdefault(row.workload, []).append(row)
    names_of_workload = {}
    for workload, members in rows_of_workload.items():
        names_of_workload[workload] = varying(members, params_first=True)

    def settings_cell(row: _Row) -> str:
        texts = {}
        for name in names_of_workload[row.workload]:
            if text := setting_cell(row, name):
                texts[formatting.heading(name)] = text
        return formatting.settings(texts)

    # The name of a workload is never folded.
    workloads = ShownColumn(title="workload", is_text=True, is_setting=True)
    settings = replace(workloads, title="settings", min_chars=SETTING_CHARS)
    return [(workloads, lambda row: str(row.workload)), (settings, settings_cell)]


def point_names(rows: Sequence[_Row]) -> list[str]:
    """Return the varying settings of each point, `k=256` or `gemm k=256`; its id without any."""
    columns = setting_columns(rows)
    has_workloads = _have_several_workloads(rows)
    names = []
    for row in rows:
        texts = {column.title: text_of(make_cell(row)) for column, make_cell in columns}
        if has_workloads:
            names.append(" ".join(filter(None, texts.values())))
        else:
            names.append(formatting.settings(texts) or row.point_id)
    return names


def _have_several_workloads(rows: Sequence[_Row]) -> bool:
    return len({row.workload for row in rows}) > 1
