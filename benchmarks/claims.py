"""Write docs/explanation/claims.md: what five articles claim, beside what committed runs say of it.

    python -m benchmarks.claims

claims.yaml has one row per claim. Its figures are Python expressions over the committed runs:
`ddp(world_size=4, precision="bf16")` is the only point of the run `ddp` with these settings,
`ddp.ratio("rate", world_size=(4, 1), precision="bf16")` compares two of its points, and
`ddp.table("devices")` is a table of it as a pandas frame.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Any

import pandas as pd
from ruamel.yaml import YAML

import raybench
from raybench.analysis.rows import point_rows
from raybench.analysis.scaling import scaling
from raybench.report import formatting

ROOT = Path(__file__).parents[1]
CLAIMS = ROOT / "benchmarks" / "claims.yaml"
PAGE = ROOT / "docs" / "explanation" / "claims.md"
RESULTS = ROOT / "results" / "examples"

# A published figure without a range is met within this share of it.
NEAR = 0.1
# Two starts of a point differ by less than this in 19 of 20 cases, by the three rounds of the run
# ddp_scaling on H200s. It is the margin of a figure that was measured in a single start.
ONE_START = 0.03
MARKS = {True: "**+** ", False: "**-** ", None: "**?** "}

HEAD = """# Five articles, claim by claim

Five published articles on timing and distributed training, and what raybench measured of what they
claim. The page is generated: edit `benchmarks/claims.yaml` and run `python -m benchmarks.claims`,
which computes the measured figures from the runs in `results/examples`.

* **+** as published, **-** not, **?** the uncertainty leaves it open. A claim holds in part where
  some of its figures are as published, and is only measured where nothing is published to compare.
* ± is half of the 95 % interval over the rounds of a run. A measurement without ± is of a single
  start and counts as known within 3 %, or within 3 points of a percentage. Sizes and counts are
  exact. A published figure without a range is met within 10 %. x is a ratio.
* The name of a run begins with the job that repeats it, `ddp_linear-…` with
  `raybench sweep jobs/ddp_linear.yaml`, or with `health`, for `raybench health`.
