"""Reference values: the range of a quantity on a device model, and figures that are impossible.

`raybench/references/` has one YAML file per model. `raybench export RUN --format reference` writes
such a file. It has the value of each start, so that files can be pooled exactly.
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

# The least half width of a range, besides the noise of starts: a few devices of one batch may agree
# better than devices of several batches.
_FLOOR = 0.01
# The least half width by a single device: healthy H200s of one host differ by up to 7 %.
_ONE_DEVICE = 0.1
# A device is compared in some 40 quantities: a healthy device would be outside of two 95 % ranges.
_CONFIDENCE = 0.99
# A range with a larger half width is not counted.
NARROW = 0.1
# In bytes. Smaller arrays may be read from a cache (256 MB on MI300X).
LARGER_THAN_CACHES = 2**28

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Run -> devices -> values of starts. Devices are a UUID, A+B for devices that worked together, or
# A/B for an unknown device of these.
Measured = dict[str, dict[str, Annotated[list[Positive], Field(min_length=1)]]]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceRun(_Strict):
    """A run that measured values; `software` has versions of torch, CUDA and the driver."""

    date: datetime.date
    software: dict[str, str]


class Quantity(_Strict):
    """What a value measures."""

    # Settings that define a point: workload, parameters, precision, world_size and others. A health
    # check has the keys `test` and `where`. `where` is "device", "pair on a node", "pair of nodes",
    # "4 on a node" or similar.
    of: dict[str, str]
    # A column of `points`, or "value" of a health check.
    metric: str
    unit: str
    # What connects the devices; "" if that does not matter.
    fabric: str = ""

    @cached_property
    def key(self) -> object:
        """A hashable key of metric and settings.

        Parameters of built-in workloads at their defaults are left out, so that new parameters
        change no key.
        """
        defaults = _defaults(self.of.get("workload", ""))
        given = ((name, text) for name, text in self.of.items() if defaults.get(name) != text)
        return self.metric, *sorted(given)


@cache
def _defaults(workload: str) -> Mapping[str, str]:
    """Return parameter -> default as text, of a built-in workload."""
    if workload not in registry.BUILTIN:
        return {}
    defaults = {}
    for parameter in parameters_of_class(registry.load_workload(workload)):
        if parameter.default is not None:
            defaults[parameter.name] = setting_text(parameter.default)
    return defaults


class MeasuredValue(Quantity):
    """A value that a run measured."""

    model: str
    value: float
    # UUIDs of the devices, as in `Measured`; "" if unknown.
    devices: str
    # "" for a health check.
    point_id: str = ""


class Entry(Quantity):
    """The range of one quantity on one device model."""

    # Geometric mean over devices.
    value: Positive
    # 99 % prediction interval for one start of a new device, by `predict_range`.
    low: Positive
    high: Positive
    devices: int = Field(ge=1)
    # The least number of hosts that the devices may be on.
    hosts: int = Field(ge=1)
    starts: int = Field(ge=1)
    days: int = Field(ge=1)
    dates: str
    # Where the range comes from, if its values are not known.
    source: str = ""
    # The values that the range is computed from; empty if only the range is known.
    measured: Measured = {}

    @property
    def observed(self) -> tuple[float, float]:
        """The least and the largest value of a start; (low, high) if values are unknown."""
        values: list[float] = []
        for of_run in self.measured.values():
            for starts in of_run.values():
                values += starts
        return (min(values), max(values)) if values else (self.low, self.high)

    @property
    def half_width(self) -> float:
        """Half of the width of the range, relative to the value."""
        return (self.high - self.low) / 2 / self.value

    @property
    def is_narrow(self) -> bool:
        """Whether the half width is at most 10 %."""
        return self.half_width <= NARROW

    @property
    def groups(self) -> int:
        """The number of groups of devices that were measured together."""
        return len(_merge(_device_sets(self.measured))) or self.devices

    @property
    def provenance(self) -> str:
        """Where the range comes from: `6 devices in 3 groups, 3 hosts, November 2026`."""
        devices = f"{self.devices} device{'s' * (self.devices > 1)}"
        if self.groups < self.devices:
            devices += f" in {self.groups} group{'s' * (self.groups > 1)}"
        return f"{devices}, {self.hosts} host{'s' * (self.hosts > 1)}, {self.dates}"


class ReferenceFile(_Strict):
    """The references of one device model."""

    model: str
    runs: dict[str, SourceRun] = {}
    # UUID -> host and index, as `alpha 3`.
    devices: dict[str, str] = {}
    quantities: list[Entry]

    @model_validator(mode="after")
    def _check_entries(self) -> ReferenceFile:
        """Raise ValueError for an impossible range, or for a run or device that is not listed."""
        for entry in self.quantities:
            if not entry.low <= entry.value <= entry.high:
                raise ValueError(f"must have low <= value <= high in {entry.metric} of {entry.of}")
            for run, of_run in entry.measured.items():
                if run not in self.runs or not _uuids("+".join(of_run)) <= set(self.devices):
                    raise ValueError(f"must list the run and devices of {run} {' '.join(of_run)}")
        return self


def predict_range(devices: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return (value, low, high): geometric mean over devices, and 99 % prediction interval.

    The interval is for one start of a new device. For the logarithms of n devices, it is
    mean ± t(n-1) s sqrt(1 + 1/n) (G. J. Hahn, W. Q. Meeker, Statistical Intervals, 1991, section
    4.7).

    The mean of a device averages over its k starts, so the variance of these means contains only
    1/k of the variance between starts. s² adds the lost part, (1 - mean(1/k)) times the variance
    between starts (unweighted means: J. D. Thomas, R. A. Hultquist, Annals of Statistics 6(3),
    1978). The least half width is 1 % (10 % for a single device) plus 2.58 standard deviations
    between starts.

    Args:
        devices: for each device the positive values of its starts.
    """
    from scipy.stats import norm, t

    logs = [np.log(starts) for starts in devices]
    means = np.array([starts.mean() for starts in logs])
    # Variance between starts of the same device.
    freedom = sum(len(starts) - 1 for starts in logs)
    squares = sum(float(((starts - starts.mean()) ** 2).sum()) for starts in logs)
    within = squares / max(freedom, 1)
    # The least half width, and the half width by the scatter of devices.
    upper, count = (1 + _CONFIDENCE) / 2, len(means)
    noise = float(norm.ppf(upper)) * within**0.5
    half = np.log1p(_ONE_DEVICE if count == 1 else _FLOOR) + noise
    if count > 1:
        lost = within * (1 - np.mean([1 / len(starts) for starts in logs]))
        variance = float(means.var(ddof=1)) + lost
        half = max(half, t.ppf(upper, count - 1) * (variance * (1 + 1 / count)) ** 0.5)
    ends = (means.mean(), means.mean() - half, means.mean() + half)
    value, low, high = (_rounded(float(np.exp(end))) for end in ends)
    return value, low, high


