"""The folder, interpreter and environment of each side: git worktrees, and their set-up command."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from raybench.ab.plan import WORKTREE, Gate, Side, gates_of
from raybench.errors import UsageError
from raybench.records.environment import FORWARDED_VARIABLE

# `git commit-tree` needs an identity, and the user may have none.
_IDENTITY = {
    **{"GIT_AUTHOR_NAME": "raybench", "GIT_AUTHOR_EMAIL": "raybench@localhost"},
    **{"GIT_COMMITTER_NAME": "raybench", "GIT_COMMITTER_EMAIL": "raybench@localhost"},
}
# A git hook sets these variables. With them, git would use the index and the repository of the hook
# in the worktrees too, and a commit would get the files of a worktree.
_HOOK_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")


class SideError(Exception):
    """A side cannot be measured; the gate can be resumed after the cause is removed."""

    def __init__(self, side: Side, reason: str, log: Path | None = None) -> None:
        super().__init__(side, reason)
        self.side, self.reason, self.log = side, reason, log


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """Folder, job, interpreter and environment of the sweeps of a side."""

    # Current folder of the sweep.
    folder: Path
    job: Path
    python: str
    # All environment variables of the sweep.
    env: Mapping[str, str]


def resolve_revisions(gate: Gate, output: Path) -> Gate:
    """Return the gate with the commits of its revisions; for WORKTREE, make a commit.

    Args:
        output: the results folder, which this commit leaves out.

    Raises:
        UsageError: a revision does not exist, or the current folder is in no git repository.
    """
    commits: dict[Side, str] = {}
    for side in Side:
        revision = gate.version(side).revision
        if revision == WORKTREE == gate.old.revision and commits:
            # A second commit of the same files could have another time, and so another id.
            commits[side] = commits[Side.OLD]
        elif revision == WORKTREE:
            try:
                commits[side] = _commit_of_files(gate.cwd, output.absolute())
            except subprocess.CalledProcessError as error:
                raise UsageError(f"--{side} {WORKTREE}: {last_line(error.stderr)}") from None
        elif revision:
            name = f"{revision}^{{commit}}"
            try:
                commits[side] = _git(gate.cwd, "rev-parse", "--verify", "--quiet", name)
            except subprocess.CalledProcessError:
                _head_of(_top_of(gate.cwd))  # raises UsageError without a repository or a commit
                raise UsageError(f"--{side} {revision}: git knows no such revision") from None
    return replace(gate, commits=commits)


def _commit_of_files(cwd: Path, output: Path) -> str:
    """Commit the current files, except ignored files, without changing a branch or the index.

    Without a change, return the commit HEAD.
    """
    top = _top_of(cwd)
    head = _head_of(top)
    with tempfile.TemporaryDirectory() as folder:
        index = Path(_git(top, "rev-parse", "--path-format=absolute", "--git-path", "index"))
        env = _IDENTITY | {"GIT_INDEX_FILE": str(Path(folder, "index"))}
        if index.exists():
            # With a copy of the index, git reads only the files that changed.
            shutil.copy2(index, Path(folder, "index"))
        # The results of the gate are no files of the version.
        results = gates_of(output) if cwd.is_relative_to(output) else output
        excluded = []
        # `git add` fails if a pathspec names an ignored folder, even to exclude it.
        if results.is_relative_to(top) and not _is_ignored(top, results):
            excluded = [f":(exclude,literal){results.relative_to(top)}"]
        _git(top, "add", "--all", "--", ".", *excluded, env=env)
        tree = _git(top, "write-tree", env=env)
        if tree == _git(top, "rev-parse", f"{head}^{{tree}}"):
            return head
        message = "raybench ab: files that are not committed"
        return _git(top, "commit-tree", tree, "-p", head, "-m", message, env=env)


def _is_ignored(top: Path, path: Path) -> bool:
    """Return whether git ignores a path."""
    try:
        _git(top, "check-ignore", "--quiet", "--", str(path))
    except subprocess.CalledProcessError:
        return False
    return True


def _top_of(cwd: Path) -> Path:
    """Return the top folder of the git repository."""
    try:
        return Path(_git(cwd, "rev-parse", "--show-toplevel"))
    except subprocess.CalledProcessError:
        raise UsageError(
            f"{cwd}: not in a git repository, so --old and --new name nothing"
        ) from None


def _head_of(top: Path) -> str:
    """Return the commit HEAD of a git repository."""
    try:
        return _git(top, "rev-parse", "--verify", "--quiet", "HEAD")
    except subprocess.CalledProcessError:
        raise UsageError(f"{top}: the git repository has no commit; commit first") from None


def _own_environment() -> dict[str, str]:
    """Return the environment of this process without the variables of a git hook."""
    return {name: value for name, value in os.environ.items() if name not in _HOOK_VARIABLES}


def _git(folder: Path, *words: str, env: Mapping[str, str] | None = None) -> str:
    """Run git in a folder and return its output; raise CalledProcessError if git fails."""
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=folder,
            env={**_own_environment(), **(env or {})},
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError:
        raise UsageError("--old and --new need git, which is not in the PATH") from None
    return done.stdout.strip()


def check_out(gate: Gate, side: Side, folder: Path) -> Checkout:
    """Make the worktree of a side and run the set-up command, unless both were done before.

    A side without a revision needs no worktree.

    Args:
        folder: the folder of the gate.

    Raises:
        SideError: git or the set-up command fails.
    """
    version, commit = gate.version(side), gate.commits.get(side)
    env, job = _own_environment() | _forwarding(version.env), gate.job_of(side)
    if commit is None:
        python = _python_of(version.python, gate.cwd, gate.cwd)
        return Checkout(folder=gate.cwd, job=job, python=python, env=env)
    top = _top_of(gate.cwd)
    worktree = folder / "worktrees" / side
    # The folder in the worktree that corresponds to the current folder.
    cwd_in_worktree = worktree / gate.cwd.resolve().relative_to(top)
    # A script may be named relative to its job, so the job must lie in the worktree too.
    if job.resolve().is_relative_to(top):
        job = worktree / job.resolve().relative_to(top)
    # Workers of Ray import raybench itself before they know the folder of the sweep.
    paths = [str(cwd_in_worktree), *filter(None, [env.get("PYTHONPATH", "")])]
    env = env | {"PYTHONPATH": os.pathsep.join(paths)}
    ready_file = folder / f"{side}.ready"
    # The file is created after the set-up command.
    if not (ready_file.exists() and cwd_in_worktree.is_dir()):
        # Start anew, because an interrupt may have left half of a worktree, or of a build.
        _remove_worktree(gate, side, folder)
        try:
            _git(gate.cwd, "worktree", "prune")
            _git(gate.cwd, "worktree", "add", "--detach", str(worktree), commit)
        except subprocess.CalledProcessError as error:
            raise SideError(side, f"git worktree: {last_line(error.stderr)}") from error
        if not cwd_in_worktree.is_dir():
            folder_name = cwd_in_worktree.relative_to(worktree)
            raise SideError(side, f"{version.revision} has no folder {folder_name}")
        if job.is_relative_to(worktree):
            job.parent.mkdir(parents=True, exist_ok=True)
            job.write_text(gate.job_texts[side], encoding="utf-8")
        _set_up(
            gate.settings.setup, side, cwd_in_worktree, env, folder / "logs" / f"setup-{side}.log"
        )
        ready_file.touch()
    python = _python_of(version.python, cwd_in_worktree, gate.cwd)
    return Checkout(folder=cwd_in_worktree, job=job, python=python, env=env)


def _forwarding(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a side, so that a running Ray cluster gives them to its workers.

    Ray and raybench themselves use RAY_ variables and CUDA_VISIBLE_DEVICES.
    """
    names = [
        name for name in variables if not name.startswith("RAY_") and name != "CUDA_VISIBLE_DEVICES"
    ]
    return {**variables, FORWARDED_VARIABLE: ",".join(names)}


