"""Predictions of steps on more devices than were measured, as a document. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from raybench.analysis.prediction import ERROR_OF_A_DOUBLING, NotPredicted, Prediction
from raybench.analysis.rows import EXECUTION, varying
from raybench.report import formatting
from raybench.report.documents import Block, Column, ColumnOf, Document, Line, Listing, make_table
from raybench.report.formatting import counted, span
from raybench.report.point_settings import setting_columns
from raybench.report.words.prediction import not_predicted
from raybench.results.tables import PointRow, Run

_COLUMNS = (
    "step: what it would take. from, to: a 95 % interval; ±: half of it, in percent. Of 25 points "
    "that 4 H200s of one node measured, 25 lay in the interval predicted from 1 and 2. comm: how "
    "many ms communication adds. efficiency: speed-up over {base}, whose step counts as exact, by "
    "the ratio of their numbers."
)
_INTERVAL = (
    "From and to hold what the run leaves open of the step that it measured; the additional "
    "communication from all hidden behind computation to none hidden; "
    f"and {ERROR_OF_A_DOUBLING:.0%} for a doubling of the devices, by the errors on "
    "H200s of one node. They do not hold slower devices or links among the others, other traffic, "
    "or data that is loaded more slowly for more devices."
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
        within = counted(self.devices_per_node, self._rank)
        return (
            f"Assumed: every {self._rank} does the step that it did on {measured}, with the same "
            "batch. What the run exposes of communication is taken to grow as the bytes that a "
            f"device sends in an all_reduce over n devices, 2 (n - 1) / n. A node of this run has "
            f"{within}."
        )

    def blocks(self) -> Iterator[Block]:
        """Yield the answer for the most devices, a table of all, notes, what is not predicted."""
        found = self.predictions
        most = max(one.world_size for one in found)
        largest = [one for one in found if one.world_size == most]
        base = span(*(counted(n, self._rank) for n in sorted({one.base_world for one in largest})))
        shares, halves = (
            span(formatting.percent(min(values)), formatting.percent(max(values)))
            for values in zip(*((p.efficiency, p.half_interval) for p in largest), strict=True)
        )
        yield Line(
            text=f"{counted(most, self._rank)} would reach an efficiency of {shares} over {base}, "
            f"with steps known to ±{halves} ({counted(len(largest), 'point')}).",
            tone="strong",
        )

        def point(one: Prediction) -> PointRow:
            return replace(one.measured, world_size=one.world_size)

        rows = list(map(point, found))
        names = varying(rows, always=("precision", "world_size"), params_first=True)
        settings = setting_columns(rows, names)
        columns: list[ColumnOf[Prediction]] = [
            *((column, lambda one, cell=cell: cell(point(one))) for column, cell in settings),
            (Column(title="step ms"), lambda one: formatting.number(one.step_ms)),
            (Column(title="±"), lambda one: f"{one.half_interval:.0%}"),
            (Column(title="from"), lambda one: formatting.number(one.step_ms_low)),
            (Column(title="to"), lambda one: formatting.number(one.step_ms_high)),
            (Column(title="comm"), lambda one: formatting.number(one.comm_exposed_ms)),
            (Column(title="efficiency"), lambda one: formatting.percent(one.efficiency)),
        ]
        yield make_table(found, columns)
        texts = [_COLUMNS.format(base=base), self._assumptions, _INTERVAL]
        highest = max(one.measured_efficiency for one in found)
        if highest > 1:
            texts.append(
                f"The run measured an efficiency above 100%, up to {formatting.percent(highest)}, "
                "so these points are predicted up to what they measured. All others end at 100%."
            )
        if bound := {one.measured.point_id for one in found if one.measured.host_bound}:
            texts.append(
                f"At {counted(len(bound), 'point')} the device waits for the host: what was taken "
                "for communication there may be Python, which more devices do not slow."
            )
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
