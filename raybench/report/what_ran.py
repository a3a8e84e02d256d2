"""What a run measured, in a line for people: the model, its size, how it was trained. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from raybench.analysis.settings import setting, setting_order
from raybench.job.point import setting_text
from raybench.report import formatting
from raybench.report.plain_text import span
from raybench.results.point_row import PointRow
from raybench.workloads.base import builtin_class, parameter_count
from raybench.workloads.replicas import ddp_defaults
from raybench.workloads.training.layout import layout_defaults

_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}
# Said with words of their own, or of no interest where they are as torch has them.
_OWN_WORDS = ("hidden", "layers", "preset", "optimizer", "seq_len", "operation", "size_bytes")
_USUAL = {
    **{name: setting_text(default) for name, default in ddp_defaults().items()},
    **{n: setting_text(usual) for n, usual in layout_defaults().items() if usual is not None},
    "compile": "false",
    "grad_accumulation": "1",
    "activation_checkpointing": "false",
    "dtype": "float32",
    "distributed_sampler": "true",
    "rows": "10000",
    "mode": "train",
    "cast_weights": "false",
    "attention": "auto",
}
_MOST_VALUES = 4


def what_ran(rows: Sequence[PointRow], ranks: str) -> tuple[str, ...]:
    """Parts of the line, the model first; rows of `raybench.analysis.scaling`."""
    return tuple(filter(None, _parts(rows, ranks))) if rows else ()


def _parts(rows: Sequence[PointRow], ranks: str) -> Iterator[str]:
    yield ", ".join(dict.fromkeys(_model(row) for row in rows))
    yield _span("", [_parameters(row) for row in rows], " parameters")
    yield ", ".join(
        _OPTIMIZERS.get(name, str(name))
        # Where nothing is trained, no optimizer is at work.
        for name in _values(
            [row for row in rows if row.params.get("mode") != "inference"], "optimizer"
        )
        if name is not None
    )
    if any(row.throughput is not None for row in rows) or _values(rows, "batch"):
        of = {"weak": " per device", "strong": " over all devices"}
        batches = [f"{int(value):,}" for value in _values(rows, "batch")]
        yield _span("batch ", batches, of.get(str(rows[0].scaling), ""))
    yield _list("", _values(rows, "operation"))
    yield _span("", [formatting.setting("size_bytes", v) for v in _values(rows, "size_bytes")])
    yield _list("", _values(rows, "dtype"))
    # A workload with a `dtype` does not use the precision.
    yield _list("", _values([row for row in rows if "dtype" not in row.params], "precision"))
    yield _list("attention by ", sorted({kernel for row in rows for kernel in kernels_of(row)}))
    counts = [str(int(value)) for value in _values(rows, "world_size")]
    yield f"{_list('', counts)} {ranks.removesuffix('s') if counts == ['1'] else ranks}"
    yield from _others(rows)


def kernels_of(row: PointRow) -> tuple[str, ...]:
    """List the kernels of attention that a point ran; none where none was seen."""
    return row.attention_kernels or ()


def _model(row: PointRow) -> str:
    workload = str(row.workload)
    built_in = builtin_class(workload)
    name = built_in.describe(row.params) if built_in else ""
    return name or workload


def _parameters(row: PointRow) -> str:
    count = parameter_count(str(row.workload), row.params)
    if count is None:
        return ""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"


def _others(rows: Sequence[PointRow]) -> Iterator[str]:
    """List the other parameters, where they are not as everybody has them."""
    for name in dict.fromkeys(name for row in rows for name in row.params):
        values = _values(rows, name)
        is_number = all(setting_order(value)[0] == 0 for value in values)
        if name in _OWN_WORDS or [str(v) for v in values] == [_USUAL.get(name)]:
            continue
        texts = [formatting.setting(name, value) for value in values]
        shown = _span("", texts) if is_number else _list("", texts)
        yield f"{name!s}={shown}"


def _values(rows: Sequence[PointRow], name: str) -> list[Any]:
    found = {setting(row, name) for row in rows}
    return sorted((value for value in found if value is not None), key=setting_order)


def _list(prefix: str, values: Sequence[Any]) -> str:
    texts = [str(value) for value in values]
    more = len(texts) - _MOST_VALUES
    shown = texts if more <= 2 else [*texts[:_MOST_VALUES], f"and {more} more"]
    return prefix + ", ".join(shown) if shown else ""


def _span(prefix: str, texts: Sequence[str], suffix: str = "") -> str:
    """From the first to the last, which are in order."""
    known = list(dict.fromkeys(filter(None, texts)))
    if not known:
        return ""
    return prefix + span(known[0], known[-1]) + suffix
