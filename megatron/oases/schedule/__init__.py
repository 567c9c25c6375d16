"""A schedule is data: ordered operations over (block, sub-batch), built here and only read elsewhere."""

from megatron.oases.schedule.operation import Kind, Operation, Schedule
from megatron.oases.schedule.oases import build_oases_schedule
from megatron.oases.schedule.validate import ScheduleError, validate

__all__ = ["Kind", "Operation", "Schedule", "ScheduleError", "build_oases_schedule", "validate"]
