"""The collectives of a step, from any code: counted, and replaced by local copies.

`torch.distributed`, functional collectives, DistributedDataParallel, FSDP, DTensor and compiled
code all call operators `c10d::…` of torch's dispatcher. Their kernels are replaced for a while; the
calling code stays the same.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
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
# Scale of random numbers: above the usual eps of norms, and as small as embeddings.
_ADDED_SCALE = 0.02
# Larger outputs are gradients that FSDP scatters; only the optimizer reads them.
_MOST_ADDED_BYTES = 2**27
# An output and its source; None if only another rank has the data.
Copy = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One call of a collective on one rank."""

    # torch's name, such as all_reduce; also send and recv.
    kind: str
    # Size of the group.
    ranks: int
    # Size of the message, as nccl-tests counts it.
    message_bytes: int
    # The outputs, each with the data of this rank that a local copy writes to it.
    copies: Sequence[Copy]


def add_up(collectives: Sequence[CollectiveCall]) -> tuple[Traffic, ...]:
    """Return the traffic of a step by kind and size of group, in the order of the first calls."""
    sizes: dict[tuple[str, int], list[int]] = defaultdict(list)
    for call in collectives:
        sizes[call.kind, call.ranks].append(call.message_bytes)
    traffic = []
    for (kind, ranks), message_sizes in sizes.items():
        total = sum(message_sizes)
        bus_bytes = busbw_factor(kind, ranks) * total
        traffic.append(
            Traffic(
                kind=kind,
                ranks=ranks,
                calls=len(message_sizes),
                message_bytes=total,
                bus_bytes=bus_bytes,
            )
        )
    return tuple(traffic)


# Replaces a collective: writes its outputs on this rank, without communication.
Handler = Callable[[CollectiveCall], Work]


@contextmanager
def replace_collectives(handler: Handler) -> Iterator[None]:
    """Call the handler instead of each collective, send and recv inside the `with` block.

    Symmetric memory, direct calls of a backend and replays of CUDA graphs are not replaced. A
    Python object that another rank would send becomes None.

    Args:
        handler: returns complete work. It must not issue real collectives: torch calls these
            kernels with the GIL, and threads of gloo and NCCL wait for the GIL while they hold
            other locks, so both would wait for ever.
    """
    with torch.library._scoped_library("c10d", "IMPL") as library, _replace_functions():
        # torch warns about replaced kernels.
        with warnings.catch_warnings(action="ignore"):
            for name in _READERS:
                _replace(library, name, handler)
        yield


def _replace(library: torch.library.Library, name: str, handler: Handler) -> None:
    """Register a kernel for operator `name` that calls the handler, on each device that has one."""
    schema = getattr(torch.ops.c10d, name).default._schema
    names, returned = [argument.name for argument in schema.arguments], len(schema.returns)

    def kernel(*values: Any) -> Any:
        arguments = dict(zip(names, values, strict=False))
        group = ProcessGroup.unbox(arguments["process_group"])
        kind, message_bytes, copies = _READERS[name](arguments, group.size(), group.rank())
        call = CollectiveCall(
            kind=kind, ranks=group.size(), message_bytes=message_bytes, copies=copies
        )
        work = handler(call)
        # Some operators return nothing, some return the work, others tensors and the work.
        if returned == 0:
            return None
        return work.boxed() if returned == 1 else (values[0], work.boxed())

    for key in _KEYS:
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", key):
            library.impl(name, kernel, key, allow_override=True)  # type: ignore[no-untyped-call]


