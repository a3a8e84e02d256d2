"""Which points of a plan an expression such as `world_size > 1 and precision == 'bf16'` keeps."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence

from simpleeval import EvalWithCompoundTypes, NameNotDefined  # type: ignore[import-untyped]

from raybench.errors import UsageError
from raybench.job.point import Point
from raybench.job.problems import quote, say_unknown

_EXAMPLE = "world_size > 1 and precision == 'bf16'"


def select_points(
    points: Sequence[Point], expression: str, option: str = "--filter"
) -> tuple[Point, ...]:
    """Return the points for which `expression`, given with `option`, is true, in their order.

    Its names are the settings of a point. Raises UsageError when it cannot be evaluated, is
    neither true nor false for a point, or keeps no point.
    """
    label = f"{option} {expression if expression.isprintable() else quote(expression)}"
    try:
        with warnings.catch_warnings():
            # What Python remarks on, as the escape in '\d', would be printed.
            warnings.simplefilter("ignore")
            # Not by simpleeval, which takes statements such as `world_size = 2` and ignores them.
            tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # MemoryError is what Python says to parentheses nested too deep.
        reason = getattr(error, "msg", None) or " ".join(str(error).split())
        message = f"{label}: not an expression: {reason}; write it as in {_EXAMPLE}"
        raise UsageError(message) from error
    evaluator = EvalWithCompoundTypes(functions={})
    kept = []
    for point in points:
        evaluator.names = point.settings
        try:
            answer = evaluator.eval(expression, previously_parsed=tree)
        except NameNotDefined as error:
            raise UsageError(f"{label}: {_explain_name(error.name, points)}") from error
        except Exception as error:
            # The expression is the user's, and so is whatever Python says to it.
            reason = " ".join(str(error).split())
            raise UsageError(f"{label}: {type(error).__name__}: {reason}") from error
        if not isinstance(answer, bool):
            raise UsageError(f"{label}: must be true or false, gives {quote(answer)}")
        if answer:
            kept.append(point)
    if not kept:
        raise UsageError(f"{label}: keeps none of the {len(points)} points")
    return tuple(kept)


def _explain_name(name: str, points: Sequence[Point]) -> str:
    """Return what is wrong with a name that is no setting: most often a text lacks its quotes."""
    for point in points:
        for setting, value in point.settings.items():
            if value == name:
                quoted = f"{setting} == {name!r}"
                return f"{name} is a value of {setting}, and a text needs quotes: {quoted}"
    return say_unknown("setting", name, points[0].settings) + f"; a text needs quotes: {name!r}"
