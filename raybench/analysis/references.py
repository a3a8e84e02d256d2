"""Reference values: which range a figure has on a model of device, and where that is known from.

`raybench/references/` has one YAML file per model; `raybench export RUN --format reference` writes
such a file, with the value of each start, so that several are pooled exactly.
"""

from __future__ import annotations

import datetime
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from raybench.errors import ResultsWarning, UsageError
from raybench.hardware.peaks import dense_peak_tflops, memory_peak_gb_s
from raybench.job import registry
from raybench.job.point import setting_text
from raybench.job.problems import key_text, rule_of
from raybench.records.health import is_time

# The range is never narrower than this on both sides, beside the noise of starts: what a few
# devices of one batch agree in, the next batch need not.
_FLOOR = 0.01
# What a single device says of another one: healthy H200s of one host differ by up to 7 %.
_ONE_DEVICE = 0.1
# A device is held against some 40 quantities: with 95 % a healthy one would get two marks.
_CONFIDENCE = 0.99
_VALUE_DIGITS = 6
# In bytes, of the cache of any device (256 MB on MI300X): arrays below it may be read from there.
LARGER_THAN_CACHES = 2**28

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceRun(_Strict):
    """A run that values come from: its date, and versions of torch, CUDA and the driver."""

    date: datetime.date
    software: dict[str, str]


class Starts(_Strict):
    """The values of the starts of a run.

    devices: UUIDs, A+B where the devices worked together, A/B where it was one of them.
    """

    run: str
    devices: str
    values: list[Positive] = Field(min_length=1)

    @property
    def uuids(self) -> set[str]:
        """Return the UUIDs that `devices` names."""
        return set(re.split(r"[+/]", self.devices))


class Entry(_Strict):
    """The range of one quantity on one model of device.

    of: settings of a point (workload, parameters, precision, batch size, world_size); of a health
    check {test, where}, where is "device", "pair on a node", "pair of nodes", or such as
    "4 on a node". fabric: what connects the devices, "" where that does not matter.
    metric: a column of `points`, or "value" of a health check. value: geometric mean over devices.
    low, high: 99 % prediction interval for one start of a new device (`predict_range`).
    devices, hosts, starts, days: how many of each; hosts counts names, and devices of one index.
    measured: the values of which all this is computed; empty where only the range is known, by
    `source`.
    """

    of: dict[str, str]
    metric: str
    unit: str
    fabric: str = ""
    value: Positive
    low: Positive
    high: Positive
    devices: int = Field(ge=1)
    hosts: int = Field(ge=1)
    starts: int = Field(ge=1)
    days: int = Field(ge=1)
    dates: str
    torch: str = ""
    source: str = ""
    measured: list[Starts] = []

    @model_validator(mode="after")
    def _check_order(self) -> Entry:
        if not self.low <= self.value <= self.high:
            raise ValueError("must have low <= value <= high")
        return self

    @property
    def key(self) -> object:
        """Return what entries of the same quantity have in common."""
        return self.metric, self.fabric, normal_form(self.of)

    @property
    def observed(self) -> tuple[float, float]:
        """Return the least and the largest value of any start; the range where none is known."""
        values = [value for starts in self.measured for value in starts.values]
        return (min(values), max(values)) if values else (self.low, self.high)

    @property
    def provenance(self) -> str:
        """Return `6 devices of 3 hosts, November 2026`."""
        devices = f"{self.devices} device{'s' * (self.devices > 1)}"
        return f"{devices}{f' of {self.hosts} hosts' * (self.hosts > 1)}, {self.dates}"


@cache
def _defaults(workload: str) -> Mapping[str, str]:
    """Return the defaults of a workload's parameters as text; none of a user's own class."""
    if workload not in registry.BUILTIN:
        return {}
    found = registry.parameters(registry.load(workload))
    return {one.name: setting_text(one.default) for one in found if one.default is not None}


