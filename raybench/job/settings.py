"""Which settings a point of a workload has, with their types, defaults and checks."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from raybench.errors import UsageError, brief
from raybench.job.point import BATCH_SIZES, MAX_SIZE, RUN_SETTINGS, UNEVEN, Scalar, Size
from raybench.job.problems import rule_of
from raybench.job.registry import usage_errors

# Parameters must not have these names: job files, filters or tables use them.
RESERVED = frozenset({*RUN_SETTINGS, "kind", "scaling", "workload", "rank", "context"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PointSetting:
    """One setting of a point: a parameter of its workload, or world_size, precision, ..."""

    name: str
    # Such as "integer >= 1".
    type: str
    # None: without a value in the job, the point lacks the setting.
    default: Scalar | None
    is_required: bool
    description: str
    adapter: TypeAdapter[Any]

    def complaint(self, value: object) -> str | None:
        """Return a one-line validation error that quotes `value`; None if `value` is valid."""
        try:
            accepted = self.adapter.validate_python(value)
        except ValidationError as error:
            violations = error.errors(include_url=False)
            # A union gives a violation for each member. For a text, report the Literal, whose
            # message lists the valid texts.
            if isinstance(value, str):
                literals = [entry for entry in violations if entry["type"] == "literal_error"]
                violations = literals or violations
            return rule_of(violations[0])
        except (Exception, SystemExit) as error:
            # A validator of the user may raise anything.
            return f"cannot be checked: {brief(error)}"
        if accepted is not None and not isinstance(accepted, Scalar):
            # Pydantic may have made a Decimal or a Path, which no table can hold.
            return f"becomes a {type(accepted).__name__}, which is no int, float, bool or str"
        return None

    def accept(self, value: object) -> Scalar:
        """Convert a valid value to the declared type, such as 1 to 1.0."""
        accepted: Scalar = self.adapter.validate_python(value)
        return accepted


def settings_of_class(workload_class: type) -> dict[str, PointSetting]:
    """Return name -> setting of a workload: `RUN_SETTINGS` that apply, then its parameters.

    Raises:
        UsageError: the class declares a parameter wrongly.
    """
    not_applicable: list[str] = []
    if not getattr(workload_class, "takes_batch_size", True):
        not_applicable += BATCH_SIZES
    if not getattr(workload_class, "weighs_loss", False):
        # Unequal shares need a loss that is weighted by the samples of each rank.
        not_applicable += UNEVEN
    run_settings = [run_setting(name) for name in RUN_SETTINGS if name not in not_applicable]
    return {
        setting.name: setting for setting in (*run_settings, *parameters_of_class(workload_class))
    }


def run_setting(name: str) -> PointSetting:
    """Return the setting `name` of `RUN_SETTINGS`, which every workload shares."""
    declared = RUN_SETTINGS[name]
    return make_setting(name, declared.annotation, declared.default, declared.about.text)


def parameters_of_class(workload_class: type) -> tuple[PointSetting, ...]:
    """Return the parameters of a class: keyword-only arguments of `__init__`, unpacked TypedDicts.

    Raises:
        UsageError: a name, type or default is wrong, or `__init__` takes other positional arguments
            than `context`.
    """
    settings = []
    with usage_errors("the class of the workload"):
        for name, annotation, default in _declared_parameters(workload_class):
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
            settings.append(setting)
    return tuple(settings)


def _declared_parameters(workload_class: type) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, annotation or None, default or PydanticUndefined) of each parameter."""
    where = f"{workload_class.__name__}.__init__"
    init = inspect.unwrap(workload_class.__init__)  # type: ignore[misc]
    arguments = list(inspect.signature(init).parameters.values())
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [argument.name for argument in arguments if argument.kind in by_position]
    if len(positional) != 2:  # self and context
        raise UsageError(
            f"{where} must be declared as __init__(self, context, *, parameters...), "
            f"given ({', '.join(positional)})"
        )
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    # `context` is left out: its type may be imported for type checkers only.
    keyword_arguments = [argument for argument in arguments if argument.kind in by_name]
    try:
        hints = _type_hints(keyword_arguments, getattr(init, "__globals__", {}))
    except Exception as error:
        # An annotation is code of the user, which may raise anything.
        raise UsageError(f"{where} has a type that cannot be read: {error}") from error
    for argument in keyword_arguments:
        hint = hints.get(argument.name)
        if argument.kind is argument.KEYWORD_ONLY:
            has_default = argument.default is not argument.empty
            yield argument.name, hint, argument.default if has_default else PydanticUndefined
            continue
        # The type of **ddp is Unpack[DdpOptions]; its argument is the TypedDict.
        (options,) = typing.get_args(hint) or (None,)
        if not typing.is_typeddict(options):
            raise UsageError(
                f"{where}: **{argument.name} must be declared as Unpack[...] of a TypedDict, "
                "as in **ddp: Unpack[raybench.DdpOptions]"
            )
        for name, annotation in typing.get_type_hints(options, include_extras=True).items():
            yield name, annotation, FieldInfo.from_annotation(annotation).default


def _type_hints(
    arguments: Sequence[inspect.Parameter], module_globals: dict[str, Any]
) -> dict[str, Any]:
    """Return name -> type of the annotated arguments; evaluates annotations that are texts."""
    annotations = {}
    for argument in arguments:
        if argument.annotation is not argument.empty:
            annotations[argument.name] = argument.annotation
    # get_type_hints needs an object with annotations.
    holder = SimpleNamespace(__annotations__=annotations)
    return typing.get_type_hints(holder, globalns=module_globals, include_extras=True)


def make_setting(
    name: str, annotation: Any, default: Any = None, description: str = ""
) -> PointSetting:
    """Return a setting of the annotated type.

    Args:
        default: not validated; PydanticUndefined makes the setting required.

    Raises:
        UsageError, TypeError, PydanticUserError: the type is not int, float, bool, str or Literal.
    """
    config = ConfigDict(strict=True, allow_inf_nan=False)
    # raybench computes with grad_accumulation, so a workload cannot declare another type.
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


_SCALAR_TYPES = ("integer", "number", "boolean", "string", "null")
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _type_in_words(schema: Mapping[str, Any]) -> str | None:
    """Return a JSON schema as text, such as `integer >= 1`; None if the type is not a scalar."""
    if "anyOf" in schema:
        members = [_type_in_words(member) for member in schema["anyOf"]]
        return None if None in members else " | ".join(map(str, members))
    if "enum" in schema or "const" in schema:
        return " | ".join(repr(value) for value in schema.get("enum", [schema.get("const")]))
    # JSON schema describes bytes, paths and dates as strings with a format.
    if "format" in schema or schema.get("type") not in _SCALAR_TYPES:
        return None
    # Omit MAX_SIZE, which only makes numbers fit into the tables.
    bounds = [
        f"{sign} {schema[key]}"
        for key, sign in _BOUNDS.items()
        if abs(schema.get(key, MAX_SIZE)) < MAX_SIZE
    ]
    return " ".join([str(schema["type"]).replace("null", "none"), *bounds])
