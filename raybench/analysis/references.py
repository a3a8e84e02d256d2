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

# Lower bound of the half width of a range, without the noise of starts. A few devices of one batch
# may agree better than devices of several batches.
_MIN_HALF_WIDTH = 0.01
# The same for a single device, because healthy H200s of one host differ by up to 7 %.
_MIN_HALF_WIDTH_OF_ONE_DEVICE = 0.1
# A device is compared in some 40 quantities, so a healthy device would be outside of two 95 %
# ranges.
_CONFIDENCE = 0.99
# A range with a larger half width is not counted.
NARROW = 0.1
# In bytes. Smaller arrays may be read from a cache (256 MB on MI300X).
LARGER_THAN_CACHES = 2**28

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# The values of starts, by run_id and devices. Devices are a UUID, A+B for devices that worked
# together, or A/B if either of them was used and it is not known which.
Measured = dict[str, dict[str, Annotated[list[Positive], Field(min_length=1)]]]


class _Strict(BaseModel):
    """A part of a reference file, in which unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceRun(_Strict):
    """A run that measured values."""

    date: datetime.date
    # Versions of torch, CUDA and the driver.
    software: dict[str, str]


class Quantity(_Strict):
    """What a value measures."""

    # Settings that define a point, as text: workload, parameters, precision, world_size and others.
    # A health check has the keys `test` and `where`, such as "device" or "pair on a node".
    of: dict[str, str]
    # A column of `points`, or "value" of a health check.
    metric: str
    unit: str
    # What connects the devices; "" if the connection does not matter.
    fabric: str = ""

    @cached_property
    def key(self) -> object:
        """What identifies the quantity: its metric and settings, hashable.

        Parameters of built-in workloads at their defaults are left out, so that new parameters
        change no key.
        """
        defaults = _parameter_defaults(self.of.get("workload", ""))
        changed = ((name, text) for name, text in self.of.items() if defaults.get(name) != text)
        return self.metric, *sorted(changed)


@cache
def _parameter_defaults(workload: str) -> Mapping[str, str]:
    """Return the defaults of the parameters of a workload as text; {} unless it is built in."""
    if workload not in registry.BUILTIN:
        return {}
    defaults = {}
    for parameter in parameters_of_class(registry.load_workload(workload)):
        if parameter.default is not None:
            defaults[parameter.name] = setting_text(parameter.default)
    return defaults


class MeasuredValue(Quantity):
    """A value that a run measured."""

    # Device model.
    model: str
    value: float
    # UUIDs of the devices, joined as in `Measured`; "" if unknown.
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
    # Number of measured devices.
    devices: int = Field(ge=1)
    # The smallest number of hosts that the devices may be on.
    hosts: int = Field(ge=1)
    # Number of measured starts.
    starts: int = Field(ge=1)
    # Number of days with a run.
    days: int = Field(ge=1)
    # First and last month.
    dates: str
    # Where the range comes from, if its values are not known.
    source: str = ""
    # The values from which the range is computed: run_id -> devices -> values of starts. Empty if
    # only the range is known.
    measured: Measured = {}

    @cached_property
    def observed(self) -> tuple[float, float]:
        """The smallest and the largest value of a start; (low, high) if values are unknown."""
        values: list[float] = []
        for starts_by_devices in self.measured.values():
            for starts in starts_by_devices.values():
                values += starts
        return (min(values), max(values)) if values else (self.low, self.high)

    @property
    def half_width(self) -> float:
        """Half the width of the range / the value."""
        return (self.high - self.low) / 2 / self.value

    @property
    def is_narrow(self) -> bool:
        """Whether the half width is at most 10 %."""
        return self.half_width <= NARROW

    @cached_property
    def groups(self) -> int:
        """The number of groups of devices that were measured together."""
        return len(_join_overlapping(_device_sets(self.measured))) or self.devices

    @cached_property
    def provenance(self) -> str:
        """Where the range comes from: `6 devices in 3 groups, 3 hosts, November 2026`."""
        devices = _counted(self.devices, "device")
        # Devices that were measured together form a group.
        if self.groups < self.devices:
            devices += f" in {_counted(self.groups, 'group')}"
        return f"{devices}, {_counted(self.hosts, 'host')}, {self.dates}"


def _counted(count: int, noun: str) -> str:
    """Return `1 host`, `2 hosts`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class ReferenceFile(_Strict):
    """The references of one device model."""

    model: str
    # The source of each run_id.
    runs: dict[str, SourceRun] = {}
    # Host and index of each device by UUID, such as `alpha 3`.
    devices: dict[str, str] = {}
    quantities: list[Entry]

    @model_validator(mode="after")
    def _check_entries(self) -> ReferenceFile:
        """Raise ValueError for an impossible range, or for a run or device that is not listed."""
        for entry in self.quantities:
            if not entry.low <= entry.value <= entry.high:
                raise ValueError(f"must have low <= value <= high in {entry.metric} of {entry.of}")
            for run_id, starts_by_devices in entry.measured.items():
                uuids = _uuids(*starts_by_devices)
                if run_id not in self.runs or not uuids <= set(self.devices):
                    names = " ".join(starts_by_devices)
                    raise ValueError(f"must list the run and devices of {run_id} {names}")
        return self


