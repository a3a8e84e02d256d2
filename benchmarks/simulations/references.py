"""How often the range of a reference holds a start of a new device.

    python -m benchmarks.simulations.references [--ranges 2000]

Each range is `predict_range` of two starts of each device. Starts scatter by 0.1 %. Either devices
differ by 1 % and are independent, or hosts differ by 1 % and the devices of a host by 0.2 %. The
new device is on a host of its own.

held: share of the ranges that hold its start; a range should hold 99 %. half: the median of half
the width of a range. In percent.
"""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd

from benchmarks.common import options
from raybench.analysis.references import predict_range

VALUE, START_SD, SD, SD_IN_HOST = 700.0, 0.001, 0.01, 0.002
DEVICES, PER_HOST = (2, 4, 8, 16), (1, 2, 4)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ranges", type=int, default=2000, help="in each row")
    chosen = parser.parse_args()
    cells = itertools.product(DEVICES, PER_HOST)
    rows = [row(chosen.ranges, *cell) for cell in cells if cell[0] >= cell[1]]
    print(pd.DataFrame(rows).to_string(index=False))


def row(ranges: int, devices: int, per_host: int) -> dict[str, object]:
    """Return the row of ranges over so many devices, with so many on a host."""
    rng = np.random.default_rng([devices, per_host])
    held, halves = [], []
    for _ in range(ranges):
        starts = draw(rng, devices // per_host, per_host)
        value, low, high = predict_range(starts.reshape(devices, 2).tolist())
        new = draw(rng, 1, per_host)[0, 0, 0]
        held.append(low <= new <= high)
        halves.append((high - low) / 2 / value)
    return {
        "devices": devices,
        "on a host": per_host,
        "held": round(100 * float(np.mean(held)), 1),
        "half": round(100 * float(np.median(halves)), 1),
    }


def draw(rng: np.random.Generator, hosts: int, per_host: int) -> np.ndarray:
    """Draw two starts of each device: hosts x devices of a host x starts."""
    host = SD * rng.standard_normal((hosts, 1, 1))
    device = (SD_IN_HOST if per_host > 1 else 0.0) * rng.standard_normal((hosts, per_host, 1))
    return VALUE * np.exp(host + device + START_SD * rng.standard_normal((hosts, per_host, 2)))


if __name__ == "__main__":
    main()
