"""The settings of a gate, and its folder."""

from __future__ import annotations

import fcntl
import math
import os
import random
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from raybench.errors import ResultsError, UsageError
from raybench.job.source import parse_source
from raybench.records.devices import read_device_list

# Name of the newest gate.
LATEST = "latest"
# Revision: the files of the current folder, uncommitted changes included.
WORKTREE = "WORKTREE"
# Subfolder of a results folder that holds all gates.
_GATES = "ab"
_FILE, _LOCK = "gate.json", ".driver"
_LONGEST_WAIT_S = 1_000_000


class Side(StrEnum):
    """The two sides of a gate; the values are stored as tags of runs."""

    OLD = "old"
    NEW = "new"

    @property
    def other(self) -> Side:
        """The other side."""
        return Side.NEW if self is Side.OLD else Side.OLD


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The code, interpreter and settings of one side."""

    # A git revision, or WORKTREE; "" measures the current folder as it is.
    revision: str = ""
    # The job file; None: the job of the gate.
    job: Path | None = None
    # Python interpreter; a relative path is tried in the worktree first. "": this interpreter.
    python: str = ""
    # Added to the environment of this process.
    env: Mapping[str, str] = field(default_factory=dict)
    # KEY=VALUE as for `--set`; they override the settings of the gate.
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a gate measures both sides and decides."""

    # Smallest change that counts; a point is `same` within twice as much.
    threshold: float = 0.015
    # No pair is started that would end after this limit; None: no limit.
    max_minutes: float | None = None
    # Shell command that is run in each worktree before it is measured.
    setup: str = ""
    # KEY=VALUE as for `--set`, for both sides.
    overrides: tuple[str, ...] = ()
    # Options of `raybench sweep`.
    address: str = "auto"
    device: str = "auto"
    devices_file: Path | None = None
    wait_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A comparison of two versions, as it was started."""

    gate_id: str
    # Absolute path of the job file.
    job: Path
    # The current folder when the gate was started.
    cwd: Path
    old: Version
    new: Version
    # Commits of the sides that have a revision.
    commits: Mapping[Side, str] = field(default_factory=dict)
    # Content of the job file of each side when the gate was started.
    job_texts: Mapping[Side, str] = field(default_factory=dict)
    settings: Settings
    # Seed of the order of the sides within the pairs.
    seed: int
    started_at: datetime

    def version(self, side: Side) -> Version:
        """Return the version of a side."""
        return self.old if side is Side.OLD else self.new

    @property
    def has_difference(self) -> bool:
        """Whether the sides differ in code, job, interpreter, variables or settings."""
        code, settings = [], []
        for side in Side:
            version = self.version(side)
            # A job may name scripts and classes that lie beside it.
            folder = self.job_of(side).parent
            code.append((self.commits.get(side), self.job_texts.get(side), folder))
            settings.append((version.python, dict(version.env), version.overrides))
        return code[0] != code[1] or settings[0] != settings[1]

    def job_of(self, side: Side) -> Path:
        """Return the absolute path of the job file of a side."""
        return self.cwd / (self.version(side).job or self.job)

    def order(self, pair: int) -> tuple[Side, Side]:
        """Return the sides of a pair in the order of their starts.

        Pairs 1 and 2 have opposite orders, in random sequence; so have pairs 3 and 4, and so on.
        """
        couple, position = divmod(pair - 1, 2)
        is_old_first = random.Random(f"{self.seed} {couple}").random() < 0.5
        if position == 1:
            is_old_first = not is_old_first
        first = Side.OLD if is_old_first else Side.NEW
        return first, first.other


_ADAPTER = TypeAdapter(Gate)


def new_gate(job: Path, old: Version, new: Version, settings: Settings) -> Gate:
    """Return a gate with a new id, for the current folder; nothing is written.

    Raises:
        UsageError: a job file is missing or not UTF-8, a setting is out of its range, the file of
            --devices is wrong, or --setup has no worktree to run in.
        JobError: a job file is no YAML, or an override cannot be applied.
    """
    _check_numbers(settings)
    for path in filter(None, (job, old.job, new.job)):
        if not path.is_file():
            raise UsageError(f"{path}: no such job file; `raybench init` writes one")
    if settings.devices_file is not None:
        # The sweeps read the file again; an error here wastes no worktree and no start.
        read_device_list(settings.devices_file)
    if settings.setup and not (old.revision and new.revision):
        raise UsageError(
            "--setup: the command runs in the worktrees of two revisions; give --old and --new, of "
            f"which one may be {WORKTREE}"
        )
    now = datetime.now(UTC)
    texts = {Side.OLD: _text_of(old.job or job), Side.NEW: _text_of(new.job or job)}
    for side, version in ((Side.OLD, old), (Side.NEW, new)):
        # The sweep checks the keys, because a revision may have parameters of its own.
        overrides = (*settings.overrides, *version.overrides)
        parse_source(str(version.job or job), texts[side], overrides)
    return Gate(
        gate_id=f"{job.stem}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        job=job.absolute(),
        cwd=Path.cwd(),
        old=old,
        new=new,
        job_texts=texts,
        settings=settings,
        seed=secrets.randbits(31),
        started_at=now,
    )


def _check_numbers(settings: Settings) -> None:
    """Raise UsageError for a number out of its range."""
    if not 0 < settings.threshold < 1:
        raise UsageError(
            f"threshold: must be above 0 and below 1, as in 0.015, given {settings.threshold}"
        )
    minutes = settings.max_minutes
    if minutes is not None and not (minutes > 0 and math.isfinite(minutes)):
        raise UsageError(f"max_minutes: must be above 0 and finite, given {minutes}")
    if not 0 <= settings.wait_s <= _LONGEST_WAIT_S:
        raise UsageError(
            f"wait_s: must be from 0 to {_LONGEST_WAIT_S:,} seconds, given {settings.wait_s}"
        )


def _text_of(job: Path) -> str:
    """Return the text of a job file."""
    try:
        return job.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{job}: a job file is UTF-8; save it as UTF-8") from None


def gates_of(output: Path) -> Path:
    """Return the subfolder of a results folder that holds all gates."""
    return output.absolute() / _GATES


def folder_of(output: Path, gate: Gate) -> Path:
    """Return the folder of a new gate in a results folder."""
    return gates_of(output) / gate.gate_id


def write_gate(folder: Path, gate: Gate) -> None:
    """Write the file of a gate, and its folder.

    Raises:
        ResultsError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Write a hidden file and rename it, so that an interrupt leaves no half of a file.
        unfinished = folder / f".{_FILE}"
        unfinished.write_bytes(_ADAPTER.dump_json(gate, indent=1))
        unfinished.replace(folder / _FILE)
    except OSError as error:
        raise ResultsError(f"{folder}: cannot be written: {error.strerror}") from error