def _rounded(value: float) -> float:
    """Return the value with 6 significant digits, as reference files store it."""
    return float(f"{value:.6g}")


def reference_files(
    run: Run, devices: Iterable[Mapping[str, Any]], measured: Iterable[MeasuredValue]
) -> list[ReferenceFile]:
    """Return the references of one run, a file for each device model.

    Args:
        run: the run.
        devices: its rows in the table `devices`.
        measured: its positive values. Several values of the same quantity and devices are several
            starts. Values of unknown devices are left out.
    """
    versions, locations = dict(run.versions), {}
    for device in devices:
        versions |= {**dict(device["versions"] or {}), "driver": device["driver_version"] or ""}
        if device["uuid"]:
            locations[device["uuid"]] = f"{device['host']} {device['index']}"
    software = {name: versions[name] for name in ("torch", "cuda", "driver") if versions.get(name)}
    runs = {run.run_id: SourceRun(date=run.started_at.date(), software=software)}
    files: dict[str, ReferenceFile] = {}
    # For each quantity of a model: its first value, and devices -> values of starts.
    by_quantity: dict[tuple[object, ...], tuple[MeasuredValue, dict[str, list[float]]]] = {}
    for value in measured:
        if value.devices:
            _, values = by_quantity.setdefault((value.model, value.key, value.fabric), (value, {}))
            values.setdefault(value.devices, []).append(_rounded(value.value))
    for first, values in by_quantity.values():
        empty = ReferenceFile(model=first.model, runs=runs, devices=locations, quantities=[])
        file = files.setdefault(first.model, empty)
        file.quantities.append(_make_entry(first, {run.run_id: values}, file))
    return list(files.values())


