"""The charts of a run and of a history: what each shows, and what it leaves out."""

import re
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pandas as pd
import pytest
from builders import (
    START,
    make_collective,
    make_failed,
    make_point,
    make_record,
    make_row,
    make_run,
    make_summary,
    make_sweep,
)
from commands import EXAMPLES

from raybench.analysis.answer import decide
from raybench.analysis.compare import Change, FactKind, history
from raybench.analysis.rounds import rank_by_iteration
from raybench.analysis.run_data import load_run_data
from raybench.records.doubts import Doubt, DoubtKind
from raybench.report.charts import (
    ChartData,
    RankTimes,
    draw_main_figure,
    main_figure,
    other_figures,
    why_no_figure,
)
from raybench.report.charts.bars import operations_figure, parts_figure
from raybench.report.charts.devices import telemetry_figure
from raybench.report.charts.grammar import Bar, BarLayout, axis, bar_panels
from raybench.report.charts.lines import memory_bandwidth_figure
from raybench.report.documents import format_document
from raybench.report.history import History, history_figure
from raybench.report.words.compare import before_and_now

# Title of the first picture of the newest run of a job.
ANSWERS = {
    "collectives": "Bus bandwidth by message size",
    "dit_sequence_parallel": "Step time, the smallest first",
    "gemm": "TFLOP/s compared with the datasheet",
    "largest_batch": "Memory by batch size",
    "memory_bandwidth": "Memory bandwidth by array size",
    "memory_of_a_step": "Memory, the smallest first",
    "mixed_precision": "Speed-up against fp32",
    "uneven_gpus": "Rows/s, the largest first",
}


def data_of(records, **run):
    return ChartData(answer=decide(make_summary(records, make_run("run-a", **run))))


def first(records, **run):
    return main_figure(data_of(records, **run))


def marks(figure, field="tip"):
    """Return the marks of all charts of a figure that have a field."""
    layers = [layer for panel in figure.panels for layer in panel.layers]
    return [mark for layer in layers for mark in layer["data"]["values"] if field in mark]


def named(data, anchor):
    figures = [main_figure(data), *other_figures(data, None)]
    return next(one for one in figures if one is not None and one.anchor == anchor)


@pytest.mark.parametrize("job", ANSWERS)
def test_first_picture_answers_question_of_job(job):
    summary = load_run_data(EXAMPLES, job)
    data = ChartData(answer=decide(summary), devices=summary.devices)
    svg = (draw_main_figure(data, "svg") or b"").decode()
    assert ANSWERS[job] in svg
    assert min(float(size) for size in re.findall(r'font-size="([\d.]+)(?:px)?"', svg)) >= 12
    # Only browsers know variables: each colour is the light one, and has a rule for the dark.
    assert "var(" not in svg
    [rules] = re.findall(r"<style>@media \(prefers-color-scheme: dark\) {(.*?)}</style>", svg)
    drawn = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6})"', svg.partition("</style>")[2]))
    assert drawn == set(re.findall(r'\[fill="(#[0-9a-f]{6})"\]', rules))


def test_slow_devices_have_map_of_best_way():
    found = load_run_data(EXAMPLES, "uneven_gpus-20261123-000526-0147")
    other = [replace(row, point_id=f"{row.point_id}b", slow_by="sms") for row in found.points]
    figure = main_figure(ChartData(answer=decide(replace(found, points=[*found.points, *other]))))
    assert [one.title.partition("=")[2] for one in figure.panels] == ["compute", "sms", ""]
    assert "by_speed +47%" in {mark["text"] for mark in marks(figure, "text")}


def names_of_legend(panel):
    return next(
        layer["encoding"]["color"] for layer in panel.layers if "color" in layer["encoding"]
    )


def test_legend_has_only_lines_of_its_panel():
    found = load_run_data(EXAMPLES, "collectives")
    two, four = main_figure(ChartData(answer=decide(found))).panels
    few, all_ = (names_of_legend(panel)["scale"] for panel in (two, four))
    assert few["domain"] == ["all_reduce", "sendrecv"]
    assert len(all_["domain"]) == 6
    colors = dict(zip(all_["domain"], all_["range"], strict=True))
    assert few["range"] == [colors[name] for name in few["domain"]]


