"""README and docs say what the repository holds: links, committed runs, commands."""

import importlib.util
import re
import shutil

import pyarrow.parquet as pq
import pytest
from commands import EXAMPLES, REPOSITORY

from raybench.cli import COMMANDS
from raybench.job.loading import load_job
from raybench.job.plan import make_plan

DOCS = REPOSITORY / "docs"
AT_THE_TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [*(REPOSITORY / name for name in AT_THE_TOP), *DOCS.rglob("*.md")]
# Jobs whose runs are in an earlier commit, as docs/results.md says.
WITHOUT_RUN = ("accumulation_or_batch", "layouts", "nccl_algorithms", "transformer_scaling")
RUN_ID = re.compile(r"`([a-z_]+-\d{8}-\d{6}-[0-9a-f]{4})`")


def prose(page):
    """The text of a page outside its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """The anchors that GitHub makes of the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_has_its_file_and_heading(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_named_run_is_committed_or_listed():
    earlier = RUN_ID.findall((REPOSITORY / "results" / "README.md").read_text())
    named = {run_id for page in PAGES for run_id in RUN_ID.findall(page.read_text())}
    committed = {path.name for path in (EXAMPLES / "points").iterdir()}
    assert named - set(earlier) - committed == set()


def commands(text):
    """The words of each `raybench` command in the code blocks of a page."""
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    code = [line.partition("#")[0] for line in lines]
    typed = [re.search(r"(?:^|\(|&& |-- |\bdo )\s*raybench ([^|;&)]+)", line) for line in code]
    return [found[1].split() for found in typed if found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_command_and_option_that_is_printed_exists(page):
    for name, *words in commands(page.read_text()):
        if name.startswith("-"):
            continue
        assert name in COMMANDS, name
        module = importlib.import_module(COMMANDS[name][0])
        known = {one for each in vars(module)[f"{name}_command"].params for one in each.opts}
        given = words[: words.index("--")] if "--" in words else words
        options = {word.partition("=")[0] for word in given if re.match(r"--?[a-z]", word)}
        assert options <= known, (name, options - known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_script_that_is_named_exists(page):
    for module in re.findall(r"python -m (benchmarks[.\w]*)", page.read_text()):
        assert (REPOSITORY / module.replace(".", "/")).with_suffix(".py").exists(), module


@pytest.fixture(scope="module")
def generated():
    """The generator of the reference pages, as a module."""
    found = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_reference_matches_commands_schemas_and_metrics(generated):
    for name, page in generated.PAGES.items():
        shown = (DOCS / "reference" / name).read_text()
        assert shown == page().rstrip() + "\n", "run: python docs/generate.py"


def test_the_pages_are_as_long_as_people_read(generated):
    made = {DOCS / "reference" / name for name in generated.PAGES}
    # The changelog grows with each release.
    made.add(REPOSITORY / "CHANGELOG.md")
    written = [page for page in PAGES if page not in made and "reports" not in page.parts]
    words = sum(len(page.read_text().split()) for page in written)
    assert words <= 31_500
    assert len((REPOSITORY / "README.md").read_text().split()) <= 700


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("jobs/*.yaml")), ids=lambda path: path.stem)
def test_every_job_loads_and_was_run(path):
    job = load_job(path)
    made = make_plan(job)
    # Nothing that tests install has torchvision.
    assert [one for one in made.warnings if "needs torchvision" not in one] == []
    planned = {point.point_id for point in made.points}
    runs = list((EXAMPLES / "points").glob(f"{job.name}-*"))
    assert bool(runs) == (job.name not in WITHOUT_RUN)
    if not runs:
        assert f"`{job.name}`" in (REPOSITORY / "docs" / "results.md").read_text()
        return
    parts = [part for run in runs for part in run.glob("*.parquet")]
    columns = [pq.read_table(part, columns=["point_id"], partitioning=None) for part in parts]
    assert planned <= {point_id for one in columns for point_id in one["point_id"].to_pylist()}


def test_readme_shows_the_report_of_its_run(command, tmp_path, monkeypatch):
    text = (REPOSITORY / "README.md").read_text()
    shown = next(block for block in text.split("```text\n")[1:] if "\nNext: " in block)
    shown = shown.partition("```")[0]
    run = re.search(r"ddp_scaling-[-\w]+", shown)[0]
    # A run in the usual folder, as that of a user.
    for table in ("runs", "devices", "points"):
        shutil.copytree(EXAMPLES / table / run, tmp_path / "results" / table / run)
    monkeypatch.chdir(tmp_path)
    assert command("report", run, results="results").out == shown
