"""The collectives of a step, whoever issues them: counted, and replaced by local copies.

What `torch.distributed` sends goes through operators `c10d::…` of torch's dispatcher: its
functions, functional collectives, DistributedDataParallel, FSDP, DTensor, compiled code. Their
kernels are replaced for a while, and nothing is asked of who calls them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    _create_work_from_future,
)
from torch.distributed import ProcessGroup, Work
from torch.futures import Future

from raybench.measure.marks import Mark, elapsed_ms, make_marker
from raybench.records import Traffic
from raybench.workloads.communication.collective_operations import busbw_factor

_KEYS = ("CPU", "CUDA")
# Above any usual eps of a norm, and as small as embeddings are.
_ADDED_SCALE = 0.02
# What is larger are gradients that FSDP shares out, which go to the optimizer alone.
_MOST_ADDED_BYTES = 2**27
# Where to write, and what; None: what only another rank has.
Copy = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One call on one rank.

    kind: as torch names it. ranks: of its group.
    message_bytes: as nccl-tests counts them. copies: what it writes, from what this rank has.
    """

    kind: str
    ranks: int
    message_bytes: int
    copies: Sequence[Copy]


def add_up(collectives: Sequence[Collective]) -> tuple[Traffic, ...]:
    """Add up the collectives of a step by kind and size of group, in the order of the first."""
    keys = dict.fromkeys((one.kind, one.ranks) for one in collectives)
    return tuple(
        Traffic(
            kind=kind,
            ranks=ranks,
            calls=len(own := [c for c in collectives if (c.kind, c.ranks) == (kind, ranks)]),
            message_bytes=(size := sum(one.message_bytes for one in own)),
            bus_bytes=busbw_factor(kind, ranks) * size,
        )
        for kind, ranks in keys
    )


# Makes the result of a collective on this rank alone.
Handler = Callable[[Collective], Work]


@contextmanager
def replace_collectives(handler: Handler) -> Iterator[None]:
    """Let the handler take the place of all collectives of the process inside the `with` block.

    No real one may be issued meanwhile: to call torch's own kernels from Python would hold the
    lock of its interpreter, for which threads of gloo and NCCL wait while they hold others.
    """
    with torch.library._scoped_library("c10d", "IMPL") as library, _groups_of_calls():
        with warnings.catch_warnings():
            # Torch warns of kernels that are replaced.
            warnings.simplefilter("ignore")
            for name in _READ:
                _replace(library, name, handler)
        yield


def _replace(library: torch.library.Library, name: str, handler: Handler) -> None:
    schema = getattr(torch.ops.c10d, name).default._schema
    names, results = [one.name for one in schema.arguments], len(schema.returns)

    def kernel(*values: Any) -> Any:
        work = handler(_read_collective(name, dict(zip(names, values, strict=False))))
        if not results:
            return None
        return (values[0], work.boxed()) if results > 1 else work.boxed()

    for key in _KEYS:
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", key):
            library.impl(name, kernel, key, allow_override=True)  # type: ignore[no-untyped-call]


@contextmanager
def _groups_of_calls() -> Iterator[None]:
    """Hide from NCCL the calls that it would issue as one: it gets none of them.

    Python tells the group itself of their beginning and end, past the dispatcher.
    """
    patched: Any = ProcessGroup
    # Not by the class, which gives functions that are bound to nothing.
    begin, end = (vars(patched)[name] for name in ("_start_coalescing", "_end_coalescing"))
    patched._start_coalescing = lambda group, device: None
    patched._end_coalescing = lambda group, device: _complete_work([])
    try:
        yield
    finally:
        patched._start_coalescing, patched._end_coalescing = begin, end


def _complete_work(outputs: Sequence[Tensor]) -> Work:
    """Make the work of a collective whose outputs are written on the current stream already."""
    devices = {tensor.device for tensor in outputs if tensor.is_cuda}
    future: Future[list[Tensor]] = Future(devices=list(devices))
    future.set_result(list(outputs))
    work: Work = _create_work_from_future(future)
    return work