"""


@dataclass(frozen=True)
class Figure:
    """A number with the ends of its 95 % interval.

    ends: None where measured in a single start; both are the value of what is exact. text: is shown
    in place of the number.
    """

    value: float
    ends: tuple[float, float] | None = None
    text: str = ""

    def __truediv__(self, other: Figure) -> Figure:
        """Divide figures whose intervals, as far as they are known, are independent."""
        value = self.value / other.value
        shares = [(f.ends[1] - f.ends[0]) / 2 / f.value for f in (self, other) if f.ends]
        half = value * math.hypot(*shares)
        return Figure(value, (value - half, value + half) if shares else None)

    def changed(self, change: Callable[[float], float]) -> Figure:
        low, high = sorted(map(change, self.ends or (0, 0)))
        return Figure(change(self.value), (low, high) if self.ends else None)

    def is_within(
        self, unit: str, *, near: float = 0, least: float = -math.inf, most: float = math.inf
    ) -> bool | None:
        """Whether the whole interval is in the range; None where it crosses an end of the range."""
        if near:
            least, most = near * (1 - NEAR), near * (1 + NEAR)
        margin = 100 * ONE_START if unit == "%" else ONE_START * abs(self.value)
        low, high = self.ends or (self.value - margin, self.value + margin)
        if least <= low and high <= most:
            return True
        return False if high < least or low > most else None

    def shown(self, unit: str) -> str:
        """Write the number with its unit and half of its interval: `1.91x ±4.7%`."""
        is_exact = self.ends == (self.value, self.value)
        if self.text:
            number = self.text
        elif is_exact and self.value == int(self.value):
            number = f"{self.value:,.0f}"
        elif 0 < abs(self.value) < 1e-3:
            number = f"{self.value:.1e}"
        else:
            number = formatting.number(self.value, 3)
        text = f"{number}{'' if unit in ('x', '%') else ' '}{unit}".rstrip()
        if not self.ends or is_exact:
            return text
        return (
            f"{text} {formatting.half_width((self.ends[1] - self.ends[0]) / 2 / abs(self.value))}"
        )


def exact(value: float) -> Figure:
    """Make a figure of a count or a size."""
    return Figure(value, (value, value))


def more(ratio: Figure) -> Figure:
    """Write a ratio as what it is above 1, in %."""
    return ratio.changed(lambda value: 100 * (value - 1))


def less(ratio: Figure) -> Figure:
    """Write a ratio as what it is below 1, in %."""
    return ratio.changed(lambda value: 100 * (1 - value))


def span(values: pd.Series[float]) -> Figure:
    """Show values from the least to the most: `388 to 391`."""
    ends = dict.fromkeys(formatting.number(end, 3) for end in (values.min(), values.max()))
    return Figure(values.mean(), text=" to ".join(ends))


def as_figure(value: Any) -> Figure:
    """Make a figure of what an expression gives; an integer is exact."""
    if isinstance(value, Figure):
        return value
    if isinstance(value, str):
        return Figure(math.nan, text=value)
    return exact(int(value)) if isinstance(value, Integral) else Figure(float(value))


@dataclass(frozen=True)
class Point:
    """One point of a run, over its rounds."""

    run: Run
    row: dict[str, Any]

    def __getitem__(self, expression: str) -> Figure:
        """Compute an expression over columns and the workload's metrics; it has no interval."""
        return as_figure(eval(expression, self.row | (self.row["workload_metrics"] or {})))

    @property
    def step(self) -> Figure:
        """In ms."""
        return self._with_ends("step_ms_p50", "step_ms")

    @property
    def speed_up(self) -> Figure:
        """Over the baseline point of the job."""
        return self._with_ends("speed_up", "speed_up")

    @property
    def rate(self) -> Figure:
        """Samples/s."""
        return self._with_ends("throughput", "throughput")

    @property
    def memory(self) -> Figure:
        """Peak of the allocated memory in GiB."""
        return exact(self.row["peak_mem_allocated_bytes"] / 2**30)

    def region(self, name: str) -> Figure:
        """Take the share in % of a named part of the step."""
        found = self._of_point("regions")
        return exact(found[found.region == name].share_pct.item())

    def host_over_step(self) -> Figure:
        """Divide rank 0's host time of a timed step, which waits for nothing, by the step."""
        found = self._of_point("samples")
        timed = found[~found.is_warmup & (found["rank"] == 0)]
        return Figure(timed.host_ns.median() / timed.step_ns.median())

    def first_five(self, *, is_warm: bool) -> Figure:
        """Divide the mean of five steps, from the first call or after the warm-up, by the step."""
        found = self._of_point("samples")
        is_early = (found.iteration < 5) & (found.repeat == 0)
        slowest = found[(found.is_warmup != is_warm) & is_early].groupby("iteration").step_ns.max()
        return Figure(slowest.mean() / 1e6 / self.row["step_ms_p50"])

    def rank_spread(self, *, is_first: bool) -> Figure:
        """Take the slowest rank's mean host time of a step, or of the first, less the fastest's."""
        found = self._of_point("samples")
        chosen = found.is_warmup & (found.iteration == 0) if is_first else ~found.is_warmup
        means_ms = found[chosen].groupby("rank").host_ns.mean() / 1e6
        return Figure(means_ms.max() - means_ms.min())

    def warm_up(self) -> Figure:
        """Count the steps before three in a row are within 5 % of the median of the timed ones."""
        found = self._of_point("samples")
        steps_ms = found[found.is_warmup].groupby("iteration").step_ns.max() / 1e6
        is_near = (steps_ms / self.row["step_ms_p50"]).between(0.95, 1.05)
        three = is_near & is_near.shift(-1, fill_value=True) & is_near.shift(-2, fill_value=True)
        if three.any():
            return exact(int(three.to_numpy().argmax()))
        many = len(steps_ms)
        return Figure(many + 1, (many + 1, many + 1), f"more than {many}")

    def _of_point(self, table: str) -> pd.DataFrame:
        """Read the rows of the latest attempt."""
        found = self.run.table(table)
        is_latest = found.attempt == self.row["attempt"]
        return found.loc[is_latest & (found.point_id == self.row["point_id"])]

    def _with_ends(self, column: str, name: str) -> Figure:
        low, high = self.row[f"{name}_low"], self.row[f"{name}_high"]
        return Figure(self.row[column], None if pd.isna(low) else (low, high))


@dataclass(frozen=True)
class Run:
    """A committed run."""

    run_id: str

    def __call__(self, **settings: Any) -> Point:
        """Find the only point that is ok with these settings and parameters of the workload."""
        [row] = self.rows(**settings)
        return Point(self, row)

    def rows(self, **settings: Any) -> list[dict[str, Any]]:
        """Find the points that are ok with these settings, compared as text."""
        wanted = {name: str(value).lower() for name, value in settings.items()}
        return [
            row
            for row in _points(self.run_id)
            if row["status"] == "ok"
            and all(str((row | row["params"]).get(k)).lower() == v for k, v in wanted.items())
        ]

    def ratio(self, figure: str, **settings: Any) -> Figure:
        """Divide a property or expression of two points; a tuple has the setting of both."""
        [varied] = [name for name, value in settings.items() if isinstance(value, tuple)]
        points = [self(**settings | {varied: value}) for value in settings[varied]]
        above, below = (getattr(p, figure) if hasattr(p, figure) else p[figure] for p in points)
        return above / below

    def table(self, name: str) -> pd.DataFrame:
        """Read a table as `raybench.load` does."""
        return _load(name, self.run_id)

    def test(self, name: str) -> pd.Series[float]:
        """Take what a test of a health check measured, of each device, pair or node."""
        return self.table("health").query("test == @name and kind != 'cluster'").value.dropna()


