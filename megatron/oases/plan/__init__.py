"""The plan: which tensor-parallel degree every block has, and which are recomputed."""

from megatron.oases.plan.check import Run, check_degrees, check_plan
from megatron.oases.plan.degrees import LayerDegrees, format_degrees, legal_degrees, parse_degrees
from megatron.oases.plan.plan import BlockPlan, Devices, LayerPlan, Plan, Predicted, Solver, read_plan, write_plan

__all__ = [
    "BlockPlan",
    "Devices",
    "LayerDegrees",
    "LayerPlan",
    "Plan",
    "Predicted",
    "Run",
    "Solver",
    "check_degrees",
    "check_plan",
    "format_degrees",
    "legal_degrees",
    "parse_degrees",
    "read_plan",
    "write_plan",
]
