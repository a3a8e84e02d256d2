"""The page in a real browser: `make browser`, which needs Chromium on this machine.

RAYBENCH_CHROMIUM names its program where it is not on the PATH under a usual name.
"""

import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "results" / "examples"
# The newest run of each job by the name of the job; a health check has a page of another kind.
NEWEST = {path.name.rsplit("-", 3)[0]: path.name for path in sorted(EXAMPLES.glob("points/*-*"))}
COMPARED = ("ddp_scaling-20261121-132844-4b9a", NEWEST["ddp_scaling"])
OTHERS = {"health": ["report", NEWEST.pop("health")], "compare": ["compare", *COMPARED]}
PAGES = {job: ["report", run] for job, run in NEWEST.items()}
NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDE, PHONE, HUGE = (1280, 800), (390, 844), (2200, 1200)


@pytest.fixture(scope="session")
def browser():
    program = os.environ.get("RAYBENCH_CHROMIUM") or next(
        filter(None, map(shutil.which, NAMES)), ""
    )
    assert program, "no Chromium: install one, or set RAYBENCH_CHROMIUM to its program"
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not start for root, as in containers.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = playwright.chromium.launch(executable_path=program, args=arguments)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Make the page of a name in PAGES or OTHERS by its command, once; return its path."""
    paths = {}

    def make(name: str) -> Path:
        if name not in paths:
            paths[name] = tmp_path_factory.mktemp("pages") / f"{name}.html"
            words = [*(PAGES | OTHERS)[name], "--format", "html", "-o", str(paths[name])]
            command = [sys.executable, "-m", "raybench", *words, "--results", EXAMPLES]
            subprocess.run(command, check=True)
        return paths[name]

    return make


@pytest.fixture(params=PAGES)
def page_path(request, made):
    """The page of a committed run."""
    return made(request.param)


@pytest.fixture(params=[*PAGES, *OTHERS])
def any_path(request, made):
    """A page of any kind."""
    return made(request.param)


@pytest.fixture
def outside():
    """The address of a server, and the paths that it was asked for."""
    reached: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reached.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", reached
        server.shutdown()
        thread.join()


class Opened:
    """A page, and what the browser said and asked for meanwhile."""

    def __init__(self, browser: Browser, path: Path, size: tuple[int, int], theme: str) -> None:
        width, height = size
        self.context: BrowserContext = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=theme,  # type: ignore[arg-type]
        )
        self.page: Page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def color(self, selector: str, name: str) -> str:
        script = "([s, n]) => getComputedStyle(document.querySelector(s))[n]"
        return str(self.page.evaluate(script, [selector, name]))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE, HUGE], ids=["wide", "phone", "huge"])
def test_it_opens_without_errors_requests_or_sideways_scrolling(browser, any_path, size, theme):
    opened = Opened(browser, any_path, size, theme)
    opened.page.screenshot(full_page=True)
    assert opened.said == []
    assert opened.asked == [any_path.as_uri()]
    assert opened.page.evaluate("document.documentElement.scrollWidth") == size[0]
    charts = opened.page.locator("svg.chart:visible")
    assert charts.count() > 0
    for place in range(charts.count()):
        box = charts.nth(place).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size[0]
        assert box["height"] > 50
    opened.context.close()


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_first_screen_holds_the_whole_answer(browser, page_path, size):
    opened = Opened(browser, page_path, size, "light")
    for selector in (".question", ".facts", ".trained", ".answer"):
        box = opened.page.locator(selector).bounding_box()
        assert box is not None, selector
        assert box["y"] + box["height"] <= size[1], selector
    for table in opened.page.locator(".answer .wide").all():
        assert table.evaluate("one => one.scrollWidth <= one.clientWidth")
    opened.context.close()


def test_a_wide_screen_has_charts_beside_the_answer(browser, page_path):
    opened = Opened(browser, page_path, WIDE, "light")
    chart = opened.page.locator("#result svg.chart:visible").first.bounding_box()
    shown = min(chart["y"] + chart["height"], WIDE[1]) - chart["y"]
    assert shown >= min(chart["height"], 400)
    answer = opened.page.locator(".answer").bounding_box()
    assert answer["x"] + answer["width"] <= chart["x"]
    caveats = opened.page.locator(".caveats").bounding_box()
    assert answer["y"] + answer["height"] <= caveats["y"] < WIDE[1]
    opened.context.close()


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_chart_labels_are_large_uncut_and_not_overlapping(browser, any_path, size):
    opened = Opened(browser, any_path, size, "light")
    found = opened.page.locator("svg.chart:visible").evaluate_all(
        """charts => charts.flatMap(chart => {
          const inside = chart.getBoundingClientRect();
          const scale = inside.width / chart.viewBox.baseVal.width;
          const labels = [...chart.querySelectorAll("text")].map(text => ({
            text: text.textContent,
            size: parseFloat(getComputedStyle(text).fontSize) * scale,
            box: text.getBoundingClientRect(),
            hidden: text.getAttribute("opacity") === "0" || !text.textContent.trim(),
          })).filter(one => !one.hidden);
          const faults = [];
          for (const [place, {text, size, box: a}] of labels.entries()) {
            if (size < 12) faults.push(["small", text]);
            if (a.left < inside.left - 4 || a.right > inside.right + 4) faults.push(["cut", text]);
            for (const {text: other, box: b} of labels.slice(place + 1)) {
              const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
              const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
              if (wide > 2 && high > 3) faults.push(["overlap", text, other]);
            }
          }
          return faults;
        })"""
    )
    assert found == []
    opened.context.close()


def column(page, title):
    """The visible cells under a head of the table of all points."""
    heads = page.locator("#all th").all_text_contents()
    cells = page.locator(f"#all tbody tr:visible td:nth-child({heads.index(title) + 1})")
    return cells.all_text_contents()


def milliseconds(text):
    number, unit = text.replace(",", "").split()
    return float(number) * {"µs": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def test_a_column_head_sorts_points_both_ways(browser, page_path):
    opened = Opened(browser, page_path, WIDE, "light")
    head = opened.page.locator("#all th", has_text="step").first
    for wanted, order in (("ascending", 1), ("descending", -1)):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == wanted
        steps = [text for text in column(opened.page, "step") if text[0].isdigit()]
        times = [order * milliseconds(text) for text in steps]
        assert times == sorted(times)
        # A point without a time is last.
        assert column(opened.page, "step")[: len(steps)] == steps or order == -1
    assert opened.said == []
    opened.context.close()


def test_points_are_filtered_by_words_and_settings(browser, page_path):
    opened = Opened(browser, page_path, WIDE, "light")
    page = opened.page
    points = column(page, "point")
    page.fill("#filter input", points[-1][:8])
    assert column(page, "point") == [points[-1]]
    assert page.locator("#filter output").text_content() == f"1 of {len(points)} points"
    page.fill("#filter input", "")
    assert column(page, "point") == points
    label = page.locator("#filter label:has(select)").first
    title = (label.text_content() or "").split()[0]
    value = column(page, title)[-1]
    label.locator("select").select_option(value)
    assert set(column(page, title)) == {value}
    assert 0 < len(column(page, "point")) < len(points)
    assert opened.said == []
    opened.context.close()


def test_a_print_has_every_table_and_no_controls(browser, page_path):
    opened = Opened(browser, page_path, WIDE, "dark")
    page = opened.page
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    for table in page.locator("table").all():
        assert table.is_visible()
    assert not page.locator("nav").is_visible()
    assert not page.locator("#filter").is_visible()
    assert not page.locator("#theme").is_visible()
    assert opened.color("body", "colorScheme") == "light"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0
    opened.context.close()


def test_charts_follow_the_theme_of_reader_and_button(browser, page_path):
    light, dark = (Opened(browser, page_path, WIDE, theme) for theme in ("light", "dark"))
    assert light.color("body", "backgroundColor") == "rgb(255, 255, 255)"
    assert dark.color("body", "backgroundColor") == "rgb(20, 23, 28)"
    of_text = "svg.chart text"
    assert light.color(of_text, "fill") != dark.color(of_text, "fill")
    wanted = dark.color(of_text, "fill")
    light.page.click("#theme")
    assert light.color("body", "backgroundColor") == "rgb(20, 23, 28)"
    assert light.color(of_text, "fill") == wanted
    light.page.click("#theme")
    assert light.color("body", "backgroundColor") == "rgb(255, 255, 255)"
    for opened in (light, dark):
        assert opened.said == []
        opened.context.close()


def test_hovering_over_a_mark_shows_its_tip(browser, any_path):
    opened = Opened(browser, any_path, WIDE, "light")
    tip = opened.page.locator("#tip")
    assert not tip.is_visible()
    for section in opened.page.locator("section:has(svg.chart)").all():
        marks = section.locator("svg.chart:visible [aria-label]")
        mark = marks.last
        mark.evaluate("mark => mark.scrollIntoView({block: 'center'})")
        # A tip goes when the page scrolls, which is told with the next frame.
        opened.page.evaluate("() => new Promise(done => setTimeout(done, 100))")
        box = mark.bounding_box()
        opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        assert tip.is_visible()
        assert tip.text_content() in marks.evaluate_all(
            "marks => marks.map(mark => mark.getAttribute('aria-label'))"
        )
        assert len((tip.text_content() or "").splitlines()) > 1
    opened.page.keyboard.press("Escape")
    assert not tip.is_visible()
    assert opened.said == []
    opened.context.close()


def test_the_page_works_without_scripts(browser, page_path):
    context = browser.new_context(java_script_enabled=False, color_scheme="dark")
    page = context.new_page()
    page.goto(page_path.as_uri())
    assert page.locator("svg.chart:visible").count() > 0
    assert page.locator("#all").is_visible()
    assert not page.locator("#filter").is_visible()
    assert not page.locator("#theme").is_visible()
    assert not page.locator("#tip").is_visible()
    context.close()


def test_an_injected_script_does_not_run(browser, page_path, tmp_path, outside):
    harmed = tmp_path / "harmed.html"
    text = page_path.read_text()
    address, reached = outside
    harm = f"<script>document.title = 'harmed'</script><img src='{address}/x.png'>"
    harmed.write_text(text.replace("<main>", f"<main>{harm}"))
    opened = Opened(browser, harmed, WIDE, "light")
    assert opened.page.title() != "harmed"
    # The browser tells of the request that it then blocks.
    assert opened.asked == [harmed.as_uri(), f"{address}/x.png"]
    assert reached == []
    assert any("Content Security Policy" in line for line in opened.said)
    opened.context.close()