def read_gate(folder: Path) -> Gate:
    """Return the gate of a folder.

    Raises:
        ResultsError: the folder holds no gate, or its file is damaged.
    """
    try:
        return _ADAPTER.validate_json((folder / _FILE).read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "damaged"
        raise ResultsError(f"{folder / _FILE}: cannot be read: {reason}") from error


def find_gate(output: Path, name: str) -> Path:
    """Return the folder of the gate that `name` means: an id, its beginning, a path or `latest`.

    Raises:
        ResultsError: no gate or several gates match.
    """
    if (Path(name) / _FILE).is_file():
        return Path(name).absolute()
    files = sorted(gates_of(output).glob(f"*/{_FILE}"), key=lambda path: path.stat().st_mtime)
    folders = [path.parent.absolute() for path in files]
    if name == LATEST and folders:
        return folders[-1]
    matches = [folder for folder in folders if folder.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    problem = f"{len(matches)} gates match" if matches else "no such gate"
    names = ", ".join(folder.name for folder in folders[-5:])
    hint = f"there are: {names}" if names else f"{output / _GATES} has none"
    raise ResultsError(f"--resume {name}: {problem}; {hint}")


@contextmanager
def lock_gate(folder: Path) -> Iterator[None]:
    """Hold the lock of a gate.

    Raises:
        ResultsError: another process holds the lock.
    """
    with (folder / _LOCK).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ResultsError(
                f"{folder}: another process (not {os.getpid()}) goes on with this gate"
            ) from error
        yield
