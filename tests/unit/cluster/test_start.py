"""Which cluster is joined, where a private one has its folder, how lost programs are noticed."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from commands import REPOSITORY
from ruamel.yaml import YAML

from raybench.cluster import find_kind, starts_private
from raybench.cluster.ray_cluster import start
from raybench.cluster.ray_cluster.start import HeadMonitor, find_own_cluster, make_private_folder
from raybench.errors import ClusterError, UsageError


class Host:
    """Address files of a host, and processes that it is only told of."""

    def __init__(self, root):
        self.root, self.usual = root, root / "ray"
        self.processes = []

    def raylet(self, head, folder=None, owner=None):
        words = ["/venv/ray/core/src/ray/raylet/raylet", "--node_id=1", f"--gcs-address={head}"]
        words += [f"--temp_dir={folder or self.usual}", "--labels={}"]
        users = SimpleNamespace(real=os.geteuid() if owner is None else owner)
        self.processes.append(SimpleNamespace(info={"cmdline": words, "uids": users}))

    def address_file(self, text, folder=None):
        path = (folder or self.usual) / "ray_current_cluster"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path


@pytest.fixture
def host(tmp_path, monkeypatch):
    made = Host(tmp_path)
    monkeypatch.setattr("psutil.process_iter", lambda _: made.processes)
    monkeypatch.setattr(start.ray_internals, "default_folder", lambda: made.usual)
    return made


@pytest.mark.parametrize(
    ("address", "exported", "is_private"),
    [
        ("auto", "", True),
        ("auto", "auto", True),
        ("auto", "local", True),
        ("auto", "192.0.2.1:6379", False),
        ("local", "192.0.2.1:6379", True),
        ("192.0.2.1:6379", "local", False),
    ],
)
def test_address_and_ray_address_decide_on_private_ray(
    host, monkeypatch, address, exported, is_private
):
    monkeypatch.setenv("RAY_ADDRESS", exported)
    assert starts_private(address) is is_private


@pytest.mark.parametrize(
    ("address", "device", "here", "there", "kind"),
    [
        ("local", "cpu", 8, 8, "cpu"),
        ("local", "auto", 0, 8, "cpu"),
        ("local", "auto", 2, 0, "cuda"),
        ("local", "cuda", 0, 0, "cuda"),
        ("192.0.2.1:6379", "auto", 0, 8, "cuda"),
        ("192.0.2.1:6379", "auto", 8, 0, "cpu"),
        # The cluster has gone meanwhile, so that a private Ray starts.
        ("192.0.2.1:6379", "auto", 8, None, "cuda"),
    ],
)
def test_kind_of_devices_follows_the_cluster(monkeypatch, address, device, here, there, kind):
    monkeypatch.setattr("raybench.hardware.gpu_presence.count_gpus", lambda: here)
    monkeypatch.setattr(start, "count_gpus", lambda _: there)
    assert find_kind(address, device) == kind


def test_host_without_raylets_needs_no_ray(host, monkeypatch):
    monkeypatch.setattr(start, "find_own_cluster", lambda: pytest.fail("Ray was asked"))
    assert starts_private("auto")


@pytest.mark.parametrize(("head", "owner"), [("192.0.2.1:6379", None), ("192.0.2.66:6379", 65534)])
def test_an_unconfirmed_address_file_is_not_trusted(host, head, owner):
    host.raylet(head, owner=owner)
    host.address_file("192.0.2.66:6379")
    address, why_not = find_own_cluster()
    assert not address
    assert why_not.startswith("the cluster at 192.0.2.66:6379 is gone or another user's")


@pytest.mark.parametrize("text", ["", "x", "a b:1", "h:1\x1b[31m", "h:1234567", "h:1\n" * 200])
def test_an_address_file_without_address_is_ignored(host, text):
    host.raylet(text)
    host.address_file(text)
    assert find_own_cluster() == ("", "")


def test_an_address_file_of_invalid_bytes_is_ignored(host):
    host.raylet("192.0.2.1:6379")
    host.address_file("").write_bytes(b"192.0.2.1:6379\xff")
    assert find_own_cluster() == ("", "")


def test_a_head_in_another_temp_dir_is_found(host):
    host.raylet("192.0.2.1:6379", host.root / "a")
    host.address_file("192.0.2.1:6379", host.root / "a")
    assert find_own_cluster() == ("192.0.2.1:6379", "")
    host.raylet("192.0.2.2:6379", host.root / "b")
    host.address_file("192.0.2.2:6379", host.root / "b")
    with pytest.raises(ClusterError, match=r"several Ray clusters .*\.1:6379, 192.*name one with"):
        find_own_cluster()
    host.raylet("192.0.2.3:6379")
    host.address_file("192.0.2.3:6379")
    assert find_own_cluster() == ("192.0.2.3:6379", "")


SOCKET = "session_2026-11-22_03-57-34_123456_1234567/sockets/plasma_store"


def test_a_path_too_long_for_sockets_is_avoided(tmp_path, monkeypatch):
    far = tmp_path / ("x" * 100)
    monkeypatch.setenv("RAY_TMPDIR", str(far))
    monkeypatch.setenv("TMPDIR", str(far))
    monkeypatch.setattr("pathlib.Path.resolve", lambda _: far)  # as of a link /tmp
    folder = make_private_folder()
    folder.rmdir()
    assert len(bytes(folder / "r" / SOCKET)) <= 107
    assert folder.parent != far


@pytest.mark.parametrize("address", ["a..b:80", "127.0.0.1:²"])
def test_a_malformed_address_is_refused(address):
    with pytest.raises((UsageError, ClusterError), match=f"--address {address}: "):
        start.connect_ray(address, "cpu", 1)


@contextmanager
def listening():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("dies", ["the head", "this host's Ray"])
def test_a_fresh_check_notices_a_death_at_once(dies):
    other = {"the head": "this host's Ray", "this host's Ray": "the head"}[dies]
    with listening() as stays:
        with listening() as address:
            found = HeadMonitor({other: stays, dies: address})
            found.check(afresh=True)
        found.check()
        started_s = time.monotonic()
        with pytest.raises(ClusterError, match=f"{dies} at {address} is gone"):
            found.check(afresh=True)
        assert time.monotonic() < started_s + 10
        assert found.gone()


def test_a_head_that_missed_one_call_is_there(monkeypatch):
    connect = Mock(side_effect=[TimeoutError, Mock()])
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr("raybench.cluster.timeouts.ASK_HEAD_AGAIN_S", 0.01)
    assert not HeadMonitor({"the head": "127.0.0.1:1"}).gone()
    assert connect.call_count == 2


def test_the_guard_ends_a_process_without_a_cluster():
    hangs = (
        "import time\n"
        "from raybench.cluster.ray_cluster.start import end_process, ray_guard\n"
        "with ray_guard(lambda: 'its head is gone', end_process, patience_s=0.1):\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", hangs], capture_output=True, text=True, timeout=30, env=os.environ
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "its head is gone\n")


@pytest.mark.parametrize("file", ["cluster.yaml", "docs/launchers/aws.yaml"])
def test_ray_accepts_the_cluster_file(file):
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = YAML(typ="safe").load((REPOSITORY / file).read_text())
    validate_config(prepare_config(config))
