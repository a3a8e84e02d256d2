"""A point: one combination of axis values, its id, and its settings."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import string
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from annotated_types import Interval, Predicate

Scalar = str | int | float | bool
# The workload that runs a script of the user.
SCRIPT = "script"
BATCH_SIZES = ("batch_size", "global_batch_size")
MAX_SIZE = 2**31 - 1
_SIZES = Interval(ge=1, le=MAX_SIZE)
Size = Annotated[int, _SIZES]


def setting_text(value: Scalar) -> str:
    """Return a setting as text; booleans become `true` or `false`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class Precision(StrEnum):
    """The number format of matrix products; `Execution.precision` explains each."""

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FLOAT8 = "float8"

    @property
    def dtype(self) -> str:
        """Name of the torch dtype of autocast; `bfloat16` for float8."""
        return {"fp16": "float16", "bf16": "bfloat16", "float8": "bfloat16"}.get(self, "float32")


# Precisions that every workload accepts.
USUAL_PRECISIONS = tuple(precision for precision in Precision if precision != Precision.FLOAT8)


class SlowBy(StrEnum):
    """How a slow device is emulated."""

    # Repeat parts of the forward and backward pass.
    COMPUTE = "compute"
    # Limit the step to some multiprocessors by a CUDA green context.
    SMS = "sms"


# The setting `devices` is ANY, a model, or numbers of devices. Devices are numbered by rack, node
# and index. A device that joins later gets the next free number, so that numbers stay valid.
ANY = "any"
_NUMBERS = re.compile(r"\d+(/\d+)*")


def are_devices(value: str) -> bool:
    """Return True for a valid setting `devices`.

    Raises:
        ValueError: the text is blank or repeats a number.
    """
    numbers = device_numbers(value)
    if value.strip() and len(set(numbers)) == len(numbers):
        return True
    raise ValueError(f"must be {ANY}, a model as in H200, or different numbers as in 0/2")


def device_numbers(devices: str) -> tuple[int, ...]:
    """Return the numbers in a setting `devices`: (2, 0) for "2/0", () for a model or any."""
    return tuple(map(int, devices.split("/"))) if _NUMBERS.fullmatch(devices) else ()


def choose_devices(devices: str, models: Sequence[str]) -> list[int]:
    """Return the numbers of the devices that a setting `devices` selects, in the listed order.

    Args:
        devices: "any", numbers such as "2/0", or a part of the name of a model in any case.
        models: model of each device of the cluster, by number.
    """
    if numbers := device_numbers(devices):
        return [number for number in numbers if number < len(models)]
    return [
        number
        for number, model in enumerate(models)
        if devices == ANY or devices.casefold() in model.casefold()
    ]


# Placement of a point.
Strategy = Literal["pack", "spread", "rail"]
# What a point shares with no other point at the same time.
Isolation = Literal["cluster", "node", "device"]
# Values of the setting `shares`, besides the samples of each rank, such as 96/32.
EQUAL, FAST, BY_SPEED, BY_ACCUMULATION = "equal", "fast", "by_speed", "by_speed_accumulation"
_NAMED_SHARES = (EQUAL, FAST, BY_SPEED, BY_ACCUMULATION)


