"""Times every computing operation at one TP degree and for every number of samples that a sub-batch may have."""

from collections import defaultdict
from collections.abc import Iterable

from megatron.oases.cost.profile_file import MemoryCell, OperationCell, OptimizerPoint, Overhead
from megatron.oases.measure.peak import peak_bytes
from megatron.oases.measure.ranks import gathered, of_slowest_rank, slowest
from megatron.oases.measure.session import Session, StepTimes
from megatron.oases.schedule import Kind, Layout, Role, build_chain

WARM_UP_STEPS = 2


def sub_batch_sizes(micro_batch: int) -> list[int]:
    """Numbers of samples to measure: all equal parts of a micro-batch, and powers of two."""
    divisors = {size for size in range(1, micro_batch + 1) if micro_batch % size == 0}
    powers = {2**i for i in range(micro_batch.bit_length()) if 2**i <= micro_batch}
    return sorted(divisors | powers)


def expected_cells(*, degree: int, kept: bool, sequence_parallel: bool) -> set[tuple[Kind, Role, bool]]:
    """(kind, role, kept) of the computing operations that a session of that kind runs."""
    chain = build_chain(
        layers=1, recomputed_layers=0 if kept else 1, embedding=True, head=True, keeps_last_layer=False
    )
    layout = Layout(chain=chain, sub_batches=1, sequence_parallel=sequence_parallel and degree > 1)
    operations = layout.forward_operations() | layout.backward_operations()
    return {
        (operation.kind, part.role, not part.recomputed)
        for operation in operations
        if not operation.kind.is_communication
        for part in [chain[operation.place]]
    }


def measure_operations(session: Session, *, samples: int, repeats: int) -> tuple[list[OperationCell], OptimizerPoint]:
    """All cells of one number of samples, and the optimizer's time beside them."""
    steps = list(session.steps(WARM_UP_STEPS + repeats, samples=samples))[WARM_UP_STEPS:]
    cells = [
        OperationCell(kind=kind, role=role, degree=session.degree, samples=samples, kept=kept, **vars(timing))
        for (kind, role, kept), timing in slowest(times_by_cell(session, steps)).items()
    ]
    optimizer = of_slowest_rank([step.optimizer_ms for step in steps])
    return cells, OptimizerPoint(parameters=session.optimized_parameters, **vars(optimizer))


def times_by_cell(session: Session, steps: Iterable[StepTimes]) -> dict[tuple[Kind, Role, bool], list[float]]:
    """This rank's times of each computing operation, by (kind, role, kept), in the order in which they ran."""
    times_ms: dict[tuple[Kind, Role, bool], list[float]] = defaultdict(list)
    for step in steps:
        for operation, ms in step.operations:
            if not operation.kind.is_communication:
                part = session.chain[operation.place]
                times_ms[operation.kind, part.role, not part.recomputed].append(ms)
    return times_ms


def missing_cells(
    keys: Iterable[tuple[Kind, Role, bool]], *, degree: int, samples: int, reason: str
) -> list[OperationCell]:
    """Cells without a number, marked with the reason."""
    return [
        OperationCell(
            kind=kind, role=role, degree=degree, samples=samples, kept=kept,
            median_ms=None, spread_ms=None, repeats=0, missing=reason,
        )
        for kind, role, kept in keys
    ]  # fmt: skip


def measure_overhead(session: Session, *, samples: int, repeats: int) -> Overhead:
    """What steps of one and of two micro-batches take beside what is timed apart."""

    def rest_ms(micro_batches: int) -> float:
        steps = list(session.steps(WARM_UP_STEPS + repeats, samples=samples, micro_batches=micro_batches))
        return of_slowest_rank([step.rest_ms for step in steps[WARM_UP_STEPS:]]).median_ms

    one_ms, two_ms = rest_ms(1), rest_ms(2)
    per_micro_batch_ms = min(max(0.0, two_ms - one_ms), max(0.0, one_ms))
    return Overhead(fixed_ms=max(0.0, one_ms) - per_micro_batch_ms, per_micro_batch_ms=per_micro_batch_ms)


def measure_memory(session: Session, *, samples: int) -> MemoryCell:
    """What the session has needed so far; to be called behind its steps with that many samples, its most."""
    parameters, peaks = zip(*gathered((session.parameters_bytes, peak_bytes())), strict=True)
    return MemoryCell(
        degree=session.degree,
        layers=session.layers,
        kept=session.kept,
        samples=samples,
        parameters_bytes=max(parameters),
        peak_bytes=max(peaks),
    )
