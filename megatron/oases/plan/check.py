"""Whether a plan can be run as a command line has it.

Knows nothing of how a plan is found, and needs no process group: the planner asks before it writes, training before it
builds a model. That each degree divides T, and its sub-groups every sub-batch, a plan has checked when it was made.
"""

from dataclasses import dataclass
from pathlib import Path

from megatron.oases.cost.records import first_difference
from megatron.oases.cost.workload import ModelShape, Workload
from megatron.oases.errors import UsageError
from megatron.oases.plan.plan import Plan
from megatron.oases.sizes import GIB



@dataclass(frozen=True, kw_only=True)
class Run:
    """What a command line asks for, as far as a plan has a say in it.

    Args:
        model: from its flags.
        world_size: number of ranks.
        tensor, pipeline: parallel sizes.
        micro_batch: samples of one.
        global_batch: samples of an iteration.
        schedule: None where the command line leaves it to the plan.
        sub_batches: likewise.
        memory_bytes: of a device; None where no limit is known.
    """

    model: ModelShape
    world_size: int
    tensor: int
    pipeline: int
    micro_batch: int
    global_batch: int
    schedule: str | None = None
    sub_batches: int | None = None
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
            **others,
        )


def check_plan(plan: Plan, run: Run, *, file: Path | str) -> None:
    """Refuses a plan that cannot be run so, or was made for something else.

    Args:
        plan: the plan.
        run: the command line.
        file: where the plan is from, for the message.

    Raises:
        UsageError: names the flag and both values, or the numbers that do not divide.
    """
    if difference := first_difference(plan.model, run.model):
        raise UsageError(f"{file} is a plan for another model: {difference}")
    world_size = plan.tensor * plan.pipeline * plan.data
    global_batch = plan.micro_batch * plan.micro_batches * plan.data
    for flag, planned, asked in (
        ("--tensor-model-parallel-size", plan.tensor, run.tensor),
        ("--pipeline-model-parallel-size", plan.pipeline, run.pipeline),
        ("--micro-batch-size", plan.micro_batch, run.micro_batch),
        ("--oases-schedule", plan.schedule, run.schedule),
        ("--oases-sub-batches", plan.sub_batches, run.sub_batches),
    ):
        if asked is not None and asked != planned:
            raise UsageError(f"{flag} {asked}: {file} is a plan for {planned}")
    if run.world_size != world_size:
        arithmetic = f"TP {plan.tensor} x PP {plan.pipeline} x DP {plan.data} = {world_size}"
        raise UsageError(f"{run.world_size} ranks: {file} is a plan for {arithmetic}")
    if run.global_batch != global_batch:
        raise UsageError(
            f"--global-batch-size {run.global_batch}: {file} is a plan for {plan.micro_batches} micro-batches of "
            f"{plan.micro_batch} samples on each of {plan.data} data-parallel replicas = {global_batch}"
        )
    _check_widths(plan, file)
    predicted = plan.predicted
    if run.memory_bytes is not None and predicted is not None and predicted.memory_bytes > run.memory_bytes:
        missing_bytes = predicted.memory_bytes - run.memory_bytes
        raise UsageError(
            f"{file} needs {predicted.memory_bytes / GIB:.2f} GiB on a device, which has "
            f"{run.memory_bytes / GIB:.2f}: {missing_bytes / GIB:.2f} GiB are missing"
        )


def _check_widths(plan: Plan, file: Path | str) -> None:
    """Each block's heads, or its width, must fall into as many equal shards as its degree."""
    model = plan.model
    divisors = [degree for degree in range(1, plan.tensor + 1) if plan.tensor % degree == 0]
    for number, layer in enumerate(plan.layers):
        for name, degree, flag, size in (
            ("attention", layer.attention.degree, "--num-attention-heads", model.heads),
            ("attention", layer.attention.degree, "--num-query-groups", model.query_groups),
            ("mlp", layer.mlp.degree, "--ffn-hidden-size", model.ffn_hidden_size),
        ):
            if _can_be_sharded(flag, size, degree):
                continue
            legal = ", ".join(str(each) for each in divisors if _can_be_sharded(flag, size, each))
            raise UsageError(
                f"{file}: layers[{number}]: {name}: degree {degree} does not divide {flag} {size}: "
                f"{size} = {size // degree} x {degree} + {size % degree}; legal are {legal}"
            )


def _can_be_sharded(flag: str, size: int, degree: int) -> bool:
    # Fewer query groups than ranks are shared by equally many each.
    return size % degree == 0 or (flag == "--num-query-groups" and degree % size == 0)
