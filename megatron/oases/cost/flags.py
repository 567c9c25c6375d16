"""From Megatron's flags to what the simulator predicts. Imports Megatron, so on the CPU `host.activate` comes first."""

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

from megatron.oases.arguments import OasesConfig
from megatron.oases.available import Available
from megatron.oases.cost.system import System
from megatron.oases.cost.workload import ModelShape, Workload
from megatron.oases.errors import UsageError
from megatron.oases.parsing import parse
from megatron.oases.sizes import indivisible

_UNKNOWN = (
    ("context_parallel_size", lambda value: value > 1, "context parallelism"),
    ("expert_model_parallel_size", lambda value: value > 1, "expert parallelism"),
    ("num_experts", bool, "mixture of experts"),
    ("virtual_pipeline_model_parallel_size", bool, "interleaved pipeline parallelism"),
    ("pipeline_model_parallel_layout", bool, "a pipeline layout of your own"),
    ("decoder_first_pipeline_num_layers", bool, "pipeline stages of different size"),
    ("decoder_last_pipeline_num_layers", bool, "pipeline stages of different size"),
    ("use_megatron_fsdp", bool, "fully sharded data parallelism"),
    ("use_torch_fsdp2", bool, "fully sharded data parallelism"),
    ("step_batch_size_schedule", bool, "a batch size that changes"),
    ("fp8", bool, "fp8"),
    ("fp4", bool, "fp4"),
    ("mtp_num_layers", bool, "multi-token prediction"),
    ("multi_latent_attention", bool, "multi-latent attention"),
    ("tp_comm_overlap", bool, "Transformer Engine's own overlap"),
    ("distribute_saved_activations", bool, "activations spread over the tensor-parallel group"),
    ("cpu_offloading_num_layers", bool, "activation offloading"),
    ("use_tp_pp_dp_mapping", bool, "another order of ranks"),
    ("qk_layernorm", bool, "normalization of queries and keys"),
    ("qk_l2_norm", bool, "normalization of queries and keys"),
    ("attention_output_gate", bool, "a gate behind attention"),
    ("softmax_type", lambda value: value != "vanilla", "another softmax"),
    ("window_size", bool, "attention to a window"),
    ("experimental_attention_variant", bool, "experimental attention"),
    ("heterogeneous_layers_config_path", bool, "heterogeneous layers"),
    ("heterogeneous_layers_config_encoded_json", bool, "heterogeneous layers"),
    ("fp32_residual_connection", bool, "a residual in fp32"),
    ("use_precision_aware_optimizer", bool, "an optimizer with other types than fp32"),
    ("num_distributed_optimizer_instances", lambda value: value > 1, "several distributed optimizers"),
    ("optimizer_cpu_offload", bool, "an optimizer on the host"),
    ("fine_grained_activation_offloading", bool, "activation offloading"),
    ("account_for_embedding_in_pipeline_split", bool, "a pipeline stage without layers"),
    ("account_for_loss_in_pipeline_split", bool, "a pipeline stage without layers"),
    ("defer_embedding_wgrad_compute", bool, "Megatron's own deferred weight gradients"),
    ("delay_wgrad_compute", bool, "Megatron's own deferred weight gradients"),
    ("mlp_chunks_for_training", lambda value: value > 1, "an MLP in chunks"),
    ("cuda_graph_impl", lambda value: value != "none", "CUDA graphs"),
    ("ddp_bucket_size", bool, "buckets of your own size"),
    ("ddp_num_buckets", bool, "buckets of your own number"),
)


def parse_flags(
    flags: Sequence[str], *, available: Available, world_size: int
) -> tuple[Namespace, OasesConfig]:
    """Megatron's validated arguments for a run on `world_size` ranks, of which this process is none.

    May be called again. What Megatron prints meanwhile is left out.

    Args:
        flags: the command line of pretrain_gpt.py, without the program's name.
        available: what the devices have that are planned for, which are not this machine's.
        world_size: number of ranks.

    Raises:
        UsageError: Megatron or we refuse a flag.
    """
    from megatron.training.global_vars import unset_global_variables

    with _as_rank_0(flags, world_size), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        logging.disable(logging.WARNING)
        try:
            device = "cuda" if available.cuda else "cpu"
            args, config = parse(device, flags, available=available, possible=available.possible)
        finally:
            logging.disable(logging.NOTSET)
            unset_global_variables()
    if args.oases_device not in ("auto", device):
        raise UsageError(f"--oases-device {args.oases_device}, but the costs are of devices of the kind {device}")
    return args, config


