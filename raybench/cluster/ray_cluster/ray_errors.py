"""What one actor of a point answers, and what Ray says of one that cannot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click
import ray

from raybench.records import Answer, Cause, Device, Failure, Status, failure_text

_EXIT_CODE = re.compile(r"exit code (-?\d+)\.(?: The process receives a (SIG[A-Z]+))?")
_NODE_DEATHS = ("its node has died", "node was terminated", "NodeDiedError", "node is dead")


def answer_of(ref: Any, rank: int, device: Device) -> Answer:
    """Return what the rank answered. It must be there: this does not wait."""
    try:
        answer: Answer = ray.get(ref)
    except ray.exceptions.OutOfMemoryError as error:
        return _out_of_host_memory(rank, device, str(error))
    except (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError) as error:
        return _death(rank, device, click.unstyle(str(error)))
    except ray.exceptions.RayError as error:
        # What the worker raised, where it was that: Ray's own text begins with the actor's name.
        cause = getattr(error, "cause", None) or error
        return Failure(
            rank=rank,
            status=Status.ERROR,
            error_type=failure_text.type_of(cause),
            # Ray colours what it says for a terminal.
            message=click.unstyle(failure_text.message_of(cause)),
            detail=click.unstyle(failure_text.traceback_of(error)),
        )
    return answer


def node_lost(rank: int, device: Device) -> Failure:
    """Of a rank whose node is gone, frozen or cut off."""
    message = f"node {device.host} does not answer"
    return Failure.of(Cause.NODE_LOST, rank=rank, message=message)


def cause_of_death(told: str) -> str:
    """Tell how a process ended, in a phrase, from Ray's words."""
    if found := _EXIT_CODE.search(told):
        code, signal = found.groups()
        return f"died by {signal}" if signal else f"ended with exit code {code}"
    if "connection error code 2" in told:
        return (
            "ended without a word: by os._exit, or by a signal as SIGKILL, which the kernel sends "
            "out of memory"
        )
    for mark in ("Worker exit detail:", "The actor died because", "The actor is dead because"):
        if mark in told:
            reason = told.split(mark, 1)[1].strip().splitlines()[0]
            return f"died: {reason.split(' Some common causes', 1)[0]}"
    return f"died: {told.strip().splitlines()[0]}"


def why_no_start(error: Exception) -> str:
    """Why there is no worker, in a line for the user, from what Ray raised."""
    text = str(error).strip()
    node = re.search(r"\bip=([^,)]+)", text)
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = f"{type(error.cause).__name__}: {_first_line(error.cause)}"
    elif "creation task" in text:
        # What a constructor raised stands last, below Ray's own traceback.
        cause = text.splitlines()[-1].strip()
    elif was_killed(error):
        cause = f"its process {cause_of_death(text)}"
    else:
        cause = _first_line(error)
    hint = "; install the same packages on every node" if "ModuleNotFoundError" in cause else ""
    return f"a worker could not start{f' on {node[1]}' if node else ''}: {cause}{hint}"


def was_killed(error: Exception) -> bool:
    """Whether the process of a worker that was starting died of something outside of it."""
    is_death = isinstance(error, ray.exceptions.RayActorError)
    return is_death and "creation task" not in str(error)


def all_done(refs: Sequence[Any], timeout_s: float) -> bool:
    """Whether all of them ended in time, and without an error."""
    done, late = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    try:
        ray.get(done)
    except ray.exceptions.RayError:
        return False
    return not late


def _death(rank: int, device: Device, told: str) -> Failure:
    if "memory" in told and ("running low on memory" in told or "memory monitor" in told):
        return _out_of_host_memory(rank, device, told)
    if any(words in told for words in _NODE_DEATHS):
        return node_lost(rank, device)
    return Failure.of(
        Cause.WORKER_DIED,
        rank=rank,
        message=f"the worker process {cause_of_death(told)}",
        detail=failure_text.shorten_start(told, failure_text.DETAIL_CHARACTERS),
    )


def _out_of_host_memory(rank: int, device: Device, told: str) -> Failure:
    return Failure.of(
        Cause.HOST_OUT_OF_MEMORY,
        rank=rank,
        message=f"Ray's memory monitor killed the worker: {device.host} has run out of memory",
        detail=failure_text.shorten_start(told, failure_text.DETAIL_CHARACTERS),
    )


def _first_line(error: BaseException) -> str:
    """Return what an error says, without the pages that follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