def _are_shares(value: str) -> bool:
    if value in _NAMED_SHARES or re.fullmatch(r"\d{1,10}(/\d{1,10})+", value):
        return True
    names = ", ".join(_NAMED_SHARES)
    raise ValueError(f"must be one of {names}, or samples of each rank, as in 96/32")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a run setting means."""

    # For a sentence.
    text: str
    # For the table `points`.
    column: str
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How steps are executed, for every workload.

    A new setting needs a field here and a column in `results.point_row.PointColumns`.
    """

    precision: Annotated[
        Precision,
        About(
            text="Number format: fp32 (TF32 off), tf32, fp16 (autocast, GradScaler), "
            "bf16 (autocast), float8 (bf16, linear layers by torchao).",
            column="arithmetic",
        ),
    ] = Precision.FP32
    cuda_graph: Annotated[
        bool,
        About(
            text="Capture steps in a CUDA graph and replay it; only on CUDA devices.",
            column="steps replayed from a graph",
        ),
    ] = False
    shares: Annotated[
        str,
        Predicate(_are_shares),
        About(
            text="Who does how much of a step: equal, fast (the fast devices alone, equally), "
            "by_speed (batches by speed), by_speed_accumulation (passes by speed), or samples of "
            "each rank, as in 96/32.",
            column="how a step is shared out",
        ),
    ] = EQUAL
    slow_ratio: Annotated[
        float,
        Interval(gt=0, le=1),
        About(
            text="Emulate slow devices: the speed that they have left, as a share of their own; 1: "
            "none is slow.",
            column="asked speed of emulated slow devices",
        ),
    ] = 1.0
    slow_count: Annotated[
        int,
        Interval(ge=1, le=1_000_000),
        About(
            text="Emulate slow devices: how many, the last ranks.",
            column="emulated slow devices, if slow_ratio < 1",
        ),
    ] = 1
    slow_by: Annotated[
        SlowBy,
        About(
            text="Emulate slow devices: by extra compute, or by fewer multiprocessors (sms; CUDA, "
            "torch 2.11).",
            column="how slow devices are emulated",
        ),
    ] = SlowBy.COMPUTE
    devices: Annotated[
        str,
        Predicate(are_devices),
        About(
            text="Devices that a point may use: any, those of a model, as in H200 (a part of its "
            "name), or those with these numbers, as in 0/2. Devices are numbered from 0 by rack, "
            "node and index; those that come late get the next numbers.",
            column="devices that the point may use",
        ),
    ] = ANY
    strategy: Annotated[
        Strategy,
        About(
            text="Which devices: pack (as few nodes and racks as possible), spread (as many), rail "
            "(of the same index on the nodes of a rack).",
            column="how devices are chosen",
        ),
    ] = "pack"

    @property
    def is_uneven(self) -> bool:
        """Whether shares are not equal, or slow devices are emulated."""
        return self.shares != EQUAL or self.slow_ratio < 1

    @property
    def execution(self) -> dict[str, Any]:
        """The fields of `Execution` by name; enums stay members."""
        return {name: getattr(self, name) for name in EXECUTION}


