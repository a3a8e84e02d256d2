"""Jobs, their plans and their problems from the text of a `job.yaml`."""

import pytest

from raybench.errors import JobError
from raybench.job.loading import job_from_text
from raybench.job.model import Job
from raybench.job.plan import Plan, make_plan

HEAD = "version: 1\nname: test\n"
MLP = HEAD + "workload: {kind: mlp}\n"


def load(text: str, *overrides: str) -> Job:
    return job_from_text("job.yaml", text, overrides)


def plan(text: str, *overrides: str) -> Plan:
    return make_plan(load(text, *overrides))


def problems_of(text: str, *overrides: str) -> list[str]:
    """The lines of the error that loading and planning end with."""
    with pytest.raises(JobError) as caught:
        plan(text, *overrides)
    return str(caught.value).splitlines()


def places_of(text: str, *overrides: str) -> list[str]:
    """The key that each problem is said of."""
    return [line.split(": ")[1] for line in problems_of(text, *overrides)]
