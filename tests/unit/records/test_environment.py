"""Which files a workload is made of, when their hashes change, and which torch is too new."""

import importlib
import itertools
import shutil
import sys

import pytest

from raybench.job import registry
from raybench.records.code import code_here, code_of, code_of_script, differing_files
from raybench.records.environment import warn_of_torch

_numbers = itertools.count()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Writes the files of a project, `NAME` in them being its own, and imports its main module."""
    name = f"own_project_{next(_numbers)}"
    monkeypatch.syspath_prepend(tmp_path)

    def write(files: dict[str, str]) -> str:
        for file, text in files.items():
            path = tmp_path / file.replace("NAME", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("NAME", name))
        importlib.import_module(f"{name}.bench")
        return f"{name}.bench"

    return write


PROJECT = {
    "NAME/__init__.py": "",
    "NAME/bench.py": "import NAME.nets.small\nfrom . import losses\nimport json, raybench\n",
    "NAME/nets/small.py": "def build():\n    from NAME.nets import layers\n",
    "NAME/nets/layers.py": "from ..losses import loss\n",
    "NAME/losses.py": "loss = 1\n",
    "NAME/unused.py": "x = 1\n",
}


def test_files_include_recursive_imports(project):
    module = project(PROJECT)
    name = module.partition(".")[0]
    own = ["__init__.py", "bench.py", "losses.py", "nets/layers.py", "nets/small.py"]
    assert sorted(code_of(module).workload) == [f"{name}/{file}" for file in own]
    assert f"{name}.nets.layers" not in sys.modules  # found without importing it


def test_modules_elsewhere_count_unless_installed(project, tmp_path, monkeypatch):
    for folder, module in (("src", "own_library_x"), ("site-packages", "installed_library_x")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{module}.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path / folder)
    imports = "import torch, own_library_x, installed_library_x\nif 0: import nothing_x\n"
    module = project({"NAME/bench.py": imports})
    name = module.partition(".")[0]
    code = code_of(module)
    assert set(code.workload) == {f"{name}/bench.py", "own_library_x.py"}
    assert code_here(code) == code


def test_hash_is_independent_of_folder(project, tmp_path, monkeypatch):
    module = project(PROJECT)
    name = module.partition(".")[0]
    before = code_of(module)
    shutil.copytree(tmp_path / name, tmp_path / "elsewhere" / name)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    for known in [known for known in sys.modules if known.startswith(name)]:
        monkeypatch.delitem(sys.modules, known)
    assert code_of(module) == before
    layers = tmp_path / "elsewhere" / name / "nets" / "layers.py"
    layers.write_text(layers.read_text() + "# a word more\n")
    after = code_of(module)
    assert after.workload_sha256 != before.workload_sha256
    assert after.raybench_sha256 == before.raybench_sha256
    assert differing_files(before.workload, after.workload) == [f"{name}/nets/layers.py"]
    layers.unlink()
    assert differing_files(before.workload, code_here(before).workload) == [
        f"{name}/nets/layers.py"
    ]


@pytest.mark.parametrize("kind", registry.BUILTIN)
def test_builtin_workload_hashes_its_room(kind):
    module = registry.load_workload(kind).__module__
    files = code_of(module).workload
    path = module.replace(".", "/")
    assert {f"{path}.py", f"{path}/__init__.py"} & files.keys()
    assert "raybench/workloads/base.py" in files
    assert all(file.startswith("raybench/workloads/") for file in files)
    assert code_here(code_of(module)).workload == files


def test_a_module_without_a_file_has_no_hash(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_by_hand_x", type(sys)("made_by_hand_x"))
    assert code_of("made_by_hand_x").workload_sha256 is None


def test_script_includes_modules_beside_it(tmp_path, monkeypatch):
    (tmp_path / "random.v2").write_text("import json, torch, shards\nfrom parts import nets\n")
    (tmp_path / "shards.py").write_text("rows = 1\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "nets.py").write_text("x = " + "-" * 100_000 + "1")  # too deep to parse
    code = code_of_script(tmp_path / "random.v2")
    assert set(code.workload) == {"random.v2", "shards.py", "parts/nets.py"}
    assert str(tmp_path) not in sys.path
    # Another module of that name, which this process has loaded, is not the script's.
    monkeypatch.setitem(sys.modules, "shards", sys.modules[__name__])
    assert code_here(code) == code
    (tmp_path / "shards.py").write_text("rows = 2\n")
    assert differing_files(code.workload, code_here(code).workload) == ["shards.py"]


@pytest.mark.parametrize("tested", ["2.11.0", "2.13.1+cu130", "2.13.0a0+gitabc"])
@pytest.mark.parametrize("newer", ["2.14.0", "2.100.0+cpu", "3.0.0"])
def test_newer_torch_is_a_warning(newer, tested):
    told = f"torch {newer} is newer than 2.13, the newest that raybench was tested with"
    assert warn_of_torch({"torch": newer}) == told
    assert warn_of_torch({"torch": tested}) is warn_of_torch({}) is None
