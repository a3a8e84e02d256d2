"""Which points of a plan an expression such as `world_size > 1 and precision == 'bf16'` keeps."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from simpleeval import (  # type: ignore[import-untyped]
    EvalWithCompoundTypes,
    InvalidExpression,
    NameNotDefined,
)

from raybench.errors import UsageError
from raybench.messages import shown, unknown
from raybench.point import Point

# Comparisons and arithmetic only: nothing in a filter can call or reach into anything.
_REFUSED = (
    *(ast.Attribute, ast.Call, ast.DictComp, ast.GeneratorExp, ast.ListComp),
    # A width in a format, as in f"{1:1000000000}", takes as much memory.
    *(ast.JoinedStr, ast.FormattedValue),
)
_MAX_CHARACTERS = 1000
_MAX_BITS = 4096


def select_points(
    points: Sequence[Point], expression: str, option: str = "--filter"
) -> tuple[Point, ...]:
    """The points for which `expression`, given with `option`, is true, in their order.

    Its names are the settings of a point. Raises UsageError when it cannot be evaluated, is
    neither true nor false for a point, or keeps no point.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise UsageError(f"{option}: at most {_MAX_CHARACTERS} characters")
    label = f"{option} {expression if expression.isprintable() else shown(expression)}"
    evaluator = EvalWithCompoundTypes(functions={})
    for node in _REFUSED:
        evaluator.nodes.pop(node, None)
    evaluator.operators.update({ast.Mod: _remainder, ast.Pow: _power})
    tree = _parsed(expression, label)
    kept = tuple(point for point in points if _holds(evaluator, tree, point, label))
    if not kept:
        raise UsageError(f"{label}: keeps none of the {len(points)} points")
    return kept


def _remainder(left: float, right: float) -> float:
    """simpleeval's would also format text: `'%1000000000d' % 1`."""
    if isinstance(left, str | bytes):
        raise TypeError("% is for numbers only")
    return left % right


def _power(base: float, exponent: float) -> float:
    """simpleeval's lets powers grow until each takes a second."""
    bits = base.bit_length() if isinstance(base, int) else 1
    if abs(exponent) * bits > _MAX_BITS:
        raise ValueError(f"the power is too large: at most {_MAX_BITS} bits")
    result: float = base**exponent
    return result


def _parsed(expression: str, label: str) -> ast.expr:
    try:
        # Not by simpleeval, which takes statements such as `world_size = 2` and ignores them.
        return ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # MemoryError is what Python says to parentheses nested too deep.
        reason = getattr(error, "msg", None) or " ".join(str(error).split())
        example = "world_size > 1 and precision == 'bf16'"
        message = f"{label}: not an expression: {reason}; write it as in {example}"
        raise UsageError(message) from error


def _holds(evaluator: EvalWithCompoundTypes, tree: ast.expr, point: Point, label: str) -> bool:
    evaluator.names = point.settings
    try:
        answer = evaluator.eval("", previously_parsed=tree)
    except NameNotDefined as error:
        message = unknown("setting", error.name, point.settings)
        raise UsageError(f"{label}: {message}") from error
    except (InvalidExpression, ArithmeticError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{label}: {' '.join(str(error).split())}") from error
    if not isinstance(answer, bool):
        raise UsageError(f"{label}: must be true or false, gives {shown(answer)}")
    return answer
