"""What benchmarks over several sizes print and write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from machine import machine


def tell_sizes(sizes: Sequence[Mapping[str, float]], output: Path | None, **facts: object) -> None:
    """Print a line for each figure and a column for each size; the same as JSON, with the machine.

    facts: what else the JSON says.
    """
    for name in sizes[0]:
        print(f"{name:24}" + "".join(f"{size[name]:>12.4g}" for size in sizes))
    if output:
        content = {"machine": machine(), **facts, "sizes": sizes}
        output.write_text(json.dumps(content, indent=2) + "\n")
