"""Which cluster `--address auto` joins: never one that only a file speaks of."""

import os
import socket
from types import SimpleNamespace

import pytest

from raybench.cluster.ray_cluster.own_clusters import Found, find_own_cluster
from raybench.errors import ClusterError

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root")


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

    def found(self):
        return find_own_cluster(self.usual)


@pytest.fixture
def host(tmp_path, monkeypatch):
    made = Host(tmp_path)
    monkeypatch.setattr("psutil.process_iter", lambda _: made.processes)
    return made


def test_without_a_file_none_is_found_as_for_the_private_ray_of_another_sweep(host):
    host.raylet("127.0.0.1:1234", host.root / "raybench-1")
    assert host.found() == Found()


def test_a_file_that_no_raylet_of_ours_bears_out_is_told_and_not_believed(host):
    host.raylet("192.0.2.1:6379")
    host.address_file("192.0.2.66:6379")
    told = "the cluster at 192.0.2.66:6379 is gone: no node of it runs on this host"
    assert host.found() == Found(unused=told)


@needs_root
def test_a_file_and_a_raylet_of_another_user_are_told_and_not_believed(host):
    host.raylet("192.0.2.1:6379", owner=NOBODY)
    path = host.address_file("192.0.2.1:6379")
    assert "no node of it runs" in host.found().unused
    os.chown(path, NOBODY, NOBODY)
    host.raylet("192.0.2.1:6379")
    told = host.found()
    assert not told.address
    assert told.unused.startswith("the cluster at 192.0.2.1:6379 is another user's")


@pytest.mark.parametrize("text", ["", "x", "a b:1", "h:1\x1b[31m", "h:1234567", "h:1\n" * 200])
def test_a_file_that_holds_no_address_is_as_none(host, text):
    host.raylet(text)
    host.address_file(text)
    assert host.found() == Found()


def test_a_link_and_a_pipe_are_as_no_file(host):
    host.raylet("192.0.2.1:6379")
    path = host.address_file("192.0.2.1:6379")
    path.rename(host.root / "elsewhere")
    path.symlink_to(host.root / "elsewhere")
    assert host.found() == Found()
    path.unlink()
    os.mkfifo(path)
    assert host.found() == Found()


def test_a_head_below_another_temp_dir_is_found_where_there_is_none_in_the_usual_one(host):
    host.raylet("192.0.2.1:6379", host.root / "a")
    host.address_file("192.0.2.1:6379", host.root / "a")
    assert host.found() == Found(address="192.0.2.1:6379")
    host.raylet("192.0.2.2:6379", host.root / "b")
    host.address_file("192.0.2.2:6379", host.root / "b")
    with pytest.raises(ClusterError, match=r"several Ray clusters .*\.1:6379, 192.*name one with"):
        host.found()
    host.raylet("192.0.2.3:6379")
    host.address_file("192.0.2.3:6379")
    assert host.found() == Found(address="192.0.2.3:6379")


@needs_root
def test_a_port_of_this_host_that_another_user_has_taken_over_is_not_joined(host):
    ours = socket.create_server(("127.0.0.1", 0))
    os.seteuid(NOBODY)
    try:
        other = socket.create_server(("127.0.0.1", 0))
    finally:
        os.seteuid(0)
    with ours, other:
        for listener, is_joined in ((ours, True), (other, False)):
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            host.raylet(address)
            host.address_file(address)
            found = host.found()
            assert bool(found.address) == is_joined
        assert found.unused == f"the cluster at {address} is gone: another user listens there"
