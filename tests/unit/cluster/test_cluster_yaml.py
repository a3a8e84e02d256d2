"""The committed cluster files are accepted by Ray's own validation."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("file", ["cluster.yaml", "docs/launchers/aws.yaml"])
def test_ray_accepts_the_cluster_file(file):
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = YAML(typ="safe").load((REPOSITORY / file).read_text())
    validate_config(prepare_config(config))
