"""Leaves out of the log what tells the user nothing he can act on; errors and Megatron's own log stay."""

import logging
import warnings

_WARNINGS = (
    # What this run uses instead is said once, by us.
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "Only transformer-engine",
    "absl.logging is not installed",
    "MimoModelConfig is experimental",
    "'pin_memory' argument is set as true but no accelerator is found",
    "torch.distributed is disabled, unavailable or uninitialized",
    "The argument order of load has been changed",
)
_LOG_LINES = {
    "torch.utils.cpp_extension": ("No CUDA runtime is found",),
    "megatron.core.models.gpt.gpt_model": ("GPTModel IS DEPRECATED",),
    "megatron.core.rerun_state_machine": (
        "RerunStateMachine initialized",
        "Setting RerunStateMachine mode",
        "Result validation enabled",
        "Overwriting rerun_state_machine",
    ),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCore's async save is deprecated",),
    "megatron.core.datasets.gpt_dataset": ("Unable to save",),
}


def silence() -> None:
    """Call before torch and Megatron are imported: most of these lines appear then."""
    # The place is where Megatron's own helper warns, not where something is wrong.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name, lines in _LOG_LINES.items():
        logging.getLogger(name).addFilter(
            lambda record, lines=lines: not record.getMessage().startswith(lines)
        )
