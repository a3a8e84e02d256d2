"""Simulations with a known truth, put under the code that judges: looks, runs or stragglers.

python -m benchmarks.simulations looks|runs|stragglers [OPTIONS]
"""

from __future__ import annotations

import sys

from benchmarks.simulations import looks, runs, stragglers

SIMULATIONS = {"looks": looks.main, "runs": runs.main, "stragglers": stragglers.main}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in SIMULATIONS:
        sys.exit(f"name one of {', '.join(SIMULATIONS)}")
    SIMULATIONS[sys.argv.pop(1)]()