class LocalCopies:
    """A handler: each collective becomes copies of what its rank has, on the stream that asks.

    So outputs are written, and what is computed of them later is computed of numbers as before. An
    all_reduce and a broadcast leave what is there. What only another rank has is random, the same
    each time; integers are 0.

    A reduce_scatter of activations also adds random numbers for what the others have. A token that
    only another rank embeds would be zeros here in all layers, and its gradient through norms of
    zeros overflows: a device that multiplies NaN draws less power, and its clocks rise.
    """

    def __init__(self) -> None:
        self._made_up: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, collective: Collective) -> Work:
        """Write the outputs of a collective."""
        with torch.no_grad():
            for output, source in collective.copies:
                self._fill(output, self._make_up(output) if source is None else source)
                if collective.kind == "reduce_scatter":
                    self._add_others(output)
        return _complete_work([output for output, _ in collective.copies])

    def _fill(self, output: Tensor, source: Tensor) -> None:
        """Copy the source, cut or repeated where the output has another size."""
        if output.data_ptr() == source.data_ptr() or not output.numel() or not source.numel():
            return
        # As collectives do, past autograd: what it has saved does not count as modified.
        written = output.data
        if written.numel() == source.numel():
            written.copy_(source.view_as(written))
            return
        for part in torch.split(written.view(-1), source.numel()):
            part.copy_(source.reshape(-1)[: part.numel()])

    def _add_others(self, output: Tensor) -> None:
        # Torch adds no numbers of 8 bits.
        is_added = output.dtype.is_floating_point and output.dtype.itemsize > 1
        if is_added and 0 < output.nbytes <= _MOST_ADDED_BYTES:
            output.data.add_(self._make_up(output), alpha=_ADDED_SCALE)

    def _make_up(self, output: Tensor) -> Tensor:
        key = (output.shape, output.dtype, output.device)
        if key not in self._made_up:
            is_real = output.dtype.is_floating_point or output.dtype.is_complex
            # Torch draws no random numbers of 8 bits.
            drawn = torch.float32 if is_real and output.dtype.itemsize == 1 else output.dtype
            made_up = torch.zeros(output.shape, dtype=drawn, device=output.device)
            self._made_up[key] = (made_up.normal_() if is_real else made_up).to(output.dtype)
        return self._made_up[key]


class WatchedCopies(LocalCopies):
    """The same, and which collectives they stand for, and how long they take."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._mark = make_marker(device)
        self._steps: list[list[tuple[Collective, Mark, Mark]]] = [[]]

    def __call__(self, collective: Collective) -> Work:
        """Write the outputs of a collective between two marks."""
        start = self._mark()
        work = super().__call__(collective)
        # Without its tensors, whose memory is the step's.
        self._steps[-1].append((replace(collective, copies=()), start, self._mark()))
        return work

    def end_step(self) -> None:
        """Count what follows to the next step."""
        self._steps.append([])

    def take(self) -> list[tuple[list[Collective], float]]:
        """Take the collectives of each step that has ended, and the time of its copies in ms.

        The work must be done.
        """
        steps, self._steps = self._steps[:-1], self._steps[-1:]
        return [
            ([one for one, *_ in step], sum(elapsed_ms(*marks) for _, *marks in step))
            for step in steps
        ]


# What a collective does: its kind, the bytes of its message, and its copies.
_Effect = tuple[str, int, Sequence[Copy]]
_Given = Mapping[str, Any]


def _read_collective(name: str, given: _Given) -> Collective:
    """given: the operator's arguments by name."""
    group = ProcessGroup.unbox(given["process_group"])
    ranks, rank = group.size(), group.rank()
    kind, message_bytes, copies = _READ[name](given, ranks, rank)
    return Collective(
        kind=kind,
        ranks=ranks,
        message_bytes=message_bytes,
        copies=copies,
    )


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _in_place(kind: str, tensors: str = "tensors") -> Callable[[_Given, int, int], _Effect]:
    """Read a collective whose output lies where its input does: this rank's own numbers stay."""

    def read(given: _Given, ranks: int, rank: int) -> _Effect:
        buffers = given[tensors]
        return kind, _bytes(buffers), [(buffer, buffer) for buffer in buffers]

    return read


def _into_each(outputs: Sequence[Tensor], own: Tensor) -> list[Copy]:
    return [(output, own) for output in outputs]


def _all_gather_lists(given: _Given, ranks: int, rank: int) -> _Effect:
    lists = list(zip(given["output_tensors"], given["input_tensors"], strict=True))
    message_bytes = sum(_bytes(outputs) for outputs, _ in lists)
    return (
        "all_gather",
        message_bytes,
        [c for outputs, own in lists for c in _into_each(outputs, own)],
    )


