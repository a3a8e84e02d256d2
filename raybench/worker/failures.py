"""How an error of a point becomes a `Failure`."""

from __future__ import annotations

import torch

from raybench.errors import (
    OUT_OF_MEMORY_PHRASES,
    UsageError,
    frames_of,
    last_user_frame,
    mentions,
    message_of,
    traceback_of,
)
from raybench.records.measurement import Failure
from raybench.records.status import Status
from raybench.records.task import RankInfo


def failure_of(error: BaseException, rank_info: RankInfo) -> Failure:
    """Describe the error in texts: an exception may not survive pickling, and it holds memory."""
    is_out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and mentions(error, *OUT_OF_MEMORY_PHRASES)
    )
    # If a module cannot be imported, the cause of the UsageError has the reason.
    cause = error.__cause__ if isinstance(error, UsageError) and error.__cause__ else error
    location = last_user_frame(frames_of(error)) or last_user_frame(frames_of(cause))
    return Failure(
        rank=rank_info.rank,
        status=Status.OOM if is_out_of_memory else Status.ERROR,
        error_type=type(cause).__name__,
        message=message_of(error) + (f", at {location}" if location else ""),
        detail=traceback_of(error),
        # A device error breaks the CUDA context, so the process is lost. If torch's allocator has
        # no memory left, the context is intact.
        worker_reusable=isinstance(error, torch.OutOfMemoryError)
        or not (isinstance(error, torch.AcceleratorError) or mentions(error, "CUDA error")),
    )
