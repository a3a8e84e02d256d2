"""What the actors of a point answer: each on its own, and never later than the deadline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click
import ray

from raybench.cluster.ray_connection import first_line
from raybench.records import Answer, Failure, Status

# After the first failure of a point the other ranks are stuck, or answer at once.
_GRACE_S = 1.0


def gather(refs: Sequence[Any], timeout_s: float) -> tuple[Answer, ...]:
    """One answer per ref, in order, none later than the deadline.

    `ray.get` of all of them would show one failure and hide the others.
    """
    deadline_s = time.monotonic() + timeout_s
    waiting = {ref: rank for rank, ref in enumerate(refs)}
    answers: dict[int, Answer] = {}
    failed: int | None = None
    while waiting:
        left_s = max(0.0, deadline_s - time.monotonic())
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=left_s)
        if not ready:
            answers.update(
                {rank: _unanswered(rank, failed, timeout_s) for rank in waiting.values()}
            )
            break
        rank = waiting.pop(ready[0])
        answers[rank] = _answer(ready[0], rank)
        if failed is None and isinstance(answers[rank], Failure):
            failed = rank
            deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
    return tuple(answers[rank] for rank in range(len(refs)))


def all_done(refs: Sequence[Any], timeout_s: float) -> bool:
    """Whether all of them ended in time, and without an error."""
    done, late = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    try:
        ray.get(done)
    except ray.exceptions.RayError:
        return False
    return not late


def _answer(ref: Any, rank: int) -> Answer:
    try:
        answer: Answer = ray.get(ref)
    except ray.exceptions.RayActorError as error:
        message = f"the worker process died: {_cause_of_death(error)}"
        return Failure(rank=rank, status=Status.LOST, error_type="WorkerDied", message=message)
    except ray.exceptions.RayError as error:
        return Failure(
            rank=rank,
            status=Status.ERROR,
            error_type=type(error).__name__,
            # Ray colours what it says for a terminal.
            message=click.unstyle(first_line(error)),
            detail=click.unstyle(str(error)),
        )
    return answer


def _unanswered(rank: int, failed: int | None, timeout_s: float) -> Failure:
    if failed is None:
        return Failure(
            rank=rank,
            status=Status.TIMEOUT,
            error_type="Timeout",
            message=f"no answer within measure.timeout_s = {timeout_s:g} s",
        )
    return Failure(
        rank=rank, status=Status.LOST, error_type="PeerFailed", message=f"rank {failed} failed"
    )


def _cause_of_death(error: Exception) -> str:
    """Ray's reason, from the sentence in which it gives one."""
    text = str(error)
    for mark in ("Worker exit detail:", "The actor died because", "The actor is dead because"):
        if mark in text:
            reason = text.split(mark, 1)[1].strip().splitlines()[0]
            return reason.split(" Some common causes", 1)[0]
    return first_line(error)
