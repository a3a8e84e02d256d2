"""Ray clusters whose nodes are processes of this host."""

from typing import Any
from unittest import mock

import ray._private.node
from ray.cluster_utils import Cluster

# Programs of a head that no test uses; each takes half a second of a core to start.
_UNUSED = ("start_api_server", "start_monitor", "start_log_monitor")
# Nor one process for each slot, which Ray would start for each driver.
_SETTINGS = {"prestart_worker_first_driver": False}


def start_cluster(num_cpus: int, **head: Any) -> Cluster:
    """Start a cluster of one node with so many CPU slots; head: more arguments of that node."""
    unused = {name: mock.Mock() for name in _UNUSED}
    with mock.patch.multiple(ray._private.node.Node, **unused):
        return Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": num_cpus,
                "num_gpus": 0,
                "_system_config": _SETTINGS,
                **head,
            },
        )
