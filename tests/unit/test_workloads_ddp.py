"""Two ranks on gloo. They are started once and do everything; the tests look at the answers."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from raybench.plan import Precision
from raybench.workloads.base import Context
from raybench.workloads.mlp import Mlp
from raybench.workloads.transformer import Transformer

STEPS = 3
CASES = (
    "plain",
    "accumulated",
    "small buckets",
    "all options",
    "fp16",
    "transformer",
    "compiled",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one rank saw of one workload; plain lists, so that they travel."""

    gradients: list[list[float]]
    parameters: list[float]
    all_reduces: list[int]


def build(case: str, rank: int) -> Mlp | Transformer:
    accumulated = case in ("accumulated", "all options")
    context = Context(
        device=torch.device("cpu"),
        rank=rank,
        world_size=2,
        local_rank=rank,
        batch_size=2 if accumulated else 8,
        precision=Precision.FP16 if case == "fp16" else Precision.FP32,
    )
    passes = 4 if accumulated else 1
    if case == "transformer":
        return Transformer(
            context, preset="tiny", seq_len=8, static_graph=True, activation_checkpointing=True
        )
    if case == "compiled":
        # Generating code would take seconds; what DDP does around the graph stays the same.
        with patch.object(torch, "compile", partial(torch.compile, backend="eager")):
            return Mlp(context, hidden=16, layers=2, optimizer="sgd", compile=True)
    if case == "small buckets":
        # Four layers of 1 MiB each.
        return Mlp(context, hidden=512, layers=4, optimizer="sgd", bucket_cap_mb=1)
    every = case == "all options"
    return Mlp(
        context,
        hidden=16,
        layers=2,
        optimizer="sgd",
        gradient_as_bucket_view=every,
        static_graph=every,
        grad_accumulation=passes,
    )


def observe(case: str, rank: int) -> Seen:
    workload = build(case, rank)
    training = workload.training
    assert training.ddp is not None
    buckets: list[int] = []
    gradients: list[list[float]] = []

    # DDP compares the annotations with its classes, and here annotations are strings.
    def counted(group, bucket):  # type: ignore[no-untyped-def]
        buckets[-1] += 1
        return allreduce_hook(group, bucket)

    def note(*_: object) -> None:
        grads = [p.grad.flatten() for p in training.model.parameters() if p.grad is not None]
        gradients.append(torch.cat(grads)[:2000].tolist())

    training.ddp.register_comm_hook(dist.group.WORLD, counted)
    training.optimizer.register_step_pre_hook(note)
    for _ in range(STEPS):
        buckets.append(0)
        workload.step()
    parameters = torch.cat([p.detach().flatten() for p in training.model.parameters()])
    workload.close()
    return Seen(
        gradients=gradients,
        parameters=parameters[:2000].tolist(),
        all_reduces=buckets,
    )


def run_rank(rank: int, store: str) -> dict[str, Seen]:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    try:
        return {case: observe(case, rank) for case in CASES}
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Seen]]:
    store: Path = tmp_path_factory.mktemp("group") / "store"
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        answers = [pool.submit(run_rank, rank, str(store)) for rank in (0, 1)]
        return [answer.result(timeout=120) for answer in answers]


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_have_the_same_gradients_and_parameters(
    case: str, ranks: list[dict[str, Seen]]
) -> None:
    first, second = (rank[case] for rank in ranks)
    assert len(first.gradients) == STEPS
    assert first.gradients == second.gradients
    assert any(first.gradients[0])
    assert first.parameters == second.parameters


def test_accumulation_reduces_once_a_step(ranks: list[dict[str, Seen]]) -> None:
    # A small model is one bucket: without no_sync there would be four a step.
    assert ranks[0]["plain"].all_reduces == [1] * STEPS
    assert ranks[0]["accumulated"].all_reduces == [1] * STEPS


def test_a_static_graph_reduces_once_more_in_its_first_step(ranks: list[dict[str, Seen]]) -> None:
    assert ranks[0]["all options"].all_reduces == [2, 1, 1]


@pytest.mark.parametrize("case", ["accumulated", "all options"])
def test_accumulation_equals_one_pass_over_the_same_rows(
    case: str, ranks: list[dict[str, Seen]]
) -> None:
    whole, parts = ranks[0]["plain"].gradients, ranks[0][case].gradients
    for one, four in zip(whole, parts, strict=True):
        assert four == pytest.approx(one, rel=1e-4, abs=1e-7)


def test_smaller_buckets_are_reduced_one_by_one(ranks: list[dict[str, Seen]]) -> None:
    assert ranks[0]["small buckets"].all_reduces[-1] >= 4
