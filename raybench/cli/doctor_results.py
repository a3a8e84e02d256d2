"""The checks of `raybench doctor` as text for a terminal, and as one JSON object."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from raybench.doctor.facts import Diagnosis, Verdict
from raybench.report import plain_text
from raybench.report.text.terminal import WIDTH, render_parts

SCHEMA_VERSION = 1  # of the JSON object
_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


def format_text(diagnosis: Diagnosis, *, width: int = WIDTH, color: bool = False) -> str:
    """Return a line for each check, its advice below it, and how many are ok, warn and fail.

    width, color: of the terminal.
    """
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold", max_width=18)
    grid.add_column(overflow="fold")
    for check in diagnosis.checks:
        verdict = Text(check.verdict.value, style=_STYLES[check.verdict])
        grid.add_row(verdict, _plain(check.name), _plain(check.found))
        if check.advice:
            grid.add_row("", "", _plain(f"-> {check.advice}"))
    counts = Counter(check.verdict for check in diagnosis.checks)
    total = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
    parts: list[RenderableType] = [_plain(diagnosis.cluster), grid, Text(total)]
    return render_parts(parts, width, color)


def _plain(text: str) -> Text:
    """Return a text as one line without markup: it may be from an error message or a variable."""
    return Text(plain_text.plain(text))


def format_json(diagnosis: Diagnosis) -> str:
    """Return the JSON object of all checks.

    Its members: schema_version, cluster, checks, devices; versions and environment of this process.
    """
    content = {
        "schema_version": SCHEMA_VERSION,
        "cluster": diagnosis.cluster,
        "checks": [asdict(check) for check in diagnosis.checks],
        "devices": [asdict(device) for device in diagnosis.facts.devices],
        "versions": dict(diagnosis.facts.versions),
        "environment": dict(diagnosis.environment),
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