def pool(files: Iterable[ReferenceFile]) -> list[ReferenceFile]:
    """Return one file per model, with ranges from the starts of all files.

    Starts of the same run and devices count once, as in the last file. An entry without starts is
    kept only if no file has starts of its quantity.
    """
    by_model: dict[str, list[ReferenceFile]] = {}
    for file in files:
        by_model.setdefault(file.model, []).append(file)
    pooled = []
    for model, of_model in by_model.items():
        runs: dict[str, SourceRun] = {}
        devices: dict[str, str] = {}
        # For each quantity: its last entry, and the starts of all entries.
        by_quantity: dict[object, tuple[Entry, Measured]] = {}
        for file in of_model:
            runs |= dict(sorted(file.runs.items()))
            devices |= file.devices
            for entry in file.quantities:
                _, measured = by_quantity.get((entry.key, entry.fabric), (entry, {}))
                for name, values in entry.measured.items():
                    measured[name] = measured.get(name, {}) | values
                by_quantity[entry.key, entry.fabric] = entry, measured
        empty = ReferenceFile(model=model, runs=runs, devices=devices, quantities=[])
        entries = [
            _make_entry(last, measured, empty) if measured else last
            for last, measured in by_quantity.values()
        ]
        pooled.append(empty.model_copy(update={"quantities": entries}))
    return pooled


def _make_entry(quantity: Quantity, measured: Measured, file: ReferenceFile) -> Entry:
    """Return the entry of a quantity from its starts; `file` lists runs and devices."""
    # Starts that share a UUID may be of the same device, so they count as one group.
    groups = _merge(_device_sets(measured))
    values: list[list[float]] = [[] for _ in groups]
    are_together = False
    for of_run in measured.values():
        for names, starts in of_run.items():
            number = next(n for n, group in enumerate(groups) if group & _uuids(names))
            values[number] += starts
            are_together = are_together or "+" in names
    value, low, high = predict_range(values)
    # Unless devices worked together, it is unknown which device of a group was used: count one.
    used: set[str] = set()
    for group in groups:
        used |= group if are_together else {min(group)}
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


def _count_hosts(used: set[str], measured: Measured, locations: Mapping[str, str]) -> int:
    """Return the least number of hosts that the devices are on.

    Args:
        used: UUIDs of the devices.
        locations: UUID -> host name and index.
    """
    # Hosts may share a name. Devices with the same name and index are on different hosts, unless
    # one run used them: these count as one host.
    total = 0
    for host in {locations[uuid].rpartition(" ")[0] for uuid in used}:
        of_host = {uuid for uuid in used if locations[uuid].rpartition(" ")[0] == host}
        same_index = Counter(locations[uuid] for uuid in of_host)
        runs = [_uuids("+".join(of_run)) & of_host for of_run in measured.values()]
        total += min(max(same_index.values()), len(_merge(filter(None, runs))))
    return total


def _device_sets(measured: Measured) -> Iterator[set[str]]:
    """Yield the UUIDs of each key of `Measured`."""
    for of_run in measured.values():
        yield from map(_uuids, of_run)


def _merge(groups: Iterable[set[str]]) -> list[set[str]]:
    """Return disjoint sets: sets that have a member in common become one."""
    merged: list[set[str]] = []
    for group in groups:
        overlapping = [other for other in merged if other & group]
        merged = [other for other in merged if not other & group]
        merged.append(group.union(*overlapping))
    return merged


def _uuids(devices: str) -> set[str]:
    """Return the UUIDs of a key of `Measured`, such as "A+B"."""
    return set(re.split(r"[+/]", devices))


