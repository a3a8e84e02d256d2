"""How right the median is and how honest its interval, over simulated step times.

    python benchmarks/simulated_noise.py [--runs 1000] [-o FILE.json]

The simulation of tests/unit/test_stopping.py with more runs: AR(1) noise, a warm-up hump that
decays over 8 iterations, 1 % of outliers, the whole procedure with its default settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

from test_stopping import outcomes


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--runs", type=int, default=1000)
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    rows = []
    for noise in (0.01, 0.03):
        for hump in (0.6, 0.0):
            for phi in (0.0, 0.5, 0.8):
                found = outcomes(chosen.runs, phi=phi, noise=noise, hump=hump)
                rows.append(
                    {
                        "noise": noise,
                        "hump": hump,
                        "phi": phi,
                        "bias": round(float(np.mean([o.bias for o in found])), 5),
                        "coverage": round(float(np.mean([o.covered for o in found])), 3),
                        "warmup": round(float(np.mean([o.warmup for o in found])), 1),
                        "timed": round(float(np.mean([o.timed for o in found])), 1),
                    }
                )
                print(rows[-1], flush=True)
    if chosen.output:
        content = {"runs": chosen.runs, "rows": rows}
        chosen.output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