@pytest.mark.parametrize(
    ("links", "labels"),
    [("NVLink x18, 1:PHB", {"NVLink, 450 GB/s each way"}), ("no NVLink, 1:PHB", set())],
)
def test_bus_bandwidths_have_the_peak_of_nvlink(links, labels):
    found = load_run_data(EXAMPLES, "collectives")
    found = replace(found, devices=found.devices.assign(topology=links))
    figure = main_figure(ChartData(answer=decide(found)))
    assert {mark["text"] for mark in marks(figure, "level")} == labels


def test_ranking_panels_share_scale_unless_bars_vanish():
    def domains(slow_ms):
        records = [
            make_record(make_point(batch_size=batch, params={"way": way}), step_ms=ms * factor)
            for batch, factor in ((1, 1.0), (2, slow_ms))
            for way, ms in (("a", 8.0), ("b", 9.0))
        ]
        text = "answer: {metric: step_ms_p50, over: [way], best: min}\nworkload: {kind: mlp}\n"
        panels = first(records, job_text=text).panels
        ends = [panel.layers[0]["encoding"]["x"]["scale"]["domain"] for panel in panels]
        return [(low, round(high)) for low, high in ends]

    assert domains(2.0) == [(0, 18), (0, 18)]
    assert domains(5.0) == [(0, 9), (0, 45)]


def test_intervals_over_rounds_are_drawn():
    records = [
        make_record(make_point(world_size=size), step_ms=ms + number, round=number, attempt=number)
        for number in (1, 2, 3)
        for size, ms in ((1, 8.0), (2, 9.0), (4, 9.5))
    ]
    assert {mark["x"] for mark in marks(first(records), "high") if mark["high"]} == {2, 4}


def test_ideal_is_ratio_of_ranks_to_baseline():
    records = [make_record(make_point(world_size=size)) for size in (2, 4, 8)]
    figure = first(records, baseline={"world_size": "2"})
    ideal = figure.panels[0].layers[0]["data"]["values"]
    assert [(value["x"], value["y"]) for value in ideal] == [(2, 1.0), (4, 2.0), (8, 4.0)]
    assert "relative to the same settings on 2 GPUs" in figure.note


def test_run_without_measurements_says_why_no_picture():
    failed = data_of([make_failed()])
    assert draw_main_figure(failed, "svg") is None
    assert why_no_figure(failed.answer.data) == "no point of this run was measured (out of memory)"
    assert why_no_figure(make_summary([])) == "no point of this run has been finished yet"


def test_texts_of_results_are_escaped_in_svg():
    data = data_of(make_sweep(), job_name="<b>&job var(--x)")
    svg = draw_main_figure(data, "svg") or b""
    assert b"&lt;b&gt;&amp;job var(--x)" in svg
    assert b"<b>" not in svg
    assert (draw_main_figure(data, "png") or b"").startswith(b"\x89PNG\r\n")


def test_layouts_are_sorted_bars_with_short_names():
    records = [
        make_record(
            make_point(world_size=2, params={**layout, "activation_checkpointing": kind, **on}),
            step_ms=8.0 + layout["tp"] - (kind == "none"),
        )
        for layout in ({"dp_shard": 2, "tp": 1}, {"dp_shard": 1, "tp": 2})
        for kind, on in (("none", {"compile": 0}), ("none", {"compile": 1}), ("full", {}))
    ]
    svg = (draw_main_figure(data_of(records), "svg") or b"").decode()
    names = [text for text in re.findall(">([^<>]+)</text>", svg) if "P 2" in text]
    more = ("", ", compiled", ", full checkpointing")
    assert names == [f"{way} 2{kind}" for way in ("FSDP", "TP") for kind in more]


def test_size_out_of_memory_is_cross_on_axis():
    records = [make_record(make_point(batch_size=batch)) for batch in (8, 16)]
    records.append(make_failed(make_point(batch_size=32)))
    figure = named(data_of(records, baseline={"batch_size": 8}), "throughput")
    assert [(m["x"], m["y"]) for m in marks(figure) if "out of memory" in m["tip"]] == [(32, None)]
    assert "Crosses on the axis are points that ran out of memory." in figure.note


def test_series_that_is_not_drawn_is_explained():
    sizes = ((1, 64), (2, 64), (2, 128))
    records = [make_record(make_point(world_size=size, batch_size=b)) for size, b in sizes]
    [panel] = first([*records, make_failed(make_point(world_size=4, batch_size=64))]).panels
    assert panel.missing == (
        "Not drawn: batch 64, 4 GPUs: out of memory; batch 128, 2 GPUs: "
        "no point with world_size=1 and the same other settings is ok."
    )


