"""Which workloads there are, and which settings a point of each has.

A workload is named by a word of `BUILTIN` or as `package.module:Class`; both are loaded the
same way, and only when they are asked for. What a class tells of a point from its settings alone,
before anything runs, is asked here too: whether it runs it, and how much memory it needs. An
estimate never keeps a point from running. An `Answer` is what a class says that its runs answer.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from raybench.conversion import GIB
from raybench.errors import UsageError, brief
from raybench.job.point import (
    BATCH_SIZES,
    MAX_SIZE,
    RUN_SETTINGS,
    UNEVEN,
    Point,
    Precision,
    Scalar,
    Size,
    setting_text,
)
from raybench.job.problems import rule_of, say_unknown

BUILTIN: Mapping[str, str] = {
    "collective": "raybench.workloads.collective:Collective",
    "dit": "raybench.workloads.dit:Dit",
    "gemm": "raybench.workloads.kernels:Gemm",
    "grouped_collective": "raybench.workloads.collective:GroupedCollective",
    "host_copy": "raybench.workloads.kernels:HostCopy",
    "launch": "raybench.workloads.kernels:Launch",
    "linear": "raybench.workloads.networks:Linear",
    "memory": "raybench.workloads.kernels:Memory",
    "mlp": "raybench.workloads.networks:Mlp",
    "pairs": "raybench.workloads.pairs:Pairs",
    "resnet50": "raybench.workloads.networks:ResNet",
    "same_bits": "raybench.workloads.kernels:SameBits",
    "script": "raybench.workloads.script:Script",
    "smoke": "raybench.workloads.networks:Smoke",
    "transformer": "raybench.workloads.transformer:Transformer",
}

Best = Literal["max", "min"]

# The columns of a point's row that an answer can be, and which value is the best.
ANSWER_METRICS: Mapping[str, Best] = {
    **dict.fromkeys(("speed_up", "efficiency", "throughput", "batch_size"), "max"),
    **dict.fromkeys(("step_ms_p50", "step_ms_p99", "first_step_ms", "compiled_step_ms"), "min"),
    **dict.fromkeys(("compute_ms", "comm_exposed_ms", "straggler_ms", "data_ms"), "min"),
    **dict.fromkeys(("wall_unsynced_share", "optimizer_ms", "host_gap_ms"), "min"),
    **dict.fromkeys(("peak_mem_allocated_bytes", "energy_j"), "min"),
    **dict.fromkeys(("achieved_tflops_per_device", "mfu_pct", "mfu_6n_pct"), "max"),
    **dict.fromkeys(("gemm_share_pct", "algbw_gb_s", "busbw_gb_s", "memory_gb_s"), "max"),
    "samples_per_joule": "max",
}
SAMPLES = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a run answers.

    metric: a column of the table `points` or `scaling`, or a metric of the workload's own. over:
    the settings whose values are compared; empty for all that vary. best: whether the largest or
    the smallest value is the best. items: what a step finishes, in the plural, as in tokens.
    question: in the words of the job; empty where it asks none. Raises UsageError for an `over`
    that is no tuple, and for another `best`.
    """

    metric: str
    over: tuple[str, ...] = ()
    best: Best = "max"
    items: str = SAMPLES
    question: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.over, tuple) or self.best not in typing.get_args(Best):
            raise UsageError(f"Answer {self.metric}: over must be a tuple, best max or min")


