"""Reads torch's flight recorder: the collectives that a rank has entered, and how far each is.

Format: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, version 2. NCCL's groups and, since
torch 2.8, gloo's record each call. Numbers count the calls of a group and are the same on all its
ranks, so the same number means the same collective.
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
    """How far a collective is. Without TORCH_NCCL_ENABLE_TIMING none is known to have begun."""

    ENTERED = 0
    BEGUN = 1
    DONE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """What must be the same on all ranks of a group."""

    # torch's name, such as all_reduce.
    operation: str
    # Sizes and types of the inputs.
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        sizes = " + ".join("x".join(map(str, sizes)) or "1" for sizes in self.sizes)
        types = "/".join(dict.fromkeys(self.dtypes)).lower()
        return f"{self.operation} of {sizes} {types}" if sizes else self.operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective that this rank has entered."""

    group: str
    number: int
    shape: CallShape
    stage: Stage
    # Seconds since the rank has entered the call.
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What the flight recorder of a rank holds, at most its last 2000 calls."""

    # Whether the recorder is on and torch knows a group.
    is_on: bool
    # In the order in which they were entered; without send and recv.
    calls: tuple[Call, ...] = ()
    # Group -> its ranks, where torch tells them.
    members: Mapping[str, frozenset[int]]

    def last_number(self, group: str) -> int:
        """Return the number of the last call in the group; 0 before the first."""
        return max((call.number for call in self.calls if call.group == group), default=0)

    def pending(self, group: str) -> list[Call]:
        """Return the calls in the group that are not done."""
        return [c for c in self.calls if c.group == group and c.stage is not Stage.DONE]


class _PlainUnpickler(pickle.Unpickler):
    """Reads containers, numbers and texts, and refuses all classes."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not expected here")


def read(dumps: Dumps) -> Recording:
    """Return what the dumps hold; an unreadable one counts as empty."""
    calls: list[Call] = []
    members: dict[str, frozenset[int]] = {}
    for data in dumps.data.values():
        try:
            content = _PlainUnpickler(io.BytesIO(data)).load()
            calls.extend(_calls(content.get("entries", ()), dumps.now_ns))
            members.update(_members(content.get("pg_config", {})))
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, AttributeError):
            continue
    calls.sort(key=lambda call: -call.age_s)
    return Recording(is_on=bool(calls), calls=tuple(_of_newest_groups(calls)), members=members)


def _of_newest_groups(calls: Sequence[Call]) -> list[Call]:
    """Drop calls of former groups: a new group has the name of the former one, and counts anew."""
    newest: dict[str, int] = {}
    kept: list[Call] = []
    for call in reversed(calls):
        if call.number <= newest.get(call.group, call.number):
            newest[call.group] = call.number
            kept.append(call)
    return kept[::-1]


def _calls(entries: Sequence[Mapping[str, Any]], now_ns: int) -> Iterator[Call]:
    # A few shapes recur in all calls; pickle writes each object once.
    shapes: dict[CallShape, CallShape] = {}
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        stage = Stage.BEGUN if entry["state"] == "started" else Stage.ENTERED
        # gloo's calls stay "scheduled" when they are done.
        if entry.get("retired") or entry["state"] == "completed":
            stage = Stage.DONE
        shape = CallShape(
            operation=str(entry["profiling_name"]).partition(":")[2],
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


def _members(groups: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, frozenset[int]]]:
    for name, group in groups.items():
        ranks = str(group.get("ranks", "")).strip("[]")
        if name and ranks:
            yield name, frozenset(int(rank) for rank in ranks.split(","))
