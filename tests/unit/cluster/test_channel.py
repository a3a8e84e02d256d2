"""Who does not know the secret is not listened to, and keeps nobody waiting."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from raybench.cluster.processes.channel import GONE, Channel, Door, Reception
from raybench.errors import ClusterError

PATIENCE_S = 20.0


class Come:
    """Those who were let in, with their hellos."""

    def __init__(self) -> None:
        self.all: SimpleQueue[tuple[Connection, Any]] = SimpleQueue()

    def __call__(self, connection: Connection, hello: Any) -> None:
        self.all.put((connection, hello))


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number: int = free.getsockname()[1]
        return number


@pytest.fixture
def come() -> Come:
    return Come()


@pytest.fixture
def door(port: int, come: Come) -> Iterator[Door]:
    open_door = Door(address=("127.0.0.1", port), secret=b"known")
    reception = Reception(open_door, come)
    yield open_door
    reception.close()


class Trap:
    """What would run where it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return pytest.fail, ("a stranger's pickle was read",)


def test_a_pickle_of_a_stranger_is_not_read(door: Door, come: Come) -> None:
    with socket.create_connection(door.address) as stranger:
        data = pickle.dumps(Trap())
        stranger.sendall(len(data).to_bytes(4, "big") + data)
        stranger.settimeout(PATIENCE_S)
        while stranger.recv(4096):
            """Until the driver hangs up."""
    assert come.all.empty()


def test_another_secret_is_told_in_one_line(door: Door, come: Come) -> None:
    with pytest.raises(ClusterError, match="RAYBENCH_SECRET is another one there"):
        Door(address=door.address, secret=b"guessed").enter("hello")
    assert come.all.empty()


def test_a_stranger_that_says_nothing_keeps_nobody_waiting(door: Door, come: Come) -> None:
    with socket.create_connection(door.address):
        connection = door.enter("hello")
        _, hello = come.all.get(timeout=PATIENCE_S)
        assert hello == "hello"
        connection.close()


def test_a_door_that_nobody_opens_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no raybench answers there") as raised:
        Door(address=str(tmp_path / "door"), secret=b"").enter("hello", timeout_s=0.0)
    assert "\n" not in str(raised.value)


def test_who_listens_late_hears_that_the_other_end_is_gone(door: Door, come: Come) -> None:
    theirs = door.enter("hello")
    connection, _ = come.all.get(timeout=PATIENCE_S)
    first: SimpleQueue[object] = SimpleQueue()
    channel = Channel(connection, first.put)
    theirs.send("one")
    assert first.get(timeout=PATIENCE_S) == "one"
    theirs.close()
    assert first.get(timeout=PATIENCE_S) is GONE
    second: SimpleQueue[object] = SimpleQueue()
    channel.listen(second.put)
    assert second.get(timeout=PATIENCE_S) is GONE
    channel.send("to nobody")
    channel.close()


def test_a_port_that_is_taken_is_told_in_one_line(door: Door, come: Come) -> None:
    with pytest.raises(ClusterError, match="set MASTER_PORT to another port"):
        Reception(door, come)
