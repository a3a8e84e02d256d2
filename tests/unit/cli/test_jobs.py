"""`plan`, `schema`, `init`, `workloads` and `explain`, and the jobs of the package."""

import errno
import json
import re
import tomllib
from functools import partial
from pathlib import Path

import click
import jsonschema
import pytest
from click.testing import CliRunner
from commands import EXAMPLES, REPOSITORY, refusal_of, run_python
from ruamel.yaml import YAML

import raybench
from raybench.cli import raybench as command_line
from raybench.cli.jobs import templates
from raybench.cli.shared import write_file
from raybench.errors import ClusterError, JobError, UsageError
from raybench.job.estimate import estimate_time
from raybench.job.loading import job_from_text
from raybench.job.model import Job, job_schema
from raybench.job.plan import make_plan

JOBS = sorted((REPOSITORY / "jobs").glob("*.yaml"))
JOB = """version: 1
name: test
workload: {kind: mlp, hidden: 64}
matrix: {world_size: [1, 2], batch_size: [8, 16]}
"""
HEAVY = ("torch", "ray", "pandas", "pyarrow", "numpy", "scipy", "vl_convert")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)


def run(*arguments):
    """What the command prints on stdout; a failure raises as it does for `main`."""
    result = CliRunner().invoke(command_line, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_plan_tabulates_only_settings_that_vary():
    lines = run("plan", "job.yaml").splitlines()
    assert lines[0] == "test: workload mlp"
    assert "hidden=64" in " ".join(lines[1:4])
    table = lines.index("")
    headings = ["#", "point_id", "world_size", "batch_size", "est.", "GiB"]
    assert lines[table + 1].split() == headings
    assert lines[table + 2].split()[2:4] == ["1", "8"]
    assert lines[table + 5].split()[2:4] == ["2", "16"]
    assert "4 points; the largest needs 2 devices" in lines
    told = " ".join(" ".join(lines).split())
    assert "iterations: 16 s to 80 s (4 points x 1 repeat of 4 to 20 s); steps above 0.41 s" in told
    assert "are timed fewer than 30 times, but at least 5 times" in told
    assert max(map(len, lines)) <= 80
    job = JOB.replace("mlp, hidden: 64", "transformer")
    Path("job.yaml").write_text(f"{job}include: [{{world_size: 1, batch_size: 1, layers: 2}}]\n")
    assert " none " in run("plan", "job.yaml")


def test_quick_replaces_a_fixed_count_of_iterations():
    Path("job.yaml").write_text(JOB + "measure: {seconds: 0.5, max_seconds: 9}\n")
    expected = run("plan", "job.yaml")
    Path("job.yaml").write_text(JOB + "measure: {iterations: 5000, max_seconds: 9}\n")
    assert run("plan", "job.yaml", "--set", "measure=quick") == expected
    counted = ["--set", "measure.iterations=7", "--set", "measure=quick"]
    assert run("plan", "job.yaml", *counted) == expected
    assert run("plan", "job.yaml") != expected


@pytest.mark.parametrize(
    "arguments",
    [
        "plan {}.yaml",
        "plan job.yaml --set {}=1",
        "plan job.yaml {}",
        "report --results {}",
        "sweep job.yaml --tag {}",
        "workloads {}",
        "init missing/{}.yaml",
        "{}",
    ],
)
def test_control_characters_never_reach_the_terminal(arguments, command):
    harm = "a\x1b]0;owned\x07\x1b[31m\r\u202eb"
    words = [word.format(harm) for word in arguments.split()]
    code, out, err = command(*words, results=None)
    assert (code, out) == (2, "")
    assert err.endswith("\n")
    assert all(line.isprintable() for line in err.splitlines())
    assert "owned" in err


@pytest.mark.parametrize("is_coloured", [False, True])
def test_plan_estimates_memory_and_what_fits(is_coloured, monkeypatch):
    monkeypatch.setattr("raybench.cli.shared.color", lambda: is_coloured)
    wide = ("--set", "workload.hidden=16384", "--set", "matrix.world_size=1")
    text = run("plan", "job.yaml", *wide)
    assert "est. GiB" in text
    assert "GiB a device; --device-memory SIZE tells which" in " ".join(text.split())
    told = " ".join(run("plan", "job.yaml", *wide, "--device-memory", "4GiB").split())
    assert "do not fit into 4 GiB, and run all the same: #1, #2 #1: by an estimate, the " in told
    assert "all fit into 93.1 GiB" in run("plan", "job.yaml", *wide, "--device-memory", "100GB")
    points = json.loads(run("plan", "job.yaml", *wide, "--json"))["points"]
    assert all(point["mem_estimate_bytes"] > 4 * 2**30 for point in points)
    with pytest.raises(UsageError, match="--device-memory: not with --json"):
        run("plan", "job.yaml", "--json", "--device-memory", "4GiB")


@pytest.mark.parametrize("given", ["80", "1.5", "big", "-1GB", "0GiB", "80 GiBs", "9" * 5000 + "B"])
def test_device_memory_without_unit_is_refused(given):
    with pytest.raises(click.BadParameter, match=r"^must be a size with its unit, as in 141GB or"):
        run("plan", "job.yaml", "--device-memory", given)


def test_plan_counts_the_time_of_heating():
    words = ("--set", "measure.heat_s=30", "--set", "measure.rounds=3")
    without, heated = (
        json.loads(run("plan", "job.yaml", "--json", *given)) for given in (words[2:], words)
    )
    sizes = {point["world_size"] for point in heated["points"]}
    assert heated["time_at_least_s"] == without["time_at_least_s"] + 30
    assert heated["time_at_most_s"] == without["time_at_most_s"] + 3 * len(sizes) * 30
    text = " ".join(run("plan", "job.yaml", *words).split())
    assert "heating: 30 s of steps before the first point" in text


def test_further_rounds_are_planned_without_heating():
    costs = set()
    for heat_s in (0, 300):
        text = " ".join(run("plan", "job.yaml", "--set", f"measure.heat_s={heat_s}").split())
        costs.add(text.partition("would take about ")[2].split(" more")[0])
    assert len(costs) == 1


def test_json_plan_has_settings_of_filtered_points():
    words = ("--set", "measure.repeats=2", "--set", "matrix.world_size=4")
    plan = json.loads(run("plan", "job.yaml", "--json", *words, "--filter", "batch_size > 8"))
    assert (plan["job"], plan["devices_needed"], plan["time_at_most_s"]) == ("test", 4, 40.0)
    [point] = plan["points"]
    assert len(point.pop("point_id")) == 12
    assert (point["world_size"], point["batch_size"], point["global_batch_size"]) == (4, 16, 64)
    assert (point["scaling"], point["hidden"], point["precision"]) == ("weak", 64, "fp32")


def test_warning_goes_to_stderr_beside_valid_json():
    arguments = ["plan", "job.yaml", "--json", "--set", "exclude=[{batch_size: 9}]"]
    result = CliRunner().invoke(command_line, arguments, standalone_mode=False)
    assert "exclude[0]: matches no point" in result.stderr
    assert json.loads(result.stdout)["warnings"] == [
        "--set exclude=[{batch_size: 9}]: exclude[0]: matches no point"
    ]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_every_job_plans_within_80_columns(path):
    assert max(map(len, run("plan", str(path)).splitlines())) <= 80


def test_the_committed_schema_is_that_of_the_code():
    committed = (REPOSITORY / "raybench" / "job.schema.json").read_text()
    assert committed == run("schema"), "run: raybench schema > raybench/job.schema.json"


def test_schema_and_code_refuse_the_same_jobs():
    validator = jsonschema.Draft202012Validator(job_schema())
    template = REPOSITORY / "raybench" / "job_template.yaml"
    for path in [*JOBS, template]:
        validator.validate(YAML(typ="safe", pure=True).load(path.read_text()))
    good = {"version": 1, "name": "x", "workload": {"kind": "mlp"}}
    for bad in [
        {"version": 2},
        {"name": "../x"},
        {"extra": 1},
        {"workload": {}},
        {"matrix": {"batch_size": []}},
        {"matrix": {"batch_size": [[1]]}},
        {"measure": {"warmup": 0}},
        {"measure": {"warmup": {"min": 1}}},
        {"placement": {"isolation": "nodes"}},
        {"on_error": "stopp"},
        {"cpu": {"name": "y"}},
        {"cpu": {"measure": {"warmup": 0}}},
    ]:
        assert not validator.is_valid({**good, **bad}), bad


def test_every_field_of_the_schema_is_described():
    schema = job_schema()
    for model in [schema, *schema["$defs"].values()]:
        for name, field in model["properties"].items():
            target = schema["$defs"].get(field.get("$ref", "").rpartition("/")[2], {})
            assert field.get("description") or target.get("description"), name
    assert set(schema["properties"]) == set(Job.model_fields)


def test_init_names_the_job_and_writes_its_schema():
    for file, name in (("cc v:2.yaml", "cc-v-2"), ("_" * 64 + "2", "2"), ("true.yaml", "true")):
        run("init", file)
        assert run("plan", file).startswith(f"{name}: workload mlp")
        assert Path(file).read_text().startswith("# yaml-language-server: $schema=job.schema.json")
    assert Path("job.schema.json").read_text() == run("schema")


def test_init_writes_valid_jobs_and_overwrites_nothing():
    assert "raybench plan new.yaml" in run("init", "new.yaml")
    assert "8 points" in run("plan", "new.yaml")
    Path("new.yaml").write_text("mine")
    with pytest.raises(UsageError, match=r"new\.yaml: exists already") as caught:
        run("init", "new.yaml")
    assert caught.value.exit_code == 2
    assert Path("new.yaml").read_text() == "mine"
    with pytest.raises(UsageError, match="cannot be written: No such file or directory"):
        run("init", "nowhere/new.yaml")


def test_full_disk_leaves_no_partial_or_missing_file(monkeypatch):
    Path("old.svg").write_text("mine")

    def fill(path, content):
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(UsageError, match=r"new\.yaml: cannot be written: No space left"):
        run("init", "new.yaml")
    assert not Path("new.yaml").exists()
    with pytest.raises(UsageError, match="cannot be written"):
        write_file(Path("old.svg"), b"another one")
    assert Path("old.svg").exists()


def test_init_writes_and_lists_template_jobs():
    assert "raybench plan gemm.yaml" in run("init", "--template", "gemm")
    assert run("plan", "gemm.yaml") == run("plan", str(REPOSITORY / "jobs" / "gemm.yaml"))
    assert "mine.yaml: written" in run("init", "mine.yaml", "--template", "ddp_scaling")
    listed = run("init", "--list")
    assert all(path.stem in listed for path in JOBS)
    assert "How many TFLOP/s does one GPU reach" in listed
    assert max(map(len, listed.splitlines())) <= 80
    with pytest.raises(UsageError, match="neither FILE nor --template"):
        run("init", "--list", "--template", "gemm")
    with pytest.raises(UsageError, match=r"no job .gem.; did you mean .gemm.\? All of them: "):
        run("init", "--template", "gem")
    with pytest.raises(UsageError) as caught:
        run("init", "--template", "nope")
    assert str(caught.value) == "--template: no job 'nope'; see: `raybench init --list`"
    with pytest.raises(JobError, match=r"`raybench init --template gemm` writes gemm\.yaml"):
        run("plan", "jobs/gemm.yaml")
    Path("jobs").mkdir()
    Path("gemm.yaml").rename("jobs/mine_too.yaml")
    for mistyped in ("mine_too", "mine_to.yaml", "jobs/mine_too.yml"):
        with pytest.raises(JobError, match=r"No such file .*; did you mean jobs/mine_too\.yaml\?$"):
            run("plan", mistyped)


def test_workloads_describes_a_class_of_the_user(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    Path("described_workload.py").write_text(
        "class Mine:\n"
        '    """Does it.\n\n    At length."""\n'
        "    def __init__(self, context, *, size: int, is_on: bool = True): ...\n"
        "    def step(self): ...\n"
    )
    (found,) = json.loads(run("workloads", "described_workload:Mine", "--json"))["workloads"]
    assert (found["name"], found["doc"]) == ("described_workload:Mine", "Does it.")
    assert [parameter["name"] for parameter in found["parameters"]] == ["size", "is_on"]
    assert [parameter["is_required"] for parameter in found["parameters"]] == [True, False]
    assert "required" in run("workloads", "described_workload:Mine")


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        *((words, (*HEAVY, "psutil")) for words in (["--help"], ["plan", str(JOBS[0])])),
        (["workloads"], HEAVY),
        (["list", "--results", str(EXAMPLES)], ("torch", "ray", "pandas")),
    ],
)
def test_no_heavy_library_is_loaded(arguments, heavy):
    program = (
        "import sys\n"
        "from raybench.cli import main\n"
        f"sys.argv = ['raybench', *{arguments!r}]\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        f"    print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)\n"
    )
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == "[]\n"


