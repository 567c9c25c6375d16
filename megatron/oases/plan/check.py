"""Whether blocks of their own degrees, or a whole plan, can be run as a command line has it.

Knows nothing of how a plan is found, and needs no process group: the planner asks before it writes, training and the
simulator before they build anything.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.oases.cost.records import first_difference
from megatron.oases.cost.workload import ModelShape, Workload
from megatron.oases.errors import UsageError
from megatron.oases.plan.degrees import LayerDegrees, refusal
from megatron.oases.plan.plan import Plan
from megatron.oases.sizes import GIB

_FORCE = "--oases-plan-force runs it all the same"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a command line asks for, as far as the degrees of blocks have to do with it.

    Args:
        model: from its flags.
        world_size: number of ranks.
        tensor, pipeline: parallel sizes.
        micro_batch: samples of one.
        global_batch: samples of an iteration.
        sub_batches: that a micro-batch is cut into.
        eval_micro_batch: samples of one in evaluation, which may have fewer sub-batches; None: as in training.
        memory_bytes: of a device; None where no limit is known.
    """

    model: ModelShape
    world_size: int
    tensor: int
    pipeline: int
    micro_batch: int
    global_batch: int
    sub_batches: int
    eval_micro_batch: int | None = None
    memory_bytes: int | None = None

    @classmethod
    def of(cls, workload: Workload, **others) -> "Run":
        """From a workload; `others` are what it does not know."""
        return cls(
            model=workload.model,
            world_size=workload.world_size,
            tensor=workload.tensor,
            pipeline=workload.pipeline,
            micro_batch=workload.micro_batch,
            global_batch=workload.micro_batch * workload.micro_batches * workload.data,
            sub_batches=workload.sub_batches,
            **others,
        )


def check_plan(plan: Plan, run: Run, *, where: str, force: bool = False) -> None:
    """Refuses a plan that cannot be run so, or was made for something else.

    Args:
        plan: the plan.
        run: the command line.
        where: what the plan is from, for the message.
        force: run even what was made for another model, layout or device, if it can be run at all.

    Raises:
        UsageError: names the flag and both values, or the numbers that do not divide.
    """
    for flag, planned, asked in (
        ("--num-layers", len(plan.layers), run.model.layers),
        ("--tensor-model-parallel-size", plan.tensor, run.tensor),
        ("--micro-batch-size", plan.micro_batch, run.micro_batch),
    ):
        if asked != planned:
            raise UsageError(f"{flag} {asked}: {where} is a plan for {planned}")
    check_degrees([layer.degrees for layer in plan.layers], run, where=where)
    if not force:
        _check_purpose(plan, run, where)


def _check_purpose(plan: Plan, run: Run, where: str) -> None:
    if difference := first_difference(plan.model, run.model):
        raise UsageError(f"{where} is a plan for another model: {difference}; {_FORCE}")
    if run.pipeline != plan.pipeline:
        planned = f"{where} is a plan for {plan.pipeline}"
        raise UsageError(f"--pipeline-model-parallel-size {run.pipeline}: {planned}; {_FORCE}")
    world_size = plan.tensor * plan.pipeline * plan.data
    if run.world_size != world_size:
        arithmetic = f"TP {plan.tensor} x PP {plan.pipeline} x DP {plan.data} = {world_size}"
        raise UsageError(f"{run.world_size} ranks: {where} is a plan for {arithmetic}; {_FORCE}")
    global_batch = plan.micro_batch * plan.micro_batches * plan.data
    if run.global_batch != global_batch:
        raise UsageError(
            f"--global-batch-size {run.global_batch}: {where} is a plan for {plan.micro_batches} micro-batches of "
            f"{plan.micro_batch} samples on each of {plan.data} data-parallel replicas = {global_batch}; {_FORCE}"
        )
    predicted = plan.predicted
    if run.memory_bytes is not None and predicted is not None and predicted.memory_bytes > run.memory_bytes:
        missing_bytes = predicted.memory_bytes - run.memory_bytes
        raise UsageError(
            f"{where} needs {predicted.memory_bytes / GIB:.2f} GiB on a device, which has "
            f"{run.memory_bytes / GIB:.2f}: {missing_bytes / GIB:.2f} GiB are missing; {_FORCE}"
        )


def check_degrees(degrees: Sequence[LayerDegrees], run: Run, *, where: str) -> None:
    """Refuses a degree that a block cannot have.

    Args:
        degrees: of every layer.
        run: the command line.
        where: what they are from, for the message.

    Raises:
        UsageError: names layer and block, what does not divide, and the legal degrees.
    """
    for number, layer in enumerate(degrees, start=1):
        for (block, degree), width in zip(layer._asdict().items(), (_attention_width, _mlp_width), strict=True):
            if reason := _refusal(degree, run, width):
                legal = [str(t) for t in range(1, run.tensor + 1) if not _refusal(t, run, width)]
                raise UsageError(
                    f"{where}: layer {number} of {len(degrees)}, {block}: degree {degree} {reason}; "
                    f"legal here: {', '.join(legal) or 'none'}"
                )


def _refusal(degree: int, run: Run, width: Callable[[ModelShape, int], str | None]) -> str | None:
    return (
        refusal(degree, run.tensor, micro_batch=run.micro_batch, sub_batches=run.sub_batches)
        or (
            run.eval_micro_batch
            and refusal(
                degree, run.tensor, micro_batch=run.eval_micro_batch, sub_batches=1, flag="--eval-micro-batch-size"
            )
        )
        or width(run.model, degree)
    )


def _attention_width(model: ModelShape, degree: int) -> str | None:
    heads, groups = model.heads, model.query_groups
    if heads % degree:
        return f"does not divide --num-attention-heads {_divided(heads, degree)}"
    if groups % degree and degree % groups:  # fewer groups than ranks are shared by equally many each
        return f"and --num-query-groups {groups}: neither divides the other"
    return None


def _mlp_width(model: ModelShape, degree: int) -> str | None:
    size = model.ffn_hidden_size
    return f"does not divide --ffn-hidden-size {_divided(size, degree)}" if size % degree else None


def _divided(size: int, degree: int) -> str:
    return f"{size}: {size} = {size // degree} x {degree} + {size % degree}"
