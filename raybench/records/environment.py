"""The environment of a process: versions, variables that change timing, the commit, cores."""

from __future__ import annotations

import os
import platform
import re
import site
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from raybench.version import __version__

# The newest minor version of torch that the tests have used.
_TESTED_TORCH = (2, 13)
_PACKAGES = ("torch", "ray", "numpy", "pyarrow")
# Its value names further variables that workers take over from the driver, separated by commas.
FORWARDED_VARIABLE = "RAYBENCH_FORWARDED"
_PREFIXES = ("NCCL_", "TORCH_", "CUDA_", "OMP_", "PYTORCH_", "GLOO_", "MKL_", "NVIDIA_TF32_")


def package_versions() -> dict[str, str]:
    """Return name -> version of raybench, python, torch, ray, numpy and pyarrow, if installed."""
    versions = {"raybench": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def warn_of_torch(versions: Mapping[str, str]) -> str | None:
    """Return a warning if torch is newer than the newest tested version, else None."""
    numbers = re.findall(r"\d+", versions.get("torch", ""))
    major_and_minor = tuple(map(int, numbers[:2]))
    if major_and_minor <= _TESTED_TORCH:
        return None
    newest = "{}.{}, the newest that raybench was tested with".format(*_TESTED_TORCH)
    return f"torch {versions['torch']} is newer than {newest}"


def variables_that_matter() -> dict[str, str]:
    """Return the environment variables that configure NCCL, torch, CUDA, OpenMP, gloo or MKL."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def path_to_raybench() -> dict[str, str]:
    """Return the variable by which `python -P -m raybench...` finds this raybench.

    `python -m raybench` in a checkout finds it in the working directory, which -P leaves out.
    """
    root = str(Path(__file__).parents[2])
    if root in site.getsitepackages():
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))}


@contextmanager
def set_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the `with` block, and restore them after it."""
    saved = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in saved.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def git_commit(folder: Path) -> str | None:
    """Return the hash of HEAD, with "+changes" if a tracked file differs; None if git fails."""
    command = ["git", "describe", "--always", "--abbrev=64", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.check_output(
            command, cwd=folder, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of hardware threads that affinity and cgroup quota let this process use.

    Args:
        root: root of the file system, for tests.
    """
    cores, folder = len(os.sched_getaffinity(0)), root / "sys/fs/cgroup"
    # cgroups version 2 has "quota period" in one file; version 1 has the period in another file.
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us"):
        try:
            quota_text, *period_texts = (folder / name).read_text(encoding="ascii").split()
            if not period_texts:
                period_texts = [(folder / "cpu/cpu.cfs_period_us").read_text("ascii")]
            quota_us, period_us = int(quota_text), int(period_texts[0])
        except (OSError, ValueError):
            continue  # the quota is "max", or there is no such cgroup
        if quota_us > 0 and period_us > 0:
            cores = min(cores, quota_us // period_us)
    return max(1, cores)