@contextmanager
def _as_rank_0(flags: Sequence[str], world_size: int) -> Iterator[None]:
    """Megatron's parser reads the command line and the environment of the process."""
    command_line, environment = sys.argv, dict(os.environ)
    sys.argv = [command_line[0], *flags]
    os.environ.update(RANK="0", WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    try:
        yield
    finally:
        sys.argv = command_line
        os.environ.clear()
        os.environ.update(environment)


def workload_of(args: Namespace, config: OasesConfig, *, on_cpu: bool) -> Workload:
    """What the arguments train.

    Args:
        args: Megatron's arguments.
        config: the Oases flags.
        on_cpu: whether the devices that it is trained on are CPUs.

    Raises:
        UsageError: something that is not simulated.
    """
    _check(args, config)
    recompute, recompute_layers = _recomputation(args)
    recomputed = None
    if config.plan is not None:
        recomputed = tuple(block.recomputed for block in config.plan.blocks)
        recompute, recompute_layers = "full" if all(recomputed) else "none", 0
    return Workload(
        model=ModelShape.from_args(args),
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        data=args.data_parallel_size,
        micro_batch=args.micro_batch_size,
        micro_batches=args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
        recompute=recompute,
        recompute_layers=recompute_layers,
        degrees=tuple(degree for layer in config.degrees or () for degree in layer),
        recomputed=recomputed,
        sub_batches=config.sub_batches,
        pieces=config.pieces,
        sequence_parallel=args.sequence_parallel and args.tensor_model_parallel_size > 1,
        distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        gradient_bytes=_gradient_bytes(args),
        hidden_dropout=args.hidden_dropout > 0,
        attention_dropout=args.attention_dropout > 0,
        unfused=on_cpu,
    )


def system_of(config: OasesConfig, *, host_sees_completion: bool) -> System:
    """Who orders the operations. See `System` for `host_sees_completion`."""
    return System(schedule=config.schedule, without=config.ablate, host_sees_completion=host_sees_completion)


def _gradient_bytes(args: Namespace) -> int:
    half = args.fp16 or args.bf16
    return 4 if not half or args.accumulate_allreduce_grads_in_fp32 else 2


def _recomputation(args: Namespace) -> tuple[str, int]:
    match args.recompute_granularity, args.recompute_method:
        case None, _:
            return "none", 0
        case "full", "block":
            return "block", args.recompute_num_layers
        case "full", "uniform" if args.recompute_num_layers == 1:
            return "full", 0
        case "full", method:
            raise UsageError(
                f"--recompute-method {method} --recompute-num-layers {args.recompute_num_layers} is not simulated; "
                "known are uniform with 1, and block"
            )
        case granularity, _:
            raise UsageError(f"--recompute-granularity {granularity} is not simulated; known are full and none")


def _check(args: Namespace, config: OasesConfig) -> None:
    for name, is_used, feature in _UNKNOWN:
        value = getattr(args, name, None)
        if value is not None and is_used(value):
            raise UsageError(f"--{name.replace('_', '-')}: {feature} is not simulated")
    if args.add_qkv_bias and not args.add_bias_linear:  # with the second Megatron sets the first
        raise UsageError("--add-qkv-bias: a bias of queries, keys and values alone is not simulated")
    if config.only is not None:
        raise UsageError(f"--oases-only {config.only} is not simulated: the table has computation and communication alone")
    if config.split == "sequence":
        raise UsageError("--oases-split sequence is not simulated: costs are of whole samples")
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if groups < args.tensor_model_parallel_size:
        raise UsageError(
            f"--num-query-groups {groups} is less than --tensor-model-parallel-size {args.tensor_model_parallel_size}: "
            "the all-gather that attention then has inside is not simulated"
        )
    if args.num_layers % args.pipeline_model_parallel_size:
        stages = args.pipeline_model_parallel_size
        raise UsageError(indivisible("--num-layers", args.num_layers, "--pipeline-model-parallel-size", stages))
    if args.optimizer != "adam":
        raise UsageError(f"--optimizer {args.optimizer} is not simulated; adam is")
