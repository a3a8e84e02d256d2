"""What ranks of the workload `dit` compute together, in fp64 on gloo."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from builders import make_context, outcome_of_check
from forked import gloo
from torch import Tensor

from raybench.job.point import Precision
from raybench.workloads import attention
from raybench.workloads.attention import attend_with_logsumexp, form_groups
from raybench.workloads.dit import Dit
from raybench.workloads.dit_model import StepBuilder
from raybench.workloads.shapes import DIT_PRESETS

# world_size -> (ulysses, ring)
DEGREES = {2: ((2, 1), (1, 2)), 3: ((3, 1), (1, 3)), 4: ((4, 1), (1, 4), (2, 2))}


def velocity(rank: int, ulysses: int, ring: int, ring_kind: Any = "p2p") -> Tensor:
    """What a forward pass gives, divided over so many ranks."""
    steps = StepBuilder(
        shape=DIT_PRESETS["tiny"],
        rows=6,
        columns=4,
        text_tokens=12,
        device=torch.device("cpu"),
        dtype=torch.float64,
        seed=3,
        attention="auto",
        parallel=form_groups(rank, ulysses=ulysses, ring=ring, ring_kind=ring_kind),
    )
    return steps.make("forward", 1)()


def cases(world_size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is compared with the whole, by name."""
    for (ulysses, ring), kind in itertools.product(DEGREES[world_size], ("p2p", "allgather")):
        if ring > 1 or kind == "p2p":
            settings = {"ulysses": ulysses, "ring": ring, "ring_kind": kind}
            yield f"ulysses {ulysses}, ring {ring} {kind}", settings


@torch.inference_mode()
def differences(rank: int, world_size: int) -> dict[str, float]:
    """Largest difference to the undivided output, as a share of its largest number."""
    whole = velocity(0, 1, 1)
    largest = whole.abs().max()
    return {
        name: float((velocity(rank, **settings) - whole).abs().max() / largest)
        for name, settings in cases(world_size)
    }


def _merge_by_means(parts: Any) -> Tensor:
    outs = [out for out, _ in parts]
    return torch.stack(outs).mean(0)


def _base_2(kernel: Any, *tokens: Tensor) -> tuple[Tensor, Tensor]:
    out, logsumexp = attend_with_logsumexp(kernel, *tokens)
    return out, logsumexp * 1.4427


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
            {"ring": 2}, mock.patch.object(attention, "merge", _merge_by_means),
        ),
        "log-sum-exp to another base": (
            {"ring": 2}, mock.patch.object(attention, "attend_with_logsumexp", _base_2),
        ),
    }  # fmt: skip
    found = {}
    for (name, (settings, fault)), precision in itertools.product(
        kinds.items(), (Precision.FP32, Precision.BF16)
    ):
        context = make_context(rank, world_size, batch_size=1, precision=precision, seed=3)
        with fault:
            workload = Dit(context, preset="tiny", height=64, width=64, text_tokens=8, **settings)
            found[f"{name}, {precision}"] = outcome_of_check(workload)
    return found


def run_rank(rank: int, store: str) -> dict[int, dict[str, Any]]:
    """Be that rank of a group of each size that has one; what was found, by size."""
    found: dict[int, dict[str, Any]] = {}
    for world_size in DEGREES:
        if rank < world_size:
            with gloo(rank, world_size, f"{store}-{world_size}"):
                found[world_size] = {"differences": differences(rank, world_size)}
                if world_size == 2:
                    found[world_size]["faults"] = faults(rank, world_size)
    return found
