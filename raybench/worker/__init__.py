"""The inside of a worker: one process that owns one device.

Private parts of torch that this room uses, each with the reason:

* `torch._dynamo.utils.counters` (state): says whether anything was compiled. Resetting the compiler
  without need would import Inductor in each process.
* `torch._inductor.async_compile` (state): ends the threads and processes that compiled, which
  nothing public ends. Those left would be taken for the workload's.
* `get_config_copy` of the configurations of `torch._dynamo`, `torch._functorch`, `torch._inductor`
  and `torch.compiler` (state): reads all their settings at once.
* `torch.autocast_increment_nesting`, not documented (state): says whether a workload left autocast.
* `torch._C._cuda_clearCublasWorkspaces` (state): frees memory that would be taken for the
  workload's.
* `torch.distributed.distributed_c10d._world` (process_group): has the groups of the workload.
* `torch.distributed.distributed_c10d._abort_process_group` (process_group): ends collectives of
  NCCL that wait for a rank which has failed. `destroy_process_group` would wait with them.
"""
