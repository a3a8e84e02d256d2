"""The page docs/claims.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.claims.article_1 import ARTICLE as TIMING
from benchmarks.claims.article_2 import ARTICLE as LATENCY
from benchmarks.claims.article_3 import ARTICLE as LINEAR
from benchmarks.claims.article_4 import ARTICLE as IMAGES
from benchmarks.claims.article_5 import TRAINING
from benchmarks.claims.article_5_fleet import FLEET
from benchmarks.claims.errors import ERRORS, Error
from benchmarks.claims.measured import RESULTS, table, versions
from benchmarks.claims.model import Article, Case, Finding, Verdict
from raybench.report import formatting

ARTICLES = (TIMING, LATENCY, LINEAR, IMAGES, TRAINING, FLEET)
_MARKS = {True: "+", False: "-", None: "?"}
_HEAD = """# Five articles, claim by claim

Five published articles lead their readers to expect what is listed here. Beside each expectation is
what raybench measured. `python -m benchmarks.claims` makes this page from the committed runs;
a test holds it equal to their Parquet.

* **+**: as published, with the whole 95 % interval. **-**: not so. **?**: the interval leaves it
  open.
  A published figure without a range holds within ±10 %. Without a mark: measured, and nothing
  published to hold it to.
* ± is half of the 95 % interval over the rounds of a run; of a ratio as far as the two have one.
  "± not known": one start, which has no interval. It is left open within 3 % of a limit (3 points
  where the unit is %): so far two starts of the flagship run lie apart. Sizes and counts have none.
* [1] is the run, at the end of the page: with machine, versions and command.
"""


def page() -> str:
    """Write the whole page."""
    found = {article: [claim.find() for claim in article.claims] for article in ARTICLES}
    shown = [(error, tuple(error.show())) for error in ERRORS]
    runs = list(
        dict.fromkeys(
            run
            for cases in (
                *(finding.cases for findings in found.values() for finding in findings),
                *(cases for _, cases in shown),
            )
            for case in cases
            for run in case.figure.runs
        )
    )
    numbers = {run: number for number, run in enumerate(runs, start=1)}
    blocks = [
        _HEAD,
        _sum([finding for findings in found.values() for finding in findings]),
        *(_article(article, findings, numbers) for article, findings in found.items()),
        _errors(shown, numbers),
        _runs(numbers),
    ]
    return "\n".join(blocks)


def _sum(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.verdict for finding in findings)
    rows = [(verdict.value, str(counts[verdict])) for verdict in Verdict]
    return _table(("verdict", "claims"), [*rows, ("together", str(len(findings)))])


def _article(article: Article, findings: Sequence[Finding], numbers: dict[str, int]) -> str:
    rows = [_row(finding, numbers) for finding in findings]
    title = f"## Article {article.number}: {article.title}\n"
    return f"{title}\n{_table(('', 'claim', 'published', 'measured', 'verdict'), rows)}"


def _row(finding: Finding, numbers: dict[str, int]) -> tuple[str, ...]:
    claim = finding.claim
    measured = [*_lines(finding.cases, numbers)]
    if claim.says:
        measured.append(f"*{claim.says}*")
    verdict = [f"**{finding.verdict.value}**", finding.condition]
    return (
        claim.id,
        f"{claim.text}<br>{claim.ask}",
        claim.published,
        "<br>".join(measured),
        "<br>".join(filter(None, verdict)),
    )


def _lines(cases: Iterable[Case], numbers: dict[str, int]) -> Iterator[str]:
    for case in cases:
        mark = f"**{_MARKS[case.holds]}** " if case.rule else ""
        where = "".join(f" [{numbers[run]}]" for run in case.figure.runs)
        yield f"{mark}{case.name}: {case.figure}{where}"


def _errors(shown: Sequence[tuple[Error, Sequence[Case]]], numbers: dict[str, int]) -> str:
    rows = [
        (error.article, error.said, error.found, "<br>".join(_lines(cases, numbers)))
        for error, cases in shown
    ]
    title = "## What the articles get wrong\n\nFigures without a run are arithmetic.\n"
    return f"{title}\n{_table(('article', 'says', 'but', 'shown by'), rows)}"


def _runs(numbers: dict[str, int]) -> str:
    rows = [(f"[{number}]", *_origin(run)) for run, number in numbers.items()]
    return f"## Runs\n\n{_table(('', 'run', 'machine', 'versions', 'command'), rows)}"


def _origin(run: str) -> tuple[str, str, str, str]:
    if run.endswith(".json"):
        return f"[{run}](benchmarks/{run})", "as it says", "", "docs/README.md"
    devices, row = table("devices", run), table("runs", run).iloc[0]
    found = versions(run)
    machine = formatting.machine(devices.to_dict("records"))
    names = ("raybench", "torch", "cuda", "nccl", "driver")
    known = {name: found[name] for name in names if name in found}
    return f"`{run}`", machine, formatting.versions(known), _command(row.job_name)


def _command(job: str) -> str:
    if job == "health":
        return "`raybench health`"
    path = RESULTS.parents[1] / "jobs" / f"{job}.yaml"
    return f"jobs/{path.name}" if path.exists() else "`raybench sweep --script`"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, [":---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
