import pytest
from fake_sweeps import fake_sweep, git, write_steps

from raybench.ab import gate


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with three points, as the current folder."""
    monkeypatch.setattr(gate, "run_sweep", fake_sweep)
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "ci.yaml").write_text("version: 1\nname: ci\n")
    (folder / ".gitignore").write_text("results\n")
    write_steps(folder, a=10.0, b=20.0, c=30.0)
    git(folder, "add", "--all")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.chdir(folder)
    return folder
