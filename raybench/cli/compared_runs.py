"""The runs of the two sides of a comparison, as the user names them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from raybench.errors import ResultsError

if TYPE_CHECKING:
    from raybench.results.run import Run

# Runs before the newest one with a tag that are looked at for others with it.
_MOST_TAGGED = 300


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what was read
class Found:
    """A run in a results folder; its row and its facts are read once, when they are needed."""

    root: Path
    run_id: str

    @cached_property
    def run(self) -> Run:
        """Return the row of the run in `runs`. Raises ResultsError where it cannot be read."""
        from raybench.results import reader

        return reader.read_run(self.root, self.run_id)

    @cached_property
    def facts(self) -> dict[str, str]:
        """Return the facts that may change a measurement by name: versions, variables, devices."""
        from raybench.analysis.environment_changes import facts
        from raybench.results import reader

        return facts(self.run, reader.load(self.root, "devices", self.run_id))

    def has_tag(self, name: str, value: str) -> bool:
        """Return whether the run has this tag; False for a run that cannot be read."""
        try:
            return self.run.tags.get(name) == value
        except ResultsError:
            return False

    def is_alike(self, other: Found) -> bool:
        """Return whether the runs differ only by their start and by devices of one model."""
        from raybench.analysis.environment_changes import lasting_changes

        is_job = self.run.job_sha256 == other.run.job_sha256
        return is_job and not lasting_changes(self.facts, other.facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """BASE or NEW: the newest of its runs and the others, the oldest first.

    words: how the user named it. left_out: runs with its tag that differ from it by more than
    their start.
    """

    own: Found
    words: str
    others: Sequence[Found] = ()
    left_out: Sequence[Found] = ()

    @property
    def runs(self) -> Sequence[Found]:
        """Return all runs of the side, the newest last."""
        return (*self.others, self.own)


def find_side(results: Path, text: str) -> Side:
    """Return the side that `text` means.

    text: as RUN of `report`; several of these with commas; or NAME=VALUE, the newest run with that
    tag and those with the tag that differ from it by nothing but their start. Raises ResultsError
    where there is none.
    """
    # Path's would raise for a name that no file can have.
    if os.path.exists(text):  # noqa: PTH110
        return Side(own=_find(results, text), words=text)
    if "=" in text:
        return _runs_with_tag(results, text)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) < 2:
        return Side(own=_find(results, text), words=text)
    found = {one.run_id: one for one in (_find(results, name) for name in names)}
    *others, own = sorted(found.values(), key=lambda one: (one.run.started_at, one.run_id))
    return Side(own=own, words=text, others=others)


def _find(results: Path, text: str) -> Found:
    from raybench.results.folder import find_run

    root, run_id = find_run(results, text)
    return Found(root=root, run_id=run_id)


def _runs_with_tag(results: Path, text: str) -> Side:
    from raybench.results.folder import run_ids

    name, _, value = text.partition("=")
    runs = (Found(root=results, run_id=run_id) for run_id in reversed(run_ids(results)))
    own = next((run for run in runs if run.has_tag(name, value)), None)
    if own is None:
        raise ResultsError(f"{results}: no run with the tag {text!r}; {_tags(results)}")
    others = [run for run in islice(runs, _MOST_TAGGED) if run.has_tag(name, value)]
    same = {run.run_id for run in others if run.is_alike(own)}
    return Side(
        own=own,
        words=text,
        others=[run for run in reversed(others) if run.run_id in same],
        left_out=[run for run in others if run.run_id not in same],
    )


def _tags(results: Path) -> str:
    """Return a few words with the first five tags of the results, for an error message."""
    from raybench.results import reader

    tags = reader.read_table(results, "runs", None, ("tags",)).to_pylist(maps_as_pydicts="strict")
    known = sorted(
        {f"{name}={value}" for row in tags for name, value in (row["tags"] or {}).items()}
    )
    return f"there are: {', '.join(known[:5])}" if known else "no run has tags"
