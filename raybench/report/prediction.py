"""Predictions of steps on more devices than were measured, as a document. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from raybench.analysis.prediction import ERROR_OF_A_DOUBLING, NotPredicted, Prediction
from raybench.analysis.rows import EXECUTION, varying
from raybench.report import formatting
from raybench.report.documents import (
    Block,
    ColumnOf,
    Document,
    Legend,
    Line,
    Listing,
    TableColumn,
    make_table,
)
from raybench.report.formatting import counted, span
from raybench.report.point_settings import setting_columns
from raybench.report.words import prediction as words
from raybench.report.words.prediction import not_predicted
from raybench.results.point_row import PointRow
from raybench.results.tables import Run

_HALF = "half of the 95 % interval of the step time, divided by the step time"
_COMM = "communication that computation does not hide, in ms"
_EFFICIENCY = (
    "speed-up divided by the ratio of devices, compared with {base}, whose step is taken as exact"
)
_CHECKED = (
    "Predictions were checked on 4 H200s of one node: 25 of 25 measured step times lay in the "
    "interval predicted from 1 and 2 of them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast(Document):
    """The predictions of a run: a document (see `raybench.report.documents`).

    predictions (one or more), left_out: as of `predict`. devices_per_node: most on a node.
    """

    run: Run
    predictions: Sequence[Prediction]
    devices_per_node: int
    left_out: Sequence[NotPredicted] = ()

    @property
    def _rank(self) -> str:
        """Return what a device is called, `GPU` or `worker`."""
        is_gpu = self.predictions[0].measured.device_type == "cuda"
        return "GPU" if is_gpu else "worker"

    @property
    def title(self) -> str:
        """Return the run's `formatting.title` and the model of the first prediction's devices."""
        measured = self.predictions[0].measured
        return f"{formatting.title(self.run)}, {measured.device_name}"

    @property
    def _assumptions(self) -> str:
        """Return the assumptions of the predictions, as a paragraph."""
        worlds = {one.measured.world_size for one in self.predictions}
        measured = span(*(counted(world, self._rank) for world in sorted(worlds)))
        return words.assumptions(self._rank, measured, counted(self.devices_per_node, self._rank))

    def blocks(self) -> Iterator[Block]:
        """Yield the answer for the most devices, a table of all, notes, what is not predicted."""
        found = self.predictions
        most = max(one.world_size for one in found)
        largest = [one for one in found if one.world_size == most]
        worlds = sorted({one.base_world for one in largest})
        base = " or ".join(counted(world, self._rank) for world in worlds)
        efficiencies = [one.efficiency for one in largest]
        ends = dict.fromkeys(
            f"{100 * share:.1f}" for share in (min(efficiencies), max(efficiencies))
        )
        answer = words.answer(counted(most, self._rank), f"{' to '.join(ends)} %", base)
        yield Line(text=answer, tone="strong")
        widest = max(one.half_interval for one in largest)
        yield Line(text=words.precision_of_steps(widest, len(largest)))

        def point(one: Prediction) -> PointRow:
            return replace(one.measured, world_size=one.world_size)

        rows = list(map(point, found))
        names = varying(rows, always=("precision", "world_size"), params_first=True)
        settings = setting_columns(rows, names)
        columns: list[ColumnOf[Prediction]] = [
            *((column, lambda one, cell=cell: cell(point(one))) for column, cell in settings),
            (
                TableColumn(title="step ms", meaning="the predicted step time"),
                lambda one: formatting.number(one.step_ms),
            ),
            (TableColumn(title="±", meaning=_HALF), lambda one: f"{one.half_interval:.0%}"),
            (
                TableColumn(title="from", meaning="the lower end of the 95 % interval, in ms"),
                lambda one: formatting.number(one.step_ms_low),
            ),
            (
                TableColumn(title="to", meaning="the upper end of the 95 % interval, in ms"),
                lambda one: formatting.number(one.step_ms_high),
            ),
            (
                TableColumn(title="exposed comm", meaning=_COMM),
                lambda one: formatting.number(one.comm_exposed_ms),
            ),
            (
                TableColumn(title="efficiency", meaning=_EFFICIENCY.format(base=base)),
                lambda one: formatting.percent(one.efficiency),
            ),
        ]
        yield make_table(found, columns, note=_CHECKED)
        yield Legend()
        texts = [self._assumptions, words.interval(ERROR_OF_A_DOUBLING)]
        highest = max(one.measured_efficiency for one in found)
        if highest > 1:
            texts.append(words.beyond_ideal(highest))
        if bound := {one.measured.point_id for one in found if one.measured.host_bound}:
            texts.append(words.host_bound(len(bound)))
        yield from (Line(text=text, tone="aside", is_apart=True) for text in texts)
        if self.left_out:
            reasons = Counter(map(not_predicted, self.left_out)).items()
            lines = [(counted(count, "series"), why) for why, count in reasons]
            yield Listing(title="Not predicted", lines=lines, is_quoted=True)

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object.

        run, assumptions, left_out (each `NotPredicted` with its text), predictions: settings and id
        of the measured point, measured_world_size and baseline_world_size, and what is predicted at
        its world_size.
        """
        return {
            "run": asdict(self.run),
            "assumptions": self._assumptions,
            "left_out": [{**asdict(one), "text": not_predicted(one)} for one in self.left_out],
            "predictions": [
                {
                    **{name: getattr(one.measured, name) for name in _OF_POINT},
                    "measured_world_size": one.measured.world_size,
                    "baseline_world_size": one.base_world,
                    "world_size": one.world_size,
                    **{name: getattr(one, name) for name in _PREDICTED},
                }
                for one in self.predictions
            ],
        }


_OF_POINT = ("point_id", "workload", "params", *EXECUTION, "batch_size", "device_name")
_PREDICTED = (
    *("step_ms", "step_ms_low", "step_ms_high", "comm_exposed_ms", "speed_up"),
    *("efficiency", "efficiency_low", "efficiency_high"),
)
