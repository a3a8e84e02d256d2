"""Which points of a plan an expression such as `world_size > 1 and precision == 'bf16'` keeps."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Sequence

from simpleeval import EvalWithCompoundTypes, NameNotDefined  # type: ignore[import-untyped]

from raybench.errors import UsageError
from raybench.job.point import Point
from raybench.job.problems import quote, say_unknown

_EXAMPLE = "world_size > 1 and precision == 'bf16'"
_CONTAINERS = (ast.List, ast.Tuple, ast.Set)
# All that an expression may be made of: nothing in it can call, reach into or build anything.
_ALLOWED = (
    *(ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.IfExp, ast.Constant, ast.Name),
    *(ast.Subscript, ast.Slice, *_CONTAINERS),
    *(ast.boolop, ast.unaryop, ast.cmpop, ast.expr_context),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
)
_NAMES_OF_NODES = {
    ast.Attribute: "an attribute",
    ast.Call: "a call",
    ast.Dict: "a mapping",
    ast.FormattedValue: "a formatted text",
    ast.JoinedStr: "a formatted text",
    ast.GeneratorExp: "a comprehension",
    ast.Lambda: "a function",
    ast.ListComp: "a comprehension",
}
_MAX_CHARACTERS = 1000


def select_points(
    points: Sequence[Point], expression: str, option: str = "--filter"
) -> tuple[Point, ...]:
    """Select the points for which `expression`, given with `option`, is true, in their order.

    Its names are the settings of a point. Raises UsageError when it cannot be evaluated, is
    neither true nor false for a point, or keeps no point.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise UsageError(f"{option}: at most {_MAX_CHARACTERS} characters")
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
    if complaint := _complaint(tree):
        raise UsageError(f"{label}: {complaint}")
    evaluator = EvalWithCompoundTypes(functions={})
    kept = []
    for point in points:
        try:
            if _holds(evaluator, tree, point):
                kept.append(point)
        except NameNotDefined as error:
            raise UsageError(f"{label}: {_name_problem(error.name, point, points)}") from error
        except Exception as error:
            # The expression is the user's, and so is whatever Python says to it.
            raise UsageError(f"{label}: {_reason(error)}") from error
    if not kept:
        raise UsageError(f"{label}: keeps none of the {len(points)} points")
    return tuple(kept)


def _complaint(tree: ast.expr) -> str | None:
    """Return what the expression may not be made of; None where it can be evaluated."""
    for node in ast.walk(tree):
        inside = ast.iter_child_nodes(node) if isinstance(node, _CONTAINERS) else ()
        if any(isinstance(child, _CONTAINERS) for child in inside):
            return "a list cannot hold lists"
        if not isinstance(node, _ALLOWED):
            what = _NAMES_OF_NODES.get(type(node), f"{type(node).__name__}")
            return f"{what} is not allowed; compare settings, as in {_EXAMPLE}"
        # Else a text could be formatted, or a list repeated, to gigabytes.
        if isinstance(node, ast.BinOp) and not (_is_number(node.left) and _is_number(node.right)):
            return "arithmetic is for numbers only"
    return None


def _is_number(operand: ast.expr) -> bool:
    """Return False for a list and for a text; a setting may be a number."""
    is_text = isinstance(operand, ast.Constant) and isinstance(operand.value, str)
    return not (is_text or isinstance(operand, _CONTAINERS))


def _holds(evaluator: EvalWithCompoundTypes, tree: ast.expr, point: Point) -> bool:
    evaluator.names = point.settings
    answer = evaluator.eval("", previously_parsed=tree)
    if not isinstance(answer, bool):
        raise TypeError(f"must be true or false, gives {quote(answer)}")
    return answer


def _name_problem(name: str, point: Point, points: Iterable[Point]) -> str:
    """Most often a text without its quotes: `precision == bf16`."""
    for other in points:
        for setting, value in other.settings.items():
            if value == name:
                quoted = f"{setting} == {name!r}"
                return f"{name} is a value of {setting}, and a text needs quotes: {quoted}"
    return say_unknown("setting", name, point.settings) + f"; a text needs quotes: {name!r}"


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, KeyError | RecursionError) or not text:
        return f"{type(error).__name__}: {text}".removesuffix(": ")
    return text
