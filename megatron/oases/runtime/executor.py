"""Runs a schedule's operations on tensors.

The order of collectives is the schedule's, the same on every rank. Only filler is dynamic: where the host can see that
a collective is still in flight, it runs operations that no gradient waits for, instead of waiting.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.oases.runtime.block import Block, Cell
from megatron.oases.runtime.collectives import Collectives, InFlight
from megatron.oases.schedule import Kind, Operation, Schedule


@dataclass(frozen=True, kw_only=True)
class Filler:
    """What may leave its place in the order, to fill the wait for a collective.

    Args:
        max_postponed_wgrads: WGRADs that may wait for a gap; their inputs stay alive meanwhile. 0: run them in place.
        max_recomputes_ahead: RECOMPUTEs that may run before their turn; their graphs stay alive meanwhile.
    """

    max_postponed_wgrads: int = 0
    max_recomputes_ahead: int = 0


class Tape:
    """What one micro-batch's forward pass keeps for its backward pass."""

    def __init__(self, schedule: Schedule, xs: Sequence[Tensor], inputs: Sequence[dict[str, Tensor | None]]):
        self.batch_sizes = [x.shape[1] for x in xs]
        self.cells = {(k, i): Cell(inputs[i]) for k in range(schedule.blocks) for i in range(schedule.sub_batches)}


class Executor:
    """Runs one schedule over a chain of blocks.

    Args:
        blocks: the chain.
        schedule: a validated schedule for as many blocks.
        collectives: those of the tensor-parallel group.
        filler: what may fill waits.
    """

    def __init__(self, blocks: Sequence[Block], schedule: Schedule, collectives: Collectives, filler: Filler):
        assert len(blocks) == schedule.blocks
        self._blocks = blocks
        self._schedule = schedule
        self._collectives = collectives
        self._filler = filler

    def forward(
        self, xs: Sequence[Tensor], inputs: Sequence[dict[str, Tensor | None]], *, keep: bool
    ) -> tuple[list[Tensor], Tape | None]:
        """Runs the forward list.

        Args:
            xs: input of the first block, for each sub-batch [s, b_i, h].
            inputs: the layers' other inputs for each sub-batch.
            keep: whether a backward pass will follow.

        Returns:
            The last block's output for each sub-batch, and the tape for `backward` (None unless kept).
        """
        tape = Tape(self._schedule, xs, inputs)
        outputs = list(xs)  # the newest x of each sub-batch
        in_flight: dict[tuple[int, int], InFlight] = {}
        for operation in self._schedule.forward:
            place = (operation.block, operation.sub_batch)
            block, cell = self._blocks[operation.block], tape.cells[place]
            keep_graph = keep and not self._schedule.recompute[operation.block]
            match operation.kind:
                case Kind.FORWARD:
                    cell.x = outputs[operation.sub_batch]
                    block.forward(cell, keep_graph=keep_graph)
                case Kind.REDUCE:
                    in_flight[place] = self._collectives.all_reduce(cell.partial.contiguous())
                case Kind.JOIN:
                    reduced = in_flight.pop(place).wait()
                    outputs[operation.sub_batch] = block.join(cell, reduced, keep_graph=keep_graph)
                    if not keep:
                        del tape.cells[place]
                    elif keep_graph:
                        cell.x = None  # the graph holds it
        return outputs, tape if keep else None

    def backward(self, tape: Tape, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Runs the backward list; parameters' gradients are accumulated on the way.

        Args:
            tape: what `forward` kept; used up.
            gradients: gradient of the last block's output, for each sub-batch [s, b_i, h].

        Returns:
            The gradient of the first block's input, for each sub-batch.
        """
        return _BackwardPass(self._blocks, self._schedule, self._collectives, self._filler, tape, gradients).run()


class _BackwardPass:
    """One run of the backward list, with the state of its filler."""

    def __init__(
        self,
        blocks: Sequence[Block],
        schedule: Schedule,
        collectives: Collectives,
        filler: Filler,
        tape: Tape,
        gradients: Sequence[Tensor],
    ):
        self._blocks = blocks
        self._collectives = collectives
        self._filler = filler
        self._cells = tape.cells
        self._gradients = list(gradients)  # the newest gradient of each sub-batch's chain
        self._in_flight: dict[tuple[int, int], InFlight] = {}
        self._todo = schedule.backward
        self._postponed: deque[Operation] = deque()
        self._recomputes = deque(
            op
            for op in schedule.backward
            if op.kind is Kind.RECOMPUTE and not blocks[op.block].communicates_inside
        )
        self._ahead: set[Operation] = set()

    def run(self) -> list[Tensor]:
        for operation in self._todo:
            if operation.kind is Kind.WGRAD and self._filler.max_postponed_wgrads:
                self._postponed.append(operation)
                if len(self._postponed) > self._filler.max_postponed_wgrads:
                    self._run(self._postponed.popleft())
            elif operation.kind is Kind.RECOMPUTE:
                if operation in self._ahead:
                    self._ahead.remove(operation)
                else:
                    if self._recomputes and self._recomputes[0] == operation:
                        self._recomputes.popleft()
                    self._run(operation)
            else:
                if operation.kind.waits:
                    self._fill(self._in_flight[operation.block, operation.sub_batch])
                self._run(operation)
        while self._postponed:
            self._run(self._postponed.popleft())
        return self._gradients

    def _fill(self, awaited: InFlight) -> None:
        """Runs filler until the collective has ended or there is no filler left."""
        while not awaited.is_completed():
            if self._postponed:
                self._run(self._postponed.popleft())
            elif self._recomputes and len(self._ahead) < self._filler.max_recomputes_ahead:
                operation = self._recomputes.popleft()
                self._ahead.add(operation)
                self._run(operation)
            else:
                return

    def _run(self, operation: Operation) -> None:
        place = (operation.block, operation.sub_batch)
        block, cell, i = self._blocks[operation.block], self._cells[place], operation.sub_batch
        match operation.kind:
            case Kind.RECOMPUTE:
                block.recompute(cell)
            case Kind.DGRAD:
                # Handed over, not kept here: the reduction happens in place.
                self._in_flight[place] = InFlight(block.dgrad(cell, self._gradients[i]), None)
            case Kind.REDUCE_GRAD:
                tensor = self._in_flight.pop(place).tensor
                self._in_flight[place] = self._collectives.all_reduce(tensor.contiguous())
            case Kind.WGRAD:
                block.wgrad(cell)
            case Kind.NORM_GRAD:
                self._gradients[i] = block.norm_grad(cell, self._in_flight.pop(place).wait())
            case _:
                raise AssertionError(f"{operation} is not a backward operation")