class References:
    """The references of a site, and the references that come with raybench.

    Args:
        of_site: files of the site, which take precedence.
    """

    def __init__(self, of_site: Iterable[ReferenceFile] = ()) -> None:
        self._of_site = {file.model: file for file in pool(of_site)}

    def entries(self, model: str) -> list[Entry]:
        """Return all entries of a model, as `NVIDIA H200`, the site's first."""
        files = filter(None, (self._of_site.get(model), shipped(model)))
        return [entry for file in files for entry in file.quantities]

    def find(self, model: str, quantity: Quantity) -> Entry | None:
        """Return the first entry of a model with the same `key` and a fabric that fits.

        The fabric of an entry fits if it is empty, the same, or the first part: the entry
        "NVLink x18" fits "NVLink x18, 1:PHB".
        """
        fabrics = ("", quantity.fabric, quantity.fabric.partition(",")[0])
        entries = (entry for entry in self.entries(model) if entry.key == quantity.key)
        return next((entry for entry in entries if entry.fabric in fabrics), None)


SHIPPED = References()


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A measured value beside its reference."""

    measured: MeasuredValue
    entry: Entry
    # The reference contains values of this run, so it is no independent check.
    is_own: bool = False

    def share_of(self, value: float) -> float:
        """Return the speed of a value, in the entry's unit, over the speed of the entry."""
        return self.entry.value / value if is_time(self.entry.unit) else value / self.entry.value

    @property
    def share(self) -> float:
        """The speed of the measured value over the speed of the reference."""
        return self.share_of(self.measured.value)

    @property
    def is_within(self) -> bool:
        """Whether the measured value lies within the range of the reference."""
        return self.entry.low <= self.measured.value <= self.entry.high

    @property
    def share_range(self) -> tuple[float, float]:
        """The range of the reference as (least, largest) `share`."""
        low, high = sorted(map(self.share_of, (self.entry.low, self.entry.high)))
        return low, high

    @property
    def members(self) -> dict[str, Any]:
        """The standing as JSON values."""
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


def counted_standings(standings: Sequence[Standing]) -> list[Standing]:
    """Return the standings whose reference range is narrow enough to count."""
    return [standing for standing in standings if standing.entry.is_narrow]


@dataclass(frozen=True, slots=True, kw_only=True)
class WithinCount:
    """How many values lie within the ranges of their references."""

    within: int
    counted: int
    # References whose range is too wide to count.
    wide: int
    # A reference contains values of this run.
    is_own: bool


def count_within(standings: Sequence[Standing]) -> WithinCount:
    """Count the standings that are within their reference."""
    counted = counted_standings(standings)
    return WithinCount(
        within=sum(standing.is_within for standing in counted),
        counted=len(counted),
        wide=len(standings) - len(counted),
        is_own=any(standing.is_own for standing in standings),
    )


def standings(
    measured: Iterable[MeasuredValue], references: References, run_id: str
) -> list[Standing]:
    """Return the measured values of a run that have a reference."""
    with_reference = []
    for value in measured:
        if entry := references.find(value.model, value):
            is_own = run_id in entry.measured
            with_reference.append(Standing(measured=value, entry=entry, is_own=is_own))
    return with_reference


