"""In which order a list really runs: its own, with waits filled by what nothing waits for.

The order of collectives is the list's, the same on every rank. Only computation moves, and only past other computation.
Pure: the executor asks whether a collective has ended by looking at it, a simulator by its clock, a test by a script.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.oases.schedule.ablation import Idea
from megatron.oases.schedule.operation import AWAITS, Kind, Operation

# Four layers' worth of weight gradients, and two layers' recomputation, of one sub-batch. More would hold more memory, and
# waits are shorter than that.
_MAX_POSTPONED_WGRADS = 16
_MAX_RECOMPUTES_AHEAD = 4


@dataclass(frozen=True, kw_only=True)
class Filler:
    """What may leave its place in the order, to fill the wait for a collective.

    Args:
        max_postponed_wgrads: WGRADs and ROW_WGRADs that may wait for a gap; their inputs stay alive meanwhile. 0: run them
            in place.
        max_recomputes_ahead: RECOMPUTEs that may run before their turn; their graphs stay alive meanwhile.
    """

    max_postponed_wgrads: int = 0
    max_recomputes_ahead: int = 0

    @classmethod
    def allowed(
        cls, *, host_sees_completion: bool, overlap_grad_reduce: bool, without: frozenset[Idea] = frozenset()
    ) -> "Filler":
        """What may fill waits in a run.

        Args:
            host_sees_completion: whether the host can tell that a collective has ended.
            overlap_grad_reduce: whether data parallelism reduces gradients as they become ready, in one order everywhere.
            without: ideas of the schedule that are left out.
        """
        fills = host_sees_completion and Idea.FILLER not in without
        postpones = fills and not overlap_grad_reduce and Idea.COLLECTIVE_FIRST not in without
        return cls(
            max_postponed_wgrads=_MAX_POSTPONED_WGRADS if postpones else 0,
            max_recomputes_ahead=_MAX_RECOMPUTES_AHEAD if fills else 0,
        )

    @property
    def is_empty(self) -> bool:
        return self.max_postponed_wgrads == self.max_recomputes_ahead == 0


def walk(
    order: Sequence[Operation],
    filler: Filler,
    *,
    may_move: Callable[[Operation], bool],
    has_ended: Callable[[Operation], bool],
) -> Iterator[Operation]:
    """Yields the operations as they are to run; each has run when the next one is asked for.

    Args:
        order: a valid list.
        filler: how much may move.
        may_move: whether a weight gradient or RECOMPUTE may leave its place at all.
        has_ended: whether a collective, which was started if the list has it, has ended; True if the list does not.
    """
    if filler.is_empty:
        yield from order
        return
    postponed: deque[Operation] = deque()
    recomputes = deque(op for op in order if op.kind is Kind.RECOMPUTE and may_move(op))
    ahead: set[Operation] = set()
    started: set[Operation] = set()
    listed = set(order)

    def awaited(operation: Operation) -> Operation | None:
        kind = AWAITS.get(operation.kind)
        if kind is None:
            return None
        collective = Operation(kind, operation.place, operation.sub_batch, operation.micro_batch)
        return collective if collective in listed else None

    def may_run(recompute: Operation) -> bool:
        gathered = awaited(recompute)
        return gathered is None or (gathered in started and has_ended(gathered))

    def fill() -> Operation | None:
        if postponed:
            return postponed.popleft()
        if recomputes and len(ahead) < filler.max_recomputes_ahead and may_run(recomputes[0]):
            ahead.add(recomputes[0])
            return recomputes.popleft()
        return None

    for operation in order:
        if operation in ahead:
            ahead.remove(operation)
            continue
        if recomputes and operation == recomputes[0]:
            recomputes.popleft()
        if operation.kind.is_weight_gradient and filler.max_postponed_wgrads and may_move(operation):
            postponed.append(operation)
            if len(postponed) > filler.max_postponed_wgrads:
                yield postponed.popleft()
            continue
        collective = awaited(operation)
        while collective is not None and not has_ended(collective):
            instead = fill()
            if instead is None:
                break
            yield instead
        yield operation
        if operation.kind.is_communication:
            started.add(operation)
    yield from postponed