EXECUTION = tuple(field.name for field in fields(Execution))
# Ids and names of points omit these settings at their default.
OPTIONAL = tuple(name for name in EXECUTION if name != "precision")
# Settings of workloads that weigh their loss, so that ranks may have unequal shares.
UNEVEN = ("shares", "slow_ratio", "slow_count", "slow_by")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Execution):
    """One combination of axis values: everything that defines what is timed."""

    workload: str
    # Parameters of the workload with defaults, sorted by name; for a script also its own axes.
    params: Mapping[str, Scalar]
    world_size: Annotated[
        int,
        Interval(ge=1, le=1_000_000),
        About(text="Devices that work on the point together, one rank each.", column="ranks"),
    ] = 1
    # None if the job gives no batch size.
    batch_size: Annotated[
        int | None,
        _SIZES,
        About(
            text="Items per device and forward pass (weak scaling).",
            column="per device and pass",
            unit="samples",
        ),
    ]
    # batch_size * world_size * grad_accumulation; if groups of ranks work on the same items,
    # batch_size * groups * grad_accumulation.
    global_batch_size: Annotated[
        int | None,
        _SIZES,
        About(
            text="Items per optimizer step over all devices (strong scaling); batch_size follows "
            "from it.",
            column="all ranks, per optimizer step",
            unit="samples",
        ),
    ]
    # strong if the job fixes global_batch_size or all ranks share their items, weak if the job
    # fixes batch_size.
    scaling: Literal["weak", "strong"] | None
    # Environment variables of its processes.
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def point_id(self) -> str:
        """Hash of all settings but `scaling` and `global_batch_size`, 12 hex digits."""
        # Default values are omitted, so that ids stay the same when raybench gets a new setting.
        optional = {name: _plain(getattr(self, name)) for name in OPTIONAL}
        meaning: dict[str, object] = {
            "workload": self.workload,
            "params": dict(self.params),
            "world_size": self.world_size,
            "precision": self.precision.value,
            "batch_size": self.batch_size,
            **{n: value for n, value in optional.items() if value != RUN_SETTINGS[n].default},
            **({"env": dict(self.env)} if self.env else {}),
        }
        text = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2s(text.encode(), digest_size=6).hexdigest()

    @property
    def settings(self) -> dict[str, Scalar]:
        """All settings but `workload`, including params and env; None is omitted."""
        run_settings = {name: _plain(getattr(self, name)) for name in (*RUN_SETTINGS, "scaling")}
        known = {name: value for name, value in run_settings.items() if value is not None}
        return {**known, **self.params, **self.env}

    @property
    def settings_as_given(self) -> dict[str, Scalar]:
        """`settings`, but of the two batch sizes only the batch size that the job fixes."""
        derived = "global_batch_size" if self.scaling == "weak" else "batch_size"
        return {name: value for name, value in self.settings.items() if name != derived}

    @property
    def devices_needed(self) -> int:
        """Number of devices that a cluster must have at least."""
        # Devices are numbered from 0.
        highest_number = max(device_numbers(self.devices), default=-1)
        return max(self.world_size, highest_number + 1)

    @property
    def grad_accumulation(self) -> int:
        """Forward passes per optimizer step."""
        return int(self.params.get("grad_accumulation", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetting:
    """A setting of points that every workload shares."""

    name: str
    # Type of stored values.
    kind: type[Any]
    # Type that pydantic validates values by.
    annotation: Any
    # None if there is no default.
    default: Scalar | None
    about: About

    def restore(self, stored: Any) -> Any:
        """Convert a stored value; None and NaN mean the default.

        Raises:
            TypeError: the value is None or NaN, and there is no default.
        """
        is_nan = stored != stored
        return self.kind(self.default if stored is None or is_nan else stored)


def _plain(value: Any) -> Any:
    """Return the text of an enum member; other values as they are."""
    return value.value if isinstance(value, StrEnum) else value


def _read_setting(name: str, hint: Any, default: Any) -> RunSetting:
    """Return the setting that a field of `Point` declares by its annotation."""
    # The hint is Annotated[declared, *notes], and one of the notes is an `About`.
    declared, *notes = get_args(hint)
    kind: Any
    if get_origin(declared) is Literal:
        kind, allowed = str, declared
    else:
        # `int | None` counts as int.
        union_members = get_args(declared) or (declared,)
        kind = allowed = union_members[0]
        if issubclass(kind, StrEnum):
            # A job has the members as texts.
            allowed = Literal[tuple(map(_plain, kind))]
    return RunSetting(
        name=name,
        kind=kind,
        annotation=Annotated[(allowed, *notes)],
        default=None if default is MISSING else _plain(default),
        about=next(note for note in notes if isinstance(note, About)),
    )


_HINTS = get_type_hints(Point, include_extras=True)
_DEFAULTS = {field.name: field.default for field in fields(Point)}
RUN_SETTINGS = {
    name: _read_setting(name, _HINTS[name], _DEFAULTS[name])
    for name in ("world_size", *EXECUTION, *BATCH_SIZES)
}


# Arguments of a script and variables may name settings in braces.
_BRACES = "a text names a setting as in {batch_size}; write {{ and }} for braces themselves"


def names_in(text: str) -> list[str]:
    """Return the distinct names in single braces, in their order.

    Raises:
        ValueError: braces are unbalanced or hold anything but a name.
    """
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError:
        raise ValueError(_BRACES) from None
    names = []
    for _, name, format_spec, conversion in parts:
        if name is None:
            # This part of the text has no braces.
            continue
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or format_spec or conversion:
            raise ValueError(_BRACES)
        names.append(name)
    return list(dict.fromkeys(names))


def fill_in(text: str, settings: Mapping[str, Scalar]) -> str:
    """Replace each name in braces by its value; `{{` becomes `{`.

    Raises:
        KeyError: a name is not in `settings`.
    """
    return text.format_map({name: setting_text(value) for name, value in settings.items()})


def split_arguments(text: str) -> list[str]:
    """Split a command line as a shell does, without expanding $X, *, # and ;.

    A backslash at the end of a line joins two lines, also in quotes.

    Raises:
        ValueError: a quote is not closed, or the text ends with a backslash.
    """
    try:
        return shlex.split(re.sub(r"(\\[^\n])|\\\n", r"\1", text))
    except ValueError:
        raise ValueError("a quote is not closed, or the last \\ escapes nothing") from None


def product_of(text: str) -> int | None:
    """Return the product that a text such as `64 * 8` or `512` gives; None for a blank text.

    Raises:
        ValueError: the text is not a product of whole numbers.
    """
    if not text.strip():
        return None
    factors = [factor.strip() for factor in text.split("*")]
    if not all(factor.isdecimal() for factor in factors):
        raise ValueError("must be a whole number, or a product of them, as in 64 * 8")
    return math.prod(map(int, factors))
