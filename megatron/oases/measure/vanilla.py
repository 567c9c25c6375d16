"""How Megatron itself, which runs by autograd, compares with the sum of the executor's operations."""

from collections.abc import Sequence
from statistics import mean, median

from megatron.oases.cost.profile_file import VanillaCell
from megatron.oases.measure.operations import WARM_UP_STEPS, times_by_cell
from megatron.oases.measure.ranks import gathered
from megatron.oases.measure.session import Session, StepTimes
from megatron.oases.schedule import Kind, Layout, Operation, Role, build_megatron_schedule


def measure_vanilla(executor: Session, megatron: Session, *, samples: int, repeats: int) -> VanillaCell:
    """Runs the same model both ways in turns, so that a slow drift of the machine hits both.

    Args:
        executor: the session whose operations are timed.
        megatron: the vanilla session, otherwise the same.
        samples: of the micro-batch.
        repeats: steps of each.
    """
    steps: dict[Session, list[StepTimes]] = {executor: [], megatron: []}
    for session in steps:
        list(session.steps(WARM_UP_STEPS, samples=samples))
    for _ in range(repeats):
        for session, taken in steps.items():
            taken += session.steps(1, samples=samples)
    whole_ms, rest_ms = (median(step.rest_ms for step in steps[session]) for session in (megatron, executor))
    # Each rank with itself, since none waits for another here; and then the mean.
    factors = gathered((whole_ms - rest_ms) / _operations_ms(executor, steps[executor]))
    factor, missing = mean(factors), None
    if factor <= 0:
        factor, missing = None, "a step of Megatron took less time than the rest of a step beside its operations"
    return VanillaCell(degree=executor.degree, samples=samples, kept=executor.kept, factor=factor, missing=missing)


def _operations_ms(session: Session, steps: Sequence[StepTimes]) -> float:
    """What the operations of Megatron's list take together."""
    layout = Layout(
        chain=session.chain,
        sub_batches=1,
        sequence_parallel=session.sequence_parallel,
        recomputes_row_parallel=True,
        repeats_collectives=True,
    )
    schedule = build_megatron_schedule(layout)
    times_ms = {key: median(times) for key, times in times_by_cell(session, steps).items()}
    return sum(
        times_ms[_as_measured(operation, layout)]
        for operation in (*schedule.forward, *schedule.backward)
        if not operation.kind.is_communication
    )


def _as_measured(operation: Operation, layout: Layout) -> tuple[Kind, Role, bool]:
    """The cell's key."""
    part = layout.chain[operation.place]
    return layout.computes_as(operation.kind), part.role, not part.recomputed
