"""A job file, its overrides, and the places that messages name."""

from __future__ import annotations

from pathlib import Path

import pytest

from raybench.errors import JobError
from raybench.job.problems import Problem
from raybench.job.source import MAX_FILE_BYTES, YamlSource, read_source


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("job.yaml")
    path.write_text("name: x\nmatrix:\n  batch_size: [64, 256]\n")
    return path


def read(path: Path, *overrides: str) -> YamlSource:
    return read_source(path, overrides)


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
def test_an_override_is_read_as_yaml_and_a_comma_makes_a_list(
    file: Path, override: str, value: object
) -> None:
    assert read(file, override).data == {"name": "x", "matrix": {"batch_size": value}}


def test_an_override_can_make_a_new_section_and_the_last_one_wins(file: Path) -> None:
    source = read(file, "measure.warmup=1", "measure.warmup=2")
    assert source.data["measure"] == {"warmup": 2}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("matrix.batch_size", "must be KEY=VALUE"),
        ("=3", "must be KEY=VALUE"),
        ("matrix..x=3", "must be KEY=VALUE"),
        ("name.x=3", "name is not a mapping"),
        ("matrix.batch_size=[1", "matrix.batch_size: not YAML"),
        ("matrix.batch_size=", "matrix.batch_size: no value given"),
        (f"a={2**64}", f"a: an integer must fit into 64 bits, given '{2**64}'"),
        ("measure.warmup={min:5}", "measure.warmup.'min:5': no value given"),
        ("matrix.batch_size=.nan", "must be finite"),
        ("matrix.batch_size=*a", "aliases"),
    ],
)
def test_a_bad_override_is_named_as_it_was_given(file: Path, override: str, message: str) -> None:
    with pytest.raises(JobError) as caught:
        read(file, override)
    assert str(caught.value).startswith(f"--set {override}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_problem_is_located_at_its_value_its_key_or_what_holds_it(file: Path) -> None:
    source = read(file)
    value = Problem(path=("matrix", "batch_size", 1), message="no")
    assert source.explain(value) == "job.yaml:3:20: matrix.batch_size[1]: no"
    key = Problem(path=("matrix", "batch_size"), at_key=True, message="no")
    assert source.explain(key) == "job.yaml:3:3: matrix.batch_size: no"
    missing = Problem(path=("matrix", "other"), at_key=True, message="no")
    assert source.explain(missing) == "job.yaml:2:1: matrix.other: no"


def test_what_lacks_in_a_section_that_an_override_made_is_located_at_the_override(
    file: Path,
) -> None:
    source = read(file, "measure.warmup.min=5", "matrix.batch_size=1")
    lacks = Problem(path=("measure", "warmup", "max"), at_key=True, message="required")
    assert source.explain(lacks) == "--set measure.warmup.min=5: measure.warmup.max: required"
    of_the_file = Problem(path=("matrix", "other"), at_key=True, message="no")
    assert source.explain(of_the_file) == "job.yaml:2:1: matrix.other: no"


def test_a_problem_of_an_overridden_value_is_located_at_the_override(file: Path) -> None:
    source = read(file, "matrix.batch_size=1,0", "new.key=1")
    below = Problem(path=("matrix", "batch_size", 1), message="no")
    above = Problem(path=("new",), at_key=True, message="no")
    elsewhere = Problem(path=("name",), message="no")
    assert source.explain_all([below, above, elsewhere]).splitlines() == [
        "job.yaml:1:7: name: no",
        "--set new.key=1: new: no",
        "--set matrix.batch_size=1,0: matrix.batch_size[1]: no",
    ]


@pytest.mark.parametrize(
    ("content", "where", "message"),
    [
        (b"", "job.yaml:1:1: ", "given an empty file; `raybench init`"),
        (b"# nothing\n", "job.yaml:1:1: ", "given an empty file"),
        (b"- a\n", "job.yaml:1:1: ", "given a list"),
        (b"hello\n", "job.yaml:1:1: ", "given one value"),
        (b"name: x\nnote: \xff\n", "job.yaml:2:7: ", "UTF-8, given the byte 0xff"),
        (b"x" * (MAX_FILE_BYTES + 1), "job.yaml:1:1: ", "at most 100,000 bytes"),
    ],
)
def test_a_file_that_is_no_mapping_of_text_is_refused(
    file: Path, content: bytes, where: str, message: str
) -> None:
    file.write_bytes(content)
    with pytest.raises(JobError) as caught:
        read(file)
    assert str(caught.value).startswith(where)
    assert message in str(caught.value)


def test_a_file_that_cannot_be_opened_is_named_with_the_reason(tmp_path: Path) -> None:
    for path, reason in [
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "x\0y", "null byte"),
    ]:
        with pytest.raises(JobError, match=reason) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}:1:1: ")


def test_a_byte_order_mark_does_not_shift_the_columns(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbfname: x\n")
    source = read(file)
    assert source.tree.value_positions[("name",)] == (1, 7)
    assert source.text == "name: x\n"
