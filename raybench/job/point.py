"""A point: one combination of axis values, what identifies it, and texts that name its settings.

All is pure.
"""

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
# The workload whose steps are those of a user's script.
SCRIPT = "script"
BATCH_SIZES = ("batch_size", "global_batch_size")
MAX_SIZE = 2**31 - 1
_SIZES = Interval(ge=1, le=MAX_SIZE)
Size = Annotated[int, _SIZES]


def setting_text(value: Scalar) -> str:
    """Return a setting as text: a bool as `true` or `false`, any other value as str() does."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class Precision(StrEnum):
    """The number format that the heavy arithmetic uses.

    fp32: IEEE single precision, TF32 off everywhere. tf32: TF32 in matmul and convolution.
    fp16: autocast to half with gradient scaling. bf16: autocast to bfloat16. float8: as bf16, with
    the products of linear layers in 8 bits, for workloads that say so (`takes_float8`).
    """

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FLOAT8 = "float8"

    @property
    def dtype(self) -> str:
        """Name of torch's dtype of matrix products, as `bfloat16`.

        For float8 it is bfloat16, the type of the autocast around the converted layers.
        """
        return {"fp16": "float16", "bf16": "bfloat16", "float8": "bfloat16"}.get(self, "float32")


# Those that mean something to every workload.
USUAL_PRECISIONS = tuple(one for one in Precision if one != Precision.FLOAT8)


class SlowBy(StrEnum):
    """How a slow device is emulated.

    compute: parts of the forward and backward pass are repeated. sms: a CUDA green context gives
    the step some of the device's multiprocessors.
    """

    COMPUTE = "compute"
    SMS = "sms"


# The setting `devices`: all devices of the cluster, devices of one model, or devices by number.
# Numbers follow rack, node and index at the start of the sweep. Each late device gets the next
# number, so that a number stays with its device.
ANY = "any"
_NUMBERS = re.compile(r"\d+(/\d+)*")


def are_devices(value: str) -> bool:
    """Return True for a setting `devices`; ValueError if it is blank or has a number twice."""
    numbers = device_numbers(value)
    if value.strip() and len(set(numbers)) == len(numbers):
        return True
    raise ValueError(f"must be {ANY}, a model as in H200, or different numbers as in 0/2")


def device_numbers(devices: str) -> tuple[int, ...]:
    """Return the device numbers in a setting `devices`: (2, 0) for 2/0; () for a model or any."""
    return tuple(map(int, devices.split("/"))) if _NUMBERS.fullmatch(devices) else ()


def choose_devices(devices: str, models: Sequence[str]) -> list[int]:
    """Return the numbers of the devices that a setting `devices` selects; [] if it selects none.

    devices: "any", numbers as in "2/0" or "2", or else a part of a model's name in any case.
    Numbers keep their order, without those beyond the cluster; else the order is ascending.
    models: of all devices, by number.
    """
    if numbers := device_numbers(devices):
        return [number for number in numbers if number < len(models)]
    return [
        number
        for number, model in enumerate(models)
        if devices == ANY or devices.casefold() in model.casefold()
    ]


# Which devices of which nodes a point gets.
Strategy = Literal["pack", "spread", "rail"]
# How a step's samples are shared out; or samples of each rank, as in 96/32.
EQUAL, FAST, BY_SPEED, BY_ACCUMULATION = "equal", "fast", "by_speed", "by_speed_accumulation"
_NAMED_SHARES = (EQUAL, FAST, BY_SPEED, BY_ACCUMULATION)


def _are_shares(value: str) -> bool:
    """Return True for a valid setting `shares`. Raises ValueError with the rule for another."""
    if value in _NAMED_SHARES or re.fullmatch(r"\d{1,10}(/\d{1,10})+", value):
        return True
    names = ", ".join(_NAMED_SHARES)
    raise ValueError(f"must be one of {names}, or samples of each rank, as in 96/32")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a run setting means.

    text: in a sentence. column, unit: for the table `points`.
    """

    text: str
    column: str
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How steps are executed, whatever the workload.

    A new setting is a field here and a column of `results.point_row.PointColumns`. Jobs
    can then set it and filter by it, ids have it, reports name it, and workloads read it.
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
        """Whether `shares` is not equal or `slow_ratio` is below 1, so that ranks may differ."""
        return self.shares != EQUAL or self.slow_ratio < 1

    @property
    def execution(self) -> dict[str, Any]:
        """Name -> value of the fields of `Execution`, of an enum its member, not its text."""
        return {name: getattr(self, name) for name in EXECUTION}


