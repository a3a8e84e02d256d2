"""What ranks wrote to stdout and stderr, as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from raybench.report.plain_text import plain_lines
from raybench.results.reader import RankLog


def format_logs(logs: Sequence[RankLog]) -> str:
    """Under a heading for each attempt and rank; ranks that wrote the same share one."""
    blocks = []
    for (point_id, attempt), of_attempt in groupby(logs, lambda log: (log.point_id, log.attempt)):
        by_text: dict[str, list[int]] = {}
        for log in of_attempt:
            by_text.setdefault(log.text, []).append(log.rank)
        for text, ranks in by_text.items():
            who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            lines = [f"== {point_id}, attempt {attempt}, {who}", *plain_lines(text), ""]
            blocks.append("\n".join(lines))
    return "\n".join(blocks)
