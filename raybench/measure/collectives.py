"""The collectives of a step, from whatever code: counted, and replaced by local copies.

All that `torch.distributed` sends goes through operators `c10d::…` of torch's dispatcher: its
functions, functional collectives, DistributedDataParallel, FSDP, DTensor, compiled code. The
kernels of these operators are replaced for a while; the calling code stays as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    _create_work_from_future,
)
from torch.distributed import ProcessGroup, Work
from torch.futures import Future

from raybench.records.measurement import Traffic
from raybench.workloads.collective import busbw_factor

_KEYS = ("CPU", "CUDA", "SparseCPU", "SparseCUDA")
# Scale of random numbers: above any usual eps of a norm, and as small as embeddings are.
_ADDED_SCALE = 0.02
# Larger outputs are gradients that FSDP shares out, which only the optimizer reads.
_MOST_ADDED_BYTES = 2**27
# An output and its source; None where only another rank has the data.
Copy = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One call of a collective on one rank.

    kind: torch's name, such as all_reduce; also send and recv. ranks: size of its group.
    message_bytes: as nccl-tests counts them. copies: the outputs, each with the data of this rank
    that a local copy writes to it.
    """

    kind: str
    ranks: int
    message_bytes: int
    copies: Sequence[Copy]


def add_up(collectives: Sequence[CollectiveCall]) -> tuple[Traffic, ...]:
    """Return the traffic of a step by kind and size of group, in the order of the first calls."""
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


# Takes the place of a collective, and writes its outputs on this rank alone.
Handler = Callable[[CollectiveCall], Work]


@contextmanager
def replace_collectives(handler: Handler) -> Iterator[None]:
    """Call the handler instead of each collective of this process inside the `with` block.

    Also of each send and recv, but not of symmetric memory, a backend that is called itself, or the
    replay of a CUDA graph. A Python object that another rank broadcasts, scatters or sends becomes
    None, and its bytes count on that rank. The handler, such as LocalCopies, returns complete work.
    It must not issue real collectives: torch's own kernels are called with the interpreter's lock,
    and threads of gloo and NCCL that hold other locks wait for it, so that both wait for ever.
    """
    with torch.library._scoped_library("c10d", "IMPL") as library, _replace_functions():
        # Torch warns of kernels that are replaced.
        with warnings.catch_warnings(action="ignore"):
            for name in _READ:
                _replace(library, name, handler)
        yield


def _replace(library: torch.library.Library, name: str, handler: Handler) -> None:
    """Register a kernel for operator `name` that calls the handler, on each device that has one."""
    schema = getattr(torch.ops.c10d, name).default._schema
    names, results = [one.name for one in schema.arguments], len(schema.returns)

    def kernel(*values: Any) -> Any:
        """Return what the operator returns, after the handler took its place."""
        given = dict(zip(names, values, strict=False))
        group = ProcessGroup.unbox(given["process_group"])
        kind, message_bytes, copies = _READ[name](given, group.size(), group.rank())
        call = CollectiveCall(
            kind=kind, ranks=group.size(), message_bytes=message_bytes, copies=copies
        )
        work = handler(call)
        if not results:
            return None
        return (values[0], work.boxed()) if results > 1 else work.boxed()

    for key in _KEYS:
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", key):
            library.impl(name, kernel, key, allow_override=True)  # type: ignore[no-untyped-call]


@contextmanager
def _replace_functions() -> Iterator[None]:
    """Replace what torch's Python functions do past the dispatcher, inside the `with` block.

    Calls that NCCL would issue as one do not begin nor end: NCCL gets none of them. A recv from any
    rank is told that the next rank has sent. An object that another rank has to send is None.
    """
    receive, broadcast, load = ProcessGroup.recv_anysource, c10d.broadcast, c10d._tensor_to_object
    sender = 0

    def receive_from_any(group: ProcessGroup, tensors: list[Tensor], tag: int) -> Work:
        nonlocal sender
        sender = (group.rank() + 1) % group.size()
        return receive(group, tensors, tag)

    def broadcast_of_objects(tensor: Tensor, *values: Any, **named: Any) -> Any:
        group, source = named.get("group"), named.get("group_src")
        if group is not None and source not in (None, group.rank()):
            tensor.zero_()  # the sizes of objects: torch initialises them on their source only
        return broadcast(tensor, *values, **named)

    others: Mapping[tuple[Any, str], Callable[..., Any]] = {
        (ProcessGroup, "_start_coalescing"): lambda group, device: None,
        (ProcessGroup, "_end_coalescing"): lambda group, device: _complete_work([]),
        (ProcessGroup, "recv_anysource"): receive_from_any,
        (Work, "_source_rank"): lambda work: sender,
        (c10d, "broadcast"): broadcast_of_objects,
        (c10d, "_tensor_to_object"): lambda data, size, group: (
            load(data, size, group) if size else None  # type: ignore[no-untyped-call]
        ),
    }
    # Not by the class, which gives functions that are bound to nothing.
    before = {(owner, name): vars(owner)[name] for owner, name in others}
    try:
        for (owner, name), function in others.items():
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name), function in before.items():
            setattr(owner, name, function)


