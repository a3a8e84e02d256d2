"""How long a cluster waits for what, in one place; tests pass smaller or larger values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTimeouts:
    """Seconds after which a wait is given up, or between two looks (`*_every_s`)."""

    # The end of a point. NCCL's abort takes half a second; a rank that does not answer in this time
    # is stuck.
    abort_s: float = 1.5
    # faulthandler writes the stacks of the ranks, which say who hangs.
    stack_dump_s: float = 0.3
    # The GPU driver takes back the memory of a process that ended within a second.
    memory_free_s: float = 10.0

    # Starting workers. Longer where many workers of one node load torch on its cores at once.
    worker_start_s: float = 180.0
    worker_start_each_s: float = 5.0
    # The other workers, once the first is there; later ones are taken in while points run.
    slow_workers_s: float = 20.0
    # Bundles on devices that were free a moment ago come in milliseconds, or not at all.
    placement_s: float = 2.0
    # Devices that the last sweep has let go of are free a moment later.
    free_soon_s: float = 5.0
    # Without any device for so long, a sweep without --wait gives up.
    first_device_s: float = 60.0
    look_for_workers_every_s: float = 1.0
    poll_every_s: float = 0.25

    # Process groups. An idle group goes in milliseconds; other points wait for it.
    store_start_s: float = 60.0
    leave_group_s: float = 10.0

    # The agents of nodes: they answer in a millisecond, and a slow one is not waited for.
    agent_answer_s: float = 0.5
    agent_start_s: float = 30.0
    agent_kill_s: float = 1.0
    # An agent waits for whoever locks a device of its host at the same time.
    agent_lock_s: float = 10.0
    # Listing the processes of a host that has thousands, all busy.
    agent_look_s: float = 2.0
    # Some hundred questions to NVML for each device, the first time with the library to load.
    agent_facts_s: float = 20.0
    # Without an answer for so long, a node is frozen or cut off. Ray takes a minute to say so.
    node_silence_s: float = 8.0
    # As long as its agent starts: 64 workers that start on two busy cores have kept an agent from
    # its first answer for more than a minute.
    node_starting_s: float = 180.0
    # A node whose raylet has ended refuses connections; one that is frozen or cut off does not.
    node_refusal_after_s: float = 2.0
    node_connect_s: float = 0.1
    # No more than this counts as silence between two looks at a node: the driver may have been
    # stopped itself, or had no reason to look.
    longest_look_s: float = 1.5
    # Hundreds of points may ask at once. A thousand nodes are looked at once a second: a ping and
    # its answer take the driver 0.3 ms.
    look_at_nodes_every_s: float = 0.25
    look_at_each_node_s: float = 0.001
    point_looks_at_nodes_every_s: float = 1.0

    # Ray itself. The connection to its head: longer than the second after which TCP sends again.
    head_connect_s: float = 2.0
    ask_head_every_s: float = 1.0
    ask_head_again_s: float = 1.0
    head_is_ray_s: float = 15.0
    find_head_s: float = 5.0
    # How long Ray may take to raise an error of its own before this process is ended for it.
    rays_own_error_s: float = 5.0
    rays_own_error_at_start_s: float = 2.0
    watch_start_every_s: float = 0.2
    # For points that still run when the cluster is closed.
    close_s: float = 3.0

    # Devices that another sweep has.
    ask_other_sweeps_every_s: float = 1.0
    # What a killed driver leaves behind is gone after so long; docs/explanation/reliability.md.
    ended_sweep_s: float = 65.0


DEFAULT_TIMEOUTS = ClusterTimeouts()
