"""A schedule is data: ordered operations over (part of the model, sub-batch), built here and only read elsewhere."""

from megatron.oases.schedule.oases import build_oases_schedule
from megatron.oases.schedule.operation import Kind, Operation, Part, Schedule, collectives, dependencies
from megatron.oases.schedule.validate import ScheduleError, validate

__all__ = [
    "Kind",
    "Operation",
    "Part",
    "Schedule",
    "ScheduleError",
    "build_oases_schedule",
    "collectives",
    "dependencies",
    "validate",
]
