"""Two ranks on gloo. They are started once and do everything; the tests look at the answers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from builders import make_context
from forked import answers_of_ranks, gloo
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from raybench.job.point import Precision
from raybench.measure.breakdown import Extent, break_down
from raybench.measure.instruments import Timer
from raybench.measure.marks import BucketMarks
from raybench.records.doubts import NotMeasured
from raybench.records.measurement import Breakdown
from raybench.workloads.base import Context, as_workload
from raybench.workloads.networks import Mlp
from raybench.workloads.transformer import Transformer

STEPS = 3
CASES = ("plain", "accumulated", "small buckets", "all options", "fp16", "transformer", "compiled")
ACCUMULATED = ("accumulated", "all options")
REHOOKED = ("plain", "accumulated", "small buckets", "all options")


def context_of(case: str, rank: int) -> Context:
    batch_size = 2 if case in ACCUMULATED else 8
    precision = Precision.FP16 if case == "fp16" else Precision.FP32
    return make_context(rank, 2, batch_size=batch_size, precision=precision, seed=0)


def build(case: str, context: Context) -> Mlp | Transformer:
    passes = 4 if case in ACCUMULATED else 1
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


def observe(case: str, rank: int) -> SimpleNamespace:
    workload = build(case, context_of(case, rank))
    ddp = workload.replica
    buckets: list[int] = []
    gradients: list[list[float]] = []

    # DDP compares the annotations with its classes, and here annotations are strings.
    def counted(group, bucket):
        buckets[-1] += 1
        return allreduce_hook(group, bucket)

    def note(*_: object) -> None:
        grads = [p.grad.flatten() for p in workload.model.parameters() if p.grad is not None]
        gradients.append(torch.cat(grads)[:2000].tolist())

    ddp.register_comm_hook(dist.group.WORLD, counted)
    workload.optimizer.register_step_pre_hook(note)
    for _ in range(STEPS):
        buckets.append(0)
        workload.step()
    parameters = torch.cat([p.detach().flatten() for p in workload.model.parameters()])
    workload.close()
    return SimpleNamespace(
        gradients=gradients, parameters=parameters[:2000].tolist(), all_reduces=buckets
    )


def rehook(case: str, rank: int) -> SimpleNamespace:
    context = context_of(case, rank)
    workload = build(case, context)
    # Without updates every step sees the same parameters.
    workload.optimizer.param_groups[0]["lr"] = 0.0
    seen: list[list[float]] = []

    def note(*_: object) -> None:
        gradient = next(workload.model.parameters()).grad
        seen.append(gradient.flatten()[:200].tolist())

    workload.optimizer.register_step_pre_hook(note)
    marks = BucketMarks(torch.device("cpu"))
    workload.step()
    first = weakref.ref(workload.replica.reducer)
    assert context.replicas.why_no_hook() is None
    buckets: list[int] = []
    for hook in (marks.hook, noop_hook, None):
        context.replicas.set_comm_hook(hook)
        assert context.replicas.why_no_hook() is None  # it can be taken back, for the profiler
        # Three, the last of which is as good as any: a static graph differs in the first.
        for _ in range(3):
            workload.step()
            marks.end_step()
            [taken] = marks.take()
            buckets.append(len(taken))
    gc.collect()
    return SimpleNamespace(
        by_itself=seen[0],
        timed=seen[3],
        not_reduced=seen[6],
        by_itself_again=seen[9],
        buckets=buckets,
        old_reducer_is_gone=first() is None,
    )


def broken_down(rank: int) -> Breakdown:
    context = context_of("small buckets", rank)
    workload = build("small buckets", context)
    return break_down(workload, Timer(torch.device("cpu")), context, Extent(samples=4))


class Twice:
    """Two models, as a class of one's own has them that inherits nothing."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.models = [context.ddp(nn.Linear(8, 8).eval()) for _ in range(2)]

    def step(self) -> None:
        # Ranks may name other regions: here one names none.
        names = ["first", "second"] if self.context.rank == 0 else []
        with ExitStack() as regions:
            for name in names:
                regions.enter_context(self.context.region(name))
            for model in self.models:
                model(torch.ones(4, 8)).sum().backward()
        optimizer = torch.optim.SGD([p for m in self.models for p in m.parameters()], lr=0.1)
        optimizer.step()


def own_class(rank: int) -> Breakdown:
    context = context_of("own", rank)
    workload = as_workload(Twice)(context)
    held = list(workload.models)
    workload.step()
    found = break_down(workload, Timer(torch.device("cpu")), context, Extent(samples=4))
    # The same objects, which may be held anywhere.
    assert all(one is other for one, other in zip(held, workload.models, strict=True))
    assert not any(model.module.training for model in workload.models)
    return found


