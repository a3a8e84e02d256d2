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

# Name in messages of a job that is a dict.
_NAME = "job"


def read_job(
    job: JobSource,
    settings: Mapping[str, Any] | None = None,
    *,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    address: str = "auto",
) -> tuple[Job, str]:
    """Read and check a job; apply its section `cpu` if the devices are CPU workers.

    Args:
        job: path of a job file, or a dict with its keys; `version` may be missing there.
        settings: dotted key -> value, in place of the settings of the job.
        device, address: as in `raybench.sweep`; they decide whether the section `cpu` applies.

    Returns:
        The job, and a line that tells the user what the section `cpu` replaced; "" if nothing.

    Raises:
        JobError: the file cannot be read, or the job has problems, one line each.
        ClusterError: the job has no form for CPU workers, and there is no GPU.
        UsageError: a value has a type that no job can have, or the class is in `__main__`.
    """
    overrides = override_texts(settings)
    source = _parse(job, overrides, on_cpu=False)
    cpu_line = ""
    if source.has_cpu and find_kind(address, device) == "cpu":
        source = _parse(job, overrides, on_cpu=True)
        if source.uses_cpu:
            why = "device='cpu'" if device == "cpu" else "no GPU here"
            cpu_line = replaced_by_cpu(source.name, source.replaced_keys, why)
    checked_job = job_of_source(source)
    if checked_job.workload.kind.startswith("__main__:"):
        raise UsageError(
            f"workload.kind {checked_job.workload.kind}: workers cannot import __main__; put the "
            "class into a module of its own, as in mine:Attention"
        )
    return checked_job, cpu_line


def _parse(job: JobSource, overrides: Sequence[str], *, on_cpu: bool) -> YamlSource:
    """Return the source of a job, with its overrides."""
    if isinstance(job, Mapping):
        text = job_text({"version": 1, **job})
        # With an option for the whole job, messages name the option and no line of a file.
        return parse_source(_NAME, text, overrides, {(): _NAME}, on_cpu=on_cpu)
    if isinstance(job, str | os.PathLike):
        return read_source(Path(job), overrides, on_cpu=on_cpu)
    raise UsageError(
        f"job: must be the path of a job file or a dict with its keys, given {quote(job)}"
    )


def override_texts(settings: Mapping[str, Any] | None, option: str = "set") -> tuple[str, ...]:
    """Return settings by dotted key as `--set` takes them: KEY=VALUE.

    Args:
        option: name of the argument, for the message.
    """
    if settings is None:
        return ()
    if not isinstance(settings, Mapping):
        raise UsageError(
            f"{option}: must be a dict of dotted keys, as in {{'matrix.world_size': [1, 2]}}, "
            f"given {quote(settings)}"
        )
    return tuple(f"{key}={_value_text(key, value)}" for key, value in settings.items())


def job_text(job: Mapping[Any, Any]) -> str:
    """Return a job as YAML, with one line per section."""
    lines = []
    for key, value in job.items():
        name = str(key) if re.fullmatch(r"\w+", str(key)) else json.dumps(str(key))
        lines.append(f"{name}: {_value_text(key, value)}\n")
    return "".join(lines)


def _value_text(key: object, value: object) -> str:
    """Return a value as JSON, which is valid YAML; a plain word needs no quotes."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w/-]*", value):
        # Without quotes, YAML would read these words as a bool or as null.
        needs_quotes = value.lower() in ("true", "false", "null")
        return json.dumps(value) if needs_quotes else value
    try:
        return json.dumps(value, ensure_ascii=False, default=_as_plain)
    except (TypeError, ValueError) as error:
        raise UsageError(f"job: {key}: cannot be part of a job: {error}") from None


def _as_plain(value: Any) -> Any:
    """Convert a number or array of numpy or torch, a path or a range to a type of JSON."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, range):
        return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"no number, text, list or dict: {quote(value)}")
