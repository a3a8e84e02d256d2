"""Which runs a comparison is made of: the two that are named, their repeats, and those alike.

A folder may hold ten thousand runs, so no more of them are read than are needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from raybench.errors import ResultsError

if TYPE_CHECKING:
    from raybench.results.run import Run

# Runs alike around BASE and around NEW, and how many are looked at for them.
_MOST_ALIKE, _MOST_READ = 20, 60
# Runs before the newest one with a tag that are looked at for others with it.
_MOST_TAGGED = 300


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what was read
class Found:
    """A run in a results folder, of which what is asked for is read once."""

    root: Path
    run_id: str

    @cached_property
    def run(self) -> Run:
        """Its row. Raises ResultsError."""
        from raybench.results import reader

        return reader.read_run(self.root, self.run_id)

    @cached_property
    def facts(self) -> dict[str, str]:
        """What may change a measurement: versions, variables, devices."""
        from raybench.analysis.environment_changes import facts
        from raybench.results import reader

        return facts(self.run, reader.load(self.root, "devices", self.run_id))

    @property
    def node(self) -> str:
        """Names the devices that it ran on."""
        from raybench.analysis.environment_changes import node

        return node(self.facts)

    def has_tag(self, name: str, value: str) -> bool:
        """Look at its tags; a run that cannot be read has none and hides itself alone."""
        try:
            return self.run.tags.get(name) == value
        except ResultsError:
            return False

    def is_alike(self, other: Found) -> bool:
        """Whether the tables tell no difference but the start and the devices of one model."""
        from raybench.analysis.environment_changes import lasting_changes

        is_job = self.run.job_sha256 == other.run.job_sha256
        return is_job and not lasting_changes(self.facts, other.facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """BASE or NEW. named: what the user named as repeats of it; None where nothing was said.

    left_out: what was named so too, but is not the same.
    """

    own: Found
    named: Sequence[Found] | None = None
    left_out: Sequence[Found] = field(default=())


def find_side(results: Path, text: str) -> Side:
    """Find the run that `text` means and its repeats.

    text: as RUN of `report`; several of these with commas, of which the newest is BASE or NEW and
    the others are repeats; or NAME=VALUE, the newest run with that tag and the others that have it.
    Raises ResultsError where there is none.
    """
    # Path's would raise for a name that no file can have.
    if os.path.exists(text):  # noqa: PTH110
        return Side(own=_find(results, text))
    if "=" in text:
        return _runs_with_tag(results, text)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) < 2:
        return Side(own=_find(results, text))
    found = {one.run_id: one for one in (_find(results, name) for name in names)}
    *others, own = sorted(found.values(), key=lambda one: (one.run.started_at, one.run_id))
    return Side(own=own, named=others)


def _find(results: Path, text: str) -> Found:
    from raybench.results.run import find_run

    root, run_id = find_run(results, text)
    return Found(root=root, run_id=run_id)


def _runs_with_tag(results: Path, text: str) -> Side:
    from raybench.results.run import run_ids

    name, _, value = text.partition("=")
    runs = (Found(root=results, run_id=run_id) for run_id in reversed(run_ids(results)))
    own = next((run for run in runs if run.has_tag(name, value)), None)
    if own is None:
        raise ResultsError(f"{results}: no run with the tag {text!r}; {_tags(results)}")
    others = [run for run in islice(runs, _MOST_TAGGED) if run.has_tag(name, value)]
    same = {run.run_id for run in others if run.is_alike(own)}
    return Side(
        own=own,
        named=[run for run in others if run.run_id in same],
        left_out=[run for run in others if run.run_id not in same],
    )


def _tags(results: Path) -> str:
    """Say what tags there are."""
    from raybench.results import reader

    tags = reader.read_table(results, "runs", None, ("tags",)).to_pylist(maps_as_pydicts="strict")
    known = sorted(
        {f"{name}={value}" for row in tags for name, value in (row["tags"] or {}).items()}
    )
    return f"there are: {', '.join(known[:5])}" if known else "no run has tags"


def alike(one: Side, other: Side) -> list[Found]:
    """List the runs near to either in time that are like `one` and that nobody named."""
    named = (*(one.named or ()), *(other.named or ()), *one.left_out, *other.left_out)
    taken = {found.run_id for found in (one.own, other.own, *named)}
    roots = {side.own.root.resolve(): side.own.root for side in (one, other)}
    found: list[Found] = []
    for root in roots.values():
        for centre in (one.own, other.own):
            near = _near(root, centre.run_id)
            new = list(islice(_alike(near, one.own, taken), _MOST_ALIKE))
            taken |= {run.run_id for run in new}
            found += new
    return found


def _near(root: Path, run_id: str) -> Iterator[Found]:
    """List the runs of a folder, nearest in time first; newest first where it has not this one."""
    from raybench.results.run import run_ids

    ids = run_ids(root)
    place = ids.index(run_id) if run_id in ids else len(ids)
    order = sorted(range(len(ids)), key=lambda other: abs(other - place))
    return (Found(root=root, run_id=ids[other]) for other in order)


def _alike(near: Iterable[Found], own: Found, taken: AbstractSet[str]) -> Iterator[Found]:
    """Those that are like `own`, of the first ones; a damaged run is none of them."""
    candidates = (run for run in near if run.run_id not in taken)
    for run in islice(candidates, _MOST_READ):
        with suppress(ResultsError):
            if run.is_alike(own):
                yield run