def _complete_work(outputs: Sequence[Tensor]) -> Work:
    """Return the work of a collective whose outputs are already written on the current stream."""
    future: Future[list[Tensor]] = Future(devices=list({t.device for t in outputs if t.is_cuda}))
    future.set_result(list(outputs))
    work: Work = _create_work_from_future(future)
    return work


class LocalCopies:
    """A handler that copies the data of this rank to the outputs, on the current stream.

    So outputs are written, and later operators compute with ordinary numbers. An all_reduce, a
    reduce and a broadcast leave their tensors as they are. Other data that only another rank has is
    random, the same each time; integers are 0.

    A reduce_scatter to at most 128 MiB, as of activations, also adds random numbers in place of
    other ranks' data. A token that only another rank embeds would be zeros in all layers here, and
    its gradient through norms of zeros overflows: a device that multiplies NaN draws less power,
    and its clocks rise.
    """

    def __init__(self, seen: list[CollectiveCall] | None = None) -> None:
        """Make the handler. seen: a list to which each call is appended, without its tensors."""
        self._drawn: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}
        self._seen = seen

    def __call__(self, collective: CollectiveCall) -> Work:
        """Write the outputs of a collective, and return a work that is already complete."""
        if self._seen is not None:
            # Without its tensors, whose memory the step needs back.
            self._seen.append(replace(collective, copies=()))
        with torch.no_grad():
            for output, source in collective.copies:
                self._fill(output, self._random(output) if source is None else source)
                is_summed = collective.kind == "reduce_scatter" and output.is_floating_point()
                # Torch adds no numbers of 8 bits.
                if is_summed and output.itemsize > 1 and 0 < output.nbytes <= _MOST_ADDED_BYTES:
                    output.data.add_(self._random(output), alpha=_ADDED_SCALE)
        return _complete_work([output for output, _ in collective.copies])

    def _fill(self, output: Tensor, source: Tensor) -> None:
        """Copy the source to the output, cut or repeated to its size; nothing to itself."""
        if output.is_sparse:  # DDP relies on its being coalesced then, as the source is
            output.copy_(source)
            return
        if output.data_ptr() == source.data_ptr() or not output.numel() or not source.numel():
            return
        # As collectives do, past autograd: tensors that it has saved do not count as modified.
        written = output.data
        if written.numel() == source.numel():
            written.copy_(source.view_as(written))
            return
        for part in torch.split(written.view(-1), source.numel()):
            part.copy_(source.reshape(-1)[: part.numel()])

    def _random(self, output: Tensor) -> Tensor:
        """Return random numbers like the output, the same each time; 0 for integers."""
        key = (output.shape, output.dtype, output.device)
        if key not in self._drawn:
            is_real = output.dtype.is_floating_point or output.dtype.is_complex
            # Torch draws no random numbers of 8 bits.
            dtype = torch.float32 if is_real and output.dtype.itemsize == 1 else output.dtype
            numbers = torch.zeros(output.shape, dtype=dtype, device=output.device)
            self._drawn[key] = (numbers.normal_() if is_real else numbers).to(output.dtype)
        return self._drawn[key]


