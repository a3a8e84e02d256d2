"""A run and what follows from its rows: all that its report, page and exports are made of.

Everything is computed when it is first asked for, and once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import pandas as pd

from raybench.analysis.references import SHIPPED, References, impossible_figures
from raybench.analysis.rounds import (
    Trials,
    latest_trials,
    regions_by_point,
    without_controls,
)
from raybench.analysis.rows import OPTIONAL, ScaledRow, batch_column, typed_rows, varying
from raybench.analysis.scaling import scaling
from raybench.analysis.uneven import Fleet, fleets
from raybench.job.model import Answer, answer_of_run
from raybench.job.point import RUN_SETTINGS
from raybench.job.source import overrides_in
from raybench.records import Cause, TrialKey, by_point
from raybench.report import formatting, messages
from raybench.report.answers import (
    Case,
    LargestBatch,
    in_order_of_answer,
    largest_batches,
    rank_cases,
    settings_of_cases,
    usable_answer,
)
from raybench.report.documents import records
from raybench.report.messages import MARKS, MessageGroup, marks
from raybench.report.plain_text import counted, span
from raybench.report.point_settings import distinguishing_settings
from raybench.report.references import Standing, measurements, standings
from raybench.results.reader import Run
from raybench.results.tables import PointRow, RegionRow
from raybench.sweep.scheduler import BETWEEN_ROUNDS_S, WORTHWHILE
from raybench.workloads.base import builtin_class, parameter_count


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreRounds:
    """What it takes to have `rounds` rounds in all: about `seconds` more."""

    rounds: int
    seconds: float

    @property
    def sentence(self) -> str:
        """Return `3 rounds, which give an interval, would take about 2 min 40 s more`."""
        time = formatting.long_time(self.seconds)
        return f"{self.rounds} rounds, which give an interval, would take about {time} more"


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class Summary:
    """A run with its rows of the tables, and what follows from them.

    folder: with its results. devices, region_rows: its rows of these tables, as `raybench.load`
    gives them.
    references: what its figures are held against.
    """

    run: Run
    devices: pd.DataFrame
    points: Sequence[PointRow]
    folder: Path = Path("results")
    region_rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    references: References = SHIPPED

    @cached_property
    def rows(self) -> list[ScaledRow]:
        """Return the latest attempt at each point against its baseline, of `analysis.scaling`.

        What cannot be is among the warnings of a point.
        """
        return [
            replace(row, warnings=(*row.warnings, *texts)) if texts else row
            for row in scaling(self.points, self.run.baseline)
            for rounds in [self._trials.rounds(row).values()]
            for attempts_s in [[one.duration_s for one in rounds]]
            for texts in [impossible_figures(row, self.references, attempts_s)]
        ]

    @cached_property
    def standings(self) -> list[Standing]:
        """Return the figures that have a reference, beside it."""
        return standings(measurements(self.rows), self.references)

    @cached_property
    def _trials(self) -> Trials:
        return Trials(self.points)

    @cached_property
    def _attempts(self) -> list[PointRow]:
        return without_controls(latest_trials(self.points))

    @cached_property
    def ranks(self) -> str:
        """Return what a rank runs on, `GPUs` or `workers`."""
        is_known = not self.devices.empty
        first = [self.devices["kind"].iloc[0]] if is_known else []
        return ranks_word(first or (row.device_type for row in self.rows))

    @cached_property
    def shared(self) -> Mapping[str, str]:
        """Return parameters, and settings other than their defaults, that all points share."""
        rows = self.rows
        if not rows:
            return {}
        first = rows[0].params
        same = {k: v for k, v in first.items() if all(row.params.get(k) == v for row in rows)}
        options = {name: {getattr(row, name) for row in rows} for name in OPTIONAL}
        alike = {name: values.pop() for name, values in options.items() if len(values) == 1}
        return same | {
            name: formatting.setting(name, value)
            for name, value in alike.items()
            if formatting.has_value(value) and value != RUN_SETTINGS[name].default
        }

    @cached_property
    def has_throughput(self) -> bool:
        """Return whether the points finish items; where none is ok, those with a batch size do."""
        if any(row.status == "ok" for row in self.rows):
            return any(row.throughput is not None for row in self.rows)
        return any(batch_column(row) for row in self.rows)

    @cached_property
    def unit(self) -> formatting.Unit:
        """Return the unit of all step times in the tables."""
        return formatting.unit_of(self.rows)

    @cached_property
    def case_settings(self) -> list[str]:
        """Return the settings that make cases, in each of which one point is the best."""
        return settings_of_cases(self.rows, self.answer)

    @cached_property
    def table_settings(self) -> list[str]:
        """Return the settings that tell the points apart; those that make cases come first."""
        names, cases = distinguishing_settings(self.rows), self.case_settings
        return sorted(names, key=lambda name: name not in cases)

    @cached_property
    def ordered(self) -> list[ScaledRow]:
        """Return `rows` case by case, in each the best first."""
        return in_order_of_answer(self.rows, self.answer)

    @cached_property
    def alike(self) -> str:
        """Return the main settings of all points: `fp32, batch 64 per device, 2 GPUs`.

        A batch that varies is named without its value.
        """
        if not self.rows:
            return ""
        first, apart = self.rows[0], varying(self.rows)
        names = ("precision", "batch", "world_size")
        words = {name: formatting.settings_words(first, [name], self.ranks) for name in names}
        words |= {name: "batch" if name == "batch" else "" for name in names if name in apart}
        if "dtype" in first.params:  # it computes nothing in the precision
            words["precision"] = ""
        elif words["precision"] and self.is_precision_unknown:
            words["precision"] = "precision as the script has it"
        if words["batch"] and first.scaling and "scaling" not in apart:
            words["batch"] += " per device" if first.scaling == "weak" else " over all devices"
        return ", ".join(filter(None, words.values()))

    @property
    def is_precision_unknown(self) -> bool:
        """Return whether a script ran whose job sets no precision: its rows have a default."""
        texts = (self.run.job_text, *overrides_in(self.run.argv))
        is_set = any(re.search(r"\bprecision\s*[:=]", text) for text in texts)
        return bool(self.points) and self.points[0].workload == "script" and not is_set

    @cached_property
    def words(self) -> dict[str, str]:
        """Return what stands for {ranks}, {baseline} and {items} in the meaning of a metric."""
        baseline = formatting.settings(self.run.baseline)
        return {"ranks": self.ranks, "baseline": baseline, "items": self.answer.items}

    @cached_property
    def marks_meaning(self) -> str:
        """Return what the marks of the points mean, of those that are set."""
        letters = {letter for row in self.rows for letter in marks(row)}
        found = (f"{mark} {text}" for mark, text in MARKS.items() if mark in letters)
        return "; ".join(found)

    @cached_property
    def answer(self) -> Answer:
        """Return what the job asks, or what its workload answers."""
        # A job file names the batch by the column that it fixes.
        batch = next(filter(None, map(batch_column, self.rows)), "batch")
        asked = [batch if name == "batch" else name for name in varying(self.rows)]
        found = answer_of_run(self.run.job_text, overrides_in(self.run.argv), asked)
        return replace(found, over=tuple("batch" if n == batch else n for n in found.over))

    @cached_property
    def fleets(self) -> Sequence[Fleet]:
        """Return scenarios of devices of different speed; empty where the run has none."""
        return fleets(self.rows)

    @cached_property
    def regions(self) -> Mapping[str, Sequence[RegionRow]]:
        """Return the regions that the step of each point names, by point_id."""
        return regions_by_point(typed_rows(self.region_rows, RegionRow))

    @cached_property
    def largest_batches(self) -> tuple[LargestBatch, ...]:
        """Return the largest batch of each series that was searched for it."""
        return largest_batches(self.rows)

    @cached_property
    def ranked_by(self) -> Answer:
        """Return the answer by a metric that can rank points, also where it asks for a speed-up."""
        return usable_answer(self.rows, self.answer)

    @cached_property
    def cases(self) -> list[Case]:
        """Return the points case by case, the best first."""
        return rank_cases(self.rows, self.ranked_by, self.ranks)

    @property
    def contested(self) -> list[Case]:
        """Return the cases in which two points or more compete."""
        return [case for case in self.cases if len(case.ranked) > 1]

    @cached_property
    def machine(self) -> str:
        """Return the devices of the run: `4 x NVIDIA H200 on 1 node; P2P/CUMEM`."""
        devices = self.devices
        if devices.empty:
            return self.run.cluster
        most = max((row.node_count or 0 for row in self.rows), default=0)
        # After `--resume` elsewhere no point may have had all of them.
        nodes = _node_count(devices, most)
        text = formatting.machine(records(devices), nodes)
        if 0 < most < nodes:
            text += f", at most {counted(most, 'node')} in a point"
        if self.run.only_devices:
            text += ", only those that --devices named"
        ways = {way for row in self.rows for way in row.transports or ()}
        return f"{text}; {formatting.some(sorted(ways))}" if ways else text

    @cached_property
    def model(self) -> tuple[str, ...]:
        """Return what the points run, the parameters of their models, and the optimizers.

        As in ("MLP of 8 layers, 4,096 wide", "134 M parameters", "adam"); shorter for no model.
        """
        rows = self.rows
        classes = {row.workload: builtin_class(row.workload) for row in rows}
        names = dict.fromkeys(
            (found.describe(row.params) if (found := classes[row.workload]) else "") or row.workload
            for row in rows
        )
        sizes = sorted({parameter_count(row.workload, row.params) or 0 for row in rows} - {0})
        size = span(*(formatting.amount(count) for count in sizes[:: len(sizes) - 1 or 1]))
        trained = [row for row in rows if row.params.get("mode") != "inference"]
        optimizers = {row.params["optimizer"] for row in trained if "optimizer" in row.params}
        parts = (
            ", ".join(names),
            f"{size} parameters" if size else "",
            ", ".join(sorted(optimizers)),
        )
        return tuple(filter(None, parts))

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """Return name -> version of the run's software; those of its first device replace them.

        The driver too, where it is known. Whether other devices have others is not told.
        """
        if self.devices.empty:
            return dict(self.run.versions)
        first = self.devices.iloc[0]
        driver = first["driver_version"]
        own = {"driver": driver} if formatting.has_value(driver) else {}
        return {**self.run.versions, **dict(first["versions"]), **own}

    @cached_property
    def lost_nodes(self) -> tuple[str, ...]:
        """Return hosts lost during an attempt, also where the point was measured later."""
        hosts = (row.error_host for row in self.points if row.error_type == Cause.NODE_LOST)
        return tuple(dict.fromkeys(host for host in hosts if host is not None))

    @cached_property
    def counts(self) -> str:
        """Return how the points ended: `36 points: 36 ok, 0 failed, 0 skipped; 3 rounds`."""
        ended = {TrialKey(row.point_id, row.round or 1): str(row.status) for row in self._attempts}
        rounds = max((row.rounds for row in self.rows), default=1)
        text = formatting.counts(self.run, list(by_point(ended).values()))
        capped = sum("power_cap" in (row.throttle_reasons or ()) for row in self.rows)
        text += f"; {rounds} rounds" if rounds > 1 else ""
        return text + (f"; power cap reached in {counted(capped, 'point')}" if capped else "")

    @property
    def course(self) -> str:
        """Return when the run was, and how long it took."""
        return f"{formatting.when(self.run.started_at)}, {formatting.course(self.run)}"

    @cached_property
    def failures(self) -> tuple[MessageGroup, ...]:
        """Return how points failed or were skipped, and why."""
        return messages.failures(self._attempts)

    @cached_property
    def without_speed_up(self) -> tuple[MessageGroup, ...]:
        """Return why points have no speed-up."""
        return messages.group_messages(messages.reasons_without_speed_up(self.rows))

    @cached_property
    def warnings(self) -> tuple[MessageGroup, ...]:
        """Return what makes figures doubtful, the most harmful first."""
        drifts = messages.drift_warnings(self._trials, self.ranks)
        found = messages.group_messages([*drifts, *messages.warnings_of(self.rows)])
        return messages.by_harm(found)

    @property
    def has_one_start(self) -> bool:
        """Return whether each ok point has one round, so that no number has an interval."""
        return all(row.rounds == 1 for row in self.rows if row.status == "ok")

    @cached_property
    def plus_minus(self) -> str:
        """Return a sentence that says what ± holds over; empty where nothing has one."""
        known = [row.rounds for row in self.rows if row.step_ms_low is not None]
        if not known:
            return ""
        counts = span(*(str(choose(known)) for choose in (min, max)))
        return f"± is half of the 95 % interval over the {counts} rounds of this run."

    @cached_property
    def more_rounds(self) -> MoreRounds | None:
        """Return what three rounds in all would take; None where the run has them."""
        measured = [row for row in self.rows if row.status == "ok"]
        done = max((row.rounds for row in measured), default=WORTHWHILE)
        if done >= WORTHWHILE:
            return None
        each_s = [
            one.duration_s
            for row in measured
            for one in self._trials.rounds(row).values()
            if one.duration_s is not None
        ]
        more = WORTHWHILE - done
        return MoreRounds(rounds=WORTHWHILE, seconds=more * (sum(each_s) / done + BETWEEN_ROUNDS_S))


def ranks_word(device_types: Iterable[str | None]) -> str:
    """Return what a rank runs on, `workers` where all are of the CPU, else `GPUs`."""
    return "workers" if {kind for kind in device_types if kind} == {"cpu"} else "GPUs"


def _node_count(devices: pd.DataFrame, most: int) -> int:
    """Return the number of nodes. most: the nodes that a point had at most.

    A Ray that was started anew gives the same host another id. Hosts may have the same name; one
    has a device of each index once.
    """
    alike = devices.groupby(["host", "address", "index"]).size()
    hosts = int(alike.groupby(level=["host", "address"]).max().sum())
    return hosts if 0 < most <= hosts else int(devices["node_id"].nunique())