ALL = templates()


def test_the_package_has_the_jobs_of_the_repository():
    assert list(ALL) == sorted(path.stem for path in (REPOSITORY / "jobs").glob("*.yaml"))
    # An editable install reads the link; a wheel has the files in its place.
    (package,) = raybench.__path__
    assert Path(package, "jobs").resolve() == REPOSITORY / "jobs"
    built = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert built["targets"]["wheel"] == {
        "packages": ["raybench"],
        "exclude": ["raybench/jobs", "raybench/how-to"],
        "force-include": {"jobs": "raybench/jobs", "docs/how-to": "raybench/how-to"},
    }


# Jobs about something that only GPUs have.
FOR_GPUS = {"environment", "memory_of_a_step", "nccl_algorithms", "timing_ways"}


@pytest.mark.parametrize("name", sorted({*ALL} - FOR_GPUS))
def test_job_takes_two_cores_a_minute(name):
    job = job_from_text(f"{name}.yaml", ALL[name], on_cpu=True)
    plan = make_plan(job)
    assert plan.warnings == () or "needs torchvision" in plan.warnings[0]
    assert job.uses_cpu
    assert job.question.endswith("?")
    assert job.question.count("?") == 1
    assert max(point.world_size for point in plan.points) <= 2
    assert not any(point.cuda_graph for point in plan.points)
    assert estimate_time(job, plan, job.measure.rounds * len(plan.points)).total_s < 60


