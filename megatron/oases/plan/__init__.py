"""The plan: which tensor-parallel degree every block has, and which are recomputed."""

from megatron.oases.plan.degrees import LayerDegrees, format_degrees, parse_degrees
from megatron.oases.plan.plan import BlockPlan, LayerPlan, Plan, Predicted, Solver, read_plan, write_plan

__all__ = [
    "BlockPlan",
    "LayerDegrees",
    "LayerPlan",
    "Plan",
    "Predicted",
    "Solver",
    "format_degrees",
    "parse_degrees",
    "read_plan",
    "write_plan",
]
