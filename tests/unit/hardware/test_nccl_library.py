"""Which NCCL a process has loaded, told by the process itself."""

import json

import pytest
from commands import run_python

from raybench.hardware.nccl_library import loaded_nccl
from tests.nccl_files import compile_nccl

TELL = """
import ctypes, dataclasses, json, os, sys
from raybench.hardware.nccl_library import loaded_nccl
for path in sys.argv[1:]:
    ctypes.CDLL(path)
{then}
found = loaded_nccl()
print(json.dumps(found and dataclasses.asdict(found)))
"""


def told(*paths, then="", **variables):
    done = run_python(TELL.format(then=then), *paths, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("number", "version"), [(22809, "2.28.9"), (23000, "2.30.0"), (2804, "2.8.4")]
)
def test_the_loaded_library_tells_its_version(tmp_path, number, version):
    library = compile_nccl(tmp_path / "a folder", number)
    assert told(library) == {"version": version, "path": str(library)}


def test_a_preloaded_library_replaces_the_other(tmp_path):
    usual = compile_nccl(tmp_path / "usual", 22809)
    # Without the usual name of a library the linker loads both.
    other = compile_nccl(tmp_path / "other", 22703, soname="mine.so")
    assert told(usual, LD_PRELOAD=str(other)) == {"version": "2.27.3", "path": str(other)}
    assert told(usual)["version"] == "2.28.9"


def test_a_replaced_file_is_not_the_library(tmp_path):
    library = compile_nccl(tmp_path / "a", 22809)
    newer = compile_nccl(tmp_path / "b", 23000)
    found = told(library, then=f"os.replace({str(newer)!r}, sys.argv[1])")
    assert found == {"version": "2.28.9", "path": str(library)}


def test_plugins_and_unloaded_libraries_are_no_nccl(tmp_path):
    library = compile_nccl(tmp_path / "a", 22809)
    plugin = library.rename(library.with_name("libnccl-net.so"))
    assert told(plugin) is None
    assert loaded_nccl() is None
