"""Which points an expression keeps."""

from __future__ import annotations

import pytest

from raybench.errors import UsageError
from raybench.point import Point, Precision
from raybench.select import select_points


def make_point(world_size: int, precision: Precision) -> Point:
    return Point(
        workload="mlp",
        params={"hidden": 8, "optimizer": "adam"},
        world_size=world_size,
        precision=precision,
        batch_size=4,
        global_batch_size=4 * world_size,
        scaling="weak",
    )


POINTS = [make_point(n, p) for n in (1, 2, 4) for p in (Precision.FP32, Precision.BF16)]


@pytest.mark.parametrize(
    ("expression", "kept"),
    [
        ("world_size == 2", [2, 3]),
        ("world_size > 1 and precision == 'bf16'", [3, 5]),
        ("precision in ['fp16', 'bf16']", [1, 3, 5]),
        ("not world_size in (1, 2)", [4, 5]),
        ("global_batch_size >= 2 * batch_size", [2, 3, 4, 5]),
        ("scaling == 'weak' and optimizer != 'sgd' and hidden == 8", [0, 1, 2, 3, 4, 5]),
        ("not cuda_graph", [0, 1, 2, 3, 4, 5]),
        ("True", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_it_keeps_the_points_for_which_it_is_true_in_their_order(
    expression: str, kept: list[int]
) -> None:
    assert select_points(POINTS, expression) == tuple(POINTS[index] for index in kept)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("world_size > 8", "keeps none of the 6 points"),
        ("world_sise > 1", "unknown setting 'world_sise'; did you mean 'world_size'?"),
        ("world_size", "must be true or false, gives 1"),
        ("world_size >", "not an expression"),
        ("", "not an expression"),
        ("world_size = 2", "as in world_size > 1 and precision == 'bf16'"),
        ("(" * 400 + "1" + ")" * 400, "not an expression"),
        ("world_size > 'x'", "not supported between"),
        ("world_size / 0 > 1", "division"),
        ("9 ** 9 ** 9 > 1", "the power is too large"),
        ("((9 ** 600) ** 600) ** 600 > 1", "the power is too large"),
        ("1 << 10 ** 9 > 1", "Sorry"),
        ("'%1000000000d' % 1 == ''", "% is for numbers only"),
        ("f'{1:1000000000}' == ''", "JoinedStr"),
        ("('x' * 99999) * 99999 == 'x'", "Sorry"),
        ("'x' * 10000000 == 'x'", "Sorry"),
        ("len(precision) > 1", "Call"),
        ("precision.upper() == 'X'", "Call"),
        ("precision.__class__ == 1", "Attribute"),
        ("[x for x in (1, 2)] == 1", "ListComp"),
        ("str(1) == '1'", "Call"),
        ("world_size >\n", "--filter 'world_size >\\n': not an expression"),
        ("x" * 1001, "at most 1000 characters"),
    ],
)
def test_an_expression_that_cannot_select_is_one_line(expression: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        select_points(POINTS, expression)
    text = str(caught.value)
    assert text.startswith("--filter")
    assert message in text
    assert "\n" not in text
