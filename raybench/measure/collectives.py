"""The collectives of a step, from any code: counted, and replaced by local copies.

`torch.distributed`, functional collectives, DistributedDataParallel, FSDP, DTensor and compiled
code all call operators `c10d::…` of torch's dispatcher, whose kernels `replace_collectives`
replaces for a while.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

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

_DISPATCH_KEYS = ("CPU", "CUDA", "SparseCPU", "SparseCUDA")
# Scale of the random numbers in place of other ranks' summands: above the usual eps of norms, and
# as small as embeddings.
_NOISE_SCALE = 0.02
# Larger outputs are gradients that FSDP scatters. Only the optimizer reads them, so they need no
# summands.
_MOST_NOISE_BYTES = 2**27
# An output, and the local data to copy there; None if only another rank has the data.
Copy = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One call of a collective on one rank."""

    # torch's name, such as all_reduce; also send and recv.
    kind: str
    # Number of ranks in the group.
    ranks: int
    # Size of the message, as nccl-tests counts it.
    message_bytes: int
    # What a local copy writes to each output.
    copies: Sequence[Copy]


def add_up(collectives: Sequence[CollectiveCall]) -> tuple[Traffic, ...]:
    """Return the traffic of a step by kind and size of group, in the order of the first calls."""
    # (kind, ranks) -> bytes of each message.
    sizes: dict[tuple[str, int], list[int]] = defaultdict(list)
    for call in collectives:
        sizes[call.kind, call.ranks].append(call.message_bytes)
    traffic = []
    for (kind, ranks), message_sizes in sizes.items():
        message_bytes = sum(message_sizes)
        traffic.append(
            Traffic(
                kind=kind,
                ranks=ranks,
                calls=len(message_sizes),
                message_bytes=message_bytes,
                bus_bytes=busbw_factor(kind, ranks) * message_bytes,
            )
        )
    return tuple(traffic)


# Replaces a collective: writes its outputs on this rank, without communication.
Handler = Callable[[CollectiveCall], Work]


@contextmanager
def replace_collectives(handler: Handler) -> Iterator[None]:
    """Call the handler instead of each collective, send and recv inside the `with` block.

    This does not replace symmetric memory, direct calls of a backend and replays of CUDA graphs. A
    Python object that another rank would send becomes None.

    Args:
        handler: returns complete work. It must not issue real collectives: torch calls these
            kernels with the GIL, and threads of gloo and NCCL wait for the GIL while they hold
            other locks, which is a deadlock.
    """
    with torch.library._scoped_library("c10d", "IMPL") as library, _replaced_functions():
        # torch warns about replaced kernels.
        with warnings.catch_warnings(action="ignore"):
            for operator in _EFFECTS:
                _replace_kernels(library, operator, handler)
        yield


def _replace_kernels(library: torch.library.Library, operator: str, handler: Handler) -> None:
    """Replace the operator's kernels on all devices by a kernel that calls the handler."""
    schema = getattr(torch.ops.c10d, operator).default._schema
    argument_names = [argument.name for argument in schema.arguments]
    return_count = len(schema.returns)

    def kernel(*values: Any) -> Any:
        arguments = dict(zip(argument_names, values, strict=False))
        group = ProcessGroup.unbox(arguments["process_group"])
        effect = _EFFECTS[operator](arguments, group.size(), group.rank())
        call = CollectiveCall(
            kind=effect.kind,
            ranks=group.size(),
            message_bytes=effect.message_bytes,
            copies=effect.copies,
        )
        work = handler(call)
        # Some operators return nothing, some return the work, others tensors and the work.
        if return_count == 0:
            return None
        return work.boxed() if return_count == 1 else (values[0], work.boxed())

    for key in _DISPATCH_KEYS:
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{operator}", key):
            library.impl(operator, kernel, key, allow_override=True)  # type: ignore[no-untyped-call]