def test_note_explains_panel_without_marks():
    made = [make_collective(f"op{n}", size, 1.0, 2) for n in range(5) for size in (8, 16)]
    failed = [make_failed(replace(one.point, world_size=4)) for one in made]
    data = data_of([*made[1:], make_failed(made[0].point), *failed])
    assert main_figure(data).note.endswith(" Not drawn: 4 GPUs: out of memory.")
    assert b"Not drawn: op0, 8 B: out of memory." in draw_main_figure(data, "svg")


def test_slow_rank_is_part_and_negatives_are_omitted():
    data = data_of(make_sweep())
    changed = {
        **{"slowest_rank": 1, "straggler_ms": 2.0, "straggler_error_ms": 0.1},
        **{"straggler_device_ms": 1.5, "compute_ms": 5.0, "host_gap_ms": 1.0},
        **{"comm_exposed_ms": -0.2},
    }
    data.rows[:] = [replace(row, **changed) for row in data.measured][:1]
    figure = parts_figure(data)
    bars = [mark["tip"].splitlines()[-1].partition(",")[0] for mark in marks(figure)]
    told = ["compute: 3.500 ms", "host gap: 0.5000 ms", "slow rank: 2.000 ms"]
    assert bars == told
    exposed = figure.table.titles.index("exposed communication ms")
    assert "-0.2" in figure.table.texts[0][exposed]


def test_note_names_parts_that_exceed_their_step():
    data = data_of(make_sweep())
    data.rows[:] = [replace(row, compute_ms=4.0) for row in data.rows]
    exceeds = Doubt(kind=DoubtKind.NO_BREAKDOWN, value=1.2, limit=1.1)
    data.rows[0] = replace(data.rows[0], compute_ms=None, why_no_breakdown=exceeds)
    figure = parts_figure(data)
    assert "Not drawn: 1 point whose parts add up to more than 110 % of the step." in figure.note
    assert len({mark["tip"] for mark in marks(figure)}) == len(data.measured) - 1
    assert data.rows[0].point_id not in [line[0] for line in figure.table.texts]


def test_products_without_numeric_dimensions_are_sorted_by_speed():
    data = ChartData(answer=decide(load_run_data(EXAMPLES, "gemm")))
    data.rows[:] = [replace(row, params={**row.params, "m": "all"}) for row in data.rows]
    assert operations_figure(data).note.startswith("TFLOP/s of one device.")


def test_memory_faster_than_datasheet_is_called_cache():
    data = data_of([make_collective("copy", size, 0.01 + size / 1e9, 1) for size in (2**20, 2**30)])
    data.rows[:] = [
        replace(row, busbw_gb_s=None, memory_gb_s=rate, device_name="NVIDIA H200")
        for row, rate in zip(data.rows, (6000.0, 4000.0), strict=True)
    ]
    figure = memory_bandwidth_figure(data)
    assert "Arrays of 1 MiB fit into the device's cache" in figure.note
    levels = {(mark["level"], mark["text"]) for mark in marks(figure, "level")}
    assert levels == {(4800.0, "datasheet, 4,800 GB/s")}


def test_slow_step_stays_visible_in_wide_columns():
    places = {"rank": np.repeat([0, 1], 1000), "iteration": np.tile(np.arange(1000), 2)}
    found = pd.DataFrame({"repeat": 0, **places, "is_warmup": False, "step_ns": 8_000_000})
    found.loc[(found["rank"] == 1) & (found["iteration"] == 777), "step_ns"] = 16_000_000
    found.loc[found["iteration"] % 50 == 9, "step_ns"] = 10_000_000
    by_rank, median_ms = rank_by_iteration(found, 20)
    assert by_rank.shape == (2, 20)
    data = data_of(make_sweep())
    mapped = RankTimes(row=data.rows[0], times_ms=by_rank, median_ms=median_ms)
    cells = marks(named(replace(data, rank_times=[mapped]), "ranks"))
    assert {mark["excess"] for mark in cells} == {0.25, 1.0}  # over the median of all iterations


def telemetry(times):
    known = {"sm_clock_mhz": 1980, "power_w": 500.0, "temperature_c": 50.0}
    never = {"gpu_utilization_pct": np.nan}
    return pd.DataFrame({"node_id": "node-a", "index": 0, "time": times, **known, **never})


