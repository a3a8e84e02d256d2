"""How many iterations come next."""

import pytest

from raybench.measure.stopping import Progress, next_block


@pytest.mark.parametrize(
    ("done", "wanted", "step_s", "left_s", "expected", "why"),
    [
        (0, 50, 0.1, 20.0, 50, "all of them fit"),
        (0, 50, 1.0, 20.0, 20, "as many as fit the budget"),
        (20, 50, 1.0, 0.0, 0, "the budget is spent"),
        (50, 50, 0.1, 20.0, 0, "nothing is missing"),
        (0, 50, 30.0, 20.0, 1, "one iteration, however slow"),
        (0, 50, 30.0, -5.0, 1, "one iteration, even with nothing left"),
        (0, 50, None, 20.0, 1, "one iteration to learn the step time"),
        (10, 50, 0.1, 1.05, 10, "the rest of the budget"),
        (0, 0, None, 20.0, 0, "a phase of nothing"),
        (0, 5, 0.0, 1.0, 5, "a step too short for the clock"),
    ],
)
def test_the_next_block_is_what_is_missing_and_fits(done, wanted, step_s, left_s, expected, why):
    progress = Progress(done=done, wanted=wanted, step_s=step_s, left_s=left_s)
    assert next_block(progress) == expected, why
