"""What a step of GitHub Actions shows of a report: its summary."""

from __future__ import annotations

import os
from pathlib import Path

from raybench.errors import ResultsError, UsageError

_VARIABLE = "GITHUB_STEP_SUMMARY"
# A longer summary is not shown at all.
# https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands#step-isolation-and-limits
_MOST_BYTES = 1024**2


def append_to_summary(markdown: str) -> None:
    """Append to the file that GITHUB_STEP_SUMMARY names. Raises UsageError when none is named,
    ResultsError when it cannot be written or becomes longer than GitHub shows."""
    name = os.environ.get(_VARIABLE)
    if not name:
        raise UsageError(f"--github: {_VARIABLE} is not set; it is in a step of GitHub Actions")
    path, content = Path(name), markdown.encode()
    try:
        already = path.stat().st_size if path.exists() else 0
        if already + len(content) > _MOST_BYTES:
            raise ResultsError(
                f"{path}: GitHub shows summaries of up to 1 MiB; it has {already} bytes and the "
                f"report {len(content)}; keep the report as a file with -o"
            )
        with path.open("ab") as summary:
            summary.write(content)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written: {error.strerror}") from error