def why_no_hook(rank: int, harm: Callable[[nn.Module], object]) -> str | None:
    context = context_of("own", rank)
    for _ in range(2):  # as two repeats of a point: the second finds its code compiled
        context.replicas.forget()
        model = context.ddp(nn.Linear(8, 8))
        harm(model)
    return context.replicas.why_no_hook()


def compiled(model: nn.Module) -> None:
    one, rank = torch.compile(model, backend="eager"), dist.get_rank()
    with context_of("own", rank).no_sync(one):
        one(torch.full((4, 8), rank + 1.0)).sum().backward()
    assert model.module.weight.grad[0, 0] == 4 * (rank + 1), "reduced"


def run_rank(rank: int, store: str) -> SimpleNamespace:
    harms = (compiled, lambda model: model.register_comm_hook(None, noop_hook), str)
    with gloo(rank, 2, store):
        return SimpleNamespace(
            seen={case: observe(case, rank) for case in CASES},
            rehooked={case: rehook(case, rank) for case in REHOOKED},
            why_no_hook=[why_no_hook(rank, harm) for harm in harms],
            breakdown=broken_down(rank),
            own_class=own_class(rank),
        )


answers = answers_of_ranks(run_rank, 2)


@pytest.fixture
def ranks(answers):
    return [answer.seen for answer in answers]


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_have_the_same_gradients_and_parameters(case, ranks):
    first, second = (rank[case] for rank in ranks)
    assert len(first.gradients) == STEPS
    assert first.gradients == second.gradients
    assert any(first.gradients[0])
    assert first.parameters == second.parameters


def test_each_bucket_is_reduced_once_a_step(ranks):
    # A small model is one bucket: without no_sync there would be four a step.
    assert ranks[0]["plain"].all_reduces == [1] * STEPS
    assert ranks[0]["accumulated"].all_reduces == [1] * STEPS
    # A static graph reduces once more in its first step.
    assert ranks[0]["all options"].all_reduces == [2, 1, 1]
    assert ranks[0]["small buckets"].all_reduces[-1] >= 4


@pytest.mark.parametrize("case", ["accumulated", "all options"])
def test_accumulation_equals_one_pass_over_the_same_rows(case, ranks):
    whole, parts = ranks[0]["plain"].gradients, ranks[0][case].gradients
    for one, four in zip(whole, parts, strict=True):
        assert four == pytest.approx(one, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("case", REHOOKED)
def test_gradients_go_the_way_of_the_hook(case, answers):
    first, second = (answer.rehooked[case] for answer in answers)
    assert any(first.by_itself)
    # Timed buckets are averaged as DDP averages them, and None puts its own way back.
    for found in (first, second):
        assert found.timed == pytest.approx(first.by_itself, rel=1e-5, abs=1e-9)
        assert found.by_itself_again == pytest.approx(first.by_itself, rel=1e-5, abs=1e-9)
        # The hook before is called no more.
        assert all(found.buckets[:3])
        assert found.buckets[3:] == [0] * 6
        assert found.old_reducer_is_gone
    assert first.not_reduced != second.not_reduced
    average = [(a + b) / 2 for a, b in zip(first.not_reduced, second.not_reduced, strict=True)]
    assert average == pytest.approx(first.by_itself, rel=1e-3, abs=1e-7)


def test_compiled_models_and_custom_hooks_get_no_hook(answers):
    for first, second, third in (answer.why_no_hook for answer in answers):
        assert first is NotMeasured.COMPILED
        assert second is NotMeasured.OWN_HOOK
        assert third is None


@pytest.mark.parametrize("whose", ["breakdown", "own_class"])
def test_a_step_of_two_ranks_is_taken_apart(whose, answers):
    for found in (getattr(answer, whose) for answer in answers):
        assert len(found.comm_ms) == len(found.tail_ms) == 4
        assert all(tail > 0 for tail in found.tail_ms)
        assert all(comm > 0 for comm in found.comm_ms)
        assert 0 < found.optimizer_ms < median(found.local_ms[0])
        assert "noop_hook" in found.methods["comm_exposed_ms"]


def test_a_rank_without_regions_does_not_hide_others(answers):
    named, unnamed = (answer.own_class for answer in answers)
    assert [region.name for region in named.regions] == ["first", "second"]
    assert all(region.ms > 0 for region in named.regions)
    assert "host clock" in named.methods["regions"]
    assert unnamed.regions == ()
    assert "regions" not in unnamed.methods
