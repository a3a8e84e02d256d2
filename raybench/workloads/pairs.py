"""The workload `pairs`, messages within disjoint pairs of devices, and a probe of transports.

`raybench plan` imports this module, so torch is imported inside the functions that need it. The
module is also a program, for `TransportProbe`:

    torchrun --nproc-per-node=2 -m raybench.workloads.pairs cuda

It prints the lines of NCCL's log about transports, and what the host offers, as `raybench: KEY
VALUE`. `raybench.doctor.diagnosis` reads them.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from raybench.errors import UsageError
from raybench.job.answer import Answer
from raybench.workloads.base import Context, Workload, WrongResultError
from raybench.workloads.collective import check_ranks, exchange

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Pair = tuple[int, int]
Direction = Literal["forward", "backward", "both", "round_trip"]
Transport = Literal["send", "copy"]

# Directions in which two messages go in a step.
_TWICE = ("both", "round_trip")


def turns(world_size: int) -> int:
    """Return the number of turns after which each rank has met every other rank."""
    return world_size - 1 + world_size % 2


def pairs_of_turn(world_size: int, turn: int) -> tuple[Pair, ...]:
    """Return the disjoint pairs of one turn of a round-robin, sorted, the lower rank first.

    Turns count from 0. With an odd number of ranks one rank has no partner.
    """
    even = world_size + world_size % 2
    circle = [even - 1, *((turn + step) % (even - 1) for step in range(even - 1))]
    # The circle method: the first place is fixed, the others rotate, and opposite ranks are a pair.
    opposite = ((circle[index], circle[-index]) for index in range(1, even // 2))
    pairs = [(circle[0], circle[even // 2]), *opposite]
    return tuple(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < world_size))


def parse_pairs(text: str, world_size: int) -> tuple[Pair, ...]:
    """Return the pairs that a text such as "0-3,1-2" names, lower rank first in each.

    Raises UsageError unless the pairs are disjoint and have only ranks below world_size.
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
        self.pair: Pair | None = next((pair for pair in pairs if context.rank in pair), None)
        self.message_bytes = (2 if direction in _TWICE else 1) * size_bytes
        self._direction, self._transport = direction, transport
        # The message that this process checks: sender, receiver, received data, sent data.
        self._arrival: tuple[int, int, Tensor, Tensor] | None = None
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
        sends = is_low == (self._direction == "forward")
        batches = [[send if sends else receive]]
        if self._direction == "both":
            batches = [[send, receive]]
        elif self._direction == "round_trip":
            batches = [[send], [receive]] if is_low else [[receive], [send]]

        def issue() -> None:
            for operations in batches:
                exchange(operations)

        self._issue = issue
        if self._direction in _TWICE or not sends:
            self._arrival = peer, rank, incoming, _message(peer, size_bytes, device)

    def step(self) -> None:
        """Issue the pair's messages once; on a GPU the current stream waits for them, not the host.

        With transport send both ranks of a pair must call this; with copy only the lower rank must.
        """
        self._issue()

    def check(self) -> None:
        """Raise WrongResultError, which names the pair, if the last message has wrong bytes.

        The receiver checks the message; with transport copy the lower rank does. The message is
        wrong before the first step and after each check. With copy, wait for both devices before
        and after this call.
        """
        import torch

        if self._arrival is None or self.pair is None:
            return
        sender, receiver, received, expected = self._arrival
        is_right = torch.equal(received, expected)
        received.fill_(-1)
        if not is_right:
            raise WrongResultError(
                f"ranks {self.pair[0]} and {self.pair[1]}: a message from rank {sender} to rank "
                f"{receiver} ({self._transport}, {self._direction}) arrived with a wrong payload"
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
        if self._direction in _TWICE:
            raise UsageError(
                f"workload pairs: direction {self._direction} needs transport: send; a copy goes "
                "forward or backward"
            )
        # Node and device of each rank.
        locations: list[Any] = [None] * context.world_size
        dist.all_gather_object(locations, (os.environ.get("GROUP_RANK", ""), context.device.index))
        nodes = [node for node, _ in locations]
        apart = next(((low, high) for low, high in pairs if nodes[low] != nodes[high]), None)
        if apart is not None:
            raise UsageError(
                f"workload pairs: ranks {apart[0]} and {apart[1]} are on two hosts, and "
                "transport copy is within one; name the pairs of one host in partners, or give "
                "transport: send"
            )
        if self.pair is None or context.rank != self.pair[0]:
            return

        # On the lower rank: this device, and the device of the higher rank.
        _, peer_index = locations[self.pair[1]]
        pair, here, there = self.pair, context.device, torch.device("cuda", peer_index)
        is_forward = self._direction == "forward"
        sender, receiver = pair if is_forward else pair[::-1]
        source = _message(sender, size_bytes, here if is_forward else there)
        target = torch.full_like(source, -1, device=there if is_forward else here)
        self._arrival = sender, receiver, target, source.to(target.device, copy=True)
        from cuda.bindings import runtime

        error, can_reach = runtime.cudaDeviceCanAccessPeer(here.index, there.index)
        if error or not can_reach:
            raise UsageError(
                f"workload pairs: {here} cannot reach the memory of {there} directly; give "
                "transport: send"
            )
        (error,) = runtime.cudaDeviceEnablePeerAccess(there.index, 0)
        codes = runtime.cudaError_t
        if error not in (codes.cudaSuccess, codes.cudaErrorPeerAccessAlreadyEnabled):
            raise RuntimeError(f"cudaDeviceEnablePeerAccess: {error.name}")
        ends = (target.data_ptr(), target.device.index, source.data_ptr(), source.device.index)

        def copy() -> None:
            # Tensor.copy_ would also record an event on the other device, where it takes turns with
            # the process that owns the device: 2.4 ms instead of 0.7 ms beside a waiting
            # collective.
            stream = torch.cuda.current_stream(here).cuda_stream
            (error,) = runtime.cudaMemcpyPeerAsync(*ends, source.nbytes, stream)
            if error:
                raise RuntimeError(f"cudaMemcpyPeerAsync: {error.name}")

        self._issue = copy


def _message(sender: int, size_bytes: int, device: torch.device) -> Tensor:
    """Return the message of `sender`: int64, different at each position and for each sender."""
    import torch

    return torch.arange(size_bytes // 8, dtype=torch.int64, device=device) * 7919 + sender + 1


class TransportProbe(Workload):
    """Runs one collective in other processes, and prints the transports that NCCL or gloo use.

    NCCL logs its transports once, when a communicator is made, and only in a process that was
    started with NCCL_DEBUG. Each worker runs `main` in such a process, so that nothing is logged
    while something is timed, and prints its output. If a process fails, this raises RuntimeError
    with the last line of its stderr; after 90 s it raises TimeoutExpired.
    """

    takes_batch_size = False
    # Declare a collective, so that no floating-point operations are counted.
    message_bytes = 4
    busbw_factor = 1.0

    def __init__(self, context: Context) -> None:
        import torch.distributed as dist

        name = [f"{os.getpid()}-{time.monotonic_ns()}"]
        if context.world_size > 1:
            # All ranks meet under a name that rank 0 chooses; no name is used twice.
            dist.broadcast_object_list(name, device=context.device)
        command = [sys.executable, "-m", __name__, str(context.device), name[0]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90.0)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
        print(done.stdout, flush=True)

    def step(self) -> None:
        """Wait for a millisecond: everything was printed when the workload was built."""
        time.sleep(0.001)


_TIMEOUT = timedelta(seconds=60)
# Up to this number of ranks an all_to_all connects all pairs. With more ranks only the all_reduce
# runs, which connects some pairs.
_MOST_IN_ALL_PAIRS = 64
_TRANSPORT = re.compile(
    r" via |NET/|Using network|NVLS multicast|nvls channels|nNodes|NCCL version|GPU Direct"
    r"|NCCL_SOCKET_IFNAME|Init COMPLETE|NCCL WARN"
)
_CHANNEL = re.compile(r"Channel \d+(/\d+)? : ")
_LINE = re.compile(r"^.*?(NCCL (INFO|WARN) .*|NCCL version .*)$")


def main() -> None:
    """Run the collective; print lines of the host, then gloo's connections or NCCL's transports.

    The arguments of the program are the device (cuda for LOCAL_RANK's device, cuda:N or cpu) and a
    prefix for keys in the store, which is equal on all ranks and used once. The exit code is 0.

    Raises:
        KeyError: torchrun's variables are missing.
        RuntimeError: the store or a peer did not answer within 60 s; NCCL may wait longer.
    """
    device, name = [*sys.argv[1:], "transport"][:2]
    with TemporaryDirectory(prefix="raybench-nccl-") as folder:
        log = Path(folder) / "nccl.log"
        # NCCL reads these variables once, so set them before NCCL is loaded.
        os.environ |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,P2P,SHM,NVLS",
            "NCCL_DEBUG_FILE": str(log),
        }
        peers = _communicate(device, name)
        text = log.read_text(errors="replace") if log.exists() else ""
    adapters = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    print(f"raybench: adapters {','.join(adapters)}")
    print(f"raybench: memlock {'unlimited' if locked == resource.RLIM_INFINITY else locked}")
    print(f"raybench: rank {os.environ['RANK']}")
    lines = (match[1] for line in text.splitlines() if (match := _LINE.match(line)))
    transports = (_CHANNEL.sub("", line) for line in lines if _TRANSPORT.search(line))
    print(*peers, *dict.fromkeys(transports), sep="\n", flush=True)
    # Skip gloo's destructors, which may abort the process.
    os._exit(0)


def _communicate(device_name: str, name: str) -> list[str]:
    """Reduce a number over all ranks and, on GPUs, connect each pair; return lines to print.

    On CPUs there is a line for each TCP connection of this process, except to the store. It has the
    interface, this address and the peer's address.
    """
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
        store=PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    ones = torch.ones(world_size, device=device)
    dist.all_reduce(ones)
    if is_cuda and world_size <= _MOST_IN_ALL_PAIRS:
        dist.all_to_all_single(torch.empty_like(ones), ones)
    assert ones[0].item() == world_size
    dist.barrier()
    if is_cuda:
        return []
    import psutil

    names = {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    lines = []
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr.port != port:
            ends = (connection.laddr.ip, connection.raddr.ip)
            here, there = (address.removeprefix("::ffff:") for address in ends)
            lines.append(f"raybench: gloo {names.get(here, 'unknown')} {here} {there}")
    return lines


if __name__ == "__main__":
    main()
