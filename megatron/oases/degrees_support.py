"""Whether blocks of their own degrees can run with these flags, on this many ranks."""

from argparse import Namespace

from megatron.oases.arguments import OasesConfig
from megatron.oases.cost.workload import ModelShape
from megatron.oases.errors import UsageError
from megatron.oases.plan import Run, check_degrees, check_plan


def check_block_flags(args: Namespace, config: OasesConfig) -> None:
    """Refuses what blocks of these degrees cannot run with; does nothing where all have that of the flags.

    Args:
        args: Megatron's arguments, validated.
        config: the Oases flags.
    """
    if config.degrees is None:
        return
    run = Run(
        model=ModelShape.from_args(args),
        world_size=args.world_size,
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        micro_batch=args.micro_batch_size,
        global_batch=args.global_batch_size,
        sub_batches=config.sub_batches,
        eval_micro_batch=args.eval_micro_batch_size,
    )
    where = config.degrees_flag
    if config.plan is not None:
        check_plan(config.plan, run, where=where, force=config.plan_force)
        _check_recomputation(args, config)
    else:
        check_degrees(config.degrees, run, where=where)
    if any(degree != args.tensor_model_parallel_size for layer in config.degrees for degree in layer):
        _check_features(args, config)


def _check_recomputation(args: Namespace, config: OasesConfig) -> None:
    recomputed = [block.recomputed for block in config.plan.blocks]
    if args.recompute_granularity is None or (args.recompute_granularity == "full" and all(recomputed)):
        return
    raise UsageError(
        f"--recompute-granularity {args.recompute_granularity}: {config.degrees_flag} recomputes {sum(recomputed)} of "
        f"{len(recomputed)} blocks, and says which: leave it out"
    )


def _check_features(args: Namespace, config: OasesConfig) -> None:
    """Only where a degree is not T."""
    if config.split == "sequence":
        raise UsageError(
            f"--oases-split sequence: {config.degrees_flag} divides samples among sub-groups; use --oases-split batch"
        )
    if config.only is not None:
        raise UsageError(f"--oases-only {config.only} knows one tensor-parallel group; {config.degrees_flag} makes more")
    if args.softmax_type == "learnable":
        raise UsageError(f"--softmax-type learnable: {config.degrees_flag} does not run with weights in core attention")
