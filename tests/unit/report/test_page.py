import base64
import hashlib
import re
from dataclasses import asdict
from html.parser import HTMLParser

import numpy as np
import pandas as pd
from builders import (
    START,
    make_device,
    make_failed,
    make_point,
    make_record,
    make_run,
    make_steady,
    make_summary,
    write_run,
)
from commands import EXAMPLES

from raybench.analysis.answer import decide
from raybench.analysis.run_data import load_run_data
from raybench.report.charts import ChartData, RankTimes
from raybench.report.page import format_run_page

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>&lt;\u202e\x1b</svg></style>'


class Elements(HTMLParser):
    """The names and attributes of all elements, and the texts of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, str] = {}
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.raw[self._inside] = data


def page_data(summary):
    known = {"sm_clock_mhz": 1980, "power_w": 500.0, "temperature_c": 50.0}
    at = {"node_id": "node-a", "index": 0, "time": pd.date_range(START, periods=50, freq="s")}
    wide = [row for row in summary.rows if row.world_size > 1]
    times = pd.DataFrame(8 + 0.01 * np.arange(40).reshape(2, 20))
    return ChartData(
        answer=decide(summary),
        devices=pd.DataFrame([asdict(make_device(rank)) for rank in range(4)]),
        telemetry=pd.DataFrame({**at, **known, "gpu_utilization_pct": np.nan}),
        rank_times=[RankTimes(row=row, times_ms=times, median_ms=8.195) for row in wide],
    )


def test_page_escapes_names_and_is_self_contained():
    records = [
        make_record(
            make_point(workload=HOSTILE, world_size=size, params={HOSTILE: value}),
            devices=(make_device(name=HOSTILE),),
        )
        for size in (1, 2)
        for value in (HOSTILE, "b")
    ]
    failed = make_failed(make_point(workload=HOSTILE), error_message=HOSTILE)
    texts = dict.fromkeys(("job_name", "job_text", "cluster"), HOSTILE)
    pairs = {name: {HOSTILE: HOSTILE} for name in ("environment", "tags", "versions")}
    run = make_run("run-a", argv=(HOSTILE,), **texts, **pairs)
    page = format_run_page(page_data(make_summary([*records, failed], run)))
    assert not {"\u202e", "\x1b"} & set(page)
    assert "&lt;script&gt;alert(1)" in page
    assert "url(" not in page
    assert "eval(" not in page
    elements = Elements(page)
    tags = [tag for tag, _ in elements.found]
    assert (tags.count("script"), tags.count("style")) == (1, 1)
    assert not {"link", "img", "iframe", "base", "object", "form"} & {*tags}
    for _, attributes in elements.found:
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
        links = [attributes.get(name) or "#" for name in ("href", "src", "xlink:href")]
        assert all(link.startswith("#") for link in links)
    [policy] = [a["content"] for _, a in elements.found if "Content-Security-Policy" in a.values()]
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(elements.raw[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def first_screen(summary):
    page = format_run_page(page_data(summary))
    body = page.partition("<header>")[2].partition("<nav>")[0]
    body = re.sub(r"<svg.*?</svg>", "", body, flags=re.DOTALL)
    return [" ".join(text.split()) for text in re.split(r"<[^>]+>", body) if text.strip()]


def test_first_screen_has_question_answer_and_doubts():
    texts = first_screen(load_run_data(EXAMPLES, "ddp_scaling-20261122-142621-6209"))
    wanted = (
        "How does a DDP training step scale from 1 to 2 to 4 devices",
        "4 x NVIDIA H200, 3 rounds",
        "Speed-up from 1 GPU to 4 GPUs",
        "batch 1,024",
        "3.47",
        "72 to 78 % of the lost time",
        "Doubts",
        "Main caveat: 2 GPUs, fp16, batch 256:",
        "Speed-up by number of GPUs",
    )
    found = [next(n for n, text in enumerate(texts) if text.startswith(one)) for one in wanted]
    assert found == sorted(found)


def test_a_number_stays_with_its_percent_sign():
    page = format_run_page(page_data(load_run_data(EXAMPLES, "ddp_scaling-20261122-142621-6209")))
    assert "72 to 78\u00a0% of the lost time" in page


def test_a_single_value_is_a_sentence_without_doubts():
    rounds = [
        make_record(make_point(), step_ms=8.0, round=number, attempt=number) for number in (1, 2, 3)
    ]
    texts = first_screen(make_summary(rounds))
    assert "The step takes 8.003 ms." in " ".join(texts)
    assert "No doubts." in texts
    assert not [text for text in texts if text == "Doubts"]


def test_names_may_be_folded_and_hold_no_markup():
    records = [
        make_record(
            make_point(workload="own", batch_size=size, params={"slow_ratio_of_all": value})
        )
        for size in (1, 2)
        for value in ("<b>", "c")
    ]
    page = format_run_page(page_data(make_summary(records)))
    assert "slow_<wbr>ratio_<wbr>of_<wbr>all=" in page
    assert "<b>" not in page.partition("<nav>")[0].replace("<li><b>", "")


def test_charts_are_stacked_where_they_fit_a_screen():
    def layout(run):
        page = format_run_page(page_data(load_run_data(EXAMPLES, run)))
        return re.findall(r'class="beside (\w+)"', page)

    jobs = ("uneven_gpus", "raw_latency", "gemm")
    assert [layout(job) for job in jobs] == [["single"], ["stacked"], ["broad"]]


def test_steps_of_no_duration_have_a_page(tmp_path, command):
    write_run(tmp_path, "run-a", [make_steady(2, 0.0)])
    done = command("report", "run-a", "--format", "html", "-o", tmp_path / "page.html")
    assert (done.code, (tmp_path / "page.html").exists()) == (0, True), done.err


def test_run_without_ok_points_has_a_page():
    assert "out of memory" in format_run_page(page_data(make_summary([make_failed()])))
