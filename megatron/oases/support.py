"""Which of Megatron's features pretrain_gpt.py and the overlapped schedule run with.

The schedule runs the decoder's blocks itself. A feature that changes what a block is, who communicates for it, or in
which order layers run has to be brought into the schedule first; until then it is refused, by the name of its flag.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from megatron.oases.arguments import OasesConfig
from megatron.oases.errors import UsageError


@dataclass(frozen=True)
class Unsupported:
    """A feature that cannot be combined with the schedule."""

    flag: str
    feature: str
    is_used: Callable[[Namespace], bool]


def _set(name: str) -> Callable[[Namespace], bool]:
    """The flag was given a value, or switched on."""
    return lambda args: bool(getattr(args, name, None))


def _above_one(name: str) -> Callable[[Namespace], bool]:
    return lambda args: (getattr(args, name, None) or 1) > 1


def _not(name: str, *allowed: object) -> Callable[[Namespace], bool]:
    return lambda args: getattr(args, name, None) not in (None, *allowed)


def _has_weight_shards(args: Namespace) -> bool:
    """More shards of each weight than tensor-parallel ranks; Megatron fills in the ranks where none is given."""
    ranks = args.tensor_model_parallel_size
    return (getattr(args, "tensor_parallel_num_weight_shards", None) or ranks) != ranks


UNSUPPORTED = (
    Unsupported("--num-experts", "mixture of experts", _set("num_experts")),
    Unsupported("--expert-model-parallel-size", "expert parallelism", _above_one("expert_model_parallel_size")),
    Unsupported("--context-parallel-size", "context parallelism", _above_one("context_parallel_size")),
    Unsupported("--tensor-parallel-num-weight-shards", "weight shards", _has_weight_shards),
    Unsupported("--use-megatron-fsdp", "fully sharded data parallelism", _set("use_megatron_fsdp")),
    Unsupported("--use-torch-fsdp2", "fully sharded data parallelism", _set("use_torch_fsdp2")),
    Unsupported("--fp8-format", "fp8", _set("fp8")),
    Unsupported("--fp4-format", "fp4", _set("fp4")),
    Unsupported("--cuda-graph-impl", "CUDA graphs", _not("cuda_graph_impl", "none")),
    Unsupported("--enable-cuda-graph", "CUDA graphs", _set("enable_cuda_graph")),
    Unsupported("--external-cuda-graph", "CUDA graphs", _set("external_cuda_graph")),
    Unsupported(
        "--num-layers-per-virtual-pipeline-stage",
        "interleaved pipeline parallelism",
        _set("num_layers_per_virtual_pipeline_stage"),
    ),
    Unsupported(
        "--num-virtual-stages-per-pipeline-rank",
        "interleaved pipeline parallelism",
        _set("num_virtual_stages_per_pipeline_rank"),
    ),
    Unsupported(
        "--pipeline-model-parallel-layout",
        "a pipeline layout of your own",
        _set("pipeline_model_parallel_layout"),
    ),
    Unsupported("--mtp-num-layers", "multi-token prediction", _set("mtp_num_layers")),
    Unsupported("--multi-latent-attention", "multi-latent attention", _set("multi_latent_attention")),
    Unsupported(
        "--experimental-attention-variant",
        "experimental attention",
        _set("experimental_attention_variant"),
    ),
    Unsupported("--spec", "a layer specification of your own", _set("spec")),
    Unsupported(
        "--heterogeneous-layers-config-path",
        "heterogeneous layers",
        _set("heterogeneous_layers_config_path"),
    ),
    Unsupported(
        "--heterogeneous-layers-config-encoded-json",
        "heterogeneous layers",
        _set("heterogeneous_layers_config_encoded_json"),
    ),
    Unsupported("--transformer-impl", "layers that communicate by themselves", _not("transformer_impl", "local")),
    Unsupported("--tp-comm-overlap", "Transformer Engine's own overlap", _set("tp_comm_overlap")),
    Unsupported(
        "--distribute-saved-activations",
        "activations spread over the tensor-parallel group",
        _set("distribute_saved_activations"),
    ),
    Unsupported("--optimizer", "optimizers other than adam and sgd", _not("optimizer", "adam", "sgd")),
    Unsupported(
        "--num-distributed-optimizer-instances",
        "several distributed optimizers",
        _above_one("num_distributed_optimizer_instances"),
    ),
    Unsupported("--cpu-offloading-num-layers", "activation offloading", _set("cpu_offloading_num_layers")),
    Unsupported(
        "--fine-grained-activation-offloading",
        "activation offloading",
        _set("fine_grained_activation_offloading"),
    ),
    Unsupported("--mlp-chunks-for-training", "an MLP in chunks", _above_one("mlp_chunks_for_training")),
    Unsupported(
        "--defer-embedding-wgrad-compute",
        "Megatron's own deferred weight gradients",
        _set("defer_embedding_wgrad_compute"),
    ),
    Unsupported("--save-activations-interval", "saved activations", _set("save_activations_interval")),
    Unsupported("--save-dgrads-interval", "saved input gradients", _set("save_dgrads_interval")),
    Unsupported(
        "--recompute-modules",
        "recomputation of norms by themselves",
        lambda args: args.recompute_granularity == "selective" and "layernorm" in (args.recompute_modules or ()),
    ),
    Unsupported(
        "--account-for-embedding-in-pipeline-split",
        "a pipeline stage without layers",
        _set("account_for_embedding_in_pipeline_split"),
    ),
    Unsupported(
        "--account-for-loss-in-pipeline-split",
        "a pipeline stage without layers",
        _set("account_for_loss_in_pipeline_split"),
    ),
    Unsupported(
        "--te-rng-tracker",
        "dropout from a random state that replays cannot go back to",
        lambda args: bool(getattr(args, "te_rng_tracker", None)) and max(args.hidden_dropout, args.attention_dropout) > 0,
    ),
    Unsupported(
        "--recompute-num-layers",
        "fewer kept activations than one a block (with --recompute-method uniform, use 1)",
        lambda args: args.recompute_method == "uniform" and (args.recompute_num_layers or 1) > 1,
    ),
)


# These train something else than a GPT on running text, and bring another batch with them.
UNSUPPORTED_BY_SCRIPT = (
    Unsupported("--hybrid-layer-pattern", "hybrid models", _set("hybrid_layer_pattern")),
    Unsupported("--hybrid-override-pattern", "hybrid models", _set("hybrid_override_pattern")),
    Unsupported("--hybrid-context-parallel", "packed sequences", _set("hybrid_context_parallel")),
    Unsupported("--sft", "supervised fine-tuning", _set("sft")),
    Unsupported("--fim-data", "fill-in-the-middle data", _set("fim_data")),
    Unsupported("--dataloader-inter-document-masking", "packed sequences", _set("dataloader_inter_document_masking")),
    Unsupported("--dataloader-type", "a data loader of your own", lambda args: args.dataloader_type == "external"),
    Unsupported("--overlap-moe-expert-parallel-comm", "batch overlap", _set("overlap_moe_expert_parallel_comm")),
    Unsupported(
        "--rampup-batch-size",
        "it, since megatron-core 0.19 ignores it; use --step-batch-size-schedule",
        _set("rampup_batch_size"),
    ),
    Unsupported("--perform-rl-step", "reinforcement learning", _set("perform_rl_step")),
)


def check_script(args: Namespace) -> None:
    """Refuses what pretrain_gpt.py does not do, whichever schedule runs."""
    for entry in UNSUPPORTED_BY_SCRIPT:
        if entry.is_used(args):
            raise UsageError(f"{entry.flag}: pretrain_gpt.py does not support {entry.feature}")


def check_schedule(args: Namespace, config: OasesConfig) -> None:
    """Refuses what the schedule cannot run; does nothing for a vanilla run.

    Args:
        args: Megatron's arguments, before or after Megatron has validated them.
        config: the Oases flags.
    """
    if config.core_attention != "local" and getattr(args, "transformer_impl", "local") != "local":
        raise UsageError(
            f"--oases-core-attention {config.core_attention}: with --transformer-impl {args.transformer_impl} core attention is not ours to "
            "choose; use --transformer-impl local"
        )
    if not config.is_scheduled:
        return
    for entry in UNSUPPORTED:
        if entry.is_used(args):
            value = getattr(args, entry.flag.removeprefix("--").replace("-", "_"), True)
            shown = entry.flag if value is True else f"{entry.flag} {value}"
            raise UsageError(f"{shown}: {config.scheduling_flag} does not run with {entry.feature}")
    _check_split(args, config)
    _check_pieces(args, config)


def check_only(args: Namespace, config: OasesConfig) -> None:
    """Refuses what has no meaning where one half of training is left out."""
    if config.only is None:
        return
    if args.tensor_model_parallel_size == 1:
        raise UsageError(
            f"--oases-only {config.only} with --tensor-model-parallel-size 1: there is no tensor-parallel communication"
        )
    if args.save is not None:
        raise UsageError(f"--oases-only {config.only} with --save {args.save}: there is nothing worth keeping")
    if getattr(args, "tp_comm_overlap", False):
        raise UsageError(
            f"--oases-only {config.only} with --tp-comm-overlap: Transformer Engine communicates by itself"
        )
    if config.only == "communication" and getattr(args, "step_batch_size_schedule", None):
        raise UsageError(
            "--oases-only communication repeats the first step's collectives, and --step-batch-size-schedule changes them"
        )


def _check_pieces(args: Namespace, config: OasesConfig) -> None:
    if config.pieces == 1:
        return
    if args.sequence_parallel:
        raise UsageError(
            f"--sequence-parallel: {config.scheduling_flag} cuts all-reduces into pieces, and with it there are none"
        )
    if args.seq_length is not None and args.seq_length < config.pieces:
        raise UsageError(f"--seq-length {args.seq_length} is less than --oases-pieces {config.pieces}")


def _check_split(args: Namespace, config: OasesConfig) -> None:
    parts, size = config.sub_batches, args.micro_batch_size
    if config.split == "sequence":
        if args.seq_length is not None and args.seq_length < parts:
            raise UsageError(f"--seq-length {args.seq_length} is less than --oases-sub-batches {parts}")
        for flag, is_used in (
            ("--sequence-parallel", args.sequence_parallel),
            ("--recompute-granularity selective", args.recompute_granularity == "selective"),
            ("--oases-core-attention te", config.core_attention == "te"),
        ):
            if is_used:
                raise UsageError(f"--oases-split sequence does not run with {flag}: use --oases-split batch")
    # Megatron itself asks for a micro-batch size that is missing.
    elif size is not None and size < parts:
        raise UsageError(
            f"--micro-batch-size {size} is less than --oases-sub-batches {parts}: "
            f"use at most {size} sub-batches, or cut along --oases-split sequence"
        )