@contextmanager
def _replaced_functions() -> Iterator[None]:
    """Replace Python functions of torch that bypass the dispatcher, inside the `with` block."""
    receive, broadcast, load = ProcessGroup.recv_anysource, c10d.broadcast, c10d._tensor_to_object
    # torch asks for the sender after a recv from any rank; any other rank will do.
    sender = 0

    def receive_from_next_rank(group: ProcessGroup, tensors: list[Tensor], tag: int) -> Work:
        nonlocal sender
        sender = (group.rank() + 1) % group.size()
        return receive(group, tensors, tag)

    def zero_and_broadcast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Zero a tensor that this rank would receive, and call `broadcast`, which sends nothing."""
        group, source = kwargs.get("group"), kwargs.get("group_src")
        is_receiver = group is not None and source not in (None, group.rank())
        if is_receiver:
            # `broadcast_object_list` would read sizes of objects from uninitialised memory.
            tensor.zero_()
        return broadcast(tensor, *args, **kwargs)

    def load_or_none(data: Any, size: Any, group: Any) -> Any:
        # Another rank would have sent an object of size 0.
        return load(data, size, group) if size else None  # type: ignore[no-untyped-call]

    replacements: Mapping[tuple[Any, str], Callable[..., Any]] = {
        # NCCL gets no calls that it could coalesce.
        (ProcessGroup, "_start_coalescing"): lambda group, device: None,
        (ProcessGroup, "_end_coalescing"): lambda group, device: _complete_work([]),
        (ProcessGroup, "recv_anysource"): receive_from_next_rank,
        (Work, "_source_rank"): lambda work: sender,
        (c10d, "broadcast"): zero_and_broadcast,
        (c10d, "_tensor_to_object"): load_or_none,
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
    devices = {output.device for output in outputs if output.is_cuda}
    future: Future[list[Tensor]] = Future(devices=list(devices))
    future.set_result(list(outputs))
    work: Work = _create_work_from_future(future)
    return work


class LocalCopies:
    """A handler that copies this rank's data to the outputs, on the current stream.

    all_reduce, reduce and broadcast leave their tensors unchanged. Random numbers, the same each
    time, replace data that only another rank has; integers are 0.
    """

    def __init__(self, calls: list[CollectiveCall] | None = None) -> None:
        """Make the handler; `calls` collects each call without its tensors."""
        # Random numbers by shape, type and device.
        self._random_tensors: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}
        self._calls = calls

    def __call__(self, collective: CollectiveCall) -> Work:
        """Write the outputs of a collective, and return complete work."""
        if self._calls is not None:
            # Do not keep the tensors: the step needs their memory.
            self._calls.append(replace(collective, copies=()))
        with torch.no_grad():
            for output, source in collective.copies:
                _copy_cyclically(output, self._random_like(output) if source is None else source)
                if collective.kind == "reduce_scatter":
                    # The copy has only this rank's summand.
                    self._add_noise(output)
        return _complete_work([output for output, _ in collective.copies])

    def _add_noise(self, output: Tensor) -> None:
        """Add random numbers in place of other ranks' summands to an output of up to 128 MiB."""
        # Without summands a token that only another rank embeds would be zeros in all layers, and
        # its gradient would overflow in norms. A device that multiplies NaN draws less power, so
        # its clocks rise. torch cannot add 8-bit numbers.
        can_add = output.is_floating_point() and output.itemsize > 1
        if can_add and 0 < output.nbytes <= _MOST_NOISE_BYTES:
            output.data.add_(self._random_like(output), alpha=_NOISE_SCALE)

    def _random_like(self, output: Tensor) -> Tensor:
        """Return random numbers like the output, the same each time; 0 for integers."""
        key = (output.shape, output.dtype, output.device)
        if key not in self._random_tensors:
            is_real = output.dtype.is_floating_point or output.dtype.is_complex
            # torch cannot draw 8-bit random numbers.
            dtype = torch.float32 if is_real and output.dtype.itemsize == 1 else output.dtype
            numbers = torch.zeros(output.shape, dtype=dtype, device=output.device)
            if is_real:
                numbers.normal_()
            self._random_tensors[key] = numbers.to(output.dtype)
        return self._random_tensors[key]


def _copy_cyclically(output: Tensor, source: Tensor) -> None:
    """Copy the source to the output; cut or repeat the source if their sizes differ."""
    if output.is_sparse:  # DDP needs a coalesced output, and the source is coalesced
        output.copy_(source)
        return
    if output.data_ptr() == source.data_ptr() or not output.numel() or not source.numel():
        return
    # Bypass autograd as collectives do, so that saved tensors do not count as modified.
    target = output.data
    if target.numel() == source.numel():
        target.copy_(source.view_as(target))
        return
    for part in torch.split(target.view(-1), source.numel()):
        part.copy_(source.reshape(-1)[: part.numel()])


class _Effect(NamedTuple):
    """What a collective does on one rank, with the fields of `CollectiveCall`."""

    kind: str
    message_bytes: int
    copies: Sequence[Copy]


# The arguments of an operator by name.
_Arguments = Mapping[str, Any]


