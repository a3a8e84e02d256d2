"""The client of NCCL's RAS service, against a server on a real socket."""

import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from raybench.hangs import ras
from raybench.hangs.ras import NoRas

# As NCCL 2.28.9 writes it (src/ras/client_support.cc), without a comma before "status".
ANSWER = """{
  "nccl_version": "2.28.9",
  "cuda_runtime_version": 13000,
  "cuda_driver_version": 13000,
  "timestamp": "2026-11-29 20:30:00",
  "communicators_count": 1,
  "communicators": [
    {
      "hash": "0x1f2e",
      "secondary_hash": "0x3:0x4",
      "size": 2,
      "ranks_count": 1,
      "missing_ranks_count": 1,
      "ranks": [
        {
          "rank": 0,
          "host": "10.0.0.1",
          "pid": 4711,
          "cuda_dev": 0,
          "nvml_dev": 0,
          "status": {
            "init_state": 0,
            "async_error": 0,
            "finalize_called": false,
            "destroy_flag": false,
            "abort_flag": false
          },
          "collective_counts": {
            "Broadcast": 3,
            "Reduce": 0,
            "AllGather": 12,
            "ReduceScatter": 0,
            "AllReduce": 118
          }
        }
      ],
      "missing_ranks": [
        {
          "rank": 1,
          "host": "10.0.0.1",
          "pid": 4712,
          "cuda_dev": 1,
          "nvml_dev": 1
          "status": {
            "unresponsive": true,
            "considered_dead": false
          }
        }
      ]
    }
  ],
  "ras": {
    "collection_time_sec": 1.000,
    "timeouts_count": 1
  }
}
"""
PIDS = {4711, 4712}


class Server:
    """Answers as NCCL does; the first `silent` connections get nothing."""

    def __init__(self, answer=ANSWER, *, knows_json=True, silent=0):
        self._answer, self._knows_json, self._silent = answer, knows_json, silent
        self.lines = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = self._socket.getsockname()
        self._kept = []

    def serve(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._kept.append(connection)
            if self._silent:
                self._silent -= 1
                continue
            self._converse(connection)

    def _converse(self, connection):
        for line in connection.makefile(encoding="ascii"):
            self.lines.append(line.strip())
            if line.startswith("VERBOSE STATUS"):
                connection.sendall(self._answer.encode())
                connection.shutdown(socket.SHUT_RDWR)
                return
            answer = "OK"
            if line.startswith("CLIENT PROTOCOL"):
                answer = "SERVER PROTOCOL 2"
            elif line.startswith("SET FORMAT") and not self._knows_json:
                answer = "ERROR: Unknown command SET FORMAT json"
            connection.sendall(f"{answer}\n".encode())

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self._kept:
            connection.close()


@contextmanager
def serving(*arguments, **named):
    server = Server(*arguments, **named)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


def test_a_missing_comma_is_repaired():
    with serving() as server:
        text = ras.ask(server.address, 3.0)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    report = ras.read(text, PIDS)
    (communicator,) = report.communicators
    first, second = communicator.ranks
    assert first.launched["AllReduce"] == 118
    assert (second.pid, second.is_missing, second.is_dead) == (4712, True, False)
    assert server.lines == ["CLIENT PROTOCOL 2", "TIMEOUT 1", "SET FORMAT json", "VERBOSE STATUS"]


def test_sound_json_is_read_as_it_is():
    sound = ANSWER.replace('"nvml_dev": 1\n', '"nvml_dev": 1,\n').replace("2.28.9", "2.30.7")
    assert ras.read(sound, PIDS).nccl_version == "2.30.7"


def test_a_refused_connection_is_a_value():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    assert ras.ask(address, 3.0) is NoRas.REFUSED


def test_a_stopped_process_is_passed_over():
    with serving(silent=2) as server:
        assert ras.ask(server.address, 5.0) == ANSWER


def test_silence_ends_at_the_deadline():
    with serving(silent=99) as server:
        began_s = time.monotonic()
        answer = ras.ask(server.address, 1.0)
        # As long as it takes on a busy machine; without a deadline it would be for ever.
        assert time.monotonic() - began_s < 30
    assert answer is NoRas.SILENT


def test_an_old_service_is_not_asked_for_status():
    with serving(knows_json=False) as server:
        assert ras.ask(server.address, 3.0) is NoRas.TOO_OLD
    assert "VERBOSE STATUS" not in server.lines


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (ANSWER[:300], NoRas.UNREADABLE),
        ("[]", NoRas.UNREADABLE),
        (ANSWER.replace("2.28.9", "2.28.3"), NoRas.TOO_OLD),
        (ANSWER.replace("4711", "99"), NoRas.OTHER_PROCESSES),
    ],
)
def test_what_cannot_be_used_has_a_reason(text, why):
    assert ras.read(text, PIDS) is why
