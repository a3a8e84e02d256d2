"""Texts of a job in which `{name}` stands for a setting of the point; `{{` is a brace. Pure."""

from __future__ import annotations

import math
import re
import shlex
import string
from collections.abc import Mapping

from raybench.job.point import Scalar, setting_text

_NAME = re.compile(r"[A-Za-z_]\w*")
_BRACES = "a text names a setting as in {batch_size}; write {{ and }} for braces themselves"


def names_in(text: str) -> list[str]:
    """List the settings that a text names, in their order. Raises ValueError with the rule."""
    try:
        fields = [field for _, *field in string.Formatter().parse(text) if field[0] is not None]
    except ValueError:
        raise ValueError(_BRACES) from None
    for name, format_spec, conversion in fields:
        if not _NAME.fullmatch(name or "") or format_spec or conversion:
            raise ValueError(_BRACES)
    return list(dict.fromkeys(str(name) for name, *_ in fields))


def render(text: str, settings: Mapping[str, Scalar]) -> str:
    """Put the settings in their places, as a command line has them: `true` for True."""
    return text.format_map({name: setting_text(value) for name, value in settings.items()})


def split_arguments(text: str) -> list[str]:
    """Split a command line as a shell does. Raises ValueError with the rule."""
    try:
        return shlex.split(text)
    except ValueError:
        raise ValueError("a quote is not closed") from None


def product_of(text: str) -> int | None:
    """Multiply the whole numbers of a text; None for an empty one. Raises ValueError."""
    if not text.strip():
        return None
    factors = [factor.strip() for factor in text.split("*")]
    if not all(factor.isdecimal() for factor in factors):
        raise ValueError("must be a whole number, or a product of them, as in 64 * 8")
    return math.prod(map(int, factors))
