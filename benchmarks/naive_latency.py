"""How far from the device's time of a forward pass do the usual ways of timing it lie?

    python -m benchmarks.naive_latency [--device cpu|cuda] [-o FILE.json]

One model after the other, each in a process of its own, in which nothing ran before, is called
    10 times from the first on, time.time() around them, nothing waited for
    10 times from the first on, time.time() around them, the device waited for at the end
and then, warm,
    100 times, time.time() around each, nothing waited for
    100 times, time.time() around each, the device waited for in each
    100 times, CUDA events between them, the device waited for at the end
The mean of each is held against the median of the last one, in ms. On a CPU nothing is waited for,
and the last one is by the host's clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import torch

from raybench.job.point import Precision
from raybench.measure.timing import make_timer
from raybench.workloads import precision
from raybench.workloads.base import Context
from raybench.workloads.mlp import Mlp
from raybench.workloads.transformer import Transformer

_COLD, _WARM = 10, 100
Model = Callable[[Context], Mlp | Transformer]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    options.add_argument("--models", nargs="*", default=list(MODELS))
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    found = {}
    for name in chosen.models:
        with get_context("spawn").Pool(1) as pool:
            found[name] = pool.apply(times_ms, (name, chosen.device))
        exact = found[name]["events, warm, median"]
        print(f"{name}: {exact:.3f} ms")
        for way, ms in found[name].items():
            print(f"  {ms:10.3f} ms {ms / exact:8.2f} x  {way}", flush=True)
    device = torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu"
    if chosen.output:
        result = {"device": device, "torch": torch.__version__, "ms": found}
        chosen.output.write_text(json.dumps(result, indent=2) + "\n")


def mlp_of_8_layers(context: Context) -> Mlp:
    return Mlp(context, hidden=4096, layers=8, mode="inference", cast_weights=True)


def prompt_of_1024(context: Context) -> Transformer:
    return Transformer(context, preset="124m", mode="inference", phase="prefill", cast_weights=True)


def tiny_prompt(context: Context) -> Transformer:
    return Transformer(context, preset="tiny", seq_len=64, mode="inference", phase="prefill")


MODELS: dict[str, Model] = {"mlp": mlp_of_8_layers, "prefill-124m": prompt_of_1024}
# For a trial on a CPU: --models tiny.
SMALL: dict[str, Model] = {"tiny": tiny_prompt}


def times_ms(name: str, device: str) -> dict[str, float]:
    """Time the model in all ways, in ms a call."""
    context = make_context(torch.device(device))
    precision.apply(context.precision)
    step = {**MODELS, **SMALL}[name](context).step
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start_s = time.time()
    for _ in range(_COLD):
        step()
    issued_s = time.time()
    wait()
    done_s = time.time()
    unawaited = mean_ms(step, lambda: None)
    wait()
    awaited = mean_ms(step, wait)
    samples = make_timer(context.device).block(step, _WARM, context.parts, lead_in=2)
    return {
        "time.time(), first 10 calls, not waited for": (issued_s - start_s) / _COLD * 1e3,
        "time.time(), first 10 calls, waited for at the end": (done_s - start_s) / _COLD * 1e3,
        "time.time(), warm, not waited for": unawaited,
        "time.time(), warm, waited for in each call": awaited,
        "events, warm, mean": statistics.fmean(samples.step_ns) / 1e6,
        "events, warm, median": statistics.median(samples.step_ns) / 1e6,
    }


def mean_ms(step: Callable[[], None], wait: Callable[[], None]) -> float:
    spent_s = 0.0
    for _ in range(_WARM):
        start_s = time.time()
        step()
        wait()
        spent_s += time.time() - start_s
    return spent_s / _WARM * 1e3


def make_context(device: torch.device) -> Context:
    return Context(
        device=device,
        rank=0,
        world_size=1,
        local_rank=0,
        batch_size=8,
        precision=Precision.BF16,
    )


if __name__ == "__main__":
    main()
