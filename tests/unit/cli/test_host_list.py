"""Lists of nodes, as Slurm writes them."""

import subprocess

import pytest
from commands import refusal_of

from raybench.cli.host_list import read_hosts
from raybench.errors import UsageError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu[01-03,15],login1", ["gpu01", "gpu02", "gpu03", "gpu15", "login1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]-ib", ["n098-ib", "n099-ib", "n100-ib", "n101-ib"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("alpha, beta,alpha", ["alpha", "beta"]),
        ("a.site", ["a.site"]),
    ],
)
def test_lists_are_expanded_in_order(text, hosts):
    assert list(read_hosts(text)) == hosts


def test_file_has_names_lists_and_comments(tmp_path):
    path = tmp_path / "nodes"
    path.write_text("# rack 1\nalpha\n\nbeta[1-2]  # new\n")
    assert read_hosts(str(path)) == ("alpha", "beta1", "beta2")


@pytest.mark.parametrize(
    "text",
    ["gpu[1-", "gpu[3-1]", "gpu[a]", "gpu[]", "a,,b", "n[0-999999999]", "a b", "-x y", "n[1]]"],
)
def test_wrong_list_is_refused_in_a_line(text):
    assert "gpu[01-12,15],login1" in refusal_of(UsageError, read_hosts, text)


def test_missing_or_empty_file_is_refused(tmp_path):
    missing = str(tmp_path / "nodes")
    assert "No such file" in refusal_of(UsageError, read_hosts, missing)
    (tmp_path / "nodes").write_text("# nothing\n")
    assert "names no node" in refusal_of(UsageError, read_hosts, missing)


def test_names_are_those_of_scontrol():
    """Where Slurm is installed, its own expansion is the same."""
    text = "gpu[01-03,15],login1,r[1-2]n[01-02]"
    try:
        told = subprocess.run(
            ["scontrol", "show", "hostnames", text], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("no Slurm here")
    assert told.stdout.split() == list(read_hosts(text))