def _set_up(command: str, side: Side, folder: Path, env: Mapping[str, str], log: Path) -> None:
    """Run the set-up command in a worktree; its output goes to the log."""
    if not command:
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["sh", "-c", command],
            cwd=folder,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # The command may have started other processes, as `make` does.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if code:
        error = last_line(log.read_text(errors="replace"))
        raise SideError(side, f"--setup ended with exit code {code}: {error}", log)


def _python_of(python: str, folder: Path, cwd: Path) -> str:
    """Return the path of an interpreter; a relative path is tried in both folders."""
    if not python:
        return sys.executable
    if os.sep not in python:
        return shutil.which(python) or python
    for base in (folder, cwd):
        # Do not resolve a link: the target is outside of the virtual environment.
        if (base / python).exists():
            return str(base / python)
    return python


def last_line(text: str) -> str:
    """Return the last line that is not blank, such as the error of a program."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def remove_worktrees(gate: Gate, folder: Path) -> None:
    """Remove the worktrees of a gate."""
    for side in gate.commits:
        _remove_worktree(gate, side, folder)


def _remove_worktree(gate: Gate, side: Side, folder: Path) -> None:
    """Remove the worktree of a side, if there is a worktree, even if git refuses."""
    (folder / f"{side}.ready").unlink(missing_ok=True)
    worktree = folder / "worktrees" / side
    words = ["git", "worktree", "remove", "--force", str(worktree)]
    subprocess.run(words, cwd=gate.cwd, env=_own_environment(), capture_output=True)
    shutil.rmtree(worktree, ignore_errors=True)


def files_from_elsewhere(checkout: Checkout, hashes: Mapping[str, str]) -> list[str]:
    """Return the files of a workload that the sweep imported from outside of its worktree.

    Args:
        hashes: SHA-256 of each file by its name, such as `package/module.py`.
    """
    foreign_files = []
    top = _top_of(checkout.folder)
    for name, imported_sha256 in hashes.items():
        # Find the files of the worktree with this name. If there are none, the sweep has imported a
        # file of an installed package.
        listed = _git(top, "ls-files", "-z", "--", f":(glob)**/{name}")
        files = [top / path for path in listed.split("\0") if path]
        worktree_sha256s = {
            hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()
        }
        # The sweep has imported another version of the file.
        if worktree_sha256s and imported_sha256 not in worktree_sha256s:
            foreign_files.append(name)
    return foreign_files
