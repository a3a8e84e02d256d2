"""The committed cluster files are accepted by Ray's own validation."""

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

REPOSITORY = Path(__file__).parents[3]


def documented_cluster(provider):
    blocks = re.findall(
        r"```yaml\n(cluster_name:.*?)```", (REPOSITORY / "docs/cluster.md").read_text(), re.DOTALL
    )
    (block,) = [text for text in blocks if f"type: {provider}" in text]
    return block


@pytest.mark.parametrize(
    "text",
    [
        pytest.param((REPOSITORY / "cluster.yaml").read_text(), id="cluster.yaml"),
        pytest.param(documented_cluster("aws"), id="docs/cluster.md, AWS"),
    ],
)
def test_ray_accepts_the_cluster_file(text):
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = YAML(typ="safe").load(text)
    validate_config(prepare_config(config))