# Kind, message bytes and copies of a collective.
_Effect = tuple[str, int, Sequence[Copy]]
# The arguments of an operator by name.
_Arguments = Mapping[str, Any]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all tensors; of a sparse one, which is coalesced, indices and values."""
    return sum(t.indices().nbytes + t.values().nbytes if t.is_sparse else t.nbytes for t in tensors)


def _in_place(kind: str, given: _Arguments) -> _Effect:
    """Return the effect of a collective in place, which leaves sparse tensors coalesced."""
    copies = [(t, t.coalesce() if t.is_sparse else t) for t in given["tensors"]]
    return kind, _bytes(source for _, source in copies), copies


def _all_gather(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> _Effect:
    """Return the effect of an all_gather. outputs: of each input, those of all ranks."""
    copies = [(out, own) for outs, own in zip(outputs, inputs, strict=True) for out in outs]
    return "all_gather", _bytes(chain(*outputs)), copies


def _reduce_scatter(
    outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], rank: int
) -> _Effect:
    """Return the effect of a reduce_scatter. inputs: of each output, those for all ranks."""
    copies = [(own, parts[rank]) for own, parts in zip(outputs, inputs, strict=True)]
    return "reduce_scatter", _bytes(chain(*inputs)), copies


def _parts(whole: Tensor, ranks: int) -> Sequence[Tensor]:
    """Return the flattened tensor cut into a part for each rank."""
    return whole.reshape(-1).chunk(ranks)


def _scatter(given: _Arguments, ranks: int, rank: int) -> _Effect:
    """Return the effect of a scatter; outputs of ranks that do not send have no source here."""
    own, lists = given["output_tensors"], given["input_tensors"]
    sources = [inputs[rank] for inputs in lists] or [None] * len(own)
    return "scatter", ranks * _bytes(own), list(zip(own, sources, strict=True))


def _all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> _Effect:
    """Return the effect of an all_to_all, whose outputs get this rank's inputs, in order."""
    return "all_to_all", _bytes(inputs), list(zip(outputs, inputs, strict=True))


# The reader of each operator `c10d::…`, called with (arguments, ranks, rank).
_READ: Mapping[str, Callable[[_Arguments, int, int], _Effect]] = {
    "allreduce_": lambda a, ranks, rank: _in_place("all_reduce", a),
    "allreduce_coalesced_": lambda a, ranks, rank: _in_place("all_reduce", a),
    "broadcast_": lambda a, ranks, rank: _in_place("broadcast", a),
    "reduce_": lambda a, ranks, rank: _in_place("reduce", a),
    "allgather_": lambda a, ranks, rank: _all_gather(a["output_tensors"], a["input_tensors"]),
    # Its output lists are by rank and not by tensor.
    "allgather_coalesced_": lambda a, ranks, rank: _all_gather(
        list(zip(*a["output_lists"], strict=True)), a["input_list"]
    ),
    "_allgather_base_": lambda a, ranks, rank: _all_gather(
        [_parts(a["output_tensor"], ranks)], [a["input_tensor"]]
    ),
    "allgather_into_tensor_coalesced_": lambda a, ranks, rank: _all_gather(
        [_parts(output, ranks) for output in a["outputs"]], a["inputs"]
    ),
    "reduce_scatter_": lambda a, ranks, rank: _reduce_scatter(
        a["output_tensors"], a["input_tensors"], rank
    ),
    "_reduce_scatter_base_": lambda a, ranks, rank: _reduce_scatter(
        [a["output_tensor"]], [_parts(a["input_tensor"], ranks)], rank
    ),
    "reduce_scatter_tensor_coalesced_": lambda a, ranks, rank: _reduce_scatter(
        a["outputs"], [_parts(whole, ranks) for whole in a["inputs"]], rank
    ),
    "alltoall_": lambda a, ranks, rank: _all_to_all(a["output_tensors"], a["input_tensors"]),
    "alltoall_base_": lambda a, ranks, rank: _all_to_all([a["output"]], [a["input"]]),
    # Every output gets this rank's input; ranks that do not collect have no outputs.
    "gather_": lambda a, ranks, rank: (
        "gather",
        ranks * _bytes(a["input_tensors"]),
        [(out, a["input_tensors"][0]) for out in chain(*a["output_tensors"])],
    ),
    "scatter_": _scatter,
    "send": lambda a, ranks, rank: ("send", _bytes(a["tensors"]), []),
    **dict.fromkeys(
        ("recv_", "recv_any_source_"),
        lambda a, ranks, rank: ("recv", _bytes(a["tensors"]), [(t, None) for t in a["tensors"]]),
    ),
    "barrier": lambda a, ranks, rank: ("barrier", 0, []),
    "monitored_barrier_": lambda a, ranks, rank: ("barrier", 0, []),
}
