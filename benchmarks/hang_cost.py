"""Measure what it costs a step of about 1 ms to be watched for hangs. Needs two GPUs.

    PYTHONPATH=. python -m benchmarks.hang_cost --rounds 60

Torch's flight recorder, NCCL's RAS service, and the times at which collectives begin are switched
by variables that a process reads once. Each way therefore has a pair of processes of its own. All
pairs live at the same time and run steps in turns, so that drift of the clocks meets all alike.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

OFF = {
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    "NCCL_RAS_ENABLE": "0",
}
# Way -> variables. `watched` is what a sweep has, `timed` what it has with `measure.hang_s`.
WAYS: Mapping[str, Mapping[str, str]] = {
    "off": OFF,
    "off again": OFF,
    "watched": {},
    "timed": {"TORCH_NCCL_ENABLE_TIMING": "1"},
}
_GRADIENT, _MATRIX, _PRODUCTS = 8 << 20, 4096, 3


class Pair:
    """Two ranks of one way."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """Start the processes; `run` waits for them."""
        port, ras_port = _free_port(), _free_port()
        environment = {
            **os.environ,
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_RAS_ADDR": f"127.0.0.1:{ras_port}",
            **variables,
        }
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), "--port", str(port)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    def run(self, steps: int) -> float:
        """Run steps on both ranks; return the milliseconds of a step."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        took_ms = []
        for rank in self._ranks:
            assert rank.stdout is not None
            took_ms.append(float(rank.stdout.readline()))
        return max(took_ms)

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def serve(rank: int, port: int) -> None:
    """Run as many steps as each line of stdin says, and print how long one took."""
    import torch
    import torch.distributed as dist

    from raybench.hangs import responder

    responder.of_this_process().serve()
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    matrix = torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16)
    gradients = [torch.zeros(_GRADIENT, device="cuda") for _ in range(2)]
    loss = torch.zeros(1, device="cuda")
    for line in sys.stdin:
        steps = int(line)
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            for _ in range(_PRODUCTS):
                matrix @ matrix
            for gradient in gradients:
                dist.all_reduce(gradient)
            dist.all_reduce(loss)
        end.record()
        torch.cuda.synchronize()
        sys.stdout.write(f"{begin.elapsed_time(end) / steps}\n")
        sys.stdout.flush()


def main() -> None:
    """Measure all ways in turns, and print their differences to `off` with 95 % intervals."""
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--out", type=Path)
    options.add_argument("--rank", type=int)
    options.add_argument("--port", type=int)
    given = options.parse_args()
    if given.rank is not None:
        serve(given.rank, given.port)
        return
    pairs = {way: Pair(variables) for way, variables in WAYS.items()}
    try:
        for pair in pairs.values():
            pair.run(given.steps)
        took_ms: dict[str, list[float]] = {way: [] for way in WAYS}
        names = list(WAYS)
        for number in range(given.rounds):
            # Each way follows each other one equally often.
            turn = number % len(names)
            for way in (*names[turn:], *names[:turn]):
                took_ms[way].append(pairs[way].run(given.steps))
                time.sleep(0.01)
    finally:
        for pair in pairs.values():
            pair.close()
    off_ms = statistics.median(took_ms["off"])
    print(f"off: {off_ms:.4f} ms a step, three collectives, {given.rounds} rounds")
    for way in WAYS:
        if way != "off":
            low, middle, high = _interval(took_ms["off"], took_ms[way])
            print(f"{way}: {middle:+.3f} % ({low:+.3f} % to {high:+.3f} %)")
    if given.out:
        given.out.write_text(json.dumps(took_ms))


def _interval(off_ms: Sequence[float], on_ms: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of the rounds' differences in percent between the ends of its interval."""
    ratios = [100 * (on / off - 1) for on, off in zip(on_ms, off_ms, strict=True)]
    middle = statistics.mean(ratios)
    half = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return middle - half, middle, middle + half


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
