"""From the user's own command line to a Megatron that is up, for the profiler."""

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout

from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.training import training

from megatron.oases.arguments import OasesConfig
from megatron.oases.errors import UsageError
from megatron.oases.parsing import parse
from oases_patches import optimizer_distrib_optimizer, torch_norm

# The operations are the schedule's. One sub-batch is measured at a time, so that its size alone decides.
_SCHEDULE = ("--oases-schedule", "oases", "--oases-sub-batches", "1")


def initialize(flags: Sequence[str], device: str) -> tuple[Namespace, OasesConfig]:
    """Parses the flags and puts up process groups and random states.

    Raises:
        UsageError: Megatron, the schedule or the profiler cannot honour a flag.
    """
    if USING_PYTORCH_OPTIMIZER:
        optimizer_distrib_optimizer.apply()
    command_line = sys.argv
    try:
        sys.argv = [command_line[0], *flags, *_SCHEDULE]  # Megatron's own parser reads nothing else
        args, config = parse(device)
    finally:
        sys.argv = command_line
    _check(args, config)
    if args.sequence_parallel:
        torch_norm.apply()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        training.initialize_megatron()
    # Megatron logs every model that it builds, which here are many.
    logging.getLogger("megatron").setLevel(logging.WARNING)
    training.set_jit_fusion_options(tp_size=args.tensor_model_parallel_size)
    return args, config


def _check(args: Namespace, config: OasesConfig) -> None:
    if config.split == "sequence":
        raise UsageError("--oases-split sequence: the profiler measures sub-batches of whole samples; leave it out")
    if config.degrees is not None:
        raise UsageError(f"{config.degrees_flag}: the profiler measures every degree by itself; leave it out")
    for name in ("use_tp_pp_dp_mapping", "optimizer_cpu_offload"):
        if getattr(args, name, False):
            raise UsageError(f"--{name.replace('_', '-')}: the profiler does not measure with it")
