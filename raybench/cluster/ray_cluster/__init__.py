"""Workers on Ray: the only place that imports it.

Private parts of Ray that this room uses, each with the reason. They are why `pyproject.toml` holds
Ray below the next minor version:

* `ray._private.node.Node`, three methods (private_ray): start a dashboard, an autoscaler and a log
  reader that no sweep uses. `ray.init` has no option against them.
* `ray._private.ray_constants.ENABLE_RAY_CLUSTER` (private_ray): Ray listens on loopback only while
  this is False.
* `ray._raylet.AuthenticationTokenLoader` and `Config` (private_ray): read the token and the
  settings of a new private Ray again, in a process that had another one before.
* `ray._private.authentication.authentication_token_setup` (connection): lets `ray.init` find the
  user's token for a cluster that is asked before it.
* `ray._private.services.find_node_ids` (connection): tells whether a node of a cluster runs on this
  host.
* `ray._private.worker.print_to_stdstream` (connection): prints what workers write, which raybench
  keeps in the logs of the run.
* `ray._raylet.GcsClient` (connection): asks a head for an answer in a process of its own, because a
  wrong address ends the process that asks.
* `ray._private.state.available_resources_per_node` (placement): what is free on each node.
* `ray._private.worker._global_node` (node_agent): the folder of the session's logs.
"""