@contextmanager
def _replace_functions() -> Iterator[None]:
    """Replace Python functions of torch that bypass the dispatcher, inside the `with` block.

    Coalesced calls are neither begun nor ended, because NCCL gets none of them. A recv from any
    rank gets the next rank as sender. An object that another rank would send becomes None.
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
            # torch initialises the sizes of objects only on the rank that sends them.
            tensor.zero_()
        return broadcast(tensor, *values, **named)

    replacements: Mapping[tuple[Any, str], Callable[..., Any]] = {
        (ProcessGroup, "_start_coalescing"): lambda group, device: None,
        (ProcessGroup, "_end_coalescing"): lambda group, device: _complete_work([]),
        (ProcessGroup, "recv_anysource"): receive_from_any,
        (Work, "_source_rank"): lambda work: sender,
        (c10d, "broadcast"): broadcast_of_objects,
        (c10d, "_tensor_to_object"): lambda data, size, group: (
            load(data, size, group) if size else None  # type: ignore[no-untyped-call]
        ),
    }
    # Read `vars`, because getattr of a class would return unbound functions.
    originals = {(owner, name): vars(owner)[name] for owner, name in replacements}
    try:
        for (owner, name), function in replacements.items():
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name), function in originals.items():
            setattr(owner, name, function)


def _complete_work(outputs: Sequence[Tensor]) -> Work:
    """Return the work of a collective whose outputs are already written on the current stream."""
    future: Future[list[Tensor]] = Future(devices=list({t.device for t in outputs if t.is_cuda}))
    future.set_result(list(outputs))
    work: Work = _create_work_from_future(future)
    return work


class LocalCopies:
    """A handler that copies this rank's data to the outputs, on the current stream.

    all_reduce, reduce and broadcast leave their tensors unchanged. Data that only another rank has
    is replaced by random numbers, the same each time; integers are 0.

    The output of a reduce_scatter is a sum, so up to 128 MiB, which may be activations, it gets
    random numbers in place of other ranks' summands. Otherwise a token that only another rank
    embeds would be zeros in all layers, and its gradient would overflow in norms. A device that
    multiplies NaN draws less power, so its clocks rise.
    """

    def __init__(self, calls: list[CollectiveCall] | None = None) -> None:
        """Make the handler; `calls` collects each call without its tensors."""
        # Random numbers by shape, type and device.
        self._drawn: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}
        self._calls = calls

    def __call__(self, collective: CollectiveCall) -> Work:
        """Write the outputs of a collective, and return complete work."""
        if self._calls is not None:
            # Do not keep the tensors: the step needs their memory.
            self._calls.append(replace(collective, copies=()))
        with torch.no_grad():
            for output, source in collective.copies:
                self._fill(output, self._random(output) if source is None else source)
                is_summed = collective.kind == "reduce_scatter" and output.is_floating_point()
                # torch cannot add 8-bit numbers.
                if is_summed and output.itemsize > 1 and 0 < output.nbytes <= _MOST_ADDED_BYTES:
                    output.data.add_(self._random(output), alpha=_ADDED_SCALE)
        return _complete_work([output for output, _ in collective.copies])

    def _fill(self, output: Tensor, source: Tensor) -> None:
        """Copy the source to the output, cut or repeated to its size."""
        if output.is_sparse:  # DDP needs a coalesced output, and this copy of the source is one
            output.copy_(source)
            return
        if output.data_ptr() == source.data_ptr() or not output.numel() or not source.numel():
            return
        # Bypass autograd as collectives do, so that saved tensors do not count as modified.
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
            # torch cannot draw 8-bit random numbers.
            dtype = torch.float32 if is_real and output.dtype.itemsize == 1 else output.dtype
            numbers = torch.zeros(output.shape, dtype=dtype, device=output.device)
            self._drawn[key] = (numbers.normal_() if is_real else numbers).to(output.dtype)
        return self._drawn[key]


# Kind, message bytes and copies of a collective.
_Effect = tuple[str, int, Sequence[Copy]]
# The arguments of an operator by name.
_Arguments = Mapping[str, Any]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.indices().nbytes + t.values().nbytes if t.is_sparse else t.nbytes for t in tensors)


def _in_place(kind: str, arguments: _Arguments) -> _Effect:
    # DDP needs coalesced tensors.
    copies = [(t, t.coalesce() if t.is_sparse else t) for t in arguments["tensors"]]
    return kind, _bytes(source for _, source in copies), copies


def _all_gather(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> _Effect:
    # Each input has an output for each rank.
    copies = [(out, local) for outs, local in zip(outputs, inputs, strict=True) for out in outs]
    return "all_gather", _bytes(chain(*outputs)), copies


def _reduce_scatter(
    outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], rank: int
) -> _Effect:
    # Each output has an input for each rank.
    copies = [(out, parts[rank]) for out, parts in zip(outputs, inputs, strict=True)]
    return "reduce_scatter", _bytes(chain(*inputs)), copies


def _parts(whole: Tensor, ranks: int) -> Sequence[Tensor]:
    return whole.reshape(-1).chunk(ranks)


def _scatter(arguments: _Arguments, ranks: int, rank: int) -> _Effect:
    outputs, lists = arguments["output_tensors"], arguments["input_tensors"]
    # Only the sending rank has inputs.
    sources = [inputs[rank] for inputs in lists] or [None] * len(outputs)
    return "scatter", ranks * _bytes(outputs), list(zip(outputs, sources, strict=True))


def _all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> _Effect:
    return "all_to_all", _bytes(inputs), list(zip(outputs, inputs, strict=True))


# The reader of each operator `c10d::…`, called with (arguments, ranks, rank).
_READERS: Mapping[str, Callable[[_Arguments, int, int], _Effect]] = {
    "allreduce_": lambda a, ranks, rank: _in_place("all_reduce", a),
    "allreduce_coalesced_": lambda a, ranks, rank: _in_place("all_reduce", a),
    "broadcast_": lambda a, ranks, rank: _in_place("broadcast", a),
    "reduce_": lambda a, ranks, rank: _in_place("reduce", a),
    "allgather_": lambda a, ranks, rank: _all_gather(a["output_tensors"], a["input_tensors"]),
    # The output lists are by rank, not by tensor.
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
    # Only the collecting rank has outputs.
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
