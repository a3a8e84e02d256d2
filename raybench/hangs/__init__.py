"""Find the rank that hangs: when to look for it, which evidence to collect, what it proves.

`suspicion` decides when to look. `responder` runs in the process of each rank and answers requests
from `processes`, which runs in the node's agent. `recorder`, `stacks` and `ras` parse the answers
of torch, Python and NCCL; `evidence` combines them for each rank. `verdict` names the rank and the
cause.
"""
