"""Runs a list of operations on tensors."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from megatron.oases.runtime.block import Block
from megatron.oases.runtime.cell import Cell, Tape
from megatron.oases.runtime.collectives import Collectives, InFlight
from megatron.oases.runtime.ends import Embedding, Head
from megatron.oases.schedule import Filler, Kind, Operation, walk


Observer = Callable[[Operation], AbstractContextManager]
_UNOBSERVED = nullcontext()


def unobserved(_: Operation) -> AbstractContextManager:
    """The observer that sees nothing."""
    return _UNOBSERVED


class Executor:
    """Runs lists over a chain of parts.

    Args:
        parts: the chain.
        collectives: those of the tensor-parallel group.
        filler: what may fill waits.
        sequence_parallel: whether what lies between blocks is split along the sequence.
        observer: what it returns for an operation is entered before that runs, and left behind it.
    """

    def __init__(
        self,
        parts: Sequence[Embedding | Block | Head],
        collectives: Collectives,
        filler: Filler,
        *,
        sequence_parallel: bool,
        observer: Observer = unobserved,
    ):
        self._parts = parts
        self._collectives = collectives
        self._filler = filler
        self._sequence_parallel = sequence_parallel
        self._observer = observer

    def run(self, order: Sequence[Operation], *tapes: Tape) -> None:
        """Runs the list. `tapes` are the micro-batches that it deals with; what they hold is used up or filled in."""

        def has_ended(collective: Operation) -> bool:
            cell = tapes[collective.micro_batch].cells[collective.place, collective.sub_batch]
            return cell.in_flight[collective.kind].is_completed()

        for operation in walk(order, self._filler, may_move=self._may_move, has_ended=has_ended):
            with self._observer(operation):
                self._run(operation, tapes[operation.micro_batch])

    def _may_move(self, operation: Operation) -> bool:
        part = self._parts[operation.place]
        return part.wgrad_may_move if operation.kind.is_weight_gradient else not part.communicates_inside

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
                part.wgrad_of_all(tape, [tape.cells[operation.place, i] for i in range(len(tape.sizes))])
            case Kind.WGRAD:
                part.wgrad(cell, is_last=tape.is_last(operation))
            case Kind.ROW_WGRAD:
                part.row_wgrad(cell, is_last=tape.is_last(operation))
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
