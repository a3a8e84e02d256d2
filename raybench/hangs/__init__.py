"""Which rank hangs: when to look, what is collected, and what it shows.

`suspicion` says when a point is worth a look. `responder` runs in the process of a rank, and
`processes` asks it from outside. `recorder`, `stacks` and `ras` read what torch, Python and NCCL
know; `evidence` puts it together for each rank. `verdict` names the rank and the cause.
"""
