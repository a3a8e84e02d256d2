"""How a message of the workload `pairs` goes from one device of a pair to the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from raybench.errors import UsageError
from raybench.workloads.base import Context
from raybench.workloads.communication.collective_operations import exchange
from raybench.workloads.communication.pairings import Pair

if TYPE_CHECKING:
    from raybench.workloads.communication.pairs import Direction, Transport


@dataclass(slots=True, kw_only=True)
class _Arrival:
    """A message that this process can look at when it has arrived."""

    sender: int
    receiver: int
    found: Tensor
    expected: Tensor


@dataclass(slots=True, kw_only=True)
class Path:
    """What a rank does in a step. issue: the current stream waits for it, the host does not."""

    issue: Callable[[], object]
    arrivals: list[_Arrival] = field(default_factory=list)

    def first_wrong(self) -> Pair | None:
        """Return sender and receiver of the first message that arrived wrong; spoil them all."""
        wrong = [
            (one.sender, one.receiver)
            for one in self.arrivals
            if not torch.equal(one.found, one.expected)
        ]
        for one in self.arrivals:
            one.found.fill_(-1)
        return wrong[0] if wrong else None


def make_path(
    context: Context,
    pairs: Sequence[Pair],
    pair: Pair | None,
    transport: Transport,
    direction: Direction,
    size_bytes: int,
) -> Path:
    """Make what this rank has a part in. All ranks call it together. Raises UsageError."""
    peer_device = _peer_device(context, pairs, pair) if transport == "copy" else None
    if pair is None or (peer_device is not None and context.rank == pair[1]):
        return Path(issue=lambda: None)
    if peer_device is None:
        return _sending(context, pair, direction, size_bytes)
    return _copying(context, peer_device, pair, direction, size_bytes)


def _message(sender: int, size_bytes: int, device: torch.device) -> Tensor:
    """Make what `sender` sends: other numbers in each place, and of each sender."""
    return torch.arange(size_bytes // 8, dtype=torch.int64, device=device) * 7919 + sender + 1


def _sending(context: Context, pair: Pair, direction: Direction, size_bytes: int) -> Path:
    rank, device = context.rank, context.device
    is_first = rank == pair[0]
    peer = pair[1] if is_first else pair[0]
    outgoing = _message(rank, size_bytes, device)
    incoming = torch.full_like(outgoing, -1)
    send = dist.P2POp(dist.isend, outgoing, peer)
    receive = dist.P2POp(dist.irecv, incoming, peer)
    arrival = _Arrival(
        sender=peer, receiver=rank, found=incoming, expected=_message(peer, size_bytes, device)
    )
    if direction == "both":
        return Path(issue=partial(exchange, [send, receive]), arrivals=[arrival])
    if direction == "round_trip":
        order = (send, receive) if is_first else (receive, send)
        return Path(issue=partial(_one_by_one, *order), arrivals=[arrival])
    if is_first == (direction == "forward"):
        return Path(issue=partial(exchange, [send]))
    return Path(issue=partial(exchange, [receive]), arrivals=[arrival])


def _one_by_one(*operations: dist.P2POp) -> None:
    for operation in operations:
        exchange([operation])


def _copying(
    context: Context, peer_device: torch.device, pair: Pair, direction: Direction, size_bytes: int
) -> Path:
    """Copy to the peer's memory or from it; the process of the lower rank does both."""
    here, there = context.device, peer_device
    is_forward = direction == "forward"
    sender, receiver = pair if is_forward else pair[::-1]
    source = _message(sender, size_bytes, here if is_forward else there)
    found = torch.full_like(source, -1, device=there if is_forward else here)
    arrival = _Arrival(
        sender=sender, receiver=receiver, found=found, expected=source.to(found.device, copy=True)
    )
    return Path(issue=_make_copy(here, found, source), arrivals=[arrival])


def _make_copy(here: torch.device, found: Tensor, source: Tensor) -> Callable[[], object]:
    """Make a copy by the copy engine of `here`. Raises UsageError where it reaches no peer.

    Tensor.copy_ would also record an event on the other device in each step, which there takes
    turns with whatever the process that owns the device runs: 2.4 ms in place of 0.7 ms beside
    a collective that waits.
    """
    from cuda.bindings import runtime

    peer = (source if found.device == here else found).device
    error, can_reach = runtime.cudaDeviceCanAccessPeer(here.index, peer.index)
    if error or not can_reach:
        raise UsageError(
            f"workload pairs: {here} cannot reach the memory of {peer} directly; give transport: "
            "send"
        )
    (error,) = runtime.cudaDeviceEnablePeerAccess(peer.index, 0)
    if error not in (
        runtime.cudaError_t.cudaSuccess,
        runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled,
    ):
        raise RuntimeError(f"cudaDeviceEnablePeerAccess: {error.name}")
    ends = (found.data_ptr(), found.device.index, source.data_ptr(), source.device.index)

    def copy() -> None:
        stream = torch.cuda.current_stream(here).cuda_stream
        (error,) = runtime.cudaMemcpyPeerAsync(*ends, source.nbytes, stream)
        if error:
            raise RuntimeError(f"cudaMemcpyPeerAsync: {error.name}")

    return copy


def _peer_device(context: Context, pairs: Sequence[Pair], pair: Pair | None) -> torch.device | None:
    """Find the device of the partner. Raises UsageError where a pair is on two hosts."""
    own = (os.environ.get("GROUP_RANK", ""), context.device.index)
    places: list[tuple[str, int] | None] = [None] * context.world_size
    dist.all_gather_object(places, own)
    nodes = [place and place[0] for place in places]
    apart = [(low, high) for low, high in pairs if nodes[low] is None or nodes[low] != nodes[high]]
    if apart:
        raise UsageError(
            f"workload pairs: ranks {apart[0][0]} and {apart[0][1]} are on two hosts, and "
            "transport copy is within one; name the pairs of one host in partners, or give "
            "transport: send"
        )
    if pair is None:
        return None
    peer = places[pair[1] if context.rank == pair[0] else pair[0]]
    assert peer is not None
    return torch.device("cuda", peer[1])
