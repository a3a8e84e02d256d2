"""What `make lint` counts of the structure, on a package made for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "structure.py"
PYPROJECT = """\
[[tool.importlinter.contracts]]
layers = ["raybench.top", "raybench.middle : raybench.loose", "raybench.bottom"]
"""
FILES = {
    "top/__init__.py": "",
    "top/one.py": "from raybench.middle import run\nfrom raybench.bottom import value\n",
    "top/two.py": "import raybench.bottom\nfrom raybench.top import one\n",
    "middle.py": "def run():\n    from raybench.bottom import value\n    return value\n",
    "loose.py": "def opened():\n    told_once = 1\n    return told_once\n",
    "bottom.py": "value = 1\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    for name, text in FILES.items():
        path = tmp_path / "raybench" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def counts(root: Path) -> tuple[dict[str, float], str]:
    done = subprocess.run([sys.executable, SCRIPT, root], capture_output=True, text=True)
    lines = (line.split(" (at most")[0].split(maxsplit=1) for line in done.stdout.splitlines())
    return {name: float(value) for value, name in lines}, done.stderr


def test_rooms_are_folders_and_files_and_an_arrow_counts_once(package: Path) -> None:
    found, _ = counts(package)
    assert found["rooms"] == 4
    assert found["arrows between rooms"] == 3
    assert found["arrows that point up"] == 0
    assert found["circles of rooms"] == 0


def test_an_import_for_type_checkers_of_a_room_above_points_up_and_closes_a_circle(
    package: Path,
) -> None:
    (package / "raybench" / "bottom.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from raybench.top.one import run\nvalue = 1\n"
    )
    found, _ = counts(package)
    assert found["arrows that point up"] == 1
    assert found["circles of rooms"] == 1


def test_names_that_tell_nothing_are_counted_and_too_many_are_an_error(package: Path) -> None:
    found, said = counts(package)
    assert found["functions named by participles, %"] == 50
    assert found["identifiers of a private language"] == 2
    assert "too many: functions named by participles, %\n" in said


def test_two_test_files_of_one_name_fail(package: Path) -> None:
    for folder in ("unit", "integration/nodes"):
        path = package / "tests" / folder / "test_one.py"
        path.parent.mkdir(parents=True)
        path.write_text("")
    found, complaint = counts(package)
    assert found["test files with the name of another"] == 1
    assert "too many: test files with the name of another" in complaint
