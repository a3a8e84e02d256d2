"""A job in Python: the path of its file, or a dict with the same keys."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from raybench.cluster import find_kind
from raybench.errors import UsageError
from raybench.job.loading import job_of_source
from raybench.job.model import Job
from raybench.job.problems import quote
from raybench.job.source import YamlSource, parse_source, read_source
from raybench.report.words.sweep import replaced_by_cpu

JobSource = str | os.PathLike[str] | Mapping[str, Any]

# Stands for the file of a dict in messages.
_NAME = "job"


def read_job(
    job: JobSource,
    settings: Mapping[str, Any] | None = None,
    *,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    address: str = "auto",
) -> tuple[Job, str]:
    """Return the job, checked as `raybench sweep` checks it, and what its section `cpu` replaces.

    Args:
        job: path of a job file, or a dict with its keys; `version` may be missing there.
        settings: values that replace those of the job, by dotted key.
        device, address: as in `raybench.sweep`; they decide whether the section `cpu` applies.

    Returns:
        The job, and a line for the user; "" if the section `cpu` does not apply.

    Raises:
        JobError: the file cannot be read, or the job has problems, one line each.
        ClusterError: the job has no form for CPU workers, and there is no GPU.
        UsageError: a value is of a type that no job can have.
    """
    overrides = override_texts(settings)
    source, replaced = _parse(job, overrides, on_cpu=False), ""
    if source.has_cpu and find_kind(address, device) == "cpu":
        source = _parse(job, overrides, on_cpu=True)
        if source.uses_cpu:
            why = "device='cpu'" if device == "cpu" else "no GPU here"
            replaced = replaced_by_cpu(source.name, source.replaced_keys, why)
    read = job_of_source(source)
    if read.workload.kind.startswith("__main__:"):
        raise UsageError(
            f"workload.kind {read.workload.kind}: workers cannot import __main__; put the class "
            "into a module of its own, as in mine:Attention"
        )
    return read, replaced


def _parse(job: JobSource, overrides: Sequence[str], *, on_cpu: bool) -> YamlSource:
    if isinstance(job, Mapping):
        text = job_text({"version": 1, **job})
        return parse_source(_NAME, text, overrides, {(): _NAME}, on_cpu=on_cpu)
    if isinstance(job, str | os.PathLike):
        return read_source(Path(job), overrides, on_cpu=on_cpu)
    raise UsageError(
        f"job: must be the path of a job file or a dict with its keys, given {quote(job)}"
    )


def override_texts(settings: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the values of `--set` that stand for settings by dotted key."""
    if settings is None:
        return ()
    if not isinstance(settings, Mapping):
        raise UsageError(
            "set: must be a dict of dotted keys, as in {'matrix.world_size': [1, 2]}, given "
            f"{quote(settings)}"
        )
    return tuple(f"{key}={_value_text(key, value)}" for key, value in settings.items())


def job_text(job: Mapping[Any, Any]) -> str:
    """Return a job as YAML, a line for each section."""
    lines = []
    for key, value in job.items():
        name = str(key) if re.fullmatch(r"\w+", str(key)) else json.dumps(str(key))
        lines.append(f"{name}: {_value_text(key, value)}\n")
    return "".join(lines)


def _value_text(key: object, value: object) -> str:
    """Return a value as JSON, which is YAML; a plain word stays a word."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w/-]*", value):
        # Quotes keep words of YAML texts.
        return value if value.lower() not in ("true", "false", "null") else json.dumps(value)
    try:
        return json.dumps(value, ensure_ascii=False, default=_as_plain)
    except (TypeError, ValueError) as error:
        raise UsageError(f"job: {key}: cannot be part of a job: {error}") from None


def _as_plain(value: Any) -> Any:
    """Return a number or array of numpy or torch, a path or a range as JSON can hold it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, range):
        return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"no number, text, list or dict: {quote(value)}")
