"""Timeouts and periods of the driver, in seconds.

`*_EVERY_S` is a period. `*_EACH_S` is multiplied by the number of workers or nodes.
"""

# The end of a point. NCCL's abort takes half a second.
ABORT_S = 1.5
# How long ranks may take to write their stacks.
STACK_DUMP_S = 0.3
# The GPU driver frees the memory of an ended process within a second.
MEMORY_FREE_S = 10.0

# Starting workers. Many workers of one node load torch at once, which takes longer.
WORKER_START_S = 180.0
WORKER_START_EACH_S = 5.0
# How long to wait for other workers after the first worker. Later workers join while points run.
SLOW_WORKERS_S = 20.0
# Ray gives a device that was free a moment ago in milliseconds, or not at all.
PLACEMENT_S = 2.0
# How long to wait for devices that the previous sweep is still releasing.
FREE_SOON_S = 5.0
# A sweep without any device gives up after this time or the time of --wait, if that is longer.
FIRST_DEVICE_S = 60.0
LOOK_FOR_WORKERS_EVERY_S = 1.0
POLL_EVERY_S = 0.25

# Process groups. An idle group is destroyed in milliseconds; other points wait for it.
STORE_START_S = 60.0
LEAVE_GROUP_S = 10.0

# The agents of nodes. They answer in a millisecond.
AGENT_ANSWER_S = 0.5
AGENT_START_S = 30.0
AGENT_KILL_S = 1.0
# While an agent locks devices, it waits for other processes of its host that lock devices.
AGENT_LOCK_S = 10.0
# Listing the processes of a busy host takes long.
AGENT_LOOK_S = 2.0
# An agent makes some hundred calls of NVML for each device, and loads the library.
AGENT_FACTS_S = 20.0
# A node without an answer for this time is frozen or cut off. Ray needs a minute to notice.
NODE_SILENCE_S = 8.0
# The limit while the agent starts: 64 workers that started on two busy cores have delayed the first
# answer of an agent by more than a minute.
NODE_STARTING_S = 180.0
# A node that is silent for this time is checked for a raylet that has ended.
NODE_REFUSAL_AFTER_S = 2.0
NODE_CONNECT_S = 0.1
# Upper limit of the silence counted between two looks at a node, because the driver itself may have
# been stopped, or had no reason to look.
LONGEST_LOOK_S = 1.5
# Hundreds of points may ask at once, so looks are limited. A ping and its answer take the driver
# 0.3 ms, so a thousand nodes are pinged once a second.
LOOK_AT_NODES_EVERY_S = 0.25
LOOK_AT_EACH_NODE_S = 0.001
POINT_LOOKS_AT_NODES_EVERY_S = 1.0

# Ray itself. The connection to its head; TCP retransmits after one second.
HEAD_CONNECT_S = 2.0
ASK_HEAD_EVERY_S = 1.0
ASK_HEAD_AGAIN_S = 1.0
HEAD_IS_RAY_S = 15.0
FIND_HEAD_S = 5.0
# How long Ray may take to raise an error of its own before this process is ended for it.
RAYS_OWN_ERROR_S = 5.0
RAYS_OWN_ERROR_AT_START_S = 2.0
WATCH_START_EVERY_S = 0.2
# How long points that still run may take to end when the cluster is closed.
CLOSE_S = 3.0

# Devices that another sweep has.
ASK_OTHER_SWEEPS_EVERY_S = 1.0
# The agents of a killed driver end within a minute.
ENDED_SWEEP_S = 65.0

# The search for a hanging rank. Progress is read at this period until the time of the next look is
# known, and then at least once in HANG_LONGEST_PAUSE_S.
HANG_FIRST_LOOK_S = 5.0
HANG_POLL_S = 0.1
HANG_PROGRESS_EVERY_S = 5.0
HANG_LONGEST_PAUSE_S = 30.0
# For the stacks and recordings of the ranks of a node, and for NCCL's service.
HANG_EVIDENCE_S = 2.0
HANG_RAS_S = 1.5
HANG_ANSWER_S = 6.0
