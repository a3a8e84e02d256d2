"""Problems of an input file, and their messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

KeyPath = tuple[str | int, ...]
Position = tuple[int, int]  # line and column, both from 1

_SHOWN_CHARACTERS = 60
_LISTED_NAMES = 16

# Type of an error of pydantic -> clearer text.
_RULES = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping of keys to values",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be a list",
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
    "string_type": "must be a text",
    "tuple_type": "must be a list",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProblem:
    """One mistake in an input, at the key or the value of `path`."""

    message: str
    path: KeyPath = ()
    # Whether the key is wrong and not its value.
    at_key: bool = False
    # For problems that `path` cannot locate: a syntax error, a duplicate key.
    position: Position | None = None


def key_text(path: KeyPath) -> str:
    """Return a path as `matrix.batch_size[1]`; an unusual key is quoted."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += ("." if text else "") + (key if re.fullmatch(r"[\w-]+", key) else quote(key))
    return text


def quote(value: object) -> str:
    """Return any object as text for a message: one line of at most 60 characters."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        kind = "mapping" if isinstance(value, dict) else "list"
        return f"a {kind}" if value else f"an empty {kind}"
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def rule_of(error: ErrorDetails) -> str:
    """Return the message of a pydantic error, with the given value, without its path."""
    if error["type"] == "missing":
        return "required, but not given"
    if error["type"] == "too_short":
        return "must not be empty"
    rule = _RULES.get(error["type"])
    if rule is None:
        message = " ".join(error["msg"].split())
        rule = re.sub(r"^((Input|String|Value) should|Value error, must) ", "must ", message)
    # For a Literal, pydantic lists the allowed texts in quotes, as in "'fp32' or 'bf16'".
    expected = str(error.get("ctx", {}).get("expected", ""))
    allowed = re.findall(r"'([^']*)'", expected)
    given = error["input"]
    return f"{rule}, given {quote(given)}{did_you_mean(given, allowed)}"


def did_you_mean(given: object, valid: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the nearest valid name, or "" without one."""
    # Prefer a name that is a word of `given`, such as `seconds` for `min_seconds`.
    names = list(valid)
    words = str(given).split("_")
    similar = [name for name in names if name in words]
    similar = similar or difflib.get_close_matches(str(given), names, n=1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def say_unknown(noun: str, given: object, valid: Iterable[str]) -> str:
    """Return "unknown NOUN 'x'" with the nearest valid name, or else with 16 valid names."""
    names = list(valid)
    hint = did_you_mean(given, names)
    if not hint and names:
        more = ", ..." if len(names) > _LISTED_NAMES else ""
        hint = f"; known: {', '.join(names[:_LISTED_NAMES])}{more}"
    return f"unknown {noun} {quote(given)}{hint}"