# Names with a meaning of their own in job files, filters and result tables.
RESERVED = frozenset({*RUN_SETTINGS, "kind", "scaling", "workload", "rank", "context"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PointSetting:
    """One setting of a point: a parameter of its workload, or world_size, precision, ...

    type: in words, as `raybench workloads` lists it. default: None where there is none;
    then the point lacks the setting unless the job gives it.
    """

    name: str
    type: str
    default: Scalar | None
    is_required: bool
    description: str
    adapter: TypeAdapter[Any]

    def complaint(self, value: object) -> str | None:
        """Return what is wrong with `value`, mostly with it, on one line; None if it is valid."""
        try:
            accepted = self.adapter.validate_python(value)
        except ValidationError as error:
            found = error.errors(include_url=False)
            # Of a union: a text is meant for one of its words.
            words = [one for one in found if one["type"] == "literal_error"]
            return rule_of((words if isinstance(value, str) and words else found)[0])
        except (Exception, SystemExit) as error:  # of a validator of the user's own
            return f"cannot be checked: {brief(error)}"
        if accepted is not None and not isinstance(accepted, Scalar):
            # The type may convert: no table holds a Decimal or a Path.
            return f"becomes a {type(accepted).__name__}, which is no int, float, bool or str"
        return None

    def accept(self, value: object) -> Scalar:
        """Return `value`, which must have no `complaint`, in the declared type: 1.0 for a 1."""
        accepted: Scalar = self.adapter.validate_python(value)
        return accepted


def load_workload(kind: str) -> type:
    """Return the class of the workload `kind`, of any base (`as_workload`); imports its module.

    kind: as of `module_and_class`. The current directory is put first into `sys.path`, as `python
    -m` does, unless it is there. Raises UsageError, in one line, when there is no such class or no
    such directory, it is no workload, or its module raises anything but KeyboardInterrupt.
    """
    module_name, class_name = module_and_class(kind)
    try:
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.insert(0, here)
        # What a module prints is no part of a result, as of `plan --json`.
        with redirect_stdout(sys.stderr):
            module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A user's module may raise anything at all while it is imported.
        raise UsageError(f"cannot import module {module_name!r}: {brief(error)}") from error
    with _one_line(kind):
        workload_class = getattr(module, class_name, None)
        if not inspect.isclass(workload_class):
            classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
            raise UsageError(f"module {module_name!r}: {say_unknown('class', class_name, classes)}")
        step = getattr(workload_class, "step", None)
        if not callable(step) or getattr(step, "__isabstractmethod__", False):
            raise UsageError(f"{kind} has no method step(), which does one iteration")
        return workload_class


def module_and_class(kind: str) -> tuple[str, str]:
    """Return the names of the module and the class of a workload; imports nothing.

    kind: a built-in workload, or package.module:Class. Raises UsageError for any other text.
    """
    target = BUILTIN.get(kind, kind)
    if ":" not in target:
        message = say_unknown("workload", kind, BUILTIN)
        own = "" if message.endswith("?") else "; or your own as package.module:Class"
        raise UsageError(message + own)
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", target):
        raise UsageError(f"a workload of your own is package.module:Class, given {kind!r}")
    module_name, _, class_name = target.partition(":")
    return module_name, class_name


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Raise UsageError in one line for any other exception inside the `with` block."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what} cannot be read: {brief(error)}") from error


def settings_of_class(workload_class: type) -> dict[str, PointSetting]:
    """Return name -> setting: `RUN_SETTINGS`, then the parameters of the class.

    Batch sizes only if it `takes_batch_size`, `UNEVEN` only if it `weighs_loss`. No variables of
    `env`, no axes of a script's own. Raises UsageError as `parameters` does.
    """
    absent = (
        *(() if getattr(workload_class, "takes_batch_size", True) else BATCH_SIZES),
        *(() if getattr(workload_class, "weighs_loss", False) else UNEVEN),
    )
    run_settings = [run_setting(name) for name in RUN_SETTINGS if name not in absent]
    return {setting.name: setting for setting in (*run_settings, *parameters(workload_class))}


def run_setting(name: str) -> PointSetting:
    """Return the setting of this name in `point.RUN_SETTINGS`. Raises KeyError for another name."""
    declared = RUN_SETTINGS[name]
    return make_setting(name, declared.annotation, declared.default, declared.about.text)


def parameters(workload_class: type) -> tuple[PointSetting, ...]:
    """Return the parameters that a class declares: the keyword-only arguments of its `__init__`.

    And those of an unpacked TypedDict. UsageError if a name, type, default or `__init__` is wrong.
    """
    found = []
    with _one_line("the class of the workload"):
        for name, annotation, default in _declared(workload_class):
            where = f"{workload_class.__name__}.__init__: parameter {name}"
            if name in RESERVED:
                raise UsageError(f"{where} has a name that is raybench's own; choose another")
            if annotation is None:
                raise UsageError(f"{where} has no type; declare one, as in {name}: int = 1")
            try:
                description = FieldInfo.from_annotation(annotation).description or ""
                setting = make_setting(name, annotation, default, " ".join(description.split()))
            except (PydanticUserError, UsageError, TypeError) as error:
                raise UsageError(f"{where} must be an int, float, bool, str or Literal") from error
            if setting.default is not None and (rule := setting.complaint(setting.default)):
                raise UsageError(f"{where} has a default that is not allowed: {rule}")
            found.append(setting)
    return tuple(found)


def _declared(workload_class: type) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type with its notes, and default of each keyword-only argument of `__init__`.

    The type is None where none is given, the default PydanticUndefined where there is none; each
    member of an unpacked TypedDict is an argument. Raises UsageError where it takes more arguments
    by position than `context`, and for a type that cannot be read.
    """
    where = f"{workload_class.__name__}.__init__"
    init = inspect.unwrap(workload_class.__init__)  # type: ignore[misc]
    found = list(inspect.signature(init).parameters.values())
    positional = [
        one.name for one in found if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if len(positional) != 2:
        raise UsageError(
            f"{where} must be declared as __init__(self, context, *, parameters...), "
            f"given ({', '.join(positional)})"
        )
    named = [one for one in found if one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD)]
    # Only these: the type of `context` may be imported for type checkers alone.
    notes = {one.name: one.annotation for one in named if one.annotation is not one.empty}
    try:
        hints = typing.get_type_hints(
            SimpleNamespace(__annotations__=notes),
            globalns=getattr(init, "__globals__", {}),
            include_extras=True,
        )
    except Exception as error:
        # Annotations are the user's code too: an undefined name, a failing expression.
        raise UsageError(f"{where} has a type that cannot be read: {error}") from error
    for one in named:
        hint = hints.get(one.name)
        if one.kind is one.KEYWORD_ONLY:
            yield one.name, hint, PydanticUndefined if one.default is one.empty else one.default
            continue
        (options,) = typing.get_args(hint) or (None,)
        if not typing.is_typeddict(options):
            raise UsageError(
                f"{where}: **{one.name} must be declared as Unpack[...] of a TypedDict, "
                "as in **ddp: Unpack[raybench.DdpOptions]"
            )
        for option, of_option in typing.get_type_hints(options, include_extras=True).items():
            yield option, of_option, FieldInfo.from_annotation(of_option).default


def entries(workload_class: type, name: str, *attributes: str) -> list[Any]:
    """Return entries of class attribute `name` (tuple, list, one or none) with all `attributes`."""
    found = getattr(workload_class, name, ())
    listed = found if isinstance(found, tuple | list) else (found,)
    return [one for one in listed if all(hasattr(one, name) for name in attributes)]


def make_setting(
    name: str, annotation: Any, default: Any = None, description: str = ""
) -> PointSetting:
    """Return a setting of this type; it is required if the default is PydanticUndefined.

    That of grad_accumulation is a Size in any case. The default is not checked. Raises UsageError,
    TypeError or an error of pydantic for a type that is no scalar in JSON, as list, or has a format
    there, as Path. An Enum or a Decimal is taken, but then no value of a job file is valid.
    """
    config = ConfigDict(strict=True, allow_inf_nan=False)
    # The meaning of grad_accumulation is fixed by global_batch_size, so its range is too.
    kind = Size if name == "grad_accumulation" else annotation
    adapter: TypeAdapter[Any] = TypeAdapter(kind, config=config)
    words = _type_in_words(adapter.json_schema())
    if words is None:
        raise UsageError("not a scalar type")
    return PointSetting(
        name=name,
        type=words,
        default=None if default is PydanticUndefined else default,
        is_required=default is PydanticUndefined,
        description=description,
        adapter=adapter,
    )


def shares_work(workload_class: type) -> bool:
    """Return whether all ranks of a point finish the same items together (`shares_work`)."""
    return bool(getattr(workload_class, "shares_work", False))


def missing_packages(workload_class: type) -> dict[str, str]:
    """Return those `packages` of the workload that cannot be imported here; imports none."""
    packages: Mapping[str, str] = getattr(workload_class, "packages", {})
    return {name: cure for name, cure in packages.items() if find_spec(name) is None}


def ranks_per_item(workload_class: type, settings: Mapping[str, Scalar]) -> int:
    """Return how many ranks of a point finish the same items together; it may exceed world_size.

    All ranks if it `shares_work`, 1 if its method `ranks_per_item` is missing or returns None or 0.
    settings: world_size and the parameters. Raises UsageError when it raises or returns no number.
    """
    if shares_work(workload_class):
        return int(settings["world_size"])
    with _one_line("ranks_per_item() of the workload"):
        return int(_ask(workload_class, "ranks_per_item", settings) or 1)


def why_not(workload_class: type, settings: Mapping[str, Scalar]) -> str | None:
    """Return why the class refuses a point with these settings; None if it accepts it.

    settings: as `Point.settings`. A class refuses float8 unless it says `takes_float8`, and all but
    fp32 if it denies `takes_precision`; else its method `why_not` decides. UsageError if it raises.
    """
    precision, name = settings.get("precision", Precision.FP32), workload_class.__name__
    if precision != Precision.FP32 and not getattr(workload_class, "takes_precision", True):
        return f"precision {precision} means nothing to {name}; leave precision out"
    if precision == Precision.FLOAT8 and not getattr(workload_class, "takes_float8", False):
        return f"precision float8 is not for {name}; transformer takes it"
    return _ask(workload_class, "why_not", settings) or None


def _ask(workload_class: type, method: str, settings: Mapping[str, Scalar]) -> Any:
    """Return what an optional class method answers; None without it. Raises UsageError alone."""
    ask = getattr(workload_class, method, None)
    if ask is None:
        return None
    with _one_line(f"{method}() of the workload"):
        return ask(settings)


# Share of the device's memory that a point can use. The driver and NCCL take the rest, and some is
# lost to fragmentation.
USABLE = 0.93
# After a point ran out of memory that was estimated to fit, others must need a tenth less than its
# estimate, which was too low.
_LESS = 0.9
# Settings that need less memory, the cheapest in time first. A smaller batch is proposed beside.
_CHANGES: tuple[tuple[str, Scalar], ...] = (
    ("fused_optimizer", True),
    ("precision", "bf16"),
    ("gradient_as_bucket_view", True),
    ("dp_shard", -1),
    ("activation_checkpointing", "selective"),
    ("activation_checkpointing", "full"),
    ("optimizer_dtype", "bf16"),
)


def estimate(point: Point, **changes: Scalar) -> int | None:
    """Return the estimated device memory of a rank in bytes; None without an estimate.

    None too if the class refuses the point, if its method raises or returns no finite int or float.
    changes: values in place of the point's settings; no other setting follows.
    Raises as `load_workload`.
    """
    workload_class, settings = load_workload(point.workload), {**point.settings, **changes}
    try:
        if why_not(workload_class, settings) is not None:
            return None
        found = _ask(workload_class, "estimate_memory", settings)
    except UsageError:
        return None
    return round(found) if isinstance(found, int | float) and math.isfinite(found) else None


def explain_oom(point: Point, estimate_bytes: int, device_bytes: int) -> str:
    """Return a sentence with the estimate of a point that does not fit, and any that would fit.

    Proposed are the largest of the batch halved again and again, and the first other change, that
    by the estimate fit into 93 % of the device and 90 % of `estimate_bytes`. Raises UsageError as
    `load_workload` and `settings_of_class` do.
    """
    room_bytes = min(USABLE * device_bytes, _LESS * estimate_bytes)
    known, given = settings_of_class(load_workload(point.workload)), point.settings
    batch = int(given.get("batch_size", 1))
    batches = [("batch_size", batch >> halved) for halved in range(1, batch.bit_length())]
    changes = [
        (name, value)
        for name, value in _CHANGES
        if name in known and given.get(name) != value and known[name].complaint(value) is None
    ]
    fits = []
    for group in (batches, changes):
        for name, value in group:
            needed = estimate(point, **{name: value})
            if needed is not None and needed <= room_bytes:
                fits.append(f"{name} {setting_text(value)} ({short_gib(needed)} GiB)")
                break
    text = f"estimated {short_gib(estimate_bytes)} of {short_gib(device_bytes)} GiB"
    if not fits:
        return f"{text}; by the estimate no single setting makes it fit"
    return f"{text}; what fits by the estimate: {' or '.join(fits)}"


def short_gib(count: float) -> str:
    """Return bytes in GiB as text with at most three significant digits, without the unit."""
    return f"{float(f'{count / GIB:.3g}'):g}"  # 1230, and not 1.23e+03


_SCALAR_TYPES = ("integer", "number", "boolean", "string", "null")
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _type_in_words(schema: Mapping[str, Any]) -> str | None:
    """Return a JSON schema in words, as `integer >= 1`; None when the type is not a scalar."""
    if "anyOf" in schema:
        members = [_type_in_words(member) for member in schema["anyOf"]]
        return None if None in members else " | ".join(map(str, members))
    if "enum" in schema or "const" in schema:
        return " | ".join(repr(value) for value in schema.get("enum", [schema.get("const")]))
    # A format is that of what JSON has no type for: bytes, a path, a date.
    if "format" in schema or schema.get("type") not in _SCALAR_TYPES:
        return None
    # An upper bound that only keeps a number inside its column tells a reader nothing.
    bounds = [
        f"{sign} {schema[key]}"
        for key, sign in _BOUNDS.items()
        if abs(schema.get(key, MAX_SIZE)) < MAX_SIZE
    ]
    return " ".join([str(schema["type"]).replace("null", "none"), *bounds])
