"""Workers on Ray; no other room imports Ray. `ray_internals` has all uses of its private parts."""

import logging
import os

# Ray reads these variables when it is imported, so this file sets them first.
# The uv hook would build a new environment for every worker (ray#59639).
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# A thread that calls Ray after `ray.shutdown` would start a second Ray, open to the network.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
# These silence Ray's own lines.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# In a notebook Ray asks for ipywidgets when it is imported; no sweep uses them.
logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