def predict_range(devices: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return (value, low, high): geometric mean over devices, and 99 % prediction interval.

    The interval is for one start of a new device: G. J. Hahn, W. Q. Meeker, Statistical Intervals,
    1991, section 4.7.

    Args:
        devices: for each device the positive values of its starts.
    """
    from scipy.stats import norm, t

    count = len(devices)
    # All statistics are of logarithms.
    log_starts = [np.log(starts) for starts in devices]
    device_means = np.array([logs.mean() for logs in log_starts])
    # Variance between starts of the same device.
    degrees_of_freedom = sum(len(logs) - 1 for logs in log_starts)
    sum_of_squares = sum(float(((logs - logs.mean()) ** 2).sum()) for logs in log_starts)
    variance_of_starts = sum_of_squares / max(degrees_of_freedom, 1)
    # Lower bound of the half width.
    quantile = (1 + _CONFIDENCE) / 2
    min_half_width = _MIN_HALF_WIDTH_OF_ONE_DEVICE if count == 1 else _MIN_HALF_WIDTH
    half_width = np.log1p(min_half_width) + float(norm.ppf(quantile)) * variance_of_starts**0.5
    if count > 1:
        # The mean over k starts keeps only 1/k of the variance of starts, so add the lost part
        # (unweighted means: J. D. Thomas, R. A. Hultquist, Annals of Statistics 6(3), 1978).
        lost_share = 1 - np.mean([1 / len(logs) for logs in log_starts])
        variance = float(device_means.var(ddof=1)) + variance_of_starts * lost_share
        # The difference between a new device and the mean of n devices has 1 + 1/n times the
        # variance of a device.
        predicted_half_width = t.ppf(quantile, count - 1) * (variance * (1 + 1 / count)) ** 0.5
        half_width = max(half_width, predicted_half_width)
    mean = device_means.mean()
    log_values = (mean, mean - half_width, mean + half_width)
    value, low, high = (_rounded(float(np.exp(log_value))) for log_value in log_values)
    return value, low, high


def _rounded(value: float) -> float:
    """Return the value with 6 significant digits, as reference files store it."""
    return float(f"{value:.6g}")


def reference_files(
    run: Run, devices: Iterable[Mapping[str, Any]], measured: Iterable[MeasuredValue]
) -> list[ReferenceFile]:
    """Return the references of one run, a file for each device model.

    Args:
        devices: the rows of the run in the table `devices`.
        measured: the positive values of the run. Several values of the same quantity and devices
            are several starts. Values of unknown devices are left out.
    """
    versions = dict(run.versions)
    # UUID -> host and index, such as `alpha 3`.
    locations: dict[str, str] = {}
    for device in devices:
        versions |= {**dict(device["versions"] or {}), "driver": device["driver_version"] or ""}
        if device["uuid"]:
            locations[device["uuid"]] = f"{device['host']} {device['index']}"
    software = {name: versions[name] for name in ("torch", "cuda", "driver") if versions.get(name)}
    runs = {run.run_id: SourceRun(date=run.started_at.date(), software=software)}
    files: dict[str, ReferenceFile] = {}
    # For each quantity of a model: the first value, and the values of starts by devices.
    quantities: dict[tuple[object, ...], tuple[MeasuredValue, dict[str, list[float]]]] = {}
    for value in measured:
        if value.devices:
            key = (value.model, value.key, value.fabric)
            _, starts_by_devices = quantities.setdefault(key, (value, {}))
            starts_by_devices.setdefault(value.devices, []).append(_rounded(value.value))
    for first_value, starts_by_devices in quantities.values():
        model = first_value.model
        empty = ReferenceFile(model=model, runs=runs, devices=locations, quantities=[])
        file = files.setdefault(model, empty)
        file.quantities.append(_make_entry(first_value, {run.run_id: starts_by_devices}, file))
    return list(files.values())


def pool(files: Iterable[ReferenceFile]) -> list[ReferenceFile]:
    """Return one file per model, with ranges from the measured values of all files.

    `Entry.measured` has a value for each start of the processes. If several files have the same run
    and devices, the values of the last file count. An entry without values is kept only if no file
    has values of its quantity.
    """
    files_by_model: dict[str, list[ReferenceFile]] = {}
    for file in files:
        files_by_model.setdefault(file.model, []).append(file)
    pooled = []
    for model, files_of_model in files_by_model.items():
        runs: dict[str, SourceRun] = {}  # run_id -> run
        devices: dict[str, str] = {}  # UUID -> host and index
        # Quantity -> its last entry, and quantity -> run_id -> devices -> values of all entries.
        last_entries: dict[object, Entry] = {}
        measured_values: dict[object, Measured] = {}
        for file in files_of_model:
            runs |= dict(sorted(file.runs.items()))
            devices |= file.devices
            for entry in file.quantities:
                quantity: object = (entry.key, entry.fabric)
                last_entries[quantity] = entry
                measured = measured_values.setdefault(quantity, {})
                for run_id, starts_by_devices in entry.measured.items():
                    measured[run_id] = measured.get(run_id, {}) | starts_by_devices
        # `_make_entry` needs the runs and devices of all entries.
        pooled_file = ReferenceFile(model=model, runs=runs, devices=devices, quantities=[])
        for quantity, last_entry in last_entries.items():
            measured = measured_values[quantity]
            entry = _make_entry(last_entry, measured, pooled_file) if measured else last_entry
            pooled_file.quantities.append(entry)
        pooled.append(pooled_file)
    return pooled


def _make_entry(quantity: Quantity, measured: Measured, file: ReferenceFile) -> Entry:
    """Return the entry of a quantity from its starts; `file` lists runs and devices."""
    # Starts that share a UUID may be of the same device, so they count as one group.
    groups = _join_overlapping(_device_sets(measured))
    starts_by_group: list[list[float]] = [[] for _ in groups]
    worked_together = False
    for starts_by_devices in measured.values():
        for devices, starts in starts_by_devices.items():
            uuids = _uuids(devices)
            # The groups are disjoint, so a single group has these devices.
            [index] = [index for index, group in enumerate(groups) if group & uuids]
            starts_by_group[index] += starts
            # "A+B" are devices that worked together.
            worked_together = worked_together or "+" in devices
    value, low, high = predict_range(starts_by_group)
    # Unless devices worked together, it is unknown which device of a group was used: count one.
    used_uuids: set[str] = set()
    for group in groups:
        used_uuids |= group if worked_together else {min(group)}
    dates = sorted({file.runs[run_id].date for run_id in measured})
    first_month, last_month = f"{dates[0]:%B %Y}", f"{dates[-1]:%B %Y}"
    return Entry(
        of=quantity.of,
        metric=quantity.metric,
        unit=quantity.unit,
        fabric=quantity.fabric,
        value=value,
        low=low,
        high=high,
        devices=len(used_uuids),
        hosts=_count_hosts(used_uuids, measured, file.devices),
        starts=sum(map(len, starts_by_group)),
        days=len(dates),
        dates=first_month if first_month == last_month else f"{first_month} to {last_month}",
        measured={run_id: dict(sorted(measured[run_id].items())) for run_id in sorted(measured)},
    )


def _count_hosts(
    used_uuids: set[str],
    measured: Measured,  # run_id -> devices, such as the UUIDs "A+B" -> values of starts
    locations: Mapping[str, str],  # UUID -> host name and index, such as `alpha 3`
) -> int:
    """Return the smallest number of hosts that the devices with these UUIDs may be on."""
    uuids_by_host_name: dict[str, set[str]] = {}
    for uuid in used_uuids:
        host_name, _, _ = locations[uuid].rpartition(" ")
        uuids_by_host_name.setdefault(host_name, set()).add(uuid)
    hosts = 0
    # Several hosts may share a name.
    for uuids_of_name in uuids_by_host_name.values():
        # Devices with the same host name and index are on different hosts.
        devices_per_location = Counter(locations[uuid] for uuid in uuids_of_name)
        # Devices of one run with the same host name are on one host.
        uuids_by_run = [
            _uuids(*starts_by_devices) & uuids_of_name for starts_by_devices in measured.values()
        ]
        groups_on_one_host = _join_overlapping(uuids for uuids in uuids_by_run if uuids)
        hosts += min(max(devices_per_location.values()), len(groups_on_one_host))
    return hosts


def _device_sets(measured: Measured) -> Iterator[set[str]]:
    """Yield the UUIDs of each entry of `measured`."""
    for starts_by_devices in measured.values():
        yield from map(_uuids, starts_by_devices)


def _join_overlapping(groups: Iterable[set[str]]) -> list[set[str]]:
    """Join sets that have a member in common, so that the returned sets are disjoint."""
    disjoint: list[set[str]] = []
    for group in groups:
        overlapping = [other for other in disjoint if other & group]
        disjoint = [other for other in disjoint if not other & group]
        disjoint.append(group.union(*overlapping))
    return disjoint


def _uuids(*devices: str) -> set[str]:
    """Return the UUIDs of devices that are joined as in `Measured`, such as "A+B"."""
    return set(re.split(r"[+/]", "+".join(devices)))


class References:
    """The references of a site, and the references that come with raybench.

    Args:
        site_files: reference files of the site, which take precedence.
    """

    def __init__(self, site_files: Iterable[ReferenceFile] = ()) -> None:
        self._site_files = {file.model: file for file in pool(site_files)}

    def entries(self, model: str) -> list[Entry]:
        """Return all entries of a model, such as `NVIDIA H200`; the site's entries come first."""
        return [entry for file in self._files_of(model) for entry in file.quantities]

    def drivers(self, model: str) -> tuple[str, ...]:
        """Return the driver versions with which the references of a model were measured."""
        versions = set()
        for file in self._files_of(model):
            versions |= {run.software.get("driver", "") for run in file.runs.values()}
        return tuple(sorted(versions - {""}))

    def _files_of(self, model: str) -> list[ReferenceFile]:
        files = (self._site_files.get(model), shipped(model))
        return [file for file in files if file is not None]

    def find(self, model: str, quantity: Quantity) -> Entry | None:
        """Return the first entry of a model for a quantity; None without such an entry.

        The fabric of the entry may be empty, or only the first part of the quantity's fabric: the
        entry "NVLink x18" serves for "NVLink x18, 1:PHB".
        """
        fabrics = ("", quantity.fabric, quantity.fabric.partition(",")[0])
        for entry in self.entries(model):
            if entry.key == quantity.key and entry.fabric in fabrics:
                return entry
        return None


# Only the references that come with raybench.
SHIPPED = References()


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A measured value beside its reference."""

    measured: MeasuredValue
    entry: Entry
    # Whether the reference contains values of this run, so that it is no independent check.
    is_own: bool = False

    def share_of(self, value: float) -> float:
        """Return the speed of a value / the speed of the reference.

        Args:
            value: in the unit of the entry.
        """
        return self.entry.value / value if is_time(self.entry.unit) else value / self.entry.value

    @property
    def share(self) -> float:
        """The speed of the measured value / the speed of the reference."""
        return self.share_of(self.measured.value)

    @property
    def is_within(self) -> bool:
        """Whether the measured value lies within the range of the reference."""
        return self.entry.low <= self.measured.value <= self.entry.high

    @property
    def share_range(self) -> tuple[float, float]:
        """The smallest and the largest `share` within the range of the reference."""
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
    # Number of references whose range is too wide to count.
    wide: int
    # Whether a reference contains values of this run.
    is_own: bool


def count_within(standings: Sequence[Standing]) -> WithinCount:
    """Count values within the range of their reference; values with a wide range separately."""
    # The standings whose reference has a narrow range.
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
    """Return the references that come with raybench for a model; None without such a file."""
    name = re.sub(r"[^a-z0-9]+", "_", model.lower()).strip("_")
    folder = resources.files("raybench").joinpath("references")
    # List the folder, because joined names of several models can be too long for a file name.
    for path in folder.iterdir():
        if path.name == f"{name}.yaml":
            return parse_references(path.read_text("utf-8"), str(path))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AbovePeak:
    """An entry that is left out, because its value is above the datasheet's peak."""

    path: Path
    model: str
    entry: Entry
    # Peak of the datasheet, in the unit of the entry.
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
        possible = []
        for entry in file.quantities:
            peak = _exceeded_peak(file.model, entry)
            if peak is None:
                possible.append(entry)
            else:
                left_out.append(AbovePeak(path=file_path, model=file.model, entry=entry, peak=peak))
        files.append(file.model_copy(update={"quantities": possible}))
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
        # Within braces the emitter does not quote a text such as ":4096:8", which is invalid YAML.
        style = '"' if re.search(r"^[:?]|\x85", text) else None
        return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    yaml.representer.yaml_representers = yaml.representer.yaml_representers | {str: quote}
    stream = StringIO()
    yaml.dump(file.model_dump(mode="json", exclude_defaults=True), stream)
    return stream.getvalue()


def peak_of(model: str, of: Mapping[str, str]) -> float | None:
    """Return the datasheet's peak in TFLOP/s for gemm, in GB/s for memory; None if unknown.

    Args:
        of: the settings of a quantity (`Quantity.of`).
    """
    # A health check has a test such as "gemm bf16"; a point has a workload and a precision.
    words = [*of.get("test", "").split(), of.get("workload", ""), of.get("precision", "")]
    if words[0] == "gemm":
        return dense_peak_tflops(model, words[1])
    return memory_peak_gb_s(model) if words[0] == "memory" else None


def _exceeded_peak(model: str, entry: Entry) -> float | None:
    """Return the datasheet's peak if the value of an entry exceeds it; else None."""
    settings = entry.of
    peak, size = peak_of(model, settings), settings.get("size_bytes", "")
    # Small arrays stay in a cache, which is faster than the memory.
    is_small = size.isdecimal() and int(size) < LARGER_THAN_CACHES
    if peak is None or is_small or entry.unit not in ("TFLOP/s", "GB/s") or entry.value <= peak:
        return None
    return peak


# Factors by which a figure may exceed its limit: 2 % with an interval; 10 % without an interval,
# because starts differ; 25 % in strong scaling, because smaller shares may have faster kernels.
_TOLERANCE, _ONE_START_TOLERANCE, _STRONG_TOLERANCE = 1.02, 1.1, 1.25
# Factors by which a rate may exceed the largest value of a reference, which has few devices.
_REFERENCE_TOLERANCE, _PRODUCTS_TOLERANCE = 1.05, 1.1
# In strong scaling, the work of a rank with less peak memory (in bytes) may fit into a cache.
_MAY_FIT_INTO_CACHE = 2**30
# With NVLS the switch reduces and copies, so each byte crosses a link once instead of twice.
_NVLS_FACTOR = 2.0
_NVLS_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def impossible_figures(
    row: ScaledRow, references: References, attempts_s: Sequence[float | None] = ()
) -> list[Doubt]:
    """Return a doubt for each impossible figure of an ok point; the figure is its subject.

    This checks the efficiency, the rates that have a reference or datasheet, the samples of
    built-in workloads against the batch, and whether the iterations fit into the attempts.

    Args:
        attempts_s: durations of the attempts whose iterations `row` counts. If a duration is
            missing, the iterations are not checked.
    """
    if row.status is not Status.OK:
        return []
    doubts = list(_impossible_rates(row, references.entries(row.device_name or "")))
    if row.efficiency is not None and row.speed_up is not None and not row.is_baseline:
        # Lower bound of the efficiency, by its interval or by a tolerance.
        efficiency_low = row.efficiency_low or row.efficiency / _ONE_START_TOLERANCE
        is_strong = row.scaling == "strong"
        # A device with less work may clock higher.
        clock_gain = max(row.clock_ratio or 1.0, 1)
        limit = (_STRONG_TOLERANCE if is_strong else _TOLERANCE) * clock_gain
        may_be_in_cache = is_strong and (row.peak_mem_allocated_bytes or 0) < _MAY_FIT_INTO_CACHE
        if efficiency_low > limit and not may_be_in_cache:
            doubts.insert(0, _impossible("efficiency", row.efficiency, limit))
    # A step cannot finish more items than its batch has. The shorter step gives fewer items.
    step_ms = min(row.step_ms_mean or 0.0, row.step_ms_p50 or 0.0)
    items_of_ranks = row.batch_size * row.world_size if row.batch_size else 0
    batch = max(row.global_batch_size or 0, items_of_ranks) * (row.grad_accumulation or 1)
    items = (row.throughput or 0.0) * step_ms / MS_PER_S
    if batch and row.workload in registry.BUILTIN and items > _TOLERANCE * batch:
        doubts.append(_impossible("items", items, batch))
    # The iterations cannot take longer than the attempts that ran them.
    iterations = (row.iterations or 0) * (row.inner_iterations or 1)
    iterations_s = iterations * step_ms / MS_PER_S
    total_s = sum(filter(None, attempts_s)) if None not in attempts_s else 0.0
    if total_s and iterations_s > _ONE_START_TOLERANCE * total_s:
        doubts.append(_impossible("iterations", iterations_s, total_s))
    return doubts


def without_repeated_mfu(doubts: Sequence[Doubt]) -> list[Doubt]:
    """Return the doubts without the doubt about MFU, if the TFLOP/s are doubted too."""
    impossible = {doubt.subject for doubt in doubts if doubt.kind is DoubtKind.IMPOSSIBLE}
    if "achieved_tflops_per_device" not in impossible:
        return list(doubts)
    without_mfu = []
    for doubt in doubts:
        if doubt.kind is not DoubtKind.IMPOSSIBLE or doubt.subject != "mfu_pct":
            without_mfu.append(doubt)
    return without_mfu


def has_impossible(row: ScaledRow) -> bool:
    """Return whether a figure of a point is impossible."""
    return any(doubt.kind is DoubtKind.IMPOSSIBLE for doubt in row.doubts or ())


def _impossible(figure: str, value: float, limit: float) -> Doubt:
    return Doubt(kind=DoubtKind.IMPOSSIBLE, value=value, limit=limit, subject=figure)


def _impossible_rates(row: ScaledRow, entries: Sequence[Entry]) -> Iterator[Doubt]:
    """Yield a doubt for each rate that the device cannot reach by the references of its model."""

    def largest_of_tests(prefix: str) -> float:
        """Return the largest value of the health tests whose name begins so; 0 without any."""
        values = []
        for entry in entries:
            if entry.of.get("test", "").startswith(prefix):
                _, largest = entry.observed
                values.append(largest)
        return max(values, default=0.0)

    model = row.device_name or ""
    # Largest TFLOP/s of matrix products; 0 if unknown. A point of matrix products is not compared,
    # because its shape may be faster than the shapes of the reference.
    product_tflops = 0.0
    for entry in entries:
        # A health check names the precision in its test, such as "gemm bf16".
        precisions = (entry.of.get("precision"), *entry.of.get("test", "").split())
        is_product = entry.unit == "TFLOP/s" and row.precision in precisions
        if is_product and row.workload != "gemm":
            _, largest = entry.observed
            product_tflops = max(product_tflops, largest)
    # MFU compares with the datasheet, so it counts only without a measured limit.
    if row.mfu_pct is not None and row.mfu_pct > 100 and not product_tflops:
        yield _impossible("mfu_pct", row.mfu_pct, 100.0)
    size = row.params.get("size_bytes", "") if row.workload == "memory" else ""
    used_bytes = int(size) if size.isdecimal() else row.peak_mem_allocated_bytes or 0
    memory_gb_s = largest_of_tests("memory ") or peak_of(model, {"test": "memory"}) or 0.0
    # With NVLS the switch reduces and copies, so the bus bandwidth may be twice as large.
    may_use_nvls = row.params.get("operation", "all_reduce") in _NVLS_OPERATIONS
    # Column, rate of the point, largest known rate of such devices, tolerance.
    limits = (
        (
            "achieved_tflops_per_device",
            row.achieved_tflops_per_device,
            product_tflops,
            _PRODUCTS_TOLERANCE,
        ),
        (
            "memory_gb_s",
            row.memory_gb_s if used_bytes >= LARGER_THAN_CACHES else None,
            memory_gb_s,
            _REFERENCE_TOLERANCE,
        ),
        (
            # A bus cannot be faster than a copy between two devices.
            "busbw_gb_s",
            row.busbw_gb_s if row.world_size > 1 else None,
            largest_of_tests("copy "),
            _REFERENCE_TOLERANCE * (_NVLS_FACTOR if may_use_nvls else 1),
        ),
    )
    for column, rate, largest_rate, tolerance in limits:
        if rate and largest_rate and rate > tolerance * largest_rate:
            yield _impossible(column, rate, largest_rate)