def normal_form(of: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the settings, sorted, without parameters at their default.

    A parameter that a later version adds then changes no quantity.
    """
    defaults = _defaults(of.get("workload", ""))
    return tuple(sorted((name, text) for name, text in of.items() if defaults.get(name) != text))


class ReferenceFile(_Strict):
    """All that is known of one model of device. devices: the host and the index of each UUID."""

    model: str
    runs: dict[str, SourceRun] = {}
    devices: dict[str, str] = {}
    quantities: list[Entry]

    @model_validator(mode="after")
    def _check_names(self) -> ReferenceFile:
        for entry in self.quantities:
            for one in entry.measured:
                if one.run not in self.runs or not one.uuids <= set(self.devices):
                    raise ValueError(f"must list the run and devices of {one.run} {one.devices}")
        return self


def predict_range(devices: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the mean of devices and the 99 % prediction interval for one start of a new device.

    devices: for each device the values of its starts.

    On logarithms, for n devices: mean ± t(n-1) s sqrt(1 + 1/n), the prediction interval of a new
    observation (G. J. Hahn, W. Q. Meeker, Statistical Intervals, 1991, section 4.7). s² is the
    variance of the means of devices, plus the part of the variance between starts that their means
    have lost: within (1 - mean(1/k)) for k starts a device, by unweighted means (J. D. Thomas,
    R. A. Hultquist, Annals of Statistics 6(3), 1978). It is at least ±1 % and 2.58 times the
    deviation between starts; for one device ±10 % and that deviation.
    """
    from scipy.stats import norm, t

    logs = [np.log(starts) for starts in devices]
    means = np.array([one.mean() for one in logs])
    freedom = sum(len(one) - 1 for one in logs)
    within = sum(float(((one - one.mean()) ** 2).sum()) for one in logs) / max(freedom, 1)
    upper, count = (1 + _CONFIDENCE) / 2, len(means)
    noise = float(norm.ppf(upper)) * within**0.5
    half = np.log1p(_FLOOR) + noise
    if count == 1:
        half = np.log1p(_ONE_DEVICE) + noise
    else:
        lost = within * (1 - np.mean([1 / len(one) for one in logs]))
        variance = float(means.var(ddof=1)) + lost
        half = max(half, t.ppf(upper, count - 1) * (variance * (1 + 1 / count)) ** 0.5)
    ends = (means.mean(), means.mean() - half, means.mean() + half)
    value, low, high = (rounded(float(np.exp(end))) for end in ends)
    return value, low, high


def rounded(value: float) -> float:
    """Return a value with the six digits that files hold."""
    return float(f"{value:.{_VALUE_DIGITS}g}")


def make_entry(
    of: Mapping[str, str],
    metric: str,
    unit: str,
    fabric: str,
    measured: Iterable[Starts],
    runs: Mapping[str, SourceRun],
    devices: Mapping[str, str],
) -> Entry:
    """Return the entry of a quantity. measured, runs, devices: as in Entry and ReferenceFile."""
    measured = sorted(measured, key=lambda one: (one.run, one.devices))
    # Starts that share a UUID may be of the same device.
    groups: list[tuple[set[str], list[float]]] = []
    for one in measured:
        uuids, values = one.uuids, list(one.values)
        for group in [other for other in groups if other[0] & uuids]:
            groups.remove(group)
            uuids, values = uuids | group[0], [*group[1], *values]
        groups.append((uuids, values))
    value, low, high = predict_range([values for _, values in groups])
    are_together = any("+" in one.devices for one in measured)
    used = {
        uuid for uuids, _ in groups for uuid in (sorted(uuids) if are_together else [min(uuids)])
    }
    # A host has a device of each index once, so that of two with the same index one is elsewhere.
    hosts: Counter[str] = Counter()
    for place, count in Counter(devices[uuid] for uuid in used).items():
        host = place.rpartition(" ")[0]
        hosts[host] = max(hosts[host], count)
    made_by = [runs[one.run] for one in measured]
    dates = sorted({run.date for run in made_by})
    return Entry(
        of=dict(of),
        metric=metric,
        unit=unit,
        fabric=fabric,
        value=value,
        low=low,
        high=high,
        devices=len(used),
        hosts=hosts.total(),
        starts=sum(len(values) for _, values in groups),
        days=len(dates),
        dates=" to ".join(dict.fromkeys(f"{day:%B %Y}" for day in (dates[0], dates[-1]))),
        torch=" and ".join(sorted({run.software.get("torch", "") for run in made_by} - {""})),
        measured=measured,
    )


def pool(files: Iterable[ReferenceFile]) -> list[ReferenceFile]:
    """Return one file per model, its ranges computed anew from the starts of all files.

    Of a quantity whose starts are not known the last file counts.
    """
    by_model: dict[str, list[ReferenceFile]] = {}
    for file in files:
        by_model.setdefault(file.model, []).append(file)
    return [_pool(model, own) for model, own in by_model.items()]


def _pool(model: str, files: Sequence[ReferenceFile]) -> ReferenceFile:
    runs = {name: run for file in files for name, run in sorted(file.runs.items())}
    devices = {uuid: place for file in files for uuid, place in file.devices.items()}
    same: dict[object, list[Entry]] = {}
    for file in files:
        for entry in file.quantities:
            same.setdefault(entry.key, []).append(entry)
    entries = []
    for own in same.values():
        last = own[-1]
        measured = {(one.run, one.devices): one for entry in own for one in entry.measured}
        if measured:
            starts = measured.values()
            last = make_entry(last.of, last.metric, last.unit, last.fabric, starts, runs, devices)
        entries.append(last)
    return ReferenceFile(model=model, runs=runs, devices=devices, quantities=entries)


class References:
    """The references that come with raybench, and those of a site, which go before them."""

    def __init__(self, own: Iterable[ReferenceFile] = ()) -> None:
        self._own = {file.model: file for file in pool(own)}
        self._entries: dict[str, dict[tuple[str, object], list[Entry]]] = {}

    def entries(self, model: str) -> list[Entry]:
        """Return all entries of a model, those of the site first."""
        return [entry for found in self._of_model(model).values() for entry in found]

    def find(
        self, model: str, of: Mapping[str, str], metric: str, fabric: str = ""
    ) -> Entry | None:
        """Return the entry of a quantity; None where there is none.

        fabric: begins with that of the entry, as "NVLink x18, 1:PHB" with "NVLink x18".
        """
        known = self._of_model(model).get((metric, normal_form(of)), ())
        return next((one for one in known if fabric.startswith(one.fabric)), None)

    def _of_model(self, model: str) -> dict[tuple[str, object], list[Entry]]:
        if model not in self._entries:
            found: dict[tuple[str, object], list[Entry]] = {}
            for file in filter(None, (self._own.get(model), shipped(model))):
                for entry in file.quantities:
                    key = (entry.metric, normal_form(entry.of))
                    found.setdefault(key, []).append(entry)
            self._entries[model] = found
        return self._entries[model]


def peak_of(model: str, of: Mapping[str, str]) -> float | None:
    """Return the datasheet's peak for a product (TFLOP/s) or the memory (GB/s); None for others.

    of: as in `Entry`. None too where no datasheet is known.
    """
    words = of.get("test", "").split() or [of.get("workload", ""), of.get("precision", "")]
    if words[0] == "gemm":
        return dense_peak_tflops(model, words[1])
    return memory_peak_gb_s(model) if words[0] == "memory" else None


def file_name(model: str) -> str:
    """Return the name of the file of a model: `nvidia_h200.yaml`."""
    return re.sub(r"[^a-z0-9]+", "_", model.lower()).strip("_") + ".yaml"


@cache
def shipped(model: str) -> ReferenceFile | None:
    """Return the file that comes with raybench for a model; None where there is none."""
    path = resources.files("raybench").joinpath("references", file_name(model))
    if not path.is_file():
        return None
    return parse_references(path.read_text("utf-8"), str(path))


def load_references(path: Path | None) -> References:
    """Return the references of raybench and those of a file, or of all YAML files of a folder.

    Raises UsageError where a file cannot be read or breaks the schema.
    """
    return References(load_files(path) if path else ())


def load_files(path: Path) -> list[ReferenceFile]:
    """Return the content of a file, or of all YAML files of a folder. Raises UsageError."""
    paths = sorted(path.glob("*.y*ml")) if path.is_dir() else [path]
    if not paths:
        raise UsageError(f"--references {path}: has no YAML file")
    files = []
    for one in paths:
        try:
            files.append(_without_impossible(parse_references(one.read_text("utf-8"), str(one))))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--references {one}: cannot be read: {error}") from error
    return files


def _without_impossible(file: ReferenceFile) -> ReferenceFile:
    """Return a file without entries that cannot be, with a ResultsWarning for each."""
    sound = []
    for entry in file.quantities:
        if why := why_impossible(file.model, entry):
            text = (
                f"reference {entry.metric} of {entry.of} is left out, because it cannot be: {why}"
            )
            warnings.warn(text, ResultsWarning, stacklevel=3)
        else:
            sound.append(entry)
    return file.model_copy(update={"quantities": sound})


def why_impossible(model: str, entry: Entry) -> str:
    """Return why an entry is above what the datasheet says; empty where it is not."""
    peak, size = peak_of(model, entry.of), entry.of.get("size_bytes", "")
    # Small arrays stay in a cache, and then beat the memory.
    is_small = size.isdecimal() and int(size) < LARGER_THAN_CACHES
    if peak is None or is_small or is_time(entry.unit) or entry.value <= peak:
        return ""
    return (
        f"{entry.value:,.0f} {entry.unit} is above the peak of {model}, {peak:,.0f}; likeliest the "
        "work is counted wrong, or the precision was another"
    )


def parse_references(text: str, name: str) -> ReferenceFile:
    """Return the content of a file. Raises UsageError, with `name`, where it breaks the schema."""
    try:
        return ReferenceFile.model_validate(YAML(typ="safe", pure=True).load(text))
    except YAMLError as error:
        raise UsageError(f"{name}: is not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{name}: {key_text(first['loc'])}: {rule_of(first)}") from error


def format_references(file: ReferenceFile) -> str:
    """Return a file as YAML, a block for each quantity and a line for each device of it."""
    from io import StringIO

    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False
    # Folded keys and scalars cannot be read back.
    yaml.width = 4096
    stream = StringIO()
    yaml.dump(file.model_dump(mode="json", exclude_defaults=True), stream)
    return stream.getvalue()
