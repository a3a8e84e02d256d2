"""How long the driver waits for what, in seconds; tests set smaller or larger values.

`*_EVERY_S`: between two looks. `*_EACH_*`: for each worker or node.
"""

# The end of a point. NCCL's abort takes half a second; a rank that takes longer is stuck.
ABORT_S = 1.5
# faulthandler writes the stacks of the ranks, which say who hangs.
STACK_DUMP_S = 0.3
# The GPU driver takes back the memory of a process that ended within a second.
MEMORY_FREE_S = 10.0

# Starting workers. Longer where many workers of one node load torch on its cores at once.
WORKER_START_S = 180.0
WORKER_START_EACH_S = 5.0
# The other workers, once the first is there; later ones are taken in while points run.
SLOW_WORKERS_S = 20.0
# Bundles on devices that were free a moment ago come in milliseconds, or not at all.
PLACEMENT_S = 2.0
# Devices that the last sweep has let go of are free a moment later.
FREE_SOON_S = 5.0
# Without any device for so long, or for the time of --wait if that is longer, a sweep gives up.
FIRST_DEVICE_S = 60.0
LOOK_FOR_WORKERS_EVERY_S = 1.0
POLL_EVERY_S = 0.25

# Process groups. An idle group goes in milliseconds; other points wait for it.
STORE_START_S = 60.0
LEAVE_GROUP_S = 10.0

# The agents of nodes: they answer in a millisecond, and a slow one is not waited for.
AGENT_ANSWER_S = 0.5
AGENT_START_S = 30.0
AGENT_KILL_S = 1.0
# An agent waits for whoever locks a device of its host at the same time.
AGENT_LOCK_S = 10.0
# Listing the processes of a host that has thousands, all busy.
AGENT_LOOK_S = 2.0
# Some hundred questions to NVML for each device, the first time with the library to load.
AGENT_FACTS_S = 20.0
# Without an answer for so long, a node is frozen or cut off. Ray takes a minute to say so.
NODE_SILENCE_S = 8.0
# As long as its agent starts: 64 workers that start on two busy cores have kept an agent from
# its first answer for more than a minute.
NODE_STARTING_S = 180.0
# A node whose raylet has ended refuses connections; one that is frozen or cut off does not.
NODE_REFUSAL_AFTER_S = 2.0
NODE_CONNECT_S = 0.1
# No more than this counts as silence between two looks at a node: the driver may have been
# stopped itself, or had no reason to look.
LONGEST_LOOK_S = 1.5
# Hundreds of points may ask at once. A thousand nodes are looked at once a second: a ping and
# its answer take the driver 0.3 ms.
LOOK_AT_NODES_EVERY_S = 0.25
LOOK_AT_EACH_NODE_S = 0.001
POINT_LOOKS_AT_NODES_EVERY_S = 1.0

# Ray itself. The connection to its head: longer than the second after which TCP sends again.
HEAD_CONNECT_S = 2.0
ASK_HEAD_EVERY_S = 1.0
ASK_HEAD_AGAIN_S = 1.0
HEAD_IS_RAY_S = 15.0
FIND_HEAD_S = 5.0
# How long Ray may take to raise an error of its own before this process is ended for it.
RAYS_OWN_ERROR_S = 5.0
RAYS_OWN_ERROR_AT_START_S = 2.0
WATCH_START_EVERY_S = 0.2
# For points that still run when the cluster is closed.
CLOSE_S = 3.0

# Devices that another sweep has.
ASK_OTHER_SWEEPS_EVERY_S = 1.0
# What a killed driver leaves behind is gone after so long.
ENDED_SWEEP_S = 65.0
