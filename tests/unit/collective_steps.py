"""Workloads that communicate in ways of their own."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from builders import make_context
from torch import Tensor

from raybench.job.point import Precision
from raybench.workloads.base import Context, Workload

CPU = torch.device("cpu")
# Torch 2.13 gave both another name and warns of the older ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def context_of(rank: int, world_size: int = 2) -> Context:
    return make_context(rank, world_size, batch_size=4, precision=Precision.FP32)


def numbers(count: int = 12) -> Tensor:
    """Other ones on each rank."""
    return torch.arange(float(count)) + 100 * (dist.get_rank() + 1)


def all_gather_into(ranks: int) -> Tensor:
    whole = torch.zeros(12 * ranks)
    _all_gather(whole, numbers())
    return whole


def all_gather_in_place(ranks: int) -> Tensor:
    """As FSDP does it: the input is the rank's own part of the output."""
    whole = torch.zeros(12 * ranks)
    own = whole.narrow(0, 12 * dist.get_rank(), 12)
    own.copy_(numbers())
    _all_gather(whole, own)
    return whole


def all_gather_lists(ranks: int) -> Tensor:
    parts = [torch.zeros(12) for _ in range(ranks)]
    dist.all_gather(parts, numbers())
    return torch.cat(parts)


def reduce_scatter(ranks: int) -> Tensor:
    own = torch.zeros(12 // ranks)
    _reduce_scatter(own, numbers())
    return own


def all_to_all(ranks: int) -> Tensor:
    output = torch.zeros(12)
    dist.all_to_all_single(output, numbers())
    return output


def all_to_all_uneven(ranks: int) -> Tensor:
    """Rank 0 gets more than it sends, and the other one less."""
    from_each = (8, 4)[dist.get_rank()]
    output = torch.zeros(from_each * ranks)
    dist.all_to_all_single(output, numbers(), [from_each] * ranks, [8, 4])
    return output


def all_reduce(ranks: int) -> Tensor:
    buffer = numbers()
    work = dist.all_reduce(buffer, async_op=True)
    [result] = work.get_future().wait()
    return result


def broadcast(ranks: int) -> Tensor:
    buffer = numbers()
    dist.broadcast(buffer, src=1)
    return buffer


def scatter(ranks: int) -> Tensor:
    output = torch.zeros(12)
    parts = [numbers() + 1000 * rank for rank in range(ranks)]
    dist.scatter(output, parts if dist.get_rank() == 0 else None, src=0)
    return output


def ring(ranks: int) -> Tensor:
    output = torch.zeros(12)
    following, preceding = (dist.get_rank() + 1) % ranks, (dist.get_rank() - 1) % ranks
    sent = dist.P2POp(dist.isend, numbers(), following)
    operations = [sent, dist.P2POp(dist.irecv, output, preceding)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return output


def all_reduce_sparse(ranks: int) -> Tensor:
    """Of 12 rows of 16, whose indices are sent too; the result is coalesced."""
    buffer = torch.sparse_coo_tensor(torch.arange(12)[None], numbers(), (16,))
    dist.all_reduce(buffer)
    return buffer.values()


def from_any_rank(ranks: int) -> Tensor:
    """Rank 0 sends, and who gets that answers where it came from."""
    output = torch.zeros(12)
    if dist.get_rank() == 0:
        dist.send(numbers(), 1)
    source = dist.recv(output)
    if dist.get_rank() == 1:
        dist.send(numbers(), source)
    return output


WAYS: dict[str, Callable[[int], Tensor]] = {
    way.__name__: way
    for way in (
        *(all_gather_into, all_gather_in_place, all_gather_lists, reduce_scatter, from_any_rank),
        *(all_to_all, all_to_all_uneven, all_reduce, broadcast, scatter, ring, all_reduce_sparse),
    )
}


class SleepThenReduce(Workload):
    """A step that computes for some milliseconds, and then reduces."""

    def __init__(self, context: Context, own_ms: float) -> None:
        self.own_ms = own_ms
        self.buffer = torch.ones(16)

    def step(self) -> None:
        time.sleep(self.own_ms / 1e3)
        dist.all_reduce(self.buffer)


class ReducesInTurn(Workload):
    """A model under DDP that reduces its gradients in every second step."""

    def __init__(self, context: Context) -> None:
        self.context, self.steps = context, 0
        self.model = context.ddp(torch.nn.Linear(3, 2))

    def step(self) -> None:
        self.steps += 1
        with self.context.no_sync(self.model) if self.steps % 2 else nullcontext():
            self.model(torch.ones(4, 3)).sum().backward()


class SumOfRanks(Workload):
    """A step that sums what each rank has, and keeps the last sum."""

    def __init__(self) -> None:
        self.total = torch.zeros(1)

    def step(self) -> None:
        self.total.fill_(dist.get_rank() + 1)
        dist.all_reduce(self.total)


class Fails(Workload):
    """A step that minds what its peers have sent, on these ranks."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def step(self) -> None:
        one = torch.ones(1)
        dist.all_reduce(one)
        if dist.get_rank() in self.ranks and one.item() != dist.get_world_size():
            raise ValueError("a peer is missing")


@contextmanager
def slow_all_reduce(delay_ms: float) -> Iterator[None]:
    """Each all_reduce takes so much longer, whoever issues it."""
    real = torch.library.get_kernel("c10d::allreduce_", "CPU")

    def slow(keys: Any, *values: Any) -> Any:
        time.sleep(delay_ms / 1e3)
        return real.call_boxed(keys, *values)

    with torch.library._scoped_library("c10d", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("allreduce_", slow, "CPU", with_keyset=True, allow_override=True)
        yield


def gradient_through_a_reused_buffer() -> float:
    """A collective writes where autograd has saved something, which NCCL does not mind."""
    whole = torch.ones(2 * 4)
    factor = torch.ones(8, requires_grad=True)
    product = factor * whole
    _all_gather(whole, torch.ones(4))
    product.sum().backward()
    return float(factor.grad.sum())