def _all_gather_transposed(given: _Given, ranks: int, rank: int) -> _Effect:
    """Read one whose lists are by rank and not by tensor."""
    lists = [*zip(*given["output_lists"], strict=True)]
    given = {"output_tensors": lists, "input_tensors": given["input_list"]}
    return _all_gather_lists(given, ranks, rank)


def _all_gather_parts(pairs: Sequence[tuple[Tensor, Tensor]], ranks: int) -> _Effect:
    """Read one into tensors that have room for the input of each rank."""
    copies = [c for whole, own in pairs for c in _into_each(_parts(whole, ranks), own)]
    return "all_gather", _bytes([whole for whole, _ in pairs]), copies


def _reduce_scatter_parts(pairs: Sequence[tuple[Tensor, Tensor]], ranks: int, rank: int) -> _Effect:
    """Read one of tensors that hold the output of each rank."""
    copies = [(own, _parts(whole, ranks)[rank]) for own, whole in pairs]
    return "reduce_scatter", _bytes([whole for _, whole in pairs]), copies


def _parts(whole: Tensor, ranks: int) -> Sequence[Tensor]:
    return whole.reshape(-1).chunk(ranks)


def _reduce_scatter_lists(given: _Given, ranks: int, rank: int) -> _Effect:
    lists = list(zip(given["output_tensors"], given["input_tensors"], strict=True))
    copies = [(own, inputs[rank]) for own, inputs in lists]
    return "reduce_scatter", sum(_bytes(inputs) for _, inputs in lists), copies


def _all_to_all_lists(given: _Given, ranks: int, rank: int) -> _Effect:
    outputs, inputs = given["output_tensors"], given["input_tensors"]
    return "all_to_all", _bytes(inputs), list(zip(outputs, inputs, strict=True))


def _gather(given: _Given, ranks: int, rank: int) -> _Effect:
    own = given["input_tensors"]
    copies = [(out, own[0]) for outputs in given["output_tensors"] for out in outputs]
    return "gather", ranks * _bytes(own), copies


def _scatter(given: _Given, ranks: int, rank: int) -> _Effect:
    own, lists = given["output_tensors"], given["input_tensors"]
    sources = [inputs[rank] for inputs in lists] or [None] * len(own)
    return "scatter", ranks * _bytes(own), list(zip(own, sources, strict=True))


def _send(given: _Given, ranks: int, rank: int) -> _Effect:
    return "send", _bytes(given["tensors"]), []


def _receive(given: _Given, ranks: int, rank: int) -> _Effect:
    tensors = given["tensors"]
    return "recv", _bytes(tensors), [(tensor, None) for tensor in tensors]


def _barrier(given: _Given, ranks: int, rank: int) -> _Effect:
    return "barrier", 0, []


# By operator of torch's dispatcher.
_READ: Mapping[str, Callable[[_Given, int, int], _Effect]] = {
    "allreduce_": _in_place("all_reduce"),
    "allreduce_coalesced_": _in_place("all_reduce"),
    "broadcast_": _in_place("broadcast"),
    "reduce_": _in_place("reduce"),
    "allgather_": _all_gather_lists,
    "allgather_coalesced_": _all_gather_transposed,
    "_allgather_base_": lambda given, ranks, rank: _all_gather_parts(
        [(given["output_tensor"], given["input_tensor"])], ranks
    ),
    "allgather_into_tensor_coalesced_": lambda given, ranks, rank: _all_gather_parts(
        [*zip(given["outputs"], given["inputs"], strict=True)], ranks
    ),
    "reduce_scatter_": _reduce_scatter_lists,
    "_reduce_scatter_base_": lambda given, ranks, rank: _reduce_scatter_parts(
        [(given["output_tensor"], given["input_tensor"])], ranks, rank
    ),
    "reduce_scatter_tensor_coalesced_": lambda given, ranks, rank: _reduce_scatter_parts(
        [*zip(given["outputs"], given["inputs"], strict=True)], ranks, rank
    ),
    "alltoall_": _all_to_all_lists,
    "alltoall_base_": lambda given, ranks, rank: (
        "all_to_all",
        given["input"].nbytes,
        [(given["output"], given["input"])],
    ),
    "gather_": _gather,
    "scatter_": _scatter,
    "send": _send,
    "recv_": _receive,
    "recv_any_source_": _receive,
    "barrier": _barrier,
    "monitored_barrier_": _barrier,
}