@pytest.mark.parametrize("is_doubt", [False, True])
def test_telemetry_shades_only_throttled_points_orange(is_doubt):
    sampled = telemetry(pd.date_range(START, periods=50, freq="s"))
    data = ChartData(answer=decide(make_summary(make_sweep())), telemetry=sampled)
    doubts = (Doubt(kind=DoubtKind.THROTTLED, value=0.5, subject="heat"),) if is_doubt else ()
    data.rows[:] = [
        replace(row, started_at=START, duration_s=9.0, throttled=True, doubts=doubts)
        for row in data.rows
    ]
    figure = telemetry_figure(data)
    assert ("Orange" in figure.note) == is_doubt
    assert {mark["fill"] == "var(--held)" for mark in marks(figure, "fill")} == {is_doubt}


def test_telemetry_leaves_out_pauses_of_run():
    times = pd.date_range(START, periods=50, freq="s")
    sampled = telemetry([*times, *(times + pd.Timedelta(hours=2))])
    figure = telemetry_figure(replace(data_of(make_sweep(), started_at=START), telemetry=sampled))
    assert "run, without 1 h 59 min 11 s in which nothing was sampled." in figure.note
    assert max(mark["x"] for mark in marks(figure, "x")) < 100


def test_bar_panels_share_scale_with_room_for_texts():
    mark = {"x": 8.0, "low": 7.0, "high": 10.0, "text": "8.000 ms", "tip": "", "line": ""}
    bars = [Bar(panel="", name=f"bar {number}", marks=[mark]) for number in range(15)]
    panels = bar_panels(bars, BarLayout(x=axis("ms")))
    assert [len(panel.layers[0]["data"]["values"]) for panel in panels] == [7, 8]
    [(_, end)] = {(*panel.layers[0]["encoding"]["x"]["scale"]["domain"],) for panel in panels}
    assert end > 11


def test_note_says_how_much_is_drawn():
    records = [
        make_record(make_point(world_size=size, params={"hidden": hidden}, batch_size=batch))
        for size in (1, 2)
        for hidden in range(20)
        for batch in range(1, 10)
    ]
    figure = first(records)
    assert len(figure.panels) == 8
    assert "The first 8 of 20 charts and 7 of 9 lines are drawn; the table of" in figure.note


def runs(points, node_counts=(1,)):
    """Step times; the last point is slower from the fourth run on. node_counts: of runs in turn."""
    rows = [
        make_row(
            run_id=f"run{run}",
            point_id=f"p{point}",
            started_at=START + timedelta(days=run),
            params={"hidden": str(point)},
            **{"workload": "mlp", "scaling": "weak", "precision": "bf16", "batch_size": 1},
            **{"device_type": "cuda", "device_name": "H200"},
            node_count=node_counts[run % len(node_counts)],
            step_ms_p50=8.0 * (1.1 if point == points - 1 and run >= 3 else 1.0),
            **{"step_ms_ci_low": 7.99, "step_ms_ci_high": 8.01},
        )
        for run in range(6)
        for point in range(points)
    ]
    return history(rows)


def test_history_panels_begin_with_lasting_changes():
    titles = [panel.title for panel in history_figure(runs(3)).panels]
    assert titles == ["hidden=2", "hidden=0", "hidden=1"]
    assert "5 more points are not drawn" in history_figure(runs(45)).note


def test_weak_and_strong_scaling_share_panel():
    rows = [replace(row, scaling=("weak", "strong")[n % 2]) for n, row in enumerate(runs(1))]
    assert [panel.title for panel in history_figure(rows).panels] == ["scaling=strong"]


def test_node_counts_have_separate_histories():
    rows = runs(1, node_counts=(1, 2))
    assert [panel.title for panel in history_figure(rows).panels] == ["p0, 1 node", "p0, 2 nodes"]
    told = format_document(History(rows=rows, causes={}), "md")
    assert re.findall(r"\| p0 \| (\d)", told) == ["1", "2"]


@pytest.mark.parametrize(
    ("base", "new"),
    [
        ("a" * 40, "a" * 40 + "+changes"),
        ("GPU-4e6e0602-4757-def4", "GPU-4e6e0602-4757-abcd"),
        ("x" * 100 + "1" + "y" * 50, "x" * 100 + "2" + "y" * 50),
        ("-O1  -g", "-O1 -g"),
    ],
)
def test_shortened_values_show_their_difference(base, new):
    change = Change(kind=FactKind.VARIABLE, name="A", base=base, new=new)
    before, now = before_and_now(change, 20).split(" -> ")
    assert before != now
    assert max(len(before), len(now)) <= 20
    driver = Change(kind=FactKind.DEVICE, name="driver_version", base="580.1", new="590.2")
    assert before_and_now(driver, 20) == "580.1 -> 590.2"
