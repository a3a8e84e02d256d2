"""Reference values: the range of a quantity on a model of device, and the starts it is made of.

Also the figures of a point that cannot be, by a reference or by the datasheet of the device.
`raybench/references/` has one YAML file per model; `raybench export RUN --format reference` writes
such a file, with the value of each start, so that several are pooled exactly.
"""

from __future__ import annotations

import datetime
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML

from raybench.analysis.rows import ScaledRow
from raybench.conversion import MS_PER_S
from raybench.errors import UsageError
from raybench.job import registry
from raybench.job.point import setting_text
from raybench.job.problems import key_text, rule_of
from raybench.job.settings import parameters_of_class
from raybench.records.devices import is_time
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.status import Status
from raybench.results.metrics import dense_peak_tflops, memory_peak_gb_s
from raybench.results.tables import Run

# A range reaches at least so far to both sides, beside the noise of starts: a few devices of one
# batch may agree better than the next batch does.
_FLOOR = 0.01
# The same for a single device: healthy H200s of one host differ by up to 7 %.
_ONE_DEVICE = 0.1
# A device is held against some 40 quantities: of 95 % ranges a healthy one would be outside of two.
_CONFIDENCE = 0.99
# A wider range on either side says little about a value, so it is not counted.
NARROW = 0.1
# In bytes, of the cache of any device (256 MB on MI300X): arrays below it may be read from there.
LARGER_THAN_CACHES = 2**28

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# The values of starts by the run, and in it by the devices: UUIDs, A+B where they worked together,
# A/B where it was one of them.
Measured = dict[str, dict[str, Annotated[list[Positive], Field(min_length=1)]]]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceRun(_Strict):
    """A run that values come from: its date, and versions of torch, CUDA and the driver."""

    date: datetime.date
    software: dict[str, str]


class Quantity(_Strict):
    """What a value measures.

    of: settings that define a point, as workload, parameters, precision, world_size; of a health
    check {test, where}, where is "device", "pair on a node", "pair of nodes", or such as
    "4 on a node". metric: a column of `points`, or "value" of a health check.
    fabric: what connects the devices, "" where that does not matter.
    """

    of: dict[str, str]
    metric: str
    unit: str
    fabric: str = ""

    @cached_property
    def key(self) -> object:
        """Return a hashable key: the metric and the settings, sorted, without fabric and unit.

        A built-in workload's parameters at their default are left out: new ones change no key.
        """
        defaults = _defaults(self.of.get("workload", ""))
        given = ((name, text) for name, text in self.of.items() if defaults.get(name) != text)
        return self.metric, *sorted(given)


@cache
def _defaults(workload: str) -> Mapping[str, str]:
    """Return the defaults of a workload's parameters as text; none of a user's own class."""
    if workload not in registry.BUILTIN:
        return {}
    found = parameters_of_class(registry.load_workload(workload))
    return {one.name: setting_text(one.default) for one in found if one.default is not None}


class MeasuredValue(Quantity):
    """A value that a run measured.

    devices: as in `Measured`; "" where the run does not say which devices it was. point_id: "" of a
    health check.
    """

    model: str
    value: float
    devices: str
    point_id: str = ""


class Entry(Quantity):
    """The range of one quantity on one model of device.

    value: geometric mean over devices. low, high: 99 % prediction interval for one start of a new
    device (`predict_range`). devices, starts, days: how many of each. hosts: the least number that
    the devices may be of (`_count_hosts`). measured: the values of which all this is
    computed; empty where only the range is known, by `source`.
    """

    value: Positive
    low: Positive
    high: Positive
    devices: int = Field(ge=1)
    hosts: int = Field(ge=1)
    starts: int = Field(ge=1)
    days: int = Field(ge=1)
    dates: str
    source: str = ""
    measured: Measured = {}

    @property
    def observed(self) -> tuple[float, float]:
        """Return the least and the largest value of any start; (low, high) if none is known."""
        runs = self.measured.values()
        values = [value for run in runs for starts in run.values() for value in starts]
        return (min(values), max(values)) if values else (self.low, self.high)

    @property
    def half_width(self) -> float:
        """Return half the width of the range, as a share of the value."""
        return (self.high - self.low) / 2 / self.value

    @property
    def is_narrow(self) -> bool:
        """Return whether the range reaches at most ±10 % from its value."""
        return self.half_width <= NARROW

    @property
    def groups(self) -> int:
        """Return the number of devices, or of groups of devices that were measured together."""
        return len(_merge(_keys(self.measured))) or self.devices

    @property
    def provenance(self) -> str:
        """Return `6 devices in 3 groups, 3 hosts, November 2026`; no groups of single devices."""
        devices = f"{self.devices} device{'s' * (self.devices > 1)}"
        if self.groups < self.devices:
            devices += f" in {self.groups} group{'s' * (self.groups > 1)}"
        return f"{devices}, {self.hosts} host{'s' * (self.hosts > 1)}, {self.dates}"


