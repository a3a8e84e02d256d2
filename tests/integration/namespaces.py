"""Hosts of their own on this machine: each has its network, processes, name and scratch disk.

Nodes of `ray.cluster_utils.Cluster` share this machine's address, name and files, so they cannot
show what goes wrong between hosts. All of it vanishes with its processes, whatever the test does.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

_UNSHARE = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child"]
HEAD = ("--head", "--port=6379", "--include-dashboard=false")
_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def only_child(process_id: int) -> int:
    """The command itself: nsenter waits for it outside and passes no signal on."""
    (child,) = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    return int(child)


def why_not() -> str | None:
    """Why this process cannot make hosts; None when it can."""
    missing = [name for name in ("ip", "unshare", "nsenter", "mount") if not shutil.which(name)]
    if missing:
        return f"not on the PATH: {', '.join(missing)}"
    tried = subprocess.run([*_UNSHARE, "--mount-proc", "true"], capture_output=True, text=True)
    return tried.stderr.strip() if tried.returncode else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host: its address on the network of all hosts, its first process, its variables."""

    name: str
    address: str
    process_id: int
    environment: dict[str, str]

    def command(self, words: Sequence[str | Path]) -> list[str]:
        enter = ["nsenter", "--target", str(self.process_id), "--net", "--mount", "--pid", "--uts"]
        return [*enter, f"--wd={Path.cwd()}", "--", *map(str, words)]

    def run(
        self, words: Sequence[str | Path], timeout_s: float = 120, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(words),
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def start_ray(self, *options: str, cpus: int = 2, **environment: str) -> None:
        """`ray start`, as a user types it, with so many CPU slots."""
        ray = Path(sys.executable).with_name("ray")
        sizes = [f"--num-cpus={cpus}", "--num-gpus=0", "--object-store-memory=100000000"]
        started = self.run(
            [ray, "start", *options, f"--node-ip-address={self.address}", *sizes], **environment
        )
        assert started.returncode == 0, started.stdout + started.stderr

    def join(self, head, cpus: int = 2) -> None:
        self.start_ray(f"--address={head.address}:6379", cpus=cpus)


def slow_path(host: Host, other: Host, rate: str) -> None:
    """Limit what these two send each other, and nothing else; rate: as tc takes it."""
    for sender, receiver in ((host, other), (other, host)):
        _enter(sender, "tc qdisc add dev net0 root handle 1: htb")
        _enter(sender, f"tc class add dev net0 parent 1: classid 1:4 htb rate {rate} quantum 60000")
        to_it = f"u32 match ip dst {receiver.address}/32 flowid 1:4"
        _enter(sender, f"tc filter add dev net0 protocol ip parent 1:0 prio 1 {to_it}")


def slow_link(host: Host, rate: str) -> None:
    """Limit what this host sends, to whomever; rate: as tc takes it."""
    _enter(host, f"tc qdisc replace dev net0 root tbf rate {rate} burst 64kb latency 50ms")


def lossy_link(host: Host) -> None:
    """Lose a third of the packets that this host sends, as a switch with a small buffer does.

    Its rate is that of a fast network. Not by netem, which not every kernel has.
    """
    _enter(host, "tc qdisc replace dev net0 root tbf rate 4gbit burst 8kb limit 30000")


def pull_cable(switch: Host, host: Host) -> None:
    """Cut the host off, without a word to it. switch: the first host, which has the bridge."""
    _ip(switch, f"link set port-{host.name} down")


def plug_cable(switch: Host, host: Host) -> None:
    """Connect the host again."""
    _ip(switch, f"link set port-{host.name} up")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """`count` hosts on one network 10.99.0.0/24; the bridge is part of the first."""
    with ExitStack() as stack:
        # Ray's socket paths may have 107 characters, so not pytest's long ones.
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="rb", dir="/tmp")))
        made = [stack.enter_context(_host(number, scratch)) for number in range(count)]
        first, *others = made
        _ip(first, "link add name net0 type bridge")
        _ip(first, f"address add {first.address}/24 dev net0")
        _ip(first, "link set net0 up")
        for host in others:
            port = f"port-{host.name}"
            _ip(first, f"link add {port} type veth peer name net0 netns {host.process_id}")
            _ip(first, f"link set {port} master net0 up")
            _ip(host, f"address add {host.address}/24 dev net0")
            _ip(host, "link set net0 up")
        yield made


@contextmanager
def ray_hosts(count: int, *, without_ray: int = 0, cpus: int = 2) -> Iterator[list[Host]]:
    """`count` hosts that are one Ray cluster, and more hosts without Ray after them."""
    with hosts(count + without_ray) as made:
        head = made[0]
        head.start_ray(*HEAD, cpus=cpus)
        for host in made[1:count]:
            host.join(head, cpus=cpus)
        yield made


@contextmanager
def _host(number: int, scratch: Path) -> Iterator[Host]:
    name, names = f"node{number}", scratch / f"hosts{number}"
    # As Debian and Ubuntu write it: the host's own name is a loopback address.
    names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    ray_files = scratch / "ray"
    ray_files.mkdir(exist_ok=True)
    script = (
        f"hostname {name} && mount --bind {names} /etc/hosts && ip link set lo up && "
        f"mount -t tmpfs none {ray_files} && echo ready && exec sleep infinity"
    )
    command = [*_UNSHARE, "--mount-proc", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "ready\n"
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()
            yield Host(
                name=name,
                address=f"10.99.0.{10 + number}",
                process_id=int(children),
                environment={**_ENVIRONMENT, "RAY_TMPDIR": str(ray_files), "HOME": str(scratch)},
            )
        finally:
            # The kernel kills every process of a PID namespace with its first one.
            holder.kill()


def _ip(host: Host, words: str) -> None:
    _enter(host, f"ip {words}")


def _enter(host: Host, words: str) -> None:
    # Not in the host's process namespace, where the other hosts' process ids mean nothing.
    enter = ["nsenter", "--target", str(host.process_id), "--net"]
    done = subprocess.run([*enter, *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stderr}"


_reason = why_not()
needs_hosts = pytest.mark.skipif(_reason is not None, reason=f"needs hosts of its own: {_reason}")
needs_tc = pytest.mark.skipif(not shutil.which("tc"), reason="needs tc")
