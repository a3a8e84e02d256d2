"""A program that is not part of a run and uses its devices or cores."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherProgram:
    """A process beside a point: who started it, and what it used."""

    host: str
    process_id: int
    # Empty for a process of another container, whose name cannot be read.
    name: str = ""
    user: str = ""
    # Start of the process, in UTC.
    since: datetime | None = None
    # UUID of the GPU on which the process is; empty for a process that uses cores only.
    device_uuid: str = ""
    # Cores that the process kept busy beside the point; None for a process on a GPU.
    busy_cores: float | None = None

    @property
    def key(self) -> tuple[str, int, datetime | None]:
        """Identity of the process; process ids are reused."""
        return self.host, self.process_id, self.since
