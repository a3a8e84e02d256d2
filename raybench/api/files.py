"""Check where results may be written, and write them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from raybench.errors import ResultsError, UsageError


def check_outlives_job(output: Path, name: str = "--output") -> None:
    """Raise UsageError for a folder that is deleted with the Ray job of this process.

    Args:
        output: folder of the results.
        name: the option, for the message.
    """
    # `ray job submit` sets the variable; with --working-dir the job runs in a temporary copy.
    ray_job = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
    if '"working_dir"' in ray_job and not output.is_absolute():
        raise UsageError(
            f"{name} {output}: a Ray job's working directory is thrown away; give an absolute "
            f"path that outlives the job, as in {name} /shared/results"
        )


def write_file(path: Path, content: bytes) -> None:
    """Write or replace a file; its folder must exist.

    Raises:
        ResultsError: writing failed. A new file was removed; an older file may be truncated.
    """
    is_new = not os.path.lexists(path)
    try:
        path.write_bytes(content)
    except OSError as error:
        if is_new:
            # Remove the file: if a disk is full, an incomplete file would look complete.
            with suppress(OSError):
                path.unlink()
        raise ResultsError(f"{path}: cannot be written: {error.strerror}") from error