class ReferenceFile(_Strict):
    """All that is known of one model of device. devices: UUID -> host and index, as `alpha 3`."""

    model: str
    runs: dict[str, SourceRun] = {}
    devices: dict[str, str] = {}
    quantities: list[Entry]

    @model_validator(mode="after")
    def _check_entries(self) -> ReferenceFile:
        """Return the file. Raises ValueError for a value outside its range or unlisted devices."""
        for entry in self.quantities:
            if not entry.low <= entry.value <= entry.high:
                raise ValueError(f"must have low <= value <= high in {entry.metric} of {entry.of}")
            for run, found in entry.measured.items():
                if run not in self.runs or not _uuids("+".join(found)) <= set(self.devices):
                    raise ValueError(f"must list the run and devices of {run} {' '.join(found)}")
        return self


def predict_range(devices: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return (value, low, high): geometric mean over devices, and 99 % prediction interval.

    The interval is for one start of a new device. devices: one or more; for each the values of its
    starts, one or more, above 0. All three are rounded to six significant digits.

    On logarithms, for n devices: mean ± t(n-1) s sqrt(1 + 1/n), the prediction interval of a new
    observation (G. J. Hahn, W. Q. Meeker, Statistical Intervals, 1991, section 4.7). s² is the
    variance of the means of devices, plus the part of the variance between starts that their means
    have lost: within (1 - mean(1/k)) for k starts a device, by unweighted means (J. D. Thomas, R.
    A. Hultquist, Annals of Statistics 6(3), 1978). The least is ±1 % plus 2.58 times the deviation
    between starts; for one device it is ±10 % plus the same.
    """
    from scipy.stats import norm, t

    logs = [np.log(starts) for starts in devices]
    means = np.array([one.mean() for one in logs])
    freedom = sum(len(one) - 1 for one in logs)
    within = sum(float(((one - one.mean()) ** 2).sum()) for one in logs) / max(freedom, 1)
    upper, count = (1 + _CONFIDENCE) / 2, len(means)
    noise = float(norm.ppf(upper)) * within**0.5
    half = np.log1p(_ONE_DEVICE if count == 1 else _FLOOR) + noise
    if count > 1:
        lost = within * (1 - np.mean([1 / len(one) for one in logs]))
        variance = float(means.var(ddof=1)) + lost
        half = max(half, t.ppf(upper, count - 1) * (variance * (1 + 1 / count)) ** 0.5)
    ends = (means.mean(), means.mean() - half, means.mean() + half)
    value, low, high = (_rounded(float(np.exp(end))) for end in ends)
    return value, low, high


def _rounded(value: float) -> float:
    """Return a value with the six digits that files hold."""
    return float(f"{value:.6g}")


def reference_files(
    run: Run, devices: Iterable[Mapping[str, Any]], measured: Iterable[MeasuredValue]
) -> list[ReferenceFile]:
    """Return one file per model, with the reference entries that this run's values give.

    devices: rows of the run in the table `devices`. measured: values above 0, of these devices; one
    without known devices is left out. Several of one quantity and device are its starts.
    """
    versions, places = dict(run.versions), {}
    for one in devices:
        versions |= {**dict(one["versions"] or {}), "driver": one["driver_version"] or ""}
        if one["uuid"]:
            places[one["uuid"]] = f"{one['host']} {one['index']}"
    software = {name: versions[name] for name in ("torch", "cuda", "driver") if versions.get(name)}
    runs = {run.run_id: SourceRun(date=run.started_at.date(), software=software)}
    files: dict[str, ReferenceFile] = {}
    same: dict[tuple[object, ...], tuple[MeasuredValue, dict[str, list[float]]]] = {}
    for value in measured:
        if value.devices:
            _, values = same.setdefault((value.model, value.key, value.fabric), (value, {}))
            values.setdefault(value.devices, []).append(_rounded(value.value))
    for first, values in same.values():
        empty = ReferenceFile(model=first.model, runs=runs, devices=places, quantities=[])
        file = files.setdefault(first.model, empty)
        file.quantities.append(_make_entry(first, {run.run_id: values}, file))
    return list(files.values())


def pool(files: Iterable[ReferenceFile]) -> list[ReferenceFile]:
    """Return one file per model, its ranges computed anew from the starts of all files.

    Starts of the same run and devices count once, as in the last file. Of a quantity whose starts
    no file knows, the last entry is kept; else entries without starts are dropped.
    """
    by_model: dict[str, list[ReferenceFile]] = {}
    for file in files:
        by_model.setdefault(file.model, []).append(file)
    pooled = []
    for model, own in by_model.items():
        runs = {name: run for file in own for name, run in sorted(file.runs.items())}
        devices = {uuid: place for file in own for uuid, place in file.devices.items()}
        same: dict[object, tuple[Entry, Measured]] = {}
        for entry in (entry for file in own for entry in file.quantities):
            _, measured = same.get((entry.key, entry.fabric), (entry, {}))
            for name, values in entry.measured.items():
                measured[name] = measured.get(name, {}) | values
            same[entry.key, entry.fabric] = entry, measured
        empty = ReferenceFile(model=model, runs=runs, devices=devices, quantities=[])
        entries = [
            _make_entry(last, measured, empty) if measured else last
            for last, measured in same.values()
        ]
        pooled.append(empty.model_copy(update={"quantities": entries}))
    return pooled


def _make_entry(quantity: Quantity, measured: Measured, file: ReferenceFile) -> Entry:
    """Return the entry of a quantity from its starts, one or more. file: lists their devices."""
    # Starts that share a UUID may be of the same device.
    groups = _merge(_keys(measured))
    values: list[list[float]] = [[] for _ in groups]
    for names, starts in (start for of_run in measured.values() for start in of_run.items()):
        place = next(n for n, group in enumerate(groups) if group & _uuids(names))
        values[place] += starts
    value, low, high = predict_range(values)
    are_together = any("+" in names for of_run in measured.values() for names in of_run)
    used = {uuid for group in groups for uuid in (group if are_together else [min(group)])}
    dates = sorted({file.runs[name].date for name in measured})
    return Entry(
        of=quantity.of,
        metric=quantity.metric,
        unit=quantity.unit,
        fabric=quantity.fabric,
        value=value,
        low=low,
        high=high,
        devices=len(used),
        hosts=_count_hosts(used, measured, file.devices),
        starts=sum(map(len, values)),
        days=len(dates),
        dates=" to ".join(dict.fromkeys(f"{day:%B %Y}" for day in (dates[0], dates[-1]))),
        measured={name: dict(sorted(measured[name].items())) for name in sorted(measured)},
    )


def _count_hosts(used: set[str], measured: Measured, places: Mapping[str, str]) -> int:
    """Return the least number of hosts of the devices. places: UUID -> host name and index."""
    # Hosts may share a name. Devices with the same name and index are on different hosts, unless
    # the same run used them.
    total = 0
    for host in {places[uuid].rpartition(" ")[0] for uuid in used}:
        own = {uuid for uuid in used if places[uuid].rpartition(" ")[0] == host}
        same_index = Counter(places[uuid] for uuid in own)
        runs = [_uuids("+".join(of_run)) & own for of_run in measured.values()]
        total += min(max(same_index.values()), len(_merge(filter(None, runs))))
    return total


def _keys(measured: Measured) -> Iterator[set[str]]:
    """Yield the devices of each value."""
    for of_run in measured.values():
        yield from map(_uuids, of_run)


def _merge(groups: Iterable[set[str]]) -> list[set[str]]:
    """Return the unions of the groups that share a device."""
    merged: list[set[str]] = []
    for group in groups:
        overlapping = [other for other in merged if other & group]
        merged = [other for other in merged if not other & group]
        merged.append(group.union(*overlapping))
    return merged


def _uuids(devices: str) -> set[str]:
    return set(re.split(r"[+/]", devices))


class References:
    """The references that come with raybench, and those of a site, which have precedence.

    own: files of the site; several of one model are pooled.
    """

    def __init__(self, own: Iterable[ReferenceFile] = ()) -> None:
        self._own = {file.model: file for file in pool(own)}

    def entries(self, model: str) -> list[Entry]:
        """Return all entries of a model (`NVIDIA H200`), the site's first; empty if not known."""
        files = filter(None, (self._own.get(model), shipped(model)))
        return [entry for file in files for entry in file.quantities]

    def find(self, model: str, quantity: Quantity) -> Entry | None:
        """Return the first of `entries` for a quantity on a model of device; None without one.

        An entry fits if it has the same `key`, and no fabric, the quantity's, or the first of it:
        "NVLink x18" of "NVLink x18, 1:PHB", but not "NVLink x1".
        """
        fabrics = ("", quantity.fabric, quantity.fabric.partition(",")[0])
        same = (one for one in self.entries(model) if one.key == quantity.key)
        return next((one for one in same if one.fabric in fabrics), None)


SHIPPED = References()


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A measured value beside its reference."""

    measured: MeasuredValue
    entry: Entry
    # The reference was made from values of this run too, so the value is no independent check.
    is_own: bool = False

    def share_of(self, value: float) -> float:
        """Return the speed of a value (in the entry's unit) over the entry's: above 1 is faster."""
        return self.entry.value / value if is_time(self.entry.unit) else value / self.entry.value

    @property
    def share(self) -> float:
        """Return the speed of the measured value as a share of the reference: above 1 is faster."""
        return self.share_of(self.measured.value)

    @property
    def is_within(self) -> bool:
        """Return whether the measured value lies within the reference's range, ends included."""
        return self.entry.low <= self.measured.value <= self.entry.high

    @property
    def share_range(self) -> tuple[float, float]:
        """Return the range of `share` that counts as within, the lower end first."""
        low, high = sorted(map(self.share_of, (self.entry.low, self.entry.high)))
        return low, high

    @property
    def members(self) -> dict[str, Any]:
        """Return what JSON has of it; reference: the entry without `measured`."""
        return {
            "point_id": self.measured.point_id,
            "model": self.measured.model,
            "value": self.measured.value,
            "share": self.share,
            "is_within": self.is_within,
            "is_counted": self.entry.is_narrow,
            "is_made_from_this_run": self.is_own,
            "reference": self.entry.model_dump(mode="json", exclude={"measured"}),
        }


def counted_standings(found: Sequence[Standing]) -> list[Standing]:
    """Return the standings whose reference range is narrow enough to count."""
    return [one for one in found if one.entry.is_narrow]


@dataclass(frozen=True, slots=True, kw_only=True)
class WithinCount:
    """How many values lie within their references."""

    within: int
    counted: int
    # References whose range is too wide to count.
    wide: int
    # A reference was made from values of this run too.
    is_own: bool


def count_within(found: Sequence[Standing]) -> WithinCount:
    """Count the standings that are within their reference."""
    counted = counted_standings(found)
    return WithinCount(
        within=sum(one.is_within for one in counted),
        counted=len(counted),
        wide=len(found) - len(counted),
        is_own=any(one.is_own for one in found),
    )


def standings(
    measured: Iterable[MeasuredValue], references: References, run_id: str
) -> list[Standing]:
    """Return the measurements of a run that have a reference, each with it, in their order."""
    return [
        Standing(measured=one, entry=entry, is_own=run_id in entry.measured)
        for one in measured
        if (entry := references.find(one.model, one))
    ]


@cache
def shipped(model: str) -> ReferenceFile | None:
    """Return the references that come with raybench for a model (`NVIDIA H200`), or None."""
    name = re.sub(r"[^a-z0-9]+", "_", model.lower()).strip("_")
    folder = resources.files("raybench").joinpath("references")
    # Not opened by its name: the joined names of several models can be too long for a file.
    path = next((file for file in folder.iterdir() if file.name == f"{name}.yaml"), None)
    return None if path is None else parse_references(path.read_text("utf-8"), str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class AbovePeak:
    """An entry of a reference file that is left out: its value is above the datasheet's peak."""

    path: Path
    model: str
    entry: Entry
    # In the unit of the entry.
    peak: float


def load_files(path: Path) -> tuple[list[ReferenceFile], list[AbovePeak]]:
    """Return the content of a reference file, or of each YAML file in a folder, sorted by name.

    No subfolder is read. Impossible entries are left out of the files and returned beside them.
    Raises UsageError for a folder without YAML files, and an unreadable or invalid file.
    """
    # Path's own would raise for a name that is too long.
    paths = sorted(path.glob("*.y*ml")) if os.path.isdir(path) else [path]  # noqa: PTH112
    if not paths:
        raise UsageError(f"{path}: has no YAML file")
    files, left_out = [], []
    for one in paths:
        try:
            file = parse_references(one.read_text("utf-8"), str(one))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{one}: cannot be read: {error}") from error
        sound = []
        for entry in file.quantities:
            peak = _exceeded_peak(file.model, entry)
            if peak is None:
                sound.append(entry)
            else:
                left_out.append(AbovePeak(path=one, model=file.model, entry=entry, peak=peak))
        files.append(file.model_copy(update={"quantities": sound}))
    return files, left_out


def parse_references(text: str, name: str) -> ReferenceFile:
    """Return a reference file from its text; raises UsageError, with `name`, if it is invalid."""
    try:
        return ReferenceFile.model_validate(YAML(typ="safe", pure=True).load(text))
    except ValidationError as error:
        one = error.errors()[0]
        raise UsageError(f"{name}: {key_text(one['loc']) or 'the file'}: {rule_of(one)}") from error
    except Exception as error:  # the parser raises many types, as AssertionError for %YAML 1.0
        raise UsageError(f"{name}: is not YAML: {' '.join(str(error).split())}") from error


def format_references(file: ReferenceFile) -> str:
    """Return the file as YAML text, which `parse_references` reads back."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False
    # Folded keys and scalars cannot be read back.
    yaml.width = 4096

    def quote(representer: Any, text: str) -> Any:
        # Within braces the emitter leaves these as they are, as ":4096:8", which cannot be read.
        style = '"' if re.search(r"^[:?]|\x85", text) else None
        return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    yaml.representer.yaml_representers = yaml.representer.yaml_representers | {str: quote}
    stream = StringIO()
    yaml.dump(file.model_dump(mode="json", exclude_defaults=True), stream)
    return stream.getvalue()


def peak_of(model: str, of: Mapping[str, str]) -> float | None:
    """Return the datasheet's peak: TFLOP/s of gemm, GB/s of memory.

    None for another workload or test, and for a model or precision that no datasheet is known of.
    of: as in `Quantity`.
    """
    words = [*of.get("test", "").split(), of.get("workload", ""), of.get("precision", "")]
    if words[0] == "gemm":
        return dense_peak_tflops(model, words[1])
    return memory_peak_gb_s(model) if words[0] == "memory" else None


def _exceeded_peak(model: str, entry: Entry) -> float | None:
    """Return the datasheet's peak if the entry's value is above it."""
    peak, size = peak_of(model, entry.of), entry.of.get("size_bytes", "")
    # Small arrays stay in a cache, and then beat the memory.
    is_small = size.isdecimal() and int(size) < LARGER_THAN_CACHES
    if peak is None or is_small or entry.unit not in ("TFLOP/s", "GB/s") or entry.value <= peak:
        return None
    return peak


# What no interval covers; without an interval, what starts may differ by; with strong scaling,
# what other kernels may gain on smaller shares.
_TOLERANCE, _ONE_START, _STRONG = 1.02, 1.1, 1.25
# Above the largest value of a reference, whose devices are few.
_OVER_REFERENCE, _OVER_PRODUCTS = 1.05, 1.1
_STRONG_SHARE_IN_CACHE = 2**30
# With NVLS the switch adds up and copies: each byte crosses a link once in place of twice.
_NVLS_FACTOR = 2.0
_BY_NVLS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def impossible_figures(
    row: ScaledRow, references: References, attempts_s: Sequence[float | None] = ()
) -> list[Doubt]:
    """Return a doubt for each figure of a point that is impossible; [] for a point not ok.

    The figure is the subject of the doubt. Checked are the efficiency; rates, if a reference or
    datasheet has them; samples of built-in workloads against the batch; whether iterations fit into
    attempts.
    attempts_s: the seconds of the attempt in each round whose iterations `row` counts. Without
    them, or if one is None, iterations are not checked.
    """
    if row.status is not Status.OK:
        return []
    doubts = list(_rates(row, references.entries(row.device_name or "")))
    if row.efficiency is not None and row.speed_up is not None and not row.is_baseline:
        least = row.efficiency_low or row.efficiency / _ONE_START
        is_strong = row.scaling == "strong"
        # A device with a smaller share may clock higher.
        allowed = (_STRONG if is_strong else _TOLERANCE) * max(row.clock_ratio or 1.0, 1)
        may_be_in_cache = is_strong and (row.peak_mem_allocated_bytes or 0) < _STRONG_SHARE_IN_CACHE
        if least > allowed and not may_be_in_cache:
            doubts.insert(0, _impossible("efficiency", row.efficiency, allowed))
    step_ms = min(row.step_ms_mean or 0.0, row.step_ms_p50 or 0.0)
    per_rank = row.batch_size * row.world_size if row.batch_size else 0
    batch = max(row.global_batch_size or 0, per_rank) * (row.grad_accumulation or 1)
    items = (row.throughput or 0.0) * step_ms / MS_PER_S
    if batch and row.workload in registry.BUILTIN and items > _TOLERANCE * batch:
        doubts.append(_impossible("items", items, batch))
    count = (row.iterations or 0) * (row.inner_iterations or 1)
    took_s = count * step_ms / MS_PER_S
    total_s = sum(filter(None, attempts_s)) if None not in attempts_s else 0.0
    if total_s and took_s > _ONE_START * total_s:
        doubts.append(_impossible("iterations", took_s, total_s))
    return doubts


def without_repeated_mfu(doubts: Sequence[Doubt]) -> list[Doubt]:
    """Return the doubts without that about MFU if the same TFLOP/s exceed a reference."""
    subjects = {one.subject for one in doubts if one.kind is DoubtKind.IMPOSSIBLE}
    if "achieved_tflops_per_device" not in subjects:
        return list(doubts)
    return [
        one for one in doubts if not (one.kind is DoubtKind.IMPOSSIBLE and one.subject == "mfu_pct")
    ]


def has_impossible(row: ScaledRow) -> bool:
    """Return whether a figure of a point is impossible (`impossible_figures`)."""
    return any(doubt.kind is DoubtKind.IMPOSSIBLE for doubt in row.doubts or ())


def _impossible(figure: str, value: float, limit: float) -> Doubt:
    return Doubt(kind=DoubtKind.IMPOSSIBLE, value=value, limit=limit, subject=figure)


def _rates(row: ScaledRow, known: Sequence[Entry]) -> Iterator[Doubt]:
    """Yield a doubt for each rate (MFU, TFLOP/s, memory, bus) that its device cannot reach.

    known: the reference entries of the model; without any, MFU and peaks of datasheets are held.
    """

    def most(test: str) -> float:
        """Return the highest end of the ranges of health tests whose name begins so, or 0."""
        found = (one.observed[1] for one in known if one.of.get("test", "").startswith(test))
        return max(found, default=0.0)

    model = row.device_name or ""
    of_precision = (
        one.observed[1]
        for one in known
        if one.unit == "TFLOP/s"
        and row.precision in (one.of.get("precision"), *one.of.get("test", "").split())
    )
    # A product may be of a shape that reaches more than those of the reference.
    products = 0.0 if row.workload == "gemm" else max(of_precision, default=0.0)
    if row.mfu_pct is not None and row.mfu_pct > 100 and not products:
        yield _impossible("mfu_pct", row.mfu_pct, 100.0)
    size = row.params.get("size_bytes", "") if row.workload == "memory" else ""
    footprint = int(size) if size.isdecimal() else row.peak_mem_allocated_bytes or 0
    triad = most("memory ") or peak_of(model, {"test": "memory"}) or 0.0
    is_by_switch = row.params.get("operation", "all_reduce") in _BY_NVLS
    ceilings = (
        (
            "achieved_tflops_per_device",
            row.achieved_tflops_per_device,
            products,
            _OVER_PRODUCTS,
        ),
        (
            "memory_gb_s",
            row.memory_gb_s if footprint >= LARGER_THAN_CACHES else None,
            triad,
            _OVER_REFERENCE,
        ),
        (
            "busbw_gb_s",
            row.busbw_gb_s if row.world_size > 1 else None,
            most("copy "),
            _OVER_REFERENCE * (_NVLS_FACTOR if is_by_switch else 1),
        ),
    )
    for figure, rate, ceiling, tolerance in ceilings:
        if rate and ceiling and rate > tolerance * ceiling:
            yield _impossible(figure, rate, ceiling)
