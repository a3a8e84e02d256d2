"""Set each claim of five published articles beside what committed runs say of it.

    python -m benchmarks.claims

writes docs/claims.md. A claim is data: its text, the published figure, the figures of ours as
functions of the tables, and the rule of the verdict.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.claims.page import page

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