@cache
def _load(table: str, run_id: str) -> pd.DataFrame:
    return raybench.load(RESULTS, table, run_id)


@cache
def _points(run_id: str) -> Sequence[dict[str, Any]]:
    """Read the points of a run with speed-ups and intervals over the rounds."""
    baseline = _load("runs", run_id).baseline.iloc[0] or {}
    return list(map(vars, scaling(point_rows(_load("points", run_id)), baseline)))


def evaluate(claim: Mapping[str, Any], runs: Mapping[str, str]) -> tuple[list[str], str, list[str]]:
    """Compute the figures of a claim: their lines, the verdict, the runs that they are of."""
    lines, judged, used = [], [], []
    names: dict[str, Any] = {name: Run(run_id) for name, run_id in runs.items()}
    names |= {"exact": exact, "more": more, "less": less, "span": span}
    for key, expression, rule in _entries(claim):
        code = compile(expression.strip(), key, "eval")
        used += [runs[name] for name in code.co_names if name in runs]
        name, _, unit = key.removesuffix("]").partition(" [")
        unit = unit or claim.get("unit", "")
        figure = as_figure(eval(code, names))
        if rule:
            judged.append(figure.is_within(unit, **rule))
        mark = MARKS[judged[-1]] if rule else ""
        lines.append(f"{mark}{name}: {figure.shown(unit)}")
    return lines, _verdict(claim, judged), list(dict.fromkeys(used))


def _entries(claim: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, float] | None]]:
    """Name, expression and rule of each figure, which may be {value: expression, holds: rule}."""
    for name, entry in claim.get("figures", {}).items():
        own = entry if isinstance(entry, dict) else {"value": entry}
        yield name, own["value"], own.get("holds", claim.get("holds"))
    yield from ((name, expression, None) for name, expression in claim.get("also", {}).items())


def _verdict(claim: Mapping[str, Any], judged: Sequence[bool | None]) -> str:
    if "untested" in claim:
        return "cannot be told"
    if not judged:
        return "measured"
    if any(judged):
        return "holds" if all(judged) else "holds in part"
    return "cannot be told" if None in judged else "does not hold"


def page() -> str:
    content = YAML(typ="safe").load(CLAIMS)
    runs, blocks, verdicts = content["runs"], [], Counter[str]()
    for number, article in enumerate(content["articles"], start=1):
        rows = []
        for place, claim in enumerate(article["claims"], start=1):
            lines, verdict, used = evaluate(claim, runs)
            verdicts[verdict] += 1
            notes = [claim[name] for name in ("untested", "note") if name in claim]
            measured = [*lines, *(f"*{note}*" if lines else note for note in notes)]
            origins = [f"`{run_id}`" for run_id in used]
            said = [f"{number}.{place}", claim["claim"], claim.get("published", "")]
            rows.append([*said, "<br>".join(measured), verdict, "<br>".join(origins)])
        table = _table(["", "claim", "published", "measured", "verdict", "run"], rows)
        blocks.append(f"## Article {number}: {article['title']}\n\n{table}")
    heads = ["article", "says", "but"]
    errors = [[str(error[head]) for head in heads] for error in content["errors"]]
    blocks.append(f"## What the articles get wrong\n\n{_table(heads, errors)}")
    counts = ", ".join(f"{verdict} {count}" for verdict, count in verdicts.most_common())
    summary = f"Verdicts on {verdicts.total()} claims: {counts}.\n"
    return "\n".join([HEAD, summary, _machines(runs.values()), *blocks])


def _machines(run_ids: Iterable[str]) -> str:
    """Say what the runs were measured on."""
    devices = pd.concat([_load("devices", run_id) for run_id in run_ids])
    versions = {
        f"{name} {of[name]}" for of in devices.versions for name in ("torch", "cuda", "nccl")
    }
    versions |= {f"driver {version}" for version in devices.driver_version}
    names = ", ".join(sorted(devices.name.unique()))
    return f"Each run is of one host with {names} GPUs, and {', '.join(sorted(versions))}.\n"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, [":---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