def _total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all tensors; a sparse tensor has indices and values."""
    total = 0
    for tensor in tensors:
        if tensor.is_sparse:
            total += tensor.indices().nbytes + tensor.values().nbytes
        else:
            total += tensor.nbytes
    return total


def _in_place(kind: str, arguments: _Arguments) -> _Effect:
    """Return the effect of a collective that writes its result into its inputs."""
    # A dense tensor stays as it is. DDP needs a coalesced sparse tensor.
    copies = [
        (tensor, tensor.coalesce() if tensor.is_sparse else tensor)
        for tensor in arguments["tensors"]
    ]
    return _Effect(kind, _total_bytes(source for _, source in copies), copies)


def _all_gather(outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> _Effect:
    """Return the effect of an all_gather; the local copy repeats this rank's input."""
    copies: list[Copy] = []
    # Each input has an output for each rank.
    for rank_outputs, local in zip(outputs, inputs, strict=True):
        copies += [(output, local) for output in rank_outputs]
    return _Effect("all_gather", _total_bytes(chain(*outputs)), copies)


def _reduce_scatter(
    outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], rank: int
) -> _Effect:
    """Return the effect of a reduce_scatter; the local copy keeps this rank's summand."""
    # Each output has an input for each rank.
    copies = [
        (output, rank_inputs[rank]) for output, rank_inputs in zip(outputs, inputs, strict=True)
    ]
    return _Effect("reduce_scatter", _total_bytes(chain(*inputs)), copies)


def _equal_parts(whole: Tensor, ranks: int) -> Sequence[Tensor]:
    """Return an equal part of the tensor for each rank."""
    return whole.reshape(-1).chunk(ranks)


def _gather(arguments: _Arguments, ranks: int, rank: int) -> _Effect:
    """Return the effect of a gather; the local copy repeats this rank's input."""
    inputs = arguments["input_tensors"]
    # Only the collecting rank has outputs.
    copies = [(output, inputs[0]) for output in chain(*arguments["output_tensors"])]
    # The message consists of the inputs of all ranks.
    message_bytes = ranks * _total_bytes(inputs)
    return _Effect("gather", message_bytes, copies)


def _scatter(arguments: _Arguments, ranks: int, rank: int) -> _Effect:
    """Return the effect of a scatter; a rank that receives has no local data to copy."""
    outputs, input_lists = arguments["output_tensors"], arguments["input_tensors"]
    # Only the sending rank has inputs: for each output a list with an input for each rank.
    sources = [inputs[rank] for inputs in input_lists] or [None] * len(outputs)
    copies = list(zip(outputs, sources, strict=True))
    return _Effect("scatter", ranks * _total_bytes(outputs), copies)


def _all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> _Effect:
    return _Effect("all_to_all", _total_bytes(inputs), list(zip(outputs, inputs, strict=True)))


def _recv(arguments: _Arguments, ranks: int, rank: int) -> _Effect:
    tensors = arguments["tensors"]
    return _Effect("recv", _total_bytes(tensors), [(tensor, None) for tensor in tensors])


# Operator `c10d::…` -> function of arguments by name (`a`), number of ranks, and rank.
_EFFECTS: Mapping[str, Callable[[_Arguments, int, int], _Effect]] = {
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
        [_equal_parts(a["output_tensor"], ranks)], [a["input_tensor"]]
    ),
    "allgather_into_tensor_coalesced_": lambda a, ranks, rank: _all_gather(
        [_equal_parts(output, ranks) for output in a["outputs"]], a["inputs"]
    ),
    "reduce_scatter_": lambda a, ranks, rank: _reduce_scatter(
        a["output_tensors"], a["input_tensors"], rank
    ),
    "_reduce_scatter_base_": lambda a, ranks, rank: _reduce_scatter(
        [a["output_tensor"]], [_equal_parts(a["input_tensor"], ranks)], rank
    ),
    "reduce_scatter_tensor_coalesced_": lambda a, ranks, rank: _reduce_scatter(
        a["outputs"], [_equal_parts(whole, ranks) for whole in a["inputs"]], rank
    ),
    "alltoall_": lambda a, ranks, rank: _all_to_all(a["output_tensors"], a["input_tensors"]),
    "alltoall_base_": lambda a, ranks, rank: _all_to_all([a["output"]], [a["input"]]),
    "gather_": _gather,
    "scatter_": _scatter,
    "send": lambda a, ranks, rank: _Effect("send", _total_bytes(a["tensors"]), []),
    "recv_": _recv,
    "recv_any_source_": _recv,
    "barrier": lambda a, ranks, rank: _Effect("barrier", 0, []),
    "monitored_barrier_": lambda a, ranks, rank: _Effect("barrier", 0, []),
}
