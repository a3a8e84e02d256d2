"""Doctor's answer as text for a terminal, and as one JSON object for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from raybench.doctor.facts import Check, Diagnosis, Verdict
from raybench.report import plain_text
from raybench.report.text.terminal import WIDTH, render_parts

SCHEMA_VERSION = 1  # of the JSON object
_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


def format_text(diagnosis: Diagnosis, *, width: int = WIDTH, color: bool = False) -> str:
    """One line for each check, with its advice below it, and what it comes to."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold", max_width=18)
    grid.add_column(overflow="fold")
    for check in diagnosis.checks:
        verdict = Text(check.verdict.value, style=_STYLES[check.verdict])
        grid.add_row(verdict, _plain(check.name), _plain(check.found))
        if check.advice:
            grid.add_row("", "", _plain(f"-> {check.advice}"))
    parts: list[RenderableType] = [_plain(diagnosis.cluster), grid, Text(_sum(diagnosis.checks))]
    return render_parts(parts, width, color)


def _plain(text: str) -> Text:
    """Never markup, and one line: some of it comes from error messages and variables."""
    return Text(plain_text.plain(text))


def _sum(checks: Sequence[Check]) -> str:
    counts = Counter(check.verdict for check in checks)
    return ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)


def format_json(diagnosis: Diagnosis) -> str:
    """schema_version, cluster, checks, devices, versions and environment (of this process)."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "cluster": diagnosis.cluster,
        "checks": [asdict(check) for check in diagnosis.checks],
        "devices": [asdict(device) for device in diagnosis.facts.devices],
        "versions": dict(diagnosis.facts.versions),
        "environment": dict(diagnosis.environment),
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