EXECUTION = tuple(field.name for field in fields(Execution))
# Left out of ids and names of points where they have their default.
OPTIONAL = tuple(name for name in EXECUTION if name != "precision")
# Only for workloads whose ranks may differ.
UNEVEN = ("shares", "slow_ratio", "slow_count", "slow_by")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Execution):
    """One combination of axis values: everything that defines what is timed.

    params: the workload's parameters, defaults included, in the order of their names; of a script
    also the axes that it names itself. env: environment variables of its processes.
    global_batch_size = batch_size x world_size x the workload's `grad_accumulation` (1 where it
    has none); groups of ranks that share their items count in place of ranks. scaling: weak when
    the job fixes batch_size, strong when it fixes global_batch_size. These three are None where
    the job gives no batch size; but where all ranks share their work, scaling is strong in any
    case, and world_size is no factor of the global batch.
    """

    workload: str
    params: Mapping[str, Scalar]
    world_size: Annotated[
        int,
        Interval(ge=1, le=1_000_000),
        About(text="Devices that work on the point together, one rank each.", column="ranks"),
    ] = 1
    batch_size: Annotated[
        int | None,
        _SIZES,
        About(
            text="Items per device and forward pass (weak scaling).",
            column="per device and pass",
            unit="samples",
        ),
    ]
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
    scaling: Literal["weak", "strong"] | None
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def point_id(self) -> str:
        """Hash of all but `scaling` and `global_batch_size`, 12 hex digits; 1 differs from 1.0."""
        settings = {name: _plain(getattr(self, name)) for name in OPTIONAL}
        meaning: dict[str, object] = {
            "workload": self.workload,
            "params": dict(self.params),
            "world_size": self.world_size,
            "precision": self.precision.value,
            "batch_size": self.batch_size,
            **{n: value for n, value in settings.items() if value != RUN_SETTINGS[n].default},
            **({"env": dict(self.env)} if self.env else {}),
        }
        text = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2s(text.encode(), digest_size=6).hexdigest()

    @property
    def settings(self) -> dict[str, Scalar]:
        """Name -> value of all but `workload`, with params and env, enums as text; without None."""
        given = {name: _plain(getattr(self, name)) for name in (*RUN_SETTINGS, "scaling")}
        known = {name: value for name, value in given.items() if value is not None}
        return {**known, **self.params, **self.env}

    @property
    def settings_as_given(self) -> dict[str, Scalar]:
        """`settings` without global_batch_size if scaling is weak, else without batch_size."""
        derived = "global_batch_size" if self.scaling == "weak" else "batch_size"
        return {name: value for name, value in self.settings.items() if name != derived}

    @property
    def devices_needed(self) -> int:
        """The fewest devices that a cluster must have for the point, of whatever model."""
        return max(self.world_size, *(number + 1 for number in device_numbers(self.devices)), 0)

    @property
    def grad_accumulation(self) -> int:
        """Forward passes per optimizer step: the parameter of this name, 1 without it."""
        return int(self.params.get("grad_accumulation", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetting:
    """A setting of points that does not depend on the workload.

    kind: what makes a value, or raises ValueError; bool takes no text. annotation: how pydantic
    checks what a job gives. default: None where there is none.
    """

    name: str
    kind: type[Any]
    annotation: Any
    default: Scalar | None
    about: About

    def restore(self, stored: Any) -> Any:
        """Return `kind(stored)`; None and NaN mean the default, or TypeError where it has none."""
        return self.kind(self.default if stored is None or stored != stored else stored)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else value


def _read_setting(name: str, hint: Any, default: Any) -> RunSetting:
    """Return what a field of a point declares of a setting that a job gives."""
    declared, *notes = get_args(hint)
    kind: Any
    if get_origin(declared) is Literal:
        kind, allowed = str, declared
    else:
        # The first of `int | None`; a job gives the text of a member.
        kind = allowed = (get_args(declared) or (declared,))[0]
        if issubclass(kind, StrEnum):
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


# A text may name settings in braces: the arguments of a script, an environment variable.
_BRACES = "a text names a setting as in {batch_size}; write {{ and }} for braces themselves"


def names_in(text: str) -> list[str]:
    """Return the names in a text's single braces, each once, in their order; not {{x}}.

    Raises ValueError, with the rule, where braces hold anything but a name or are not in pairs.
    """
    try:
        fields = [field for _, *field in string.Formatter().parse(text) if field[0] is not None]
    except ValueError:
        raise ValueError(_BRACES) from None
    for name, format_spec, conversion in fields:
        if not re.fullmatch(r"[A-Za-z_]\w*", name or "") or format_spec or conversion:
            raise ValueError(_BRACES)
    return list(dict.fromkeys(str(name) for name, *_ in fields))


def fill_in(text: str, settings: Mapping[str, Scalar]) -> str:
    """Return the text with values in place of names in braces; a bool becomes `true` or `false`.

    text: one that `names_in` accepts; `{{` becomes `{`. Raises KeyError for a name not in settings.
    """
    return text.format_map({name: setting_text(value) for name, value in settings.items()})


def split_arguments(text: str) -> list[str]:
    """Return the words of a command line as a shell splits it; $X, *, # and ; stay as they are.

    A backslash at the end of a line joins it with the next, inside quotes too. Raises ValueError
    for a quote that is not closed, and for a backslash at the end of the text.
    """
    try:
        return shlex.split(re.sub(r"(\\[^\n])|\\\n", r"\1", text))
    except ValueError:
        raise ValueError("a quote is not closed, or the last \\ escapes nothing") from None


def product_of(text: str) -> int | None:
    """Return the number, 0 or more, that a text such as `64 * 8` means; None for a blank text.

    Raises ValueError, with the reason, for any other text.
    """
    if not text.strip():
        return None
    factors = [factor.strip() for factor in text.split("*")]
    if not all(factor.isdecimal() for factor in factors):
        raise ValueError("must be a whole number, or a product of them, as in 64 * 8")
    return math.prod(map(int, factors))
