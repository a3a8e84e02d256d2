"""The table of all points, which the page sorts and filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from raybench.analysis.rows import RATES, SCALING, value_of, workload_metrics
from raybench.analysis.settings import is_numeric, setting, varying
from raybench.records.metric import Metric
from raybench.report import formatting, plain_text
from raybench.report.charts.data import Row, in_order
from raybench.report.charts.scaling import speed_up_words
from raybench.report.document import MARK_COLUMN
from raybench.report.summary import Summary
from raybench.report.tables import STEP_MEANING, marks, meaning

# Of the columns that only this table has, or has with more than their value.
_MEANINGS = {
    "±": "Half of the 95 % interval of the step time, relative to it.",
    MARK_COLUMN: "What makes the number doubtful; a letter each.",
    "other step": "Step time in the run that this one is laid over.",
    "change": "Step time of this run over that of the other, less 1, ± half of the 95 % interval "
    "of these two starts. `raybench compare` tells chance from change.",
    "speed-up": "samples/s over those of the baseline point, ± half of the 95 % interval.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of the table.

    text: what is seen. value: what it is sorted by where the text is no plain number. hint: what it
    means.
    """

    text: str
    value: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """is_setting: it can be chosen by its values."""

    title: str
    is_setting: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointTable:
    """The table of all points.

    texts: how many columns, from the first, are aligned as text. meanings: of its columns and
    marks.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    texts: int
    meanings: Sequence[tuple[str, str]]


def point_table(
    rows: Sequence[Row], others: Sequence[Row], summary: Summary, against: str = ""
) -> PointTable:
    """Return the table of `rows`; others: the points of the run `against`, under theirs."""
    own = in_order(rows)
    by_id = {row["point_id"]: row for row in others}
    names = varying(own) or ["precision"]
    words = [name for name in names if not is_numeric(own, name)]
    numbers = [name for name in names if is_numeric(own, name)]
    metrics = tuple(dict.fromkeys((*SCALING.metrics, *RATES.metrics, *workload_metrics(own))))
    measured = _measurements(own, by_id, against, metrics)
    meanings = _meanings(metrics, summary) | _MEANINGS
    meanings["±"] = f"{meanings['±']} {summary.plus_minus}".rstrip()
    meanings["step"] = STEP_MEANING
    kept = [(title, cells) for title, cells in measured if any(cell.text for cell in cells)]
    settings = [(name, [_setting(row, name) for row in own]) for name in (*words, *numbers)]
    cells = zip(*(cells for _, cells in [*settings, *kept]), strict=True)
    found = {letter for row in own for letter in marks(row)}
    titles = [title for title, _ in kept]
    return PointTable(
        columns=[
            Column(title="point", hint="For `raybench show RUN POINT`."),
            *(
                Column(
                    title=summary.ranks if name == "world_size" else formatting.heading(name),
                    is_setting=True,
                )
                for name, _ in settings
            ),
            *(Column(title=title, hint=meanings[title]) for title in titles),
        ],
        rows=[
            [Cell(text=str(row["point_id"])), *line] for row, line in zip(own, cells, strict=True)
        ]
        if own
        else [],
        texts=1 + len(words),
        meanings=[
            *((title, meanings[title]) for title in titles),
            *((mark, text + ".") for mark, text in formatting.MARKS.items() if mark in found),
        ],
    )


def _meanings(metrics: Sequence[Metric], summary: Summary) -> dict[str, str]:
    """Say in a sentence what each metric is, by its heading."""
    words = {"ranks": summary.ranks, "baseline": formatting.settings(summary.run.baseline)}
    given = {_heading(metric): meaning(metric, words) for metric in metrics}
    return {heading: f"{text[:1].upper()}{text[1:]}." for heading, text in given.items()}


def _heading(metric: Metric) -> str:
    return formatting.metric_heading(metric, formatting.MILLISECONDS)


def _setting(row: Row, name: str) -> Cell:
    value = setting(row, name)
    text = "" if value is None else formatting.setting(name, value)
    return Cell(text=text, value=str(value) if name.endswith("_bytes") else "")


def _measurements(
    rows: Sequence[Row], others: Mapping[str, Row], against: str, metrics: Sequence[Metric]
) -> list[tuple[str, list[Cell]]]:
    columns: list[tuple[str, Callable[[Row], Cell]]] = [
        ("step", _step),
        ("±", _unsure),
        (MARK_COLUMN, _marks),
        *((_heading(metric), _metric_cell(metric)) for metric in metrics),
    ]
    if against:
        columns[2:2] = [
            ("other step", lambda row: _step(others.get(row["point_id"]))),
            ("change", lambda row: _change(others.get(row["point_id"]), row)),
        ]
    return [(title, [cell(row) for row in rows]) for title, cell in columns]


_NONE = Cell(text="")


def _step(row: Row | None) -> Cell:
    if row is None:
        return _NONE
    if row["status"] != "ok":
        reason = row["error_message"]
        hint = (
            plain_text.shorten(plain_text.plain(reason), 300)
            if formatting.has_value(reason)
            else ""
        )
        return Cell(text=formatting.STATUS_WORDS[row["status"]], hint=hint)
    time_ms = row["step_ms_p50"]
    if not formatting.has_value(time_ms):
        return _NONE
    return Cell(text=formatting.duration(time_ms), value=f"{time_ms:.6g}")


def _unsure(row: Row) -> Cell:
    share = formatting.step_uncertainty(row)
    if share is None:
        return _NONE
    return Cell(text=formatting.half_width(share), value=f"{share:.4g}")


def _change(other: Row | None, row: Row) -> Cell:
    """Of the step time, since the other run: this one over it, less 1."""
    if other is None or not all(formatting.has_value(one["step_ms_p50"]) for one in (other, row)):
        return _NONE
    change = float(row["step_ms_p50"] / other["step_ms_p50"] - 1)
    return Cell(text=f"{change:+.1%}", value=f"{change:.6g}")


def _marks(row: Row) -> Cell:
    found = marks(row)
    return Cell(text=found, hint="; ".join(formatting.MARKS[mark] for mark in found))


def _metric_cell(metric: Metric) -> Callable[[Row], Cell]:
    """Make the cells of a metric; a share is sorted by more digits than it shows."""
    if metric.name == "speed_up":
        return _speed_up
    whole = {"share": 1.0, "percent": 100.0}.get(metric.format)

    def cell(row: Row) -> Cell:
        value = value_of(row, metric)
        text = formatting.metric(metric, value)
        return Cell(text=text, value=f"{value / whole:.5g}" if text and whole else "")

    return cell


def _speed_up(row: Row) -> Cell:
    if not formatting.has_value(row["speed_up"]):
        reason = plain_text.plain(row["why"]) if formatting.has_value(row["why"]) else ""
        return Cell(text="–" if reason else "", hint=reason)
    return Cell(text=speed_up_words(row), value=f"{row['speed_up']:.6g}")
