"""The workload `transport_probe`: a collective in processes of its own, to read what it says.

NCCL tells which way its bytes go once, when a communicator is made, and to a process that was
started with NCCL_DEBUG. So that no line is written while something is timed, each worker starts
a process for it beside its own. That is this module too; by hand:

    torchrun --nproc-per-node=2 -m raybench.workloads.transport_probe cuda

It prints the lines of NCCL's log that tell of transports, each once, and what the host has to
offer: `raybench: KEY VALUE`. `raybench.doctor.diagnosis` reads them.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from raybench.workloads.base import Context, Workload

_TIMEOUT_S = 90.0
# So short that it does not matter, and not nothing.
_STEP_S = 0.001


class TransportProbe(Workload):
    """Lets the ranks do one collective in other processes, and prints what NCCL or gloo tell of it.

    The lines are in the output of each rank. Raises RuntimeError when a process fails.
    """

    takes_batch_size = False
    # It is communication: nobody is to count its arithmetic.
    message_bytes = 4
    busbw_factor = 1.0

    def __init__(self, context: Context) -> None:
        print(_run_process(context), flush=True)

    def step(self) -> None:
        """Do nothing: what there is to know was printed."""
        time.sleep(_STEP_S)


def _run_process(context: Context) -> str:
    """Run the process of this rank, and return what it prints; it does a collective with all ranks.

    All ranks must call it together. Raises RuntimeError with the last line of its stderr when it
    fails, and TimeoutExpired after 90 s.
    """
    import torch.distributed as dist

    name = [f"{os.getpid()}-{time.monotonic_ns()}"]
    if context.world_size > 1:
        # All ranks meet under the name that rank 0 has chosen: no name is used twice.
        dist.broadcast_object_list(name, device=context.device)
    device = str(context.device)
    command = [sys.executable, "-m", __name__, device, name[0]]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=dict(os.environ)
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
    return done.stdout


_TIMEOUT = timedelta(seconds=60)
# All pairs meet in an all_to_all; of more ranks, those that a ring or a tree connects.
_MOST_IN_ALL_PAIRS = 64
_TOLD = re.compile(
    r" via |NET/|Using network|NVLS multicast|nvls channels|nNodes|NCCL version|GPU Direct"
    r"|NCCL_SOCKET_IFNAME|Init COMPLETE|NCCL WARN"
)
_CHANNEL = re.compile(r"Channel \d+(/\d+)? : ")
_LINE = re.compile(r"^.*?(NCCL (INFO|WARN) .*|NCCL version .*)$")
_ADAPTERS = Path("/sys/class/infiniband")


def main() -> None:
    """Do the collective, print what NCCL and the host tell, each line once, and exit with 0."""
    device, name = [*sys.argv[1:], "transport"][:2]
    with TemporaryDirectory(prefix="raybench-nccl-") as folder:
        log = Path(folder) / "nccl.log"
        # Before NCCL is loaded, which reads them once. A file: stdout is for what is chosen of it.
        os.environ |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,P2P,SHM,NVLS",
            "NCCL_DEBUG_FILE": str(log),
        }
        peers = _communicate(device, name)
        text = log.read_text(errors="replace") if log.exists() else ""
    adapters = sorted(path.name for path in _ADAPTERS.iterdir()) if _ADAPTERS.is_dir() else []
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    print(f"raybench: adapters {','.join(adapters)}")
    print(f"raybench: memlock {'unlimited' if locked == resource.RLIM_INFINITY else locked}")
    print(f"raybench: rank {os.environ['RANK']}")
    lines = (found[1] for line in text.splitlines() if (found := _LINE.match(line)))
    told = (_CHANNEL.sub("", line) for line in lines if _TOLD.search(line))
    for line in (*peers, *dict.fromkeys(told)):
        print(line)
    sys.stdout.flush()
    # As doctor's bare step: gloo's destructors may abort the process.
    os._exit(0)


def _communicate(device_name: str, name: str) -> list[str]:
    """Let all ranks reduce a number and, on GPUs, each pair exchange one; return lines to print.

    Lines as `_gloo_lines` on CPUs, else none. name: the same on all ranks, and used only once.
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
    return [] if is_cuda else list(_gloo_lines(port))


def _gloo_lines(store_port: int) -> Iterator[str]:
    """Yield a line for each TCP connection of this process: interface, own address, peer's address.

    Not for those to the store at this port.
    """
    import psutil

    names = {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr.port != store_port:
            here, there = (
                address.removeprefix("::ffff:")
                for address in (connection.laddr.ip, connection.raddr.ip)
            )
            yield f"raybench: gloo {names.get(here, 'unknown')} {here} {there}"


if __name__ == "__main__":
    main()
