"""Three ranks with batches of different size train as one process does on all of the samples."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from builders import make_context
from forked import answers_of_ranks, gloo
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from raybench.workloads.base import Context
from raybench.workloads.networks import linear_stack
from raybench.workloads.training import Model, Recipe, slices

WIDTH, STEPS, RATE = 8, 5, 0.05
# Samples of each rank, and in how many passes.
CASES = {"uneven batches": ((14, 6, 4), (1, 1, 1)), "uneven passes": ((16, 6, 2), (8, 3, 1))}
CONTROL = "weights left out"


class OnRows(Model):
    """Trains in double precision on these rows of a data set that all ranks know."""

    def __init__(self, context: Context, *, first: int, passes: int) -> None:
        generator = torch.Generator().manual_seed(1)
        items = context.batch_size * passes
        data = torch.randn(2, 24, WIDTH, generator=generator, dtype=torch.float64)
        inputs, targets = data[:, first : first + items]
        self.train(
            context,
            lambda: linear_stack(WIDTH, 3).double(),
            slices(inputs, targets, context.batch_size),
            Recipe(loss=mse_loss, optimizer="sgd", grad_accumulation=passes),
        )
        self.optimizer.param_groups[0]["lr"] = RATE


def train(context: Context, first: int, passes: int) -> SimpleNamespace:
    workload = OnRows(context, first=first, passes=passes)
    reductions = [0]

    # DDP compares the annotations with its classes, and here annotations are strings.
    def counted(group, bucket):
        reductions[-1] += 1
        return allreduce_hook(group, bucket)

    if isinstance(workload.replica, DistributedDataParallel):
        workload.replica.register_comm_hook(dist.group.WORLD, counted)
    error = workload.gradient_error()
    for _ in range(STEPS):
        reductions.append(0)
        workload.step()
    parameters = torch.cat([p.detach().flatten() for p in workload.model.parameters()])
    return SimpleNamespace(
        parameters=parameters.tolist(), gradient_error=error, reductions=reductions[1:]
    )


def context_of(rank: int, world_size: int, batch_size: int, loss_weight: float) -> Context:
    # Slow devices repeat their work, and train alike.
    more = {"loss_weight": loss_weight, "extra_work": 1.5 if rank == 2 else 0.0}
    return make_context(rank, world_size, batch_size=batch_size, **more)


def observe(case: str, rank: int) -> SimpleNamespace:
    shares, passes = CASES.get(case, CASES["uneven batches"])
    weight = 1.0 if case == CONTROL else 3 * shares[rank] / sum(shares)
    context = context_of(rank, 3, shares[rank] // passes[rank], weight)
    return train(context, sum(shares[:rank]), passes[rank])


def run_rank(rank: int, store: str) -> dict[str, SimpleNamespace]:
    with gloo(rank, 3, store):
        return {case: observe(case, rank) for case in (*CASES, CONTROL)}


ranks = answers_of_ranks(run_rank, 3)


@pytest.fixture(scope="module")
def alone():
    return torch.tensor(train(context_of(0, 1, 24, 1.0), 0, 1).parameters, dtype=torch.float64)


def difference(outcome: SimpleNamespace, alone: torch.Tensor) -> float:
    parameters = torch.tensor(outcome.parameters, dtype=torch.float64)
    return float((parameters - alone).norm() / alone.norm())


@pytest.mark.parametrize("case", CASES)
def test_uneven_ranks_train_like_one_process(case, ranks, alone):
    for rank in ranks:
        assert difference(rank[case], alone) <= 1e-12
        assert rank[case].gradient_error <= 1e-12


def test_the_check_detects_training_without_loss_weights(ranks, alone):
    for rank in ranks:
        assert difference(rank[CONTROL], alone) > 1e-4
        assert rank[CONTROL].gradient_error > 0.01


def test_each_rank_reduces_once_per_step(ranks):
    assert {tuple(rank["uneven passes"].reductions) for rank in ranks} == {(1,) * STEPS}
