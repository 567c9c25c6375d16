"""Runs a list of operations on tensors.

The order of collectives is the list's, the same on every rank. Only filler is dynamic: where the host can see that
a collective is still in flight, it runs operations that no gradient waits for, instead of waiting.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.oases.runtime.block import Block
from megatron.oases.runtime.cell import Cell, Tape
from megatron.oases.runtime.collectives import Collectives, InFlight
from megatron.oases.runtime.ends import Embedding, Head
from megatron.oases.schedule import AWAITS, Kind, Operation


@dataclass(frozen=True, kw_only=True)
class Filler:
    """What may leave its place in the order, to fill the wait for a collective.

    Args:
        max_postponed_wgrads: WGRADs that may wait for a gap; their inputs stay alive meanwhile. 0: run them in place.
        max_recomputes_ahead: RECOMPUTEs that may run before their turn; their graphs stay alive meanwhile.
    """

    max_postponed_wgrads: int = 0
    max_recomputes_ahead: int = 0


class Executor:
    """Runs lists over a chain of parts.

    Args:
        parts: the chain.
        collectives: those of the tensor-parallel group.
        filler: what may fill waits.
        sequence_parallel: whether what lies between blocks is split along the sequence.
    """

    def __init__(
        self,
        parts: Sequence[Embedding | Block | Head],
        collectives: Collectives,
        filler: Filler,
        *,
        sequence_parallel: bool,
    ):
        self._parts = parts
        self._collectives = collectives
        self._filler = filler
        self._sequence_parallel = sequence_parallel

    def run(self, order: Sequence[Operation], *tapes: Tape) -> None:
        """Runs the list. `tapes` are the micro-batches that it deals with; what they hold is used up or filled in."""
        filling = _Filling(order, self._parts, self._filler)
        for operation in order:
            if filling.takes(operation):
                continue
            cell = tapes[operation.micro_batch].cells[operation.place, operation.sub_batch]
            awaited = cell.in_flight.get(AWAITS.get(operation.kind))
            while awaited is not None and not awaited.is_completed():
                filler = filling.next(tapes)
                if filler is None:
                    break
                self._run(filler, tapes[filler.micro_batch])
            self._run(operation, tapes[operation.micro_batch])
            while filling.is_full:
                self._run(filling.postponed.popleft(), tapes[0])
        while filling.postponed:
            self._run(filling.postponed.popleft(), tapes[0])

    def _run(self, operation: Operation, tape: Tape) -> None:
        part, i = self._parts[operation.place], operation.sub_batch
        cell = tape.cells[operation.place, i]
        match operation.kind:
            case Kind.FORWARD if isinstance(part, Embedding):
                cell.outgoing[Kind.REDUCE] = part.lookup(cell)
            case Kind.NORM:
                cell.outgoing[Kind.GATHER] = self._norm(part, cell, tape, i)
            case Kind.FORWARD:
                core_input = _waited_for(cell, Kind.GATHER)
                output = part.core(cell, self._norm(part, cell, tape, i) if core_input is None else core_input)
                if isinstance(part, Head):
                    tape.logits[i], cell.x = output, None
                else:
                    cell.outgoing[Kind.REDUCE] = output
            case Kind.JOIN:
                tape.xs[i] = part.join(cell, _waited_for(cell, Kind.REDUCE))
                if not tape.keep:
                    cell.x = None
            case Kind.LOSS:
                part.loss(tape)
            case Kind.LOSS_GRAD:
                part.loss_grad(tape)
            case Kind.RENORM:
                cell.outgoing[Kind.REGATHER] = part.renorm(cell)
            case Kind.RECOMPUTE:
                core_input = _waited_for(cell, Kind.REGATHER)
                part.recompute(cell, part.renorm(cell) if core_input is None else core_input)
            case Kind.JOIN_GRAD:
                cell.outgoing[Kind.GATHER_GRAD] = self._join_grad(part, cell, tape, i)
            case Kind.DGRAD:
                gradient = _waited_for(cell, Kind.GATHER_GRAD)
                if gradient is None:
                    gradient = self._join_grad(part, cell, tape, i)
                cell.outgoing[Kind.REDUCE_GRAD] = part.dgrad(cell, gradient)
            case Kind.WGRAD if isinstance(part, Embedding):
                part.wgrad_of_all(tape, [tape.cells[operation.place, i] for i in range(len(tape.batch_sizes))])
            case Kind.WGRAD:
                part.wgrad(cell)
            case Kind.NORM_GRAD:
                tape.gradients[i] = part.norm_grad(cell, _waited_for(cell, Kind.REDUCE_GRAD))
            case communication:
                assert communication.is_communication
                tensor = cell.outgoing.pop(communication).contiguous()
                cell.in_flight[communication] = self._started(communication, part)(tensor)

    def _started(self, communication: Kind, part: Embedding | Block | Head) -> Callable[[Tensor], InFlight]:
        if communication in (Kind.GATHER, Kind.REGATHER, Kind.GATHER_GRAD):
            return self._collectives.all_gather
        scatters = part.scatters if isinstance(part, Embedding) else self._sequence_parallel
        return self._collectives.reduce_scatter if scatters else self._collectives.all_reduce

    @staticmethod
    def _norm(part: Block | Head, cell: Cell, tape: Tape, i: int) -> Tensor:
        cell.x, tape.xs[i] = tape.xs[i], None
        return part.norm(cell)

    @staticmethod
    def _join_grad(part: Block | Head, cell: Cell, tape: Tape, i: int) -> Tensor:
        gradient, tape.gradients[i] = tape.gradients[i], None
        return part.join_grad(cell, gradient)


def _waited_for(cell: Cell, communication: Kind) -> Tensor | None:
    """What the collective brought; None where the schedule has no such collective."""
    in_flight = cell.in_flight.pop(communication, None)
    return in_flight.wait() if in_flight is not None else None


class _Filling:
    """The filler of one run of a list."""

    def __init__(self, order: Sequence[Operation], parts: Sequence[Embedding | Block | Head], filler: Filler):
        self._parts = parts
        self._gathers = any(op.kind is Kind.REGATHER for op in order)
        self._filler = filler
        self.postponed: deque[Operation] = deque()
        self._recomputes = deque(op for op in order if op.kind is Kind.RECOMPUTE and self._may_move(op))
        self._ahead: set[Operation] = set()

    def _may_move(self, operation: Operation) -> bool:
        return not self._parts[operation.place].communicates_inside

    @property
    def is_full(self) -> bool:
        return len(self.postponed) > self._filler.max_postponed_wgrads

    def takes(self, operation: Operation) -> bool:
        """Whether the operation, whose turn it is, need not run now: it ran ahead, or may wait for a gap."""
        if operation in self._ahead:
            self._ahead.remove(operation)
            return True
        if self._recomputes and operation == self._recomputes[0]:
            self._recomputes.popleft()
        if operation.kind is Kind.WGRAD and self._filler.max_postponed_wgrads and self._may_move(operation):
            self.postponed.append(operation)
            return True
        return False

    def next(self, tapes: Sequence[Tape]) -> Operation | None:
        """What to run while waiting, if there is anything."""
        if self.postponed:
            return self.postponed.popleft()
        if not self._recomputes or len(self._ahead) >= self._filler.max_recomputes_ahead:
            return None
        operation = self._recomputes[0]
        cell = tapes[operation.micro_batch].cells[operation.place, operation.sub_batch]
        gathered = cell.in_flight.get(Kind.REGATHER)
        if self._gathers and (gathered is None or not gathered.is_completed()):
            return None
        self._ahead.add(self._recomputes.popleft())
        return operation
