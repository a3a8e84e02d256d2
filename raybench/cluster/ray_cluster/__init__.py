"""Workers on Ray: the only place that imports it.

Private parts of Ray that this room uses, each with the reason. They are why `pyproject.toml` holds
Ray below the next minor version:

* `ray._private.node.Node`, three methods (start): start a dashboard, an autoscaler and a log
  reader that no sweep uses. `ray.init` has no option against them.
* `ray._private.ray_constants.ENABLE_RAY_CLUSTER` (start): if False, Ray listens on loopback only.
* `_node_ip_address`, `_temp_dir`, `_system_config` of `ray.init` (start): set up a private Ray.
* `ray._raylet.AuthenticationTokenLoader` and `Config` (start): read the token and the
  settings of a new private Ray again, in a process that had another one before.
* `ray._private.authentication.authentication_token_setup` (start): lets `ray.init` find the
  user's token for a cluster that is asked before it.
* `ray._private.services.find_node_ids` (start): tells whether any Ray has a node on this host.
* `ray._common.utils.get_default_ray_temp_dir` (start): the folder where `ray start` writes.
* `ray._private.worker.print_to_stdstream` (start): prints errors of raylets on stdout.
* `ray._raylet.GcsClient` (start): asks a head for an answer in a process of its own, because a
  wrong address ends the process that asks.
* `ray._private.state` (placements, pool): what is free on each node, and which other sweeps run.
* `ray._private.worker._global_node` (nodes): the folder of the session's logs.
"""

import os

# Ray reads these when it is imported, which the modules of this room do. The uv hook would build a
# new environment for every worker (ray#59639). A thread that still asks after `ray.shutdown` would
# start a second Ray, on the host's outside address. The others silence Ray's own lines.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
