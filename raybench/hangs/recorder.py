"""Parses torch's flight recorder: the collectives that a rank has entered, and how far each is.

Format: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, version 2. NCCL groups record each
call; gloo groups do so since torch 2.8. Each group numbers its calls, so all its ranks should call
the same collective under the same number.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from raybench.hangs.processes import Dumps

_NS_PER_S = 1e9


class Stage(IntEnum):
    """How far a collective is."""

    ENTERED = 0
    # Running on the device. Recorded only with TORCH_NCCL_ENABLE_TIMING.
    BEGUN = 1
    DONE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """Operation and inputs of a collective; most collectives need the same on all ranks."""

    # torch's name, such as all_reduce.
    operation: str
    # Shape of each input tensor.
    sizes: tuple[tuple[int, ...], ...]
    # Type of each input tensor.
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        sizes = " + ".join("x".join(map(str, sizes)) or "1" for sizes in self.sizes)
        types = "/".join(dict.fromkeys(self.dtypes)).lower()
        return f"{self.operation} of {sizes} {types}" if sizes else self.operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective that this rank has entered."""

    group: str
    # Sequence number in the group.
    number: int
    shape: CallShape
    stage: Stage
    # Time since the rank entered the call.
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The calls in the flight recorder of a rank; the recorder keeps the last 2000."""

    # Whether the recorder holds any call.
    is_on: bool
    # In order of entry; send and recv are omitted.
    calls: tuple[Call, ...] = ()
    # Group -> its ranks, for groups whose ranks torch has recorded.
    members: Mapping[str, frozenset[int]]

    def last_number(self, group: str) -> int:
        """Return the sequence number of the last call in the group; 0 before the first call."""
        return max((call.number for call in self.calls if call.group == group), default=0)

    def pending(self, group: str) -> list[Call]:
        """Return the unfinished calls in the group."""
        unfinished = [call for call in self.calls if call.stage is not Stage.DONE]
        return [call for call in unfinished if call.group == group]


class _PlainUnpickler(pickle.Unpickler):
    """Loads containers, numbers and strings, and refuses classes."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not expected here")


def read(dumps: Dumps) -> Recording:
    """Parse the dumps; an unreadable dump counts as empty."""
    calls: list[Call] = []
    members: dict[str, frozenset[int]] = {}
    for data in dumps.data.values():
        try:
            content = _PlainUnpickler(io.BytesIO(data)).load()
            calls.extend(_read_calls(content.get("entries", ()), dumps.now_ns))
            members.update(_read_members(content.get("pg_config", {})))
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError):
            continue
    calls.sort(key=lambda call: call.age_s, reverse=True)
    calls = _drop_former_groups(calls)
    return Recording(is_on=bool(calls), calls=tuple(calls), members=members)


def _drop_former_groups(calls: Sequence[Call]) -> list[Call]:
    """Keep the calls of the newest group of each name.

    A new group may have the name of a former one; its sequence numbers begin at 1 again.
    """
    # Group -> the smallest number so far, from the newest call back. A larger number is a call of
    # a former group.
    smallest: dict[str, int] = {}
    newest_first: list[Call] = []
    for call in reversed(calls):
        if call.number <= smallest.get(call.group, call.number):
            smallest[call.group] = call.number
            newest_first.append(call)
    return newest_first[::-1]


def _read_calls(entries: Sequence[Mapping[str, Any]], now_ns: int) -> Iterator[Call]:
    """Yield the collectives among the entries of a dump; `now_ns` is the time of the dump."""
    # Calls of the same shape share one object, because pickle then writes it only once.
    shapes: dict[CallShape, CallShape] = {}
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        # The state of gloo's calls stays "scheduled"; `retired` shows that they are finished.
        if entry.get("retired") or entry["state"] == "completed":
            stage = Stage.DONE
        else:
            stage = Stage.BEGUN if entry["state"] == "started" else Stage.ENTERED
        _, _, operation = str(entry["profiling_name"]).partition(":")  # such as nccl:all_reduce
        shape = CallShape(
            operation=operation,
            sizes=tuple(tuple(sizes) for sizes in entry["input_sizes"]),
            dtypes=tuple(entry["input_dtypes"]),
        )
        yield Call(
            group=sys.intern(str(entry["process_group"][0])),
            number=int(entry["collective_seq_id"]),
            shape=shapes.setdefault(shape, shape),
            stage=stage,
            age_s=(now_ns - entry["time_created_ns"]) / _NS_PER_S,
        )


def _read_members(groups: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, frozenset[int]]]:
    """Yield name and ranks of each group whose ranks torch has recorded."""
    for name, group in groups.items():
        ranks = str(group.get("ranks", "")).strip("[]")  # such as "[0, 1]"
        if name and ranks:
            yield name, frozenset(int(rank) for rank in ranks.split(","))
