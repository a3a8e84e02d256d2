"""`raybench predict` on the committed runs."""

import pytest
from commands import EXAMPLES

RUN = "ddp_scaling-20261122-142621-6209"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((RUN, "--world-size", "4"), "must be more than the 4 that"),
        ((RUN, "--world-size", "8,64"), "4 devices on 1 node of 4; 64 devices need several nodes"),
        ((RUN, "--world-size", "8,x"), "must be numbers from 2"),
        (("collectives", "--world-size", "8"), "no step of DistributedDataParallel"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_one_line(command, arguments, why):
    assert why in command("predict", *arguments, results=EXAMPLES).refusal
