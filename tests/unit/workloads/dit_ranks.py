"""What ranks of the workload `dit` compute together, in fp64 on gloo."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from forked import gloo
from torch import Tensor

from raybench.job.point import Precision
from raybench.workloads import attention, sequence_parallel
from raybench.workloads.base import Context, WrongResultError
from raybench.workloads.dit import Dit
from raybench.workloads.dit_steps import Numbers, Steps, Tokens
from raybench.workloads.model_sizes import DitShape
from raybench.workloads.sequence_parallel import form_groups

SHAPE = DitShape(
    double_blocks=1, single_blocks=1, heads=12, axes=(2, 2, 4), channels=8, text_width=16,
    pooled_width=8, frequencies=16,
)  # fmt: skip
# world_size -> (ulysses, ring)
DEGREES = {2: ((2, 1), (1, 2)), 3: ((3, 1), (1, 3)), 4: ((4, 1), (1, 4), (2, 2))}
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
CALLS = ("all_to_all_single", _GATHER, "batch_isend_irecv")


def make_steps(rank: int, ulysses: int, ring: int, **changes: Any) -> Steps:
    settings: dict[str, Any] = {
        "shape": SHAPE,
        "tokens": Tokens(rows=6, columns=4, text=12, split_text=changes.pop("split_text", True)),
        "numbers": Numbers(device=torch.device("cpu"), dtype=torch.float64, seed=3),
        "attention": "auto",
        "parallel": form_groups(
            rank, ulysses=ulysses, ring=ring, ring_kind=changes.pop("ring_kind", "p2p")
        ),
        **changes,
    }
    return Steps(**settings)


def cases(world_size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is compared with the whole, by name."""
    for (ulysses, ring), kind, split in itertools.product(
        DEGREES[world_size], ("p2p", "allgather"), (True, False)
    ):
        if ring > 1 or kind == "p2p":
            name = f"ulysses {ulysses}, ring {ring} {kind}, {'split' if split else 'whole'} text"
            settings = {"ulysses": ulysses, "ring": ring, "ring_kind": kind, "split_text": split}
            yield name, settings


@torch.inference_mode()
def differences(rank: int, world_size: int) -> dict[str, float]:
    """Largest difference to the undivided output, as a share of its largest number."""
    whole = make_steps(0, 1, 1).forward()()
    found = {}
    for name, settings in cases(world_size):
        out = make_steps(rank, **settings).forward()()
        found[name] = float((out - whole).abs().max() / whole.abs().max())
    return found


@contextmanager
def count_bytes() -> Iterator[Counter[str]]:
    """Count what this rank sends to others, by kind of collective, and the calls."""
    counts: Counter[str] = Counter()

    def wrap(name: str) -> Callable[..., Any]:
        call = getattr(dist, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            counts[f"{name} calls"] += 1
            if name == "batch_isend_irecv":
                sends = [one.tensor for one in arguments[0] if one.op is dist.isend]
                counts[name] += sum(one.nbytes for one in sends)
            else:
                ranks = dist.get_world_size(options["group"])
                sent = arguments[1].nbytes
                counts[name] += sent - sent // ranks if "all_to_all" in name else sent * (ranks - 1)
            return call(*arguments, **options)

        return wrapped

    with mock.patch.multiple(dist, **{name: wrap(name) for name in CALLS}):
        yield counts


@torch.inference_mode()
def bytes_of_blocks(rank: int, world_size: int) -> dict[str, dict[str, Counter[str]]]:
    found: dict[str, dict[str, Counter[str]]] = {}
    for name, settings in cases(world_size):
        steps = make_steps(rank, **settings)
        of_case = {}
        for scope in ("double_block", "single_block", "forward"):
            step = steps.make(scope, 1)
            with count_bytes() as counts:
                step()
            of_case[scope] = counts
        found[name] = of_case
    return found


def _merge_by_means(parts: Any) -> Tensor:
    outs = [out for out, _ in parts]
    return torch.stack(outs).mean(0)


def _base_2(kernel: Any) -> Any:
    whole = attention.attention_part(kernel)

    def part(*tokens: Tensor) -> tuple[Tensor, Tensor]:
        out, logsumexp = whole(*tokens)
        return out, logsumexp * 1.4427

    return part


def faults(rank: int, world_size: int) -> dict[str, str]:
    """What `check` says, without a fault and with each."""
    all_to_all = dist.all_to_all_single

    def swap(received: Tensor, sent: Tensor, group: Any = None) -> None:
        all_to_all(received, sent.roll(1, 0), group=group)

    kinds: dict[str, tuple[dict[str, Any], Any]] = {
        "ulysses": ({"ulysses": 2}, nullcontext()),
        "ring": ({"ring": 2}, nullcontext()),
        "swapped all_to_all": (
            {"ulysses": 2}, mock.patch.object(dist, "all_to_all_single", swap),
        ),
        "parts merged by their mean": (
            {"ring": 2}, mock.patch.object(sequence_parallel, "merge", _merge_by_means),
        ),
        "log-sum-exp to another base": (
            {"ring": 2}, mock.patch.object(sequence_parallel, "attention_part", _base_2),
        ),
    }  # fmt: skip
    return {
        f"{name}, {precision}": outcome(workload(rank, world_size, precision, **settings), patch)
        for name, (settings, patch) in kinds.items()
        for precision in (Precision.FP32, Precision.BF16)
    }


def workload(rank: int, world_size: int, precision: Precision, **settings: Any) -> Dit:
    context = Context(
        device=torch.device("cpu"), rank=rank, world_size=world_size, local_rank=rank,
        batch_size=1, precision=precision, seed=3,
    )  # fmt: skip
    sizes: dict[str, Any] = {"preset": "tiny", "height": 64, "width": 64, "text_tokens": 8}
    return Dit(context, **sizes, **settings)


def outcome(built: Dit, patch: Any) -> str:
    with patch:
        try:
            built.check()
        except WrongResultError as error:
            return str(error)
    return "right"


def run_rank(rank: int, store: str) -> dict[int, dict[str, Any]]:
    """Be that rank of a group of each size that has one; what was found, by size."""
    sizes = [world_size for world_size in DEGREES if rank < world_size]
    return {
        world_size: _in_group(rank, world_size, f"{store}-{world_size}") for world_size in sizes
    }


def _in_group(rank: int, world_size: int, store: str) -> dict[str, Any]:
    with gloo(rank, world_size, store):
        found = {
            "differences": differences(rank, world_size),
            "bytes": bytes_of_blocks(rank, world_size),
        }
        return {**found, "faults": faults(rank, world_size)} if world_size == 2 else found
