"""The inside of a worker: one process that owns one device.

Private parts of torch that raybench uses, each with the module and the reason. A new version of
torch may change them without notice.

worker:

* `torch._dynamo.utils.counters` (state, workloads.base): says whether anything was compiled.
* `torch._inductor.async_compile` (state): ends the threads and processes that compiled.
* `get_config_copy` of the configurations of `torch._dynamo`, `torch._functorch`, `torch._inductor`
  and `torch.compiler` (state): reads all their settings at once.
* `torch.autocast_increment_nesting` (state): says whether a workload left autocast.
* `torch._C._cuda_clearCublasWorkspaces` (state, measure.profiling): frees memory that would count
  as the workload's.
* `torch.distributed.distributed_c10d._world` (process_group): lists the groups of the workload.
* `torch.distributed.distributed_c10d._abort_process_group` (process_group): ends collectives of
  NCCL that wait for a rank which has failed. `destroy_process_group` would wait with them.

measure:

* `torch.cuda._sleep` (breakdown): holds the device back, so that a step is queued before it begins.
* `torch.library._scoped_library`, `torch._C._dispatch_has_kernel_for_dispatch_key`, the schemas of
  the operators `c10d::…` and `_create_work_from_future` (collectives): replace the kernels of
  collectives for a while.
* `ProcessGroup._start_coalescing`, `_end_coalescing`, `Work._source_rank` and `_tensor_to_object`
  (collectives): begin and end of coalesced calls, the sender of a recv, an object from bytes.
* `torch._C._autograd._enable_profiler_legacy` and `_disable_profiler_legacy` (profiling): profile
  without CUPTI, after which launches stay slower.
* `Module._compiled_call_impl` (profiling): a hook of a compiled module would be compiled with it.
* `torch.utils._pytree.tree_map_only` (profiling): finds the tensors in inputs and outputs.
* `torch._scaled_mm` (profiling): the matrix product of float8.
* `DistributedDataParallel._comm_hooks` (marks, workloads.base): says whether a hook is there.
* `DTensor._local_tensor` (marks): this rank's shard, without a new node of autograd.
* `torch.nn.modules.batchnorm._BatchNorm` (uneven): the base class of all batch norms.

workloads:

* `torch._fused_sdp_choice` and `torch._C._get_sdp_priority_order` (attention): the attention kernel
  that torch would take.
* `torch.ops.aten._scaled_dot_product_…_attention` (attention, language_models): give the
  log-sum-exp with the result.
* `torch.distributed._functional_collectives` (language_models): collectives that autograd knows.
"""
