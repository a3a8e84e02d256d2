"""What does each kernel of a decoding step take, and how far below the memory's rate is it?

    python -m benchmarks.decode_kernels

Products of one row with the matrices of the presets 1.3b and 6.7b, attention of one token, and what
comes between them. Each kernel 20 times in a CUDA graph, its matrix another one each time, so that
none is in the cache; the mean of five replays, in us, and GB/s of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

import torch
from torch import Tensor
from torch.nn import functional

_CALLS, _REPLAYS = 20, 5
_BEYOND_CACHE_BYTES = 3e8
# (k, n): a row of k by an n x k matrix; joint projections, MLP in and out, attention out, logits.
_SHAPES = (
    *((2048, 6144), (2048, 8192), (8192, 2048), (2048, 2048), (2048, 50_304)),
    *((4096, 12_288), (4096, 4096), (4096, 16_384), (16_384, 4096)),
)


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    for dtype in (torch.bfloat16, torch.float32):
        for k, n in _SHAPES:
            found = {name: time_us(kernel) for name, kernel in products(k, n, dtype)}
            size = k * n * dtype.itemsize
            words = [f"{name} {us:.1f} us {size / us / 1e3:.0f} GB/s" for name, us in found.items()]
            print(f"{dtype} {k} x {n}: {'; '.join(words)}", flush=True)
        for length in (129, 1025):
            query = torch.randn(1, 32, 1, 128, device="cuda", dtype=dtype)
            key, value = torch.randn(2, 1, 32, length, 128, device="cuda", dtype=dtype)
            us = time_us(
                lambda q=query, k=key, v=value: functional.scaled_dot_product_attention(q, k, v)
            )
            print(f"{dtype} attention to {length} tokens: {us:.1f} us")
    norm = torch.nn.LayerNorm(4096, device="cuda", dtype=torch.bfloat16)
    row = torch.randn(1, 1, 4096, device="cuda", dtype=torch.bfloat16)
    print(f"LayerNorm of 4096: {time_us(lambda: norm(row)):.1f} us")
    print(f"GELU of 4096: {time_us(lambda: functional.gelu(row, approximate='tanh')):.1f} us")
    print(f"sum of 4096: {time_us(lambda: row + row):.1f} us")


def products(k: int, n: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    count = int(_BEYOND_CACHE_BYTES // (k * n * dtype.itemsize)) + 1
    matrices = cycle([torch.randn(n, k, device="cuda", dtype=dtype) for _ in range(max(2, count))])
    bias = torch.randn(n, device="cuda", dtype=dtype)
    row = torch.randn(1, 1, k, device="cuda", dtype=dtype)
    yield "with bias", lambda: functional.linear(row, next(matrices), bias)
    yield "without", lambda: functional.linear(row, next(matrices))
    yield "sum of the matrix", lambda: next(matrices).sum()


@torch.inference_mode()
def time_us(kernel: Callable[[], object]) -> float:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        kernel()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(_CALLS):
                kernel()
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
    return start.elapsed_time(end) / _REPLAYS / _CALLS * 1e3


if __name__ == "__main__":
    main()
