"""Small NCCL libraries, compiled with gcc, which know their version and nothing else."""

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = "int ncclGetVersion(int* version) {{ *version = {number}; return 0; }}\n"


def compile_nccl(folder: Path, number: int, soname: str = "libnccl.so.2") -> Path:
    """Make `libnccl.so.2` in a new folder; skips the test without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder.mkdir(parents=True)
    library, source = folder / "libnccl.so.2", folder / "nccl.c"
    source.write_text(_SOURCE.format(number=number), encoding="utf-8")
    options = ["-shared", "-fPIC", f"-Wl,-soname,{soname}"]
    subprocess.run([compiler, *options, "-o", library, source], check=True)
    return library
