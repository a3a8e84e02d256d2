"""What ranks of a layout compute together, beside one device, in fp64."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from forked import gloo
from torch import Tensor
from torch.distributed.tensor import DTensor

from raybench.workloads import language_models
from raybench.workloads.shapes import Layout
from raybench.workloads.transformer import Transformer
from tests.unit.builders import make_context

BATCH = 2
SIZES: dict[str, Any] = {"preset": "llama-tiny", "seq_len": 16}
# By world size and name.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "DDP": {},
        "FSDP": {"dp_shard": 2},
        "FSDP, kept after the forward pass": {"dp_shard": 2, "reshard_after_forward": False},
        "FSDP of GPT-2": {"dp_shard": 2, "preset": "tiny"},
        "FSDP, two passes": {"dp_shard": 2, "grad_accumulation": 2},
        "FSDP, full checkpointing": {"dp_shard": 2, "activation_checkpointing": "full"},
        "TP": {"tp": 2},
        "TP, selective checkpointing": {"tp": 2, "activation_checkpointing": "selective"},
        "CP": {"cp": 2},
        "CP, full checkpointing": {"cp": 2, "activation_checkpointing": "full"},
    },
    4: {
        "FSDP": {"dp_shard": -1},
        "HSDP": {"dp_shard": 2},
        "FSDP x TP": {"dp_shard": 2, "tp": 2, "activation_checkpointing": "full"},
        "DDP x TP": {"dp_replicate": 2, "tp": 2},
        "CP": {"cp": 4},
        "FSDP x CP": {"dp_shard": 2, "cp": 2},
        "CP x TP": {"cp": 2, "tp": 2, "activation_checkpointing": "full"},
    },
}


# Of two ranks, with blocks and loss compiled; no code is generated, which takes minutes on CPUs.
COMPILED: dict[str, dict[str, Any]] = {
    f"{name}, compiled": {**options, "compile": True, "layers": 1}
    for name, options in {
        "FSDP": {"dp_shard": 2, "activation_checkpointing": "full"},
        # Torch 2.13 fails with full checkpointing; 2.11 does not.
        "TP": {"tp": 2, "activation_checkpointing": "selective"},
        "CP": {"cp": 2, "activation_checkpointing": "full"},
    }.items()
}


def make(rank: int, world_size: int, device: str = "cpu", **options: Any) -> Transformer:
    at = torch.device(device)
    context = make_context(rank, world_size, device=at, batch_size=BATCH, seed=3)
    return Transformer(context, **{**SIZES, **options})


@contextmanager
def _losses() -> Iterator[list[Tensor]]:
    """Note the losses of the logits that are here."""
    noted: list[Tensor] = []
    real = language_models.next_token_loss

    def note(logits: Tensor, targets: Tensor) -> Tensor:
        noted.append(real(logits, targets))
        return noted[-1]

    with mock.patch.object(language_models, "next_token_loss", note):
        yield noted


def step(rank: int, world_size: int, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the mean loss of a step here, and its gradients as wholes."""
    gradients: list[Tensor] = []

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            one = parameter.grad
            gradients.append(one.full_tensor() if isinstance(one, DTensor) else one.clone())

    with _losses() as losses:
        workload = make(rank, world_size, **options)
        workload.optimizer.register_step_pre_hook(look)
        workload.step()
    assert (workload.gradient_error is None) == Layout.make(world_size, options).is_divided
    return torch.stack(losses).mean().detach(), gradients


def difference(rank: int, world_size: int, options: dict[str, Any]) -> float:
    """Largest difference of the loss and of a gradient to those of one device, as a share."""
    degrees = ("dp_replicate", "dp_shard", "cp", "tp", "reshard_after_forward", "compile")
    alone = {name: value for name, value in options.items() if name not in degrees}
    groups = world_size // Layout.make(world_size, options).ranks_per_batch
    # The batches of all groups, one after the other, on one device.
    wholes = [step(group, 1, **alone) for group in range(groups)]
    loss, gradients = step(rank, world_size, **options)
    dist.all_reduce(loss)
    wanted_loss = torch.stack([one for one, _ in wholes]).mean()
    shares = [float((loss / world_size - wanted_loss).abs() / wanted_loss)]
    for found, *parts in zip(gradients, *(of_group for _, of_group in wholes), strict=True):
        wanted = torch.stack(parts).mean(0)
        shares.append(float((found - wanted).norm() / wanted.norm()))
    return max(shares)


def _faults() -> dict[str, tuple[dict[str, Any], AbstractContextManager[object]]]:
    def first_part(tokens: Tensor, layout: Layout, rank: int) -> Tensor:
        return tokens.chunk(layout.tp, dim=1)[0]

    return {
        "targets of another part": (
            {"tp": 2},
            mock.patch.object(language_models, "sequence_part", first_part),
        ),
        "each rank of a group with a batch of its own": (
            {"tp": 2},
            mock.patch.object(Layout, "batch_of", lambda self, rank: rank),
        ),
        "keys of this rank alone": (
            {"cp": 2},
            mock.patch.object(
                language_models.collectives,
                "all_gather_tensor_autograd",
                lambda own, gather_dim, group: own.repeat(1, 1, 2, 1),
            ),
        ),
        "nothing": ({"tp": 2}, nullcontext()),
    }


def run_rank(rank: int, world_size: int, store: str) -> dict[str, float]:
    """Be that rank of a group; how far each of its layouts is from one device.

    Each layout in a group of its own, as in the worker of a sweep: nothing may be left of the last.
    """
    torch.set_default_dtype(torch.float64)
    cases: dict[str, tuple[dict[str, Any], AbstractContextManager[object]]] = {
        name: (options, nullcontext()) for name, options in LAYOUTS[world_size].items()
    }
    if world_size == 2:
        cases |= {f"fault: {name}": case for name, case in _faults().items()}
    return _differences(rank, world_size, store, cases)


def run_rank_compiled(rank: int, world_size: int, store: str) -> dict[str, float]:
    """As `run_rank`, of the layouts that are compiled."""
    torch.set_default_dtype(torch.float64)
    without_code = partial(torch.compile, backend="aot_eager", fullgraph=True)
    cases = {
        name: (options, mock.patch.object(torch, "compile", without_code))
        for name, options in COMPILED.items()
    }
    return _differences(rank, world_size, store, cases)


def _differences(
    rank: int,
    world_size: int,
    store: str,
    cases: Mapping[str, tuple[dict[str, Any], AbstractContextManager[object]]],
) -> dict[str, float]:
    found = {}
    for number, (name, (options, fault)) in enumerate(cases.items()):
        with gloo(rank, world_size, f"{store}-{number}"), fault:
            found[name] = difference(rank, world_size, options)
    return found
