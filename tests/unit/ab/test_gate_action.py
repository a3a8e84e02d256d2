"""The steps of the GitHub Action, run as scripts beside made-up `raybench` and `gh`."""

import json
import os
import re
import subprocess

import pytest
from commands import REPOSITORY
from ruamel.yaml import YAML

ACTION = REPOSITORY / ".github" / "actions" / "gate"
WORKFLOWS = REPOSITORY / "docs" / "examples" / "ci"
VERDICT = {"verdict": "slower", "points": [{"verdict": "slower"}, {"verdict": "same"}]}
# Writes what `raybench ab` writes, or ends as a wrong command does.
RAYBENCH = """\
#!/bin/sh
printf '%s\\n' "$@" > "$GATE_FOLDER/words"
if [ "$CODE" = 2 ]; then echo "ci.yaml: no such job file" >&2; exit 2; fi
mkdir -p "$GATE_FOLDER/results/ab/ci-1"
echo "## Is NEW slower?" > "$GATE_FOLDER/results/ab/ci-1/report.md"
echo "pair 1" >&2
echo '{verdict}'
exit "$CODE"
""".replace("{verdict}", json.dumps(VERDICT))
GH = """\
#!/bin/sh
echo "$@" >> "$GATE_FOLDER/calls"
case "$*" in
  */pulls/*) echo "$PULL_HEAD" ;;
  *--paginate*) echo "$COMMENT" ;;
esac
"""


