"""What the YAML of a job file says and where, its overrides, and the places that messages name."""

import re
from pathlib import Path

import pytest
from commands import refusal_of
from hypothesis import given, settings
from hypothesis import strategies as st

from raybench.errors import JobError
from raybench.job.problems import JobProblem
from raybench.job.source import MAX_FILE_BYTES, parse_yaml, read_source


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("job.yaml")
    path.write_text("name: x\nmatrix:\n  batch_size: [64, 256]\n")
    return path


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("matrix.batch_size=8", 8),
        ("matrix.batch_size=1,2", [1, 2]),
        ("matrix.batch_size=[1, 2]", [1, 2]),
        ("matrix.batch_size= 1, 2 ", [1, 2]),
        ("matrix.batch_size='1,2'", "1,2"),
        ("matrix.batch_size=1e-3", 0.001),
        ("matrix.batch_size=a=b", "a=b"),
        ("matrix.batch_size={a: [1, 2]}", {"a": [1, 2]}),
    ],
)
def test_override_is_yaml_with_comma_lists(file, override, value):
    assert read_source(file, [override]).data == {"name": "x", "matrix": {"batch_size": value}}


def test_override_creates_sections_and_last_wins(file):
    given = ["measure.warmup=1", "measure.warmup=2", "workload.groups=0-1,2-3", "env.A=[1.10,0x1F]"]
    data = read_source(file, given).data
    assert data["measure"] == {"warmup": 2}
    # A parameter is no list, and a variable no number.
    assert data["workload"] == {"groups": "0-1,2-3"}
    assert data["env"] == {"A": ["1.10", "0x1F"]}


def test_a_variable_keeps_its_commas(file):
    data = read_source(file, ["env.NCCL_IB_HCA=mlx5_0,mlx5_1"]).data
    assert data["env"] == {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("matrix.batch_size", "must be KEY=VALUE"),
        ("=3", "must be KEY=VALUE"),
        ("matrix..x=3", "must be KEY=VALUE"),
        ("name.x=3", "name is not a mapping"),
        ("matrix.batch_size=[1", "matrix.batch_size: not YAML"),
        ("matrix.batch_size=", "matrix.batch_size: no value given"),
        ("measure.warmup={min:5}", "measure.warmup.'min:5': no value given"),
        ("matrix.batch_size=.nan", "must be finite"),
    ],
)
def test_bad_override_is_quoted(file, override, message):
    told = refusal_of(JobError, read_source, file, [override])
    assert told.startswith(f"--set {override}: ")
    assert message in told


def test_missing_key_names_override_of_section(file):
    source = read_source(file, ["measure.warmup.min=5", "matrix.batch_size=1"])
    lacks = JobProblem(path=("measure", "warmup", "max"), at_key=True, message="required")
    assert source.explain(lacks) == "--set measure.warmup.min=5: measure.warmup.max: required"
    of_the_file = JobProblem(path=("matrix", "other"), at_key=True, message="no")
    assert source.explain(of_the_file) == "job.yaml:2:1: matrix.other: no"


def test_problem_of_overridden_value_names_override(file):
    source = read_source(file, ["matrix.batch_size=1,0", "new.key=1"])
    below = JobProblem(path=("matrix", "batch_size", 1), message="no")
    above = JobProblem(path=("new",), at_key=True, message="no")
    elsewhere = JobProblem(path=("name",), message="no")
    assert source.explain_all([below, above, elsewhere]).splitlines() == [
        "job.yaml:1:7: name: no",
        "--set new.key=1: new: no",
        "--set matrix.batch_size=1,0: matrix.batch_size[1]: no",
    ]


@pytest.mark.parametrize(
    ("content", "where", "message"),
    [
        (b"", "job.yaml:1:1: ", "given an empty file; `raybench init`"),
        (b"- a\n", "job.yaml:1:1: ", "given a list"),
        (b"name: x\nnote: \xff\n", "job.yaml:2:7: ", "UTF-8, given the byte 0xff"),
        (b"x" * (MAX_FILE_BYTES + 1), "job.yaml:1:1: ", "at most 100,000 bytes"),
    ],
)
def test_file_without_mapping_is_refused(file, content, where, message):
    file.write_bytes(content)
    told = refusal_of(JobError, read_source, file, ())
    assert told.startswith(where)
    assert message in told


