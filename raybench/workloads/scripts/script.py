"""The workload `script`: a training script as one gives it to torchrun, not changed in anything."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from raybench.errors import UsageError
from raybench.workloads.base import Context, Workload


class Script(Workload):
    """Runs a training script, unchanged, as torchrun does.

    Each rank is a process of its own below its worker, which is ended when enough is measured. An
    iteration ends where the step of an optimizer of torch.optim returns.
    """

    # Parameters in whose texts {name} stands for a setting of the point, which any axis may give.
    templates: ClassVar[tuple[str, ...]] = ("args", "items_per_step")
    # Only where the job gives one.
    needs_batch_size: ClassVar[bool] = False

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
        self._run(context)

    def step(self) -> None:
        """Raise UsageError: the script runs in a process of its own."""
        self._run()

    @staticmethod
    def _run(*_: Any) -> None:
        raise UsageError("a script runs as the workload of a point only, not in this process")