@pytest.fixture
def script(tmp_path):
    """Run a script of the action in a repository of two commits."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("raybench", RAYBENCH), ("gh", GH)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    repository, gate = tmp_path / "repository", tmp_path / "gate"
    repository.mkdir()
    gate.mkdir()
    git = ["git", "-c", "user.name=somebody", "-c", "user.email=somebody@localhost"]
    subprocess.run([*git, "init", "-q"], cwd=repository, check=True)
    for name in ("first", "second"):
        message = ["commit", "-q", "--allow-empty", "-m", name]
        subprocess.run([*git, *message], cwd=repository, check=True)
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "GATE_FOLDER": str(gate),
        "GITHUB_OUTPUT": str(gate / "output"),
        "GITHUB_STEP_SUMMARY": str(gate / "summary"),
    }

    def run(name, **variables):
        done = subprocess.run(
            [str(ACTION / name)],
            cwd=repository,
            env=environment | variables,
            capture_output=True,
            text=True,
        )
        return done, gate

    return run


@pytest.mark.parametrize("code", ["0", "1", "5"])
def test_verdict_and_number_are_uploaded(code, script):
    options = "--device cpu\n--set measure.seconds=1\n"
    done, gate = script(
        "measure.sh", JOB="ci.yaml", BASE="HEAD~1", PULL_REQUEST="17", OPTIONS=options, CODE=code
    )
    assert done.returncode == 0, done.stderr
    upload = gate / "upload"
    assert json.loads((upload / "verdict.json").read_text()) == VERDICT
    assert (upload / "pull-request.txt").read_text() == "17\n"
    assert (upload / "report.md").read_text() == (gate / "summary").read_text()
    outputs = dict(line.split("=") for line in (gate / "output").read_text().splitlines())
    assert (outputs["verdict"], outputs["slower-points"]) == ("slower", "1")
    words = (gate / "words").read_text().splitlines()
    assert words[-4:] == options.split()
    assert "pair 1" in done.stderr


def test_later_use_in_a_job_has_its_own_report(script):
    _, gate = script("measure.sh", JOB="ci.yaml", BASE="HEAD", CODE="0")
    (gate / "results" / "ab" / "ci-1").rename(gate / "results" / "ab" / "ci-0")
    (gate / "upload" / "report.md").unlink()
    done, _ = script("measure.sh", JOB="ci.yaml", BASE="HEAD", CODE="0")
    assert done.returncode == 0, done.stderr
    assert (gate / "upload" / "report.md").exists()


def test_base_is_the_merge_base(script):
    _, gate = script("measure.sh", JOB="ci.yaml", BASE="HEAD~1", CODE="0")
    words = (gate / "words").read_text().splitlines()
    assert re.fullmatch("[0-9a-f]{40}", words[words.index("--old") + 1])
    assert words[words.index("--new") + 1] == "HEAD"
    assert "--setup" not in words


def test_set_up_command_stays_one_word(script):
    _, gate = script("measure.sh", JOB="ci.yaml", BASE="HEAD", SETUP="make build && true", CODE="0")
    assert "make build && true" in (gate / "words").read_text().splitlines()


def test_command_without_verdict_is_not_measured(script):
    done, gate = script("measure.sh", JOB="ci.yaml", BASE="HEAD", CODE="2")
    assert done.returncode == 0, done.stderr
    verdict = json.loads((gate / "upload" / "verdict.json").read_text())
    assert (verdict["verdict"], verdict["answer"]) == ("not_measured", "ci.yaml: no such job file")
    report = (gate / "upload" / "report.md").read_text()
    assert "This says nothing about the change." in report
    outputs = (gate / "output").read_text().splitlines()
    assert {"verdict=not_measured", "exit-code=2"} <= set(outputs)


@pytest.mark.parametrize(
    ("fail_on", "codes"),
    [
        ("slower", {"slower": 1, "undecided": 0, "not_measured": 0, "same": 0, "faster": 0}),
        ("undecided", {"slower": 1, "undecided": 5, "not_measured": 5, "same": 0, "faster": 0}),
        ("never", {"slower": 0, "undecided": 0, "not_measured": 0, "same": 0, "faster": 0}),
        ("regression", {"slower": 2, "same": 2}),
    ],
)
def test_job_fails_as_asked(fail_on, codes, script):
    for verdict, code in codes.items():
        done, _ = script("judge.sh", FAIL_ON=fail_on, VERDICT=verdict)
        assert done.returncode == code, verdict


@pytest.mark.parametrize(
    ("fail_on", "exit_code", "code"),
    [
        ("slower", "2", 2),
        ("slower", "127", 2),
        ("undecided", "4", 2),
        # No cluster now; perhaps another time.
        ("slower", "3", 0),
        ("never", "2", 0),
    ],
)
def test_gate_that_never_works_fails_the_job(fail_on, exit_code, code, script):
    done, _ = script("judge.sh", FAIL_ON=fail_on, VERDICT="not_measured", EXIT_CODE=exit_code)
    assert done.returncode == code


@pytest.fixture
def comment(script):
    """Run comment.sh on a report for pull request 17; return its calls of `gh` and the body."""

    def run(number="17\n", report="text for @somebody\n", head="abc", found=""):
        _, gate = script("judge.sh", FAIL_ON="never")
        (gate / "pull-request.txt").write_text(number)
        (gate / "report.md").write_text(report)
        done, _ = script(
            "comment/comment.sh",
            REPOSITORY="owner/project",
            HEAD_SHA="abc",
            RUN_URL="https://localhost/run",
            PULL_HEAD=head,
            COMMENT=found,
        )
        assert done.returncode == 0, done.stderr
        calls, body = gate / "calls", gate / "body.md"
        return (
            calls.read_text().splitlines() if calls.exists() else [],
            body.read_text() if body.exists() else "",
        )

    return run


def test_first_comment_is_posted(comment):
    calls, body = comment()
    assert "--method POST repos/owner/project/issues/17/comments" in calls[-1]
    assert body.startswith("<!-- raybench gate -->\n")
    assert "[run](https://localhost/run)" in body


def test_later_comment_updates_the_first(comment):
    calls, _ = comment(found="33")
    assert "--method PATCH repos/owner/project/issues/comments/33" in calls[-1]


def test_names_in_a_report_notify_nobody(comment):
    _, body = comment()
    assert "@somebody" not in body


@pytest.mark.parametrize("letter", ["x", "@"])
def test_long_report_is_cut(letter, comment):
    _, body = comment(report=letter * 100_000)
    assert len(body) < 65_536


@pytest.mark.parametrize("number", ["", "17; rm -rf .", "-1", "$(id)"])
def test_strange_number_comments_nothing(number, comment):
    assert comment(number=number) == ([], "")


def test_other_pull_request_gets_no_comment(comment):
    calls, body = comment(head="def")
    assert (len(calls), body) == (1, "")


def test_examples_of_workflows_have_few_rights():
    workflows = {path.stem: YAML(typ="safe").load(path) for path in WORKFLOWS.glob("raybench-*")}
    assert workflows["raybench-measure"]["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in json.dumps(workflows["raybench-measure"])
    comment = workflows["raybench-comment"]
    assert comment["permissions"] == {"actions": "read", "pull-requests": "write"}
    # The comment runs no code of the pull request.
    steps = comment["jobs"]["comment"]["steps"]
    assert [list(step) for step in steps] == [["uses"]]
    assert comment["on"]["workflow_run"]["workflows"] == [workflows["raybench-measure"]["name"]]


def test_examples_use_inputs_that_the_action_has():
    action = YAML(typ="safe").load(ACTION / "action.yml")
    measure = YAML(typ="safe").load(WORKFLOWS / "raybench-measure.yml")
    *_, step = measure["jobs"]["measure"]["steps"]
    assert step["uses"].partition("@")[0].endswith("/.github/actions/gate")
    required = {name for name, entry in action["inputs"].items() if entry.get("required")}
    assert required <= step["with"].keys() <= action["inputs"].keys()
    for name in ("measure", "judge"):
        assert any(f"/{name}.sh" in entry.get("run", "") for entry in action["runs"]["steps"])
