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
    ShownColumn,
    Table,
    adapt_column,
    make_table,
)
from raybench.report.formatting import counted, span
from raybench.report.point_settings import setting_columns
from raybench.report.words import prediction as words
from raybench.report.words.prediction import not_predicted
from raybench.results.point_row import PointRow
from raybench.results.tables import Run

_PLUS_MINUS_MEANING = "half of the 95 % interval of the step time, divided by the step time"
_COMM_MEANING = "communication that computation does not hide, in ms"
_EFFICIENCY_MEANING = (
    "speed-up divided by the ratio of devices, compared with {base}, whose step is taken as exact"
)
_CHECKED_NOTE = (
    "Predictions were checked on 4 H200s of one node: 25 of 25 measured step times lay in the "
    "interval predicted from 1 and 2 of them."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast(Document):
    """The predictions of a run."""

    run: Run
    # At least one.
    predictions: Sequence[Prediction]
    # Number of devices on the largest node.
    devices_per_node: int
    left_out: Sequence[NotPredicted] = ()

    @property
    def _rank_noun(self) -> str:
        """Return `GPU` or `worker`."""
        is_gpu = self.predictions[0].measured.device_type == "cuda"
        return "GPU" if is_gpu else "worker"

    @property
    def title(self) -> str:
        """Return the id of the run and the device model."""
        measured = self.predictions[0].measured
        return f"{formatting.run_title(self.run)}, {measured.device_name}"

    @property
    def _assumptions(self) -> str:
        """Return the assumptions of the predictions, as a paragraph."""
        world_sizes = {prediction.measured.world_size for prediction in self.predictions}
        measured = span(*(counted(size, self._rank_noun) for size in sorted(world_sizes)))
        per_node = counted(self.devices_per_node, self._rank_noun)
        return words.assumptions(self._rank_noun, measured, per_node)

    def blocks(self) -> Iterator[Block]:
        """Yield the answer for the most devices, a table, notes, and what is not predicted."""
        most_devices = max(prediction.world_size for prediction in self.predictions)
        largest = [item for item in self.predictions if item.world_size == most_devices]
        base_sizes = sorted({prediction.base_world for prediction in largest})
        base = " or ".join(counted(size, self._rank_noun) for size in base_sizes)
        efficiencies = [prediction.efficiency for prediction in largest]
        ends = span(f"{100 * min(efficiencies):.1f}", f"{100 * max(efficiencies):.1f}")
        answer = words.answer(counted(most_devices, self._rank_noun), f"{ends} %", base)
        yield Line(text=answer, tone="strong")
        widest = max(prediction.half_interval for prediction in largest)
        yield Line(text=words.precision_of_steps(widest, len(largest)))
        yield self._table(base)
        yield Legend()
        notes = [self._assumptions, words.interval(ERROR_OF_A_DOUBLING)]
        highest = max(prediction.measured_efficiency for prediction in self.predictions)
        if highest > 1:
            notes.append(words.beyond_ideal(highest))
        measured_points = [prediction.measured for prediction in self.predictions]
        if host_bound := {row.point_id for row in measured_points if row.host_bound}:
            notes.append(words.host_bound(len(host_bound)))
        yield from (Line(text=note, tone="aside", is_apart=True) for note in notes)
        if self.left_out:
            reasons = Counter(map(not_predicted, self.left_out)).items()
            lines = [(counted(count, "series"), why) for why, count in reasons]
            yield Listing(title="Not predicted", lines=lines, is_quoted=True)

    def _table(self, base: str) -> Table:
        """Return the table of predictions; `base`, as `1 GPU`, is the baseline of efficiencies."""
        rows = [_point_on_more_devices(prediction) for prediction in self.predictions]
        names = varying(rows, always=("precision", "world_size"), params_first=True)
        settings = setting_columns(rows, names)
        columns: list[ColumnOf[Prediction]] = [
            *(adapt_column(setting, _point_on_more_devices) for setting in settings),
            (
                ShownColumn(title="step ms", meaning="the predicted step time"),
                lambda item: formatting.number(item.step_ms),
            ),
            (
                ShownColumn(title="±", meaning=_PLUS_MINUS_MEANING),
                lambda item: f"{item.half_interval:.0%}",
            ),
            (
                ShownColumn(title="from", meaning="the lower end of the 95 % interval, in ms"),
                lambda item: formatting.number(item.step_ms_low),
            ),
            (
                ShownColumn(title="to", meaning="the upper end of the 95 % interval, in ms"),
                lambda item: formatting.number(item.step_ms_high),
            ),
            (
                ShownColumn(title="exposed comm", meaning=_COMM_MEANING),
                lambda item: formatting.number(item.comm_exposed_ms),
            ),
            (
                ShownColumn(title="efficiency", meaning=_EFFICIENCY_MEANING.format(base=base)),
                lambda item: formatting.percent(item.efficiency),
            ),
        ]
        return make_table(self.predictions, columns, note=_CHECKED_NOTE)

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object; each prediction has its measured point."""
        predictions = []
        for prediction in self.predictions:
            measured = prediction.measured
            members = {name: getattr(measured, name) for name in _POINT_COLUMNS}
            members["measured_world_size"] = measured.world_size
            members["baseline_world_size"] = prediction.base_world
            members["world_size"] = prediction.world_size
            members |= {name: getattr(prediction, name) for name in _PREDICTED_VALUES}
            predictions.append(members)
        left_out = [{**asdict(item), "text": not_predicted(item)} for item in self.left_out]
        return {
            "run": asdict(self.run),
            "assumptions": self._assumptions,
            "left_out": left_out,
            "predictions": predictions,
        }


def _point_on_more_devices(prediction: Prediction) -> PointRow:
    """Return the measured point with the predicted world size."""
    return replace(prediction.measured, world_size=prediction.world_size)


_POINT_COLUMNS = ("point_id", "workload", "params", *EXECUTION, "batch_size", "device_name")
_PREDICTED_VALUES = (
    *("step_ms", "step_ms_low", "step_ms_high", "comm_exposed_ms", "speed_up"),
    *("efficiency", "efficiency_low", "efficiency_high"),
)
