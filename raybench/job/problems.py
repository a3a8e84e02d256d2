"""Problems of an input file, and their messages: the place, the rule, the value given."""

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

# pydantic's words for a rule -> ours; what is not here is clear enough as it stands.
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
    """One mistake in an input: at the key of `path` where `at_key`, else at its value.

    position: where in the text, when `path` cannot tell (a syntax error, a second key).
    """

    message: str
    path: KeyPath = ()
    at_key: bool = False
    position: Position | None = None


def key_text(path: KeyPath) -> str:
    """Return a path as `matrix.batch_size[1]` (from 0), "" for (); a key such as a.b is quoted."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += ("." if text else "") + (key if re.fullmatch(r"[\w-]+", key) else quote(key))
    return text


def quote(value: object) -> str:
    """Return any object for a message: on one line, in at most 60 characters, as `'bf17'`.

    A bool is `true` or `false`. A dict, a list, and an object whose repr raises, as an integer of
    too many digits, are told by their kind: `a list`.
    """
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
    """Return a pydantic error without its path: the rule, mostly the value, any near word."""
    if error["type"] == "missing":
        return "required, but not given"
    if error["type"] == "too_short":
        return "must not be empty"
    rule = _RULES.get(error["type"])
    if rule is None:
        told = " ".join(error["msg"].split())
        rule = re.sub(r"^((Input|String|Value) should|Value error, must) ", "must ", told)
    allowed = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
    given = error["input"]
    return f"{rule}, given {quote(given)}{did_you_mean(given, allowed)}"


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the name nearest to `given`, or "". The case counts.

    A name that is a word of `given`, as `seconds` of `min_seconds`, is the nearest.
    """
    names = list(known)
    words = str(given).split("_")
    near = [name for name in names if name in words]
    near = near or difflib.get_close_matches(str(given), names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def say_unknown(what: str, given: object, known: Iterable[str]) -> str:
    """Return `unknown axis 'x'` (what: axis) and the nearest known name, else the first 16."""
    names = list(known)
    hint = did_you_mean(given, names)
    if not hint and names:
        more = ", ..." if len(names) > _LISTED_NAMES else ""
        hint = f"; known: {', '.join(names[:_LISTED_NAMES])}{more}"
    return f"unknown {what} {quote(given)}{hint}"
