"""Which points an expression keeps."""

import pytest
from builders import make_point

from raybench.errors import UsageError
from raybench.job.plan import select_points
from raybench.job.point import Precision

POINTS = [
    make_point(
        params={"hidden": 8, "optimizer": "adam"},
        world_size=ranks,
        precision=precision,
        batch_size=4,
    )
    for ranks in (1, 2, 4)
    for precision in (Precision.FP32, Precision.BF16)
]


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
def test_it_keeps_the_points_for_which_it_is_true_in_their_order(expression, kept):
    assert select_points(POINTS, expression) == tuple(POINTS[index] for index in kept)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("world_size > 8", "keeps none of the 6 points"),
        ("world_sise > 1", "unknown setting 'world_sise'; did you mean 'world_size'?"),
        ("world_size", "must be true or false, gives 1"),
        ("world_size >", "not an expression"),
        ("world_size = 2", "as in world_size > 1 and precision == 'bf16'"),
        ("(" * 400 + "1" + ")" * 400, "not an expression"),
        ("world_size > 'x'", "not supported between"),
        ("world_size / 0 > 1", "division"),
        ("9 ** 9 ** 9 > 1", "Sorry"),
        ("len(precision) > 1", "Function 'len' not defined"),
        ("precision.__class__ == 1", "__class__"),
        ("optimizer[9] == 'a'", "index out of range"),
        ("-" * 900 + "1 > 1", "RecursionError"),
        ("precision == bf16", "a text needs quotes: precision == 'bf16'"),
        ("precision == fp64", "; a text needs quotes: 'fp64'"),
        ("world_size >\n", "--filter 'world_size >\\n': not an expression"),
    ],
)
def test_an_expression_that_cannot_select_is_one_line(expression, message):
    with pytest.raises(UsageError) as caught:
        select_points(POINTS, expression)
    text = str(caught.value)
    assert text.startswith("--filter")
    assert message in text
    assert "\n" not in text