@pytest.mark.parametrize("name", sorted(FOR_GPUS))
def test_job_about_gpus_says_why_in_one_line(name):
    told = refusal_of(ClusterError, partial(job_from_text, on_cpu=True), f"{name}.yaml", ALL[name])
    assert told.startswith(f"{name}.yaml: needs a GPU: ")


@pytest.mark.parametrize("name", ALL)
def test_comments_of_jobs_hold_no_command(name):
    comments = re.findall(r"#.*", ALL[name])
    assert not [line for line in comments if re.search(r"raybench \w|--set|pip install", line)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("busbw",), "Bus bandwidth as nccl-tests defines it"),
        (("comm_exposed_ms",), 'comm_exposed_ms ("exposed comm" in reports), in ms:'),
        (("straggler",), "straggler_ms"),
        (("idle",), "Python has not issued work"),
        (
            ("w",),
            "w: wide: the 95 % interval of the step time within one round exceeds",
        ),
        (("not", "alone"), "n: not alone: other work used the same devices or nodes"),
        (("±",), "95 % interval"),
        (("marks",), "h: host-bound"),
        (("scaling", "efficiency"), "100 % is ideal"),
        (("exposed", "comm", "ms"), 'comm_exposed_ms ("exposed comm" in reports), in ms:'),
        (("cluster",), "# "),
        (("fused", "optimizer"), "fused_optimizer: "),
        (("layers",), "layers: Number of linear layers (parameter of mlp)."),
        ((), "marks; columns of points; parameters of workloads. How-to pages: "),
    ],
)
def test_explain_covers_words_columns_marks_and_pages(command, words, said):
    code, out, _ = command("explain", *words, results=None)
    assert code == 0
    assert said in " ".join(out.split())


def test_unknown_term_gets_the_nearest_suggestion(command):
    told = command("explain", "eficiency", results=None).refusal
    assert "did you mean 'efficiency'" in told
    told = command("explain", "slurm", results=None).refusal
    assert "how-to pages that have it: cluster" in told
