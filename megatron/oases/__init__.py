"""Oases: tensor parallelism whose communication hides behind computation, for the released Megatron-LM."""

__version__ = "0.1.0"
