"""A sweep says where it stands on a version of torch that raybench has not been tested with."""

import pytest

from raybench.records.environment import warn_of_torch


@pytest.mark.parametrize("version", ["2.11.0", "2.13.1+cu130", "2.13.0a0+gitabc"])
def test_a_tested_torch_or_an_older_one_has_no_warning(version: str) -> None:
    assert warn_of_torch({"torch": version}) is None
    assert warn_of_torch({}) is None


@pytest.mark.parametrize("version", ["2.14.0", "2.100.0+cpu", "3.0.0"])
def test_a_newer_torch_is_named_with_the_newest_that_was_tested(version: str) -> None:
    assert warn_of_torch({"torch": version}) == (
        f"torch {version} is newer than 2.13, the newest that raybench was tested with"
    )
