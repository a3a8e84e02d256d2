"""Metrics for node_exporter, read by the rules of the text format."""

import os
import re

from builders import make_finding, make_node_report, make_subject

from raybench.health.node_metrics import metrics_text, write_metrics
from raybench.records.devices import Verdict
from raybench.records.node_report import DrainKind, DrainReason, NodeState

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{((?:{LABEL})(?:,{LABEL})*)\}})? (\S+)")


def parse(text):
    """Return (name, labels) -> value; fails where the format is violated."""
    assert text.endswith("\n")
    samples, types, helps, groups = {}, {}, set(), []
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in helps
            helps.add(name)
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types
            assert kind in ("gauge", "counter", "untyped")
            types[name] = kind
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        name = match[1]
        # The lines of a metric are one group, after its TYPE.
        assert name in types
        if groups[-1:] != [name]:
            assert name not in groups
            groups.append(name)
        pairs = re.findall(LABEL, match[2] or "")
        assert len(dict(pairs)) == len(pairs)
        labels = {
            label: re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), value)
            for label, value in pairs
        }
        key = name, tuple(sorted(labels.items()))
        assert key not in samples, "two samples with the same labels"
        samples[key] = float(match[7] if match.lastindex == 7 else line.rsplit(" ", 1)[1])
    assert set(groups) == set(types) == helps
    return samples


def of(samples, name, **labels):
    """The values of the samples with these labels among theirs."""
    return [
        value
        for (found, pairs), value in samples.items()
        if found == f"raybench_health_{name}" and labels.items() <= dict(pairs).items()
    ]


STRANGE = 'alpha "GPU" \\ 1\nrow'


def test_metrics_follow_the_text_format():
    report = make_node_report(
        state=NodeState.DRAIN,
        devices=("alpha GPU 0", STRANGE),
        drain=(DrainReason(kind=DrainKind.FAILED_TWICE, device=STRANGE, test="gemm"),) * 2,
        findings=(
            make_finding(value=750.25),
            # A slow device has a finding of its own, and one as the cause of slow pairs.
            *(make_finding(make_subject(1, name=STRANGE), verdict=Verdict.BAD, value=3e-7),) * 2,
            make_finding(value=None, test="nothing"),
            make_finding(value=float("nan"), test="nan"),
        ),
    )
    samples = parse(metrics_text(report))
    assert of(samples, "state", state="drain") == [1]
    assert of(samples, "state", state="healthy") == [0]
    assert of(samples, "duration_seconds") == [60]
    assert of(samples, "timestamp_seconds") == [1796032800]
    assert of(samples, "device_verdict", device=STRANGE, verdict="bad") == [1]
    assert of(samples, "device_verdict", device="alpha GPU 0", verdict="healthy") == [1]
    assert of(samples, "device_verdict", device="alpha GPU 0", verdict="bad") == [0]
    assert of(samples, "drain_reason", device=STRANGE) == [1]
    assert of(samples, "value", subject=STRANGE, unit="TFLOP/s") == [3e-7]
    assert of(samples, "value", subject="alpha GPU 0") == [750.25]


def test_untested_node_without_devices_has_metrics():
    report = make_node_report(state=NodeState.UNTESTED, devices=(), findings=())
    samples = parse(metrics_text(report))
    assert of(samples, "state", state="untested") == [1]
    assert of(samples, "device_verdict") == []


def test_textfile_is_replaced_and_readable(tmp_path):
    path = tmp_path / "raybench.prom"
    path.write_text("old")
    before = os.umask(0o077)
    try:
        write_metrics(path, make_node_report())
    finally:
        os.umask(before)
    parse(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o644
    # node_exporter reads each file that ends in .prom.
    assert [one.name for one in tmp_path.iterdir()] == ["raybench.prom"]
