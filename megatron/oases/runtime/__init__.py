"""Runs schedules on tensors: blocks cut from Megatron layers, collectives, and the executor."""

from megatron.oases.runtime.attach import attach_schedule

__all__ = ["attach_schedule"]
