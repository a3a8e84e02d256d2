"""Where the folder of a private Ray is made; tests/integration/test_security.py enters it."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from raybench.cluster.ray_cluster.private_ray import make_private_folder
from raybench.errors import ClusterError

SOCKET = "session_2026-11-22_03-57-34_123456_1234567/sockets/plasma_store"


@pytest.fixture(autouse=True)
def no_folder_of_rays(monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("TMPDIR", raising=False)


@pytest.fixture
def short_folder():
    """Short enough for sockets, which pytest's own are not."""
    with TemporaryDirectory(prefix="rb", dir="/tmp") as folder:
        yield Path(folder)


def test_a_path_too_long_for_sockets_is_passed_over(tmp_path, monkeypatch):
    far = tmp_path / ("x" * 100)
    far.mkdir()
    monkeypatch.setenv("TMPDIR", str(far))
    folder = make_private_folder()
    folder.rmdir()
    assert len(bytes(folder / "r" / SOCKET)) <= 107
    assert folder.parent != far


def test_a_folder_that_others_could_rename_is_passed_over(monkeypatch, short_folder):
    monkeypatch.setenv("TMPDIR", str(short_folder))
    made = make_private_folder()
    assert made.parent == short_folder
    short_folder.chmod(0o777)
    other = make_private_folder()
    other.rmdir()
    assert other.parent != short_folder
    short_folder.chmod(0o1777)
    again = make_private_folder()
    assert again.parent == short_folder


def test_where_there_is_no_place_each_reason_is_told(monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(
        ClusterError, match=r"^no folder .*/tmp: No space left .*set TMPDIR"
    ) as told:
        make_private_folder()
    assert len(str(told.value).splitlines()) == 1