@cache
def shipped(model: str) -> ReferenceFile | None:
    """Return the references of a model, as `NVIDIA H200`, that come with raybench."""
    name = re.sub(r"[^a-z0-9]+", "_", model.lower()).strip("_")
    folder = resources.files("raybench").joinpath("references")
    # Listed instead of opened: joined names of several models can be too long for a file name.
    path = next((file for file in folder.iterdir() if file.name == f"{name}.yaml"), None)
    return None if path is None else parse_references(path.read_text("utf-8"), str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class AbovePeak:
    """An entry that is left out, because its value is above the datasheet's peak."""

    path: Path
    model: str
    entry: Entry
    # In the unit of the entry.
    peak: float


def load_files(path: Path) -> tuple[list[ReferenceFile], list[AbovePeak]]:
    """Return the files at a path, and the impossible entries that were left out of the files.

    Args:
        path: a reference file, or a folder of YAML files.

    Raises:
        UsageError: the folder has no YAML file, or a file is unreadable or invalid.
    """
    # `Path.is_dir` raises for a name that is too long.
    paths = sorted(path.glob("*.y*ml")) if os.path.isdir(path) else [path]  # noqa: PTH112
    if not paths:
        raise UsageError(f"{path}: has no YAML file")
    files, left_out = [], []
    for file_path in paths:
        try:
            file = parse_references(file_path.read_text("utf-8"), str(file_path))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{file_path}: cannot be read: {error}") from error
        sound = []
        for entry in file.quantities:
            peak = _exceeded_peak(file.model, entry)
            if peak is None:
                sound.append(entry)
            else:
                left_out.append(AbovePeak(path=file_path, model=file.model, entry=entry, peak=peak))
        files.append(file.model_copy(update={"quantities": sound}))
    return files, left_out


def parse_references(text: str, name: str) -> ReferenceFile:
    """Parse the text of a reference file.

    Raises:
        UsageError: the text is invalid; the error begins with `name`.
    """
    try:
        return ReferenceFile.model_validate(YAML(typ="safe", pure=True).load(text))
    except ValidationError as error:
        first = error.errors()[0]
        key = key_text(first["loc"]) or "the file"
        raise UsageError(f"{name}: {key}: {rule_of(first)}") from error
    except Exception as error:  # the parser raises many types, as AssertionError for %YAML 1.0
        raise UsageError(f"{name}: is not YAML: {' '.join(str(error).split())}") from error


def format_references(file: ReferenceFile) -> str:
    """Return the file as YAML text."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False
    # No folding, because folded keys and scalars cannot be read back.
    yaml.width = 4096

    def quote(representer: Any, text: str) -> Any:
        # Within braces the emitter leaves such text unquoted, as ":4096:8", which is no valid YAML.
        style = '"' if re.search(r"^[:?]|\x85", text) else None
        return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    yaml.representer.yaml_representers = yaml.representer.yaml_representers | {str: quote}
    stream = StringIO()
    yaml.dump(file.model_dump(mode="json", exclude_defaults=True), stream)
    return stream.getvalue()


def peak_of(model: str, of: Mapping[str, str]) -> float | None:
    """Return the datasheet's peak in TFLOP/s for gemm, in GB/s for memory; None if unknown.

    Args:
        model: model of the device.
        of: settings, as in `Quantity`.
    """
    words = [*of.get("test", "").split(), of.get("workload", ""), of.get("precision", "")]
    if words[0] == "gemm":
        return dense_peak_tflops(model, words[1])
    return memory_peak_gb_s(model) if words[0] == "memory" else None


def _exceeded_peak(model: str, entry: Entry) -> float | None:
    """Return the datasheet's peak that the value of an entry exceeds; None if it exceeds none."""
    peak, size = peak_of(model, entry.of), entry.of.get("size_bytes", "")
    # Small arrays stay in a cache, which is faster than the memory.
    is_small = size.isdecimal() and int(size) < LARGER_THAN_CACHES
    if peak is None or is_small or entry.unit not in ("TFLOP/s", "GB/s") or entry.value <= peak:
        return None
    return peak


# Factors by which figures may exceed their limit. A figure with an interval may by 2 %, and without
# an interval by 10 %, because starts differ. In strong scaling it may by 25 %, because smaller
# shares may have faster kernels.
_TOLERANCE, _ONE_START, _STRONG = 1.02, 1.1, 1.25
# A reference has few devices, so a rate may exceed its largest value by these factors.
_OVER_REFERENCE, _OVER_PRODUCTS = 1.05, 1.1
# Peak memory in bytes below which the work of a rank may be in a cache.
_STRONG_SHARE_IN_CACHE = 2**30
# With NVLS the switch reduces and copies: each byte crosses a link once instead of twice.
_NVLS_FACTOR = 2.0
_BY_NVLS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def impossible_figures(
    row: ScaledRow, references: References, attempts_s: Sequence[float | None] = ()
) -> list[Doubt]:
    """Return a doubt for each impossible figure of an ok point; the figure is its subject.

    This checks the efficiency, the rates that have a reference or datasheet, the samples of
    built-in workloads against the batch, and whether the iterations fit into the attempts.

    Args:
        row: a point.
        references: reference values.
        attempts_s: durations of the attempts whose iterations `row` counts. If a duration is
            missing, the iterations are not checked.
    """
    if row.status is not Status.OK:
        return []
    doubts = list(_rates(row, references.entries(row.device_name or "")))
    if row.efficiency is not None and row.speed_up is not None and not row.is_baseline:
        # The efficiency that the point has at least, by its interval or by a tolerance.
        least = row.efficiency_low or row.efficiency / _ONE_START
        is_strong = row.scaling == "strong"
        # A device with less work may clock higher.
        allowed = (_STRONG if is_strong else _TOLERANCE) * max(row.clock_ratio or 1.0, 1)
        may_be_in_cache = is_strong and (row.peak_mem_allocated_bytes or 0) < _STRONG_SHARE_IN_CACHE
        if least > allowed and not may_be_in_cache:
            doubts.insert(0, _impossible("efficiency", row.efficiency, allowed))
    # A step cannot finish more items than its batch has.
    step_ms = min(row.step_ms_mean or 0.0, row.step_ms_p50 or 0.0)
    per_rank = row.batch_size * row.world_size if row.batch_size else 0
    batch = max(row.global_batch_size or 0, per_rank) * (row.grad_accumulation or 1)
    items = (row.throughput or 0.0) * step_ms / MS_PER_S
    if batch and row.workload in registry.BUILTIN and items > _TOLERANCE * batch:
        doubts.append(_impossible("items", items, batch))
    # The iterations cannot take longer than the attempts that ran them.
    count = (row.iterations or 0) * (row.inner_iterations or 1)
    took_s = count * step_ms / MS_PER_S
    total_s = sum(filter(None, attempts_s)) if None not in attempts_s else 0.0
    if total_s and took_s > _ONE_START * total_s:
        doubts.append(_impossible("iterations", took_s, total_s))
    return doubts


def without_repeated_mfu(doubts: Sequence[Doubt]) -> list[Doubt]:
    """Return the doubts; the doubt about MFU is left out if the TFLOP/s are doubtful too."""
    impossible = {doubt.subject for doubt in doubts if doubt.kind is DoubtKind.IMPOSSIBLE}
    if "achieved_tflops_per_device" not in impossible:
        return list(doubts)
    kept = []
    for doubt in doubts:
        if doubt.kind is not DoubtKind.IMPOSSIBLE or doubt.subject != "mfu_pct":
            kept.append(doubt)
    return kept


def has_impossible(row: ScaledRow) -> bool:
    """Return whether a figure of a point is impossible."""
    return any(doubt.kind is DoubtKind.IMPOSSIBLE for doubt in row.doubts or ())


def _impossible(figure: str, value: float, limit: float) -> Doubt:
    return Doubt(kind=DoubtKind.IMPOSSIBLE, value=value, limit=limit, subject=figure)


def _rates(row: ScaledRow, entries: Sequence[Entry]) -> Iterator[Doubt]:
    """Yield a doubt for each rate that the device cannot reach.

    Args:
        entries: references of the model of the device.
    """

    def largest_value(test: str) -> float:
        """Return the largest value of health tests whose name begins with `test`, or 0."""
        values = []
        for entry in entries:
            if entry.of.get("test", "").startswith(test):
                values.append(entry.observed[1])
        return max(values, default=0.0)

    model = row.device_name or ""
    of_precision = []
    for entry in entries:
        precisions = (entry.of.get("precision"), *entry.of.get("test", "").split())
        if entry.unit == "TFLOP/s" and row.precision in precisions:
            of_precision.append(entry.observed[1])
    # Another shape of a matrix product may be faster than the shapes of the reference.
    products = 0.0 if row.workload == "gemm" else max(of_precision, default=0.0)
    if row.mfu_pct is not None and row.mfu_pct > 100 and not products:
        yield _impossible("mfu_pct", row.mfu_pct, 100.0)
    size = row.params.get("size_bytes", "") if row.workload == "memory" else ""
    footprint = int(size) if size.isdecimal() else row.peak_mem_allocated_bytes or 0
    memory_gb_s = largest_value("memory ") or peak_of(model, {"test": "memory"}) or 0.0
    is_by_switch = row.params.get("operation", "all_reduce") in _BY_NVLS
    # Column, rate of the point, largest rate that is known of such devices, tolerance.
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
            memory_gb_s,
            _OVER_REFERENCE,
        ),
        (
            "busbw_gb_s",
            row.busbw_gb_s if row.world_size > 1 else None,
            largest_value("copy "),
            _OVER_REFERENCE * (_NVLS_FACTOR if is_by_switch else 1),
        ),
    )
    for figure, rate, ceiling, tolerance in ceilings:
        if rate and ceiling and rate > tolerance * ceiling:
            yield _impossible(figure, rate, ceiling)
