"""Pretrains a GPT with Megatron's training loop. Takes Megatron's flags, and those of the group "oases"."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.oases.environment import require

require("torch", "megatron.core")
# ruff: noqa: E402

from megatron.oases.arguments import OasesConfig, choose_device
from megatron.oases.errors import exit_on_usage_error
from megatron.oases.launch import complete_environment
from megatron.oases.meter import Meter, meter_of
from megatron.oases.quiet import silence


def main() -> None:
    with exit_on_usage_error():
        complete_environment()
        device = choose_device(sys.argv[1:])
        # From here on Megatron may be imported.
        silence()
        if device == "cpu":
            from megatron.oases.host import activate

            activate()
        pretrain_gpt(device)


def pretrain_gpt(device: str) -> None:
    """Trains, evaluates and saves as the command line says."""
    import torch.distributed
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
    from megatron.training import training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron.oases import gpt
    from megatron.oases.parsing import megatron_refusals, parse
    from oases_patches import optimizer_distrib_optimizer, torch_norm, training_checkpointing

    if USING_PYTORCH_OPTIMIZER:
        optimizer_distrib_optimizer.apply()
    args, config = parse(device)
    if args.sequence_parallel:
        torch_norm.apply()
    if args.load is not None or args.pretrained_checkpoint is not None:
        training_checkpointing.apply()
    with megatron_refusals():
        is_metered = config.is_scheduled and config.only is None
        meter = meter_of(args.distributed_backend) if is_metered else None
        container = pretrain_cfg_container_from_args(args, gpt.model_config(args, config, meter=meter))
    with reported(args, config), evidenced(config, meter):
        training.pretrain(container, gpt.build_datasets, ModelType.encoder_or_decoder, gpt.forward_step)
    torch.distributed.destroy_process_group()


@contextmanager
def reported(args: Namespace, config: OasesConfig) -> Iterator[None]:
    """Writes `--oases-report` for what runs inside, which `--oases-only` cuts down to one half."""
    if config.report is None:
        yield
        return
    import torch
    from megatron.core import parallel_state
    from megatron.training import training

    from megatron.oases.host.replacements import Replacements
    from megatron.oases.plan import format_degrees
    from megatron.oases.report.alone import communication_only, compute_only, starting_together
    from megatron.oases.report.iterations import IterationReport, report_steps
    from megatron.oases.report.ranks import is_reporter

    report = IterationReport(
        config.report,
        {
            "schedule": config.schedule,
            "sub_batches": config.sub_batches,
            "pieces": config.pieces,
            "degrees": format_degrees(config.degrees) if config.degrees is not None else None,
            "only": config.only,
            "device": config.device,
            "world_size": args.world_size,
            "tensor_model_parallel_size": args.tensor_model_parallel_size,
            # None where the number changes during the run.
            "tokens_per_iteration": None
            if args.step_batch_size_schedule
            else args.global_batch_size * args.seq_length,
        },
    )
    step = training.train_step
    if config.only == "compute":
        step = compute_only(step, parallel_state.get_tensor_model_parallel_group)
    elif config.only == "communication":
        step = communication_only(step, parallel_state.get_tensor_model_parallel_group)
    # On the CPU `synchronize` is the host's stand-in.
    step = report_steps(step, report, is_reporter=is_reporter, synchronize=torch.cuda.synchronize)
    if config.only == "communication":
        step = starting_together(step)
    replacements = Replacements()
    replacements.set(training, "train_step", step)
    try:
        yield
    finally:
        replacements.undo()
        if is_reporter():
            report.write()


@contextmanager
def evidenced(config: OasesConfig, meter: Meter | None) -> Iterator[None]:
    """Says at the end of what runs inside, and every `--oases-report-interval`, how much communication was hidden."""
    if meter is None:
        yield
        return
    from megatron.training import training

    from megatron.oases.host.replacements import Replacements
    from megatron.oases.report.evidence import Evidence
    from megatron.oases.report.ranks import is_reporter

    evidence = Evidence(
        meter,
        predicted=config.plan.predicted if config.plan is not None else None,
        plan=config.degrees_flag,
        interval=config.report_interval,
    )
    replacements = Replacements()
    replacements.set(training, "train_step", evidence.watch(training.train_step, is_reporter))
    try:
        yield
    finally:
        replacements.undo()
    evidence.finish()


if __name__ == "__main__":
    main()
