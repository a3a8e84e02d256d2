"""The workload `script`: an unchanged training script, run as torchrun runs it.

* `Script` declares the parameters. `raybench plan` loads this module, without torch.
* `running` starts the process of the script below its worker and steers it.
* `child` is the program of this process.

`raybench.measure.scripts` times the steps and their parts.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raybench.errors import UsageError
from raybench.workloads.base import Context, Workload

_NOT_HERE = "a script runs as the workload of a point only, not in this process"


class Script(Workload):
    """Runs a training script, unchanged, as torchrun does.

    Each rank is a child process of its worker, which ends the process when enough steps are timed.
    An iteration ends where the step of an optimizer of torch.optim returns.
    """

    templates = ("args", "items_per_step")
    needs_batch_size = False

    def __init__(
        self,
        context: Context,
        *,
        path: Annotated[
            str,
            Field(
                min_length=1,
                description="The file, from the current directory or that of the job file.",
            ),
        ],
        args: Annotated[
            str, Field(description="Its arguments; {batch_size} stands for that setting.")
        ] = "",
        items_per_step: Annotated[
            str,
            Field(
                description="Samples of an iteration on one rank, as in {batch_size} or "
                "{batch_size} * 8. Without it there is no throughput."
            ),
        ] = "",
        step_of: Annotated[
            str,
            Field(
                description="Class of the optimizer whose step ends an iteration; by default the "
                "last one to make its first step."
            ),
        ] = "",
    ) -> None:
        # This class only declares the parameters; `running` starts the process of the script.
        raise UsageError(_NOT_HERE)

    def step(self) -> None:
        """Raise UsageError: the script runs in a process of its own."""
        raise UsageError(_NOT_HERE)
