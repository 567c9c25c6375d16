"""A schedule is data: ordered operations over (part of the model, sub-batch), built here and only read elsewhere."""

from megatron.oases.schedule.ablation import MEANING, Idea
from megatron.oases.schedule.chain import build_chain, enclose
from megatron.oases.schedule.layout import Layout, Schedule
from megatron.oases.schedule.megatron import build_megatron_schedule, build_wang_schedule
from megatron.oases.schedule.merak import build_domino_schedule, build_merak_schedule
from megatron.oases.schedule.oases import build_oases_schedule
from megatron.oases.schedule.operation import AWAITS, Kind, Operation, Part, Role, collectives
from megatron.oases.schedule.orderings import ORDERINGS, Cut, Ordering
from megatron.oases.schedule.validate import ScheduleError, validate
from megatron.oases.schedule.walk import Filler, walk

__all__ = [
    "AWAITS",
    "MEANING",
    "ORDERINGS",
    "Cut",
    "Filler",
    "Idea",
    "Kind",
    "Layout",
    "Operation",
    "Ordering",
    "Part",
    "Role",
    "Schedule",
    "ScheduleError",
    "build_chain",
    "build_domino_schedule",
    "build_megatron_schedule",
    "build_merak_schedule",
    "build_oases_schedule",
    "build_wang_schedule",
    "collectives",
    "enclose",
    "validate",
    "walk",
]