def test_unreadable_file_is_named_with_reason(tmp_path):
    for path, reason in [
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "x\0y", "null byte"),
    ]:
        told = refusal_of(JobError, read_source, path, ())
        assert told.startswith(f"{path}:1:1: ")
        assert reason in told


def test_byte_order_mark_keeps_columns(file):
    file.write_bytes(b"\xef\xbb\xbfname: x\n")
    source = read_source(file, ())
    assert source.explain(JobProblem(path=("name",), message="no")) == "job.yaml:1:7: name: no"
    assert source.text == "name: x\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("no", "no"),
        ("014", 14),
        ("0o14", 12),
        ("12:30:00", "12:30:00"),
        ("true", True),
        ("'64'", "64"),
        ("124m", "124m"),
        ("-1.5", -1.5),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    tree = parse_yaml(f"key: {text}")
    assert tree.problems == []
    assert tree.data["key"] == value
    assert type(tree.data["key"]) is type(value)


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("a: 1\na: 2\n", (2, 1), "duplicate key, first given on line 1"),
        ("a: &x 1\n", (1, 4), "anchors"),
        ("a: &x [*x]\n", (1, 4), "aliases (*) are not supported"),
        ("a: {&x b: 1}\n", (1, 5), "a key must be a plain word"),
        ("a: {<<: {b: 1}}\n", (1, 5), "merge keys"),
        ("? [a]\n: 1\nb: 2\n", (1, 3), "a key must be a plain word"),
        ("a: !mine 3\n", (1, 4), "tags are not supported"),
        ("a:\nb: 1\n", (1, 1), "no value given"),
        ("a: !!int ''\n", (1, 4), "not a number that can be read: ''"),
        ("a: 1e999\n", (1, 4), "must be finite, given '1e999'"),
        ("a: 9223372036854775808\n", (1, 4), "must fit into 64 bits"),
        ("a: " + "9" * 5000 + "\n", (1, 4), "not a number that can be read"),
        ("a: 0x" + "f" * 5000 + "\n", (1, 4), "must fit into 64 bits"),
        ('a: "\\ud800"\n', (1, 4), "not a text that can be kept: '\\ud800'"),
        ('a: "\\0"\n', (1, 4), "not a text that can be kept: '\\x00'"),
    ],
)
def test_forbidden_yaml_is_located(text, position, message):
    tree = parse_yaml(text)
    assert tree.is_complete
    found = [problem for problem in tree.problems if problem.position == position]
    assert any(message in problem.message for problem in found), tree.problems


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("a:\n\tb: 1\n", (2, 1), "a tab cannot indent; use spaces"),
        ("a: [1, 2", (1, 9), "expected ',' or ']'"),
        ("a: {b: 1\nc: 2\n", (2, 2), "expected ',' or '}'; does the mapping from line 1 end?"),
        ("a: b: c", (1, 5), "a ':' cannot stand here"),
        ("a:\n  b: 1\n c: 2\n", (3, 2), "the line does not go on with what is above it"),
        ("a: }", (1, 4), "a value is expected here"),
        ("a:\n- 1\n-2\n", (4, 1), "a key without its ':'"),
        ("a: \x00", (1, 4), "the character '\\x00' is not allowed"),
        ("a: 1\n---\nb: 2\n", (2, 1), "one document only"),
        ("[" * 10_000, (1, 1), "nested too deep"),
        ("- " * 10_000, (1, 1), "nested too deep"),
        ("%YAML 1.0\n---\na: 1", (1, 1), "not YAML: version"),
        ('a: "\\Uffffffff"', (1, 1), "not YAML"),
    ],
)
def test_where_reading_must_end_there_is_one_problem(text, position, message):
    tree = parse_yaml(text)
    assert not tree.is_complete
    assert tree.problems[-1].position == position
    assert message in tree.problems[-1].message


@settings(max_examples=300, deadline=None)
@given(st.text("ab01 \n\t:-[]{},&*!?|>'\"%#~.\\ux<=@`\x00é\ufeff", max_size=60))
def test_any_text_gives_readable_problems(text):
    tree = parse_yaml(text)
    assert tree.is_complete or tree.problems
    assert not any(re.search("<[a-z ]+>", problem.message) for problem in tree.problems)
