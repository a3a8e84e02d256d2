"""The workload `pairs`, messages within disjoint pairs of devices, and a probe of transports.

The module is also a program, for `TransportProbe`:

    torchrun --nproc-per-node=2 -m raybench.workloads.pairs cuda

It prints the lines of NCCL's log about transports, and gloo's connections as `raybench: gloo
INTERFACE ADDRESS PEER`. `health/transports.py` reads them.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from raybench.errors import UsageError
from raybench.job.answer import Answer
from raybench.records.environment import path_to_raybench
from raybench.workloads.base import Context, Workload, WrongResultError
from raybench.workloads.collective import check_ranks, exchange

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Pair = tuple[int, int]
Direction = Literal["forward", "backward", "both", "round_trip"]
Transport = Literal["send", "copy"]

# Directions with two messages in a step, one each way.
_TWO_WAY = ("both", "round_trip")
# Factor between the numbers of a message: a prime above any usual number of ranks, so that messages
# of two senders differ everywhere.
_STRIDE = 7919


def turns(world_size: int) -> int:
    """Return the number of turns in which each rank meets every other rank once."""
    return world_size - 1 + world_size % 2


def pairs_of_turn(world_size: int, turn: int) -> tuple[Pair, ...]:
    """Return the disjoint pairs of one turn of a round-robin, sorted, the lower rank first.

    Turns count from 0. With an odd number of ranks one rank has no partner.
    """
    # The circle method: the last rank is fixed, the others rotate, and opposite ranks form a pair.
    size = world_size + world_size % 2
    rotated = [(turn + step) % (size - 1) for step in range(size - 1)]
    circle = [size - 1, *rotated]
    pairs = [(circle[0], circle[size // 2])]
    pairs += [(circle[index], circle[-index]) for index in range(1, size // 2)]
    # An odd number of ranks was rounded up, so drop the pair of the rank that does not exist.
    return tuple(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < world_size))


def parse_pairs(text: str, world_size: int) -> tuple[Pair, ...]:
    """Return the pairs of a text such as "0-3,1-2", the lower rank first in each pair.

    Raises:
        UsageError: the text has another form, a rank is in two pairs, or a rank is not below
            world_size.
    """
    rule = "partners: must be disjoint pairs of ranks, as in 0-3,1-2"
    pairs: list[Pair] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)-(\d+)", part.strip())
        if match is None:
            raise UsageError(f"{rule}, given {text!r}")
        low, high = sorted((int(match[1]), int(match[2])))
        pairs.append((low, high))
    ranks = [rank for pair in pairs for rank in pair]
    if len(set(ranks)) < len(ranks) or max(ranks) >= world_size:
        raise UsageError(f"{rule}, below world_size {world_size}, given {text!r}")
    return tuple(pairs)


def pairs_text(pairs: Iterable[Pair]) -> str:
    """Return pairs of ranks as text such as "0-3,1-2", the inverse of `parse_pairs`."""
    return ",".join(f"{low}-{high}" for low, high in pairs)


class _CheckedMessage(NamedTuple):
    """A message that this process checks."""

    sender: int
    receiver: int
    received: Tensor
    expected: Tensor


class Pairs(Workload):
    """Moves a message within each pair of devices: latency and bandwidth of the paths between two.

    All pairs of a turn move messages at the same time; other ranks wait. transport: send uses NCCL,
    or gloo on CPUs; copy is a copy between the memories of two GPUs of one host, which the process
    of the lower rank issues. Bandwidth counts all bytes that move in a step: both and round_trip
    move size_bytes twice.
    """

    takes_batch_size = takes_precision = False
    answers = (Answer(metric="busbw_gb_s"),)
    busbw_factor = 1.0

    def __init__(
        self,
        context: Context,
        *,
        turn: Annotated[
            int, Field(ge=0, description="Which pairs: after world_size turns all have come.")
        ] = 0,
        partners: Annotated[
            str, Field(description="The pairs instead, as in 0-3,1-2; ranks not named wait.")
        ] = "",
        direction: Annotated[
            Direction,
            Field(
                description="forward: lower rank to higher. backward. both: at once. round_trip: "
                "there, and back when it has arrived."
            ),
        ] = "forward",
        transport: Annotated[
            Transport, Field(description="send: NCCL or gloo. copy: between GPUs of one host.")
        ] = "send",
        size_bytes: Annotated[
            int, Field(gt=0, multiple_of=8, description="Bytes of one message.")
        ] = 2**28,
    ) -> None:
        import torch
        import torch.distributed as dist

        check_ranks(context, "pairs")
        size = context.world_size
        pairs = parse_pairs(partners, size) if partners else pairs_of_turn(size, turn)
        # The pair of this rank; None if this rank waits.
        self.pair: Pair | None = next((pair for pair in pairs if context.rank in pair), None)
        self.message_bytes = (2 if direction in _TWO_WAY else 1) * size_bytes
        self._direction, self._transport = direction, transport
        self._checked: _CheckedMessage | None = None
        self._issue: Callable[[], object] = lambda: None
        if transport == "copy":
            self._prepare_copy(context, pairs, size_bytes)
        if transport == "copy" or self.pair is None:
            return

        rank, device = context.rank, context.device
        low, high = self.pair
        is_low = rank == low
        peer = high if is_low else low
        outgoing = _message(rank, size_bytes, device)
        incoming = torch.full_like(outgoing, -1)
        send = dist.P2POp(dist.isend, outgoing, peer)
        receive = dist.P2POp(dist.irecv, incoming, peer)
        # With direction forward the lower rank sends, with backward the higher rank.
        is_sender = is_low == (direction == "forward")
        # Operations of one exchange are issued together; exchanges follow each other.
        exchanges = [[send if is_sender else receive]]
        if direction == "both":
            exchanges = [[send, receive]]
        elif direction == "round_trip":
            exchanges = [[send], [receive]] if is_low else [[receive], [send]]

        def issue() -> None:
            for operations in exchanges:
                exchange(operations)

        self._issue = issue
        if direction in _TWO_WAY or not is_sender:
            expected = _message(peer, size_bytes, device)
            self._checked = _CheckedMessage(peer, rank, incoming, expected)

    def step(self) -> None:
        """Issue the pair's messages once; on a GPU only the current stream waits for them.

        With transport send both ranks of a pair must call this, with copy only the lower rank.
        """
        self._issue()

    def check(self) -> None:
        """Raise WrongResultError if the last message is wrong, or none came since the last check.

        The receiver checks the message; with transport copy the lower rank, which must wait for
        both devices before and after this call.
        """
        import torch

        if self._checked is None or self.pair is None:
            return
        message = self._checked
        is_right = torch.equal(message.received, message.expected)
        message.received.fill_(-1)  # the next check must not find this message again
        if not is_right:
            raise WrongResultError(
                f"ranks {self.pair[0]} and {self.pair[1]}: a message from rank {message.sender} to "
                f"rank {message.receiver} ({self._transport}, {self._direction}) arrived with a "
                "wrong payload"
            )

    def _prepare_copy(self, context: Context, pairs: Sequence[Pair], size_bytes: int) -> None:
        """Prepare the copy that the lower rank of a pair issues. Collective."""
        import torch
        import torch.distributed as dist

        if context.device.type != "cuda":
            raise UsageError(
                "workload pairs: transport copy is between the memories of two GPUs, and this is a "
                "CPU worker; give transport: send"
            )
        if self._direction in _TWO_WAY:
            raise UsageError(
                f"workload pairs: direction {self._direction} needs transport: send; a copy goes "
                "forward or backward"
            )
        # Node and device of each rank.
        locations: list[Any] = [None] * context.world_size
        dist.all_gather_object(locations, (os.environ.get("GROUP_RANK", ""), context.device.index))
        nodes = [node for node, _ in locations]
        for low, high in pairs:
            if nodes[low] != nodes[high]:
                raise UsageError(
                    f"workload pairs: ranks {low} and {high} are on two hosts, and "
                    "transport copy is within one; name the pairs of one host in partners, or give "
                    "transport: send"
                )
        if self.pair is None or context.rank != self.pair[0]:
            return

        low, high = self.pair
        _, peer_index = locations[high]
        low_device, high_device = context.device, torch.device("cuda", peer_index)
        sender, receiver, from_device, to_device = low, high, low_device, high_device
        if self._direction == "backward":
            sender, receiver, from_device, to_device = high, low, high_device, low_device
        source = _message(sender, size_bytes, from_device)
        target = torch.full_like(source, -1, device=to_device)
        expected = source.to(to_device, copy=True)
        self._checked = _CheckedMessage(sender, receiver, target, expected)
        from cuda.bindings import runtime

        error, can_access = runtime.cudaDeviceCanAccessPeer(low_device.index, high_device.index)
        if error or not can_access:
            raise UsageError(
                f"workload pairs: {low_device} cannot reach the memory of {high_device} directly; "
                "give transport: send"
            )
        (error,) = runtime.cudaDeviceEnablePeerAccess(high_device.index, 0)
        codes = runtime.cudaError_t
        if error not in (codes.cudaSuccess, codes.cudaErrorPeerAccessAlreadyEnabled):
            raise RuntimeError(f"cudaDeviceEnablePeerAccess: {error.name}")
        addresses = (target.data_ptr(), to_device.index, source.data_ptr(), from_device.index)

        def copy() -> None:
            # Tensor.copy_ would also record an event on the other device, and wait there for the
            # process that owns the device: 2.4 ms instead of 0.7 ms beside a waiting collective.
            stream = torch.cuda.current_stream(low_device).cuda_stream
            (error,) = runtime.cudaMemcpyPeerAsync(*addresses, source.nbytes, stream)
            if error:
                raise RuntimeError(f"cudaMemcpyPeerAsync: {error.name}")

        self._issue = copy


def _message(sender: int, size_bytes: int, device: torch.device) -> Tensor:
    """Return the message of `sender`: int64, different at each position and for each sender."""
    import torch

    return torch.arange(size_bytes // 8, dtype=torch.int64, device=device) * _STRIDE + sender + 1


class TransportProbe(Workload):
    """Runs one collective in other processes, and prints the transports that NCCL or gloo use.

    NCCL logs its transports only when a communicator is made, and only in a process that was
    started with NCCL_DEBUG. Each worker runs `main` in such a process and prints its output.

    Raises:
        RuntimeError: the process failed; the message is the last line of its stderr.
        TimeoutExpired: the process did not end within 90 s.
    """

    takes_batch_size = False
    # Declare a collective, so that no floating-point operations are counted.
    message_bytes = 4
    busbw_factor = 1.0

    def __init__(self, context: Context) -> None:
        import torch.distributed as dist

        # A prefix for keys in the store: rank 0 chooses one that was not used before.
        key_prefix = [f"{os.getpid()}-{time.monotonic_ns()}"]
        if context.world_size > 1:
            dist.broadcast_object_list(key_prefix, device=context.device)
        # -P: a module in the working directory is not of this installation.
        command = [sys.executable, "-P", "-m", __name__, str(context.device), key_prefix[0]]
        done = subprocess.run(
            command,
            env={**os.environ, **path_to_raybench()},
            capture_output=True,
            text=True,
            timeout=_PROCESS_TIMEOUT_S,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
        print(done.stdout, flush=True)

    def step(self) -> None:
        """Wait for a millisecond: the workload did its work when it was built."""
        time.sleep(0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlooPeer:
    """A TCP connection of gloo."""

    interface: str
    address: str
    peer_address: str


_GLOO_LINE = re.compile(r"^raybench: gloo (\S+) (\S+) (\S+)$", re.MULTILINE)


def read_gloo_peers(output: str) -> tuple[GlooPeer, ...]:
    """Return the connections that `main` has printed."""
    return tuple(
        GlooPeer(interface=match[1], address=match[2], peer_address=match[3])
        for match in _GLOO_LINE.finditer(output)
    )


# How long the store and gloo wait for other ranks.
_TIMEOUT = timedelta(seconds=60)
_PROCESS_TIMEOUT_S = 90.0
# Largest number of ranks that an all_to_all connects pair by pair. With more ranks only the
# all_reduce runs, which connects some pairs.
_MOST_RANKS_IN_ALL_TO_ALL = 64
_TRANSPORT_LINE = re.compile(
    r" via |NET/|Using network|NVLS multicast|nvls channels|nNodes|NCCL version|GPU Direct"
    r"|NCCL_SOCKET_IFNAME|Init COMPLETE|NCCL WARN"
)
_CHANNEL_NUMBER = re.compile(r"Channel \d+(/\d+)? : ")
# A line of NCCL's log. The first group is the line without host, process and time.
_NCCL_LINE = re.compile(r"^.*?(NCCL (INFO|WARN) .*|NCCL version .*)$")


def main() -> None:
    """Run collectives of all ranks; print gloo's connections or NCCL's transports.

    The arguments of the program are the device (cuda for LOCAL_RANK's device, cuda:N or cpu) and a
    prefix for keys in the store, which is equal on all ranks and used once.

    Raises:
        KeyError: torchrun's variables are missing.
        RuntimeError: the store or a peer did not answer within 60 s; NCCL may wait longer.
    """
    device, *prefixes = sys.argv[1:]
    key_prefix = prefixes[0] if prefixes else "transport"
    with TemporaryDirectory(prefix="raybench-nccl-") as folder:
        log = Path(folder) / "nccl.log"
        # NCCL reads these variables once, so set them before NCCL is loaded.
        os.environ |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,P2P,SHM,NVLS",
            "NCCL_DEBUG_FILE": str(log),
        }
        connections = _communicate(device, key_prefix)
        text = log.read_text(errors="replace") if log.exists() else ""
    transports: list[str] = []
    for line in text.splitlines():
        match = _NCCL_LINE.match(line)
        if match is not None and _TRANSPORT_LINE.search(match[1]):
            transports.append(_CHANNEL_NUMBER.sub("", match[1]))
    # Without the number of the channel many lines are equal; print each once.
    print(*connections, *dict.fromkeys(transports), sep="\n", flush=True)
    # Skip gloo's destructors, which may abort the process.
    os._exit(0)


def _communicate(device_name: str, key_prefix: str) -> list[str]:
    """Run an all_reduce and, on GPUs, an all_to_all; return lines about gloo's TCP connections."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        return []
    index = os.environ["LOCAL_RANK"] if device_name == "cuda" else None
    device = torch.device(f"cuda:{index}" if index else device_name)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=_TIMEOUT)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=PrefixStore(key_prefix, store),
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    ones = torch.ones(world_size, device=device)
    dist.all_reduce(ones)
    if is_cuda and world_size <= _MOST_RANKS_IN_ALL_TO_ALL:
        dist.all_to_all_single(torch.empty_like(ones), ones)
    assert ones[0].item() == world_size
    dist.barrier()
    if is_cuda:
        return []
    import psutil

    interfaces: dict[str, str] = {}
    for interface, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                interfaces[entry.address] = interface
    lines = []
    for connection in psutil.Process().net_connections("tcp"):
        is_to_store = connection.raddr and connection.raddr.port == port
        if connection.status == psutil.CONN_ESTABLISHED and not is_to_store:
            # Without the prefix of an IPv4 address that is written as IPv6.
            local_address = connection.laddr.ip.removeprefix("::ffff:")
            peer_address = connection.raddr.ip.removeprefix("::ffff:")
            interface = interfaces.get(local_address, "unknown")
            lines.append(f"raybench: gloo {interface} {local_address} {peer_address}")
    return lines


if __name__ == "__main__":
    main()
