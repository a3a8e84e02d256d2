"""What a run was made with: versions, variables that change timing, the code's commit."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from raybench import __version__

_PACKAGES = ("torch", "ray", "numpy", "pyarrow")
_PREFIXES = ("NCCL_", "TORCH_", "CUDA_", "OMP_", "PYTORCH_", "GLOO_", "MKL_", "NVIDIA_TF32_")


def package_versions() -> dict[str, str]:
    """Versions as installed, without importing anything."""
    found = {"raybench": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            # Absent packages are left out; the reader sees which were there.
            continue
    return found


def variables_that_matter() -> dict[str, str]:
    """Read the environment variables that are known to change what is measured."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def git_commit(folder: Path) -> str | None:
    """Find the commit of `folder`, with "+changes" when files differ; None outside git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changes" if changes else commit


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: by its affinity, and by the quota of its cgroup."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    """Whole cores that the cgroup of this process, as it sees it, may use; none where any."""
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us"):
        try:
            content = (root / "sys/fs/cgroup" / name).read_text(encoding="ascii").split()
            period = content[1:] or [
                (root / "sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text(encoding="ascii")
            ]
            quota_us, period_us = int(content[0]), int(period[0])
        except (OSError, ValueError, IndexError):
            continue  # `max`, or no such cgroup
        if quota_us > 0 and period_us > 0:
            yield quota_us // period_us
