"""A decoder under a schedule: one autograd function around the chain of blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.oases.runtime.block import Block
from megatron.oases.runtime.collectives import Collectives
from megatron.oases.runtime.executor import Executor, Filler
from megatron.oases.schedule import Schedule, build_oases_schedule, validate


class ScheduledDecoder:
    """Runs the layers of a `TransformerBlock` under the oases schedule.

    Args:
        blocks: the chain, two blocks for each layer.
        recompute: for each block, whether backward recomputes it.
        sub_batches: number of sub-batches of a micro-batch in training.
        collectives: those of the tensor-parallel group.
        filler: what may fill waits.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        recompute: Sequence[bool],
        sub_batches: int,
        collectives: Collectives,
        filler: Filler,
    ):
        self._blocks = blocks
        self._recompute = tuple(recompute)
        self._sub_batches = sub_batches
        self._collectives = collectives
        self._filler = filler
        self._executors: dict[int, Executor] = {}
        self.schedule = self._schedule(sub_batches)

    def __call__(self, hidden_states: Tensor, inputs: dict[str, Tensor | None]) -> Tensor:
        """[s, b, h] → [s, b, h], all layers, without the final norm.

        Args:
            hidden_states: output of the embedding, or of the previous pipeline stage.
            inputs: the attention's other arguments; an `attention_mask` [b, 1, s, s] is cut with the batch.
        """
        if torch.is_grad_enabled():
            if not hidden_states.requires_grad:  # a frozen embedding: the layers' parameters still want gradients
                hidden_states = hidden_states.detach().requires_grad_()
            return _Decoder.apply(hidden_states, self, inputs)
        return self.forward(hidden_states, inputs, keep=False)[0]

    def forward(self, hidden_states: Tensor, inputs: dict[str, Tensor | None], *, keep: bool):
        """Returns the output [s, b, h] and the tape for `backward` (None unless kept)."""
        # Evaluation may bring fewer samples than there are sub-batches; training was checked beforehand.
        sub_batches = min(self._sub_batches, hidden_states.shape[1])
        sizes = [len(part) for part in torch.arange(hidden_states.shape[1]).tensor_split(sub_batches)]
        xs = [x.contiguous() for x in hidden_states.split(sizes, dim=1)]
        outputs, tape = self._executor(sub_batches).forward(xs, _split_inputs(inputs, sizes), keep=keep)
        return torch.cat(outputs, dim=1), tape

    def backward(self, tape, gradient: Tensor) -> Tensor:
        """The gradient [s, b, h] of the input, from that of the output."""
        sizes = tape.batch_sizes
        gradients = [g.contiguous() for g in gradient.split(sizes, dim=1)]
        return torch.cat(self._executor(len(sizes)).backward(tape, gradients), dim=1)

    def _executor(self, sub_batches: int) -> Executor:
        if sub_batches not in self._executors:
            self._executors[sub_batches] = Executor(
                self._blocks, self._schedule(sub_batches), self._collectives, self._filler
            )
        return self._executors[sub_batches]

    def _schedule(self, sub_batches: int) -> Schedule:
        schedule = build_oases_schedule(recompute=self._recompute, sub_batches=sub_batches)
        validate(schedule)
        return schedule


class _Decoder(torch.autograd.Function):
    """The boundary to autograd: what is inside keeps its own graphs and accumulates parameters' gradients itself."""

    @staticmethod
    def forward(ctx, hidden_states: Tensor, decoder: ScheduledDecoder, inputs: dict[str, Tensor | None]) -> Tensor:
        output, ctx.tape = decoder.forward(hidden_states, inputs, keep=True)
        ctx.decoder = decoder
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        tape, ctx.tape = ctx.tape, None
        return ctx.decoder.backward(tape, gradient), None, None


def _split_inputs(inputs: dict[str, Tensor | None], sizes: Sequence[int]) -> list[dict[str, Tensor | None]]:
    mask = inputs.get("attention_mask")
    if mask is None or mask.shape[0] == 1:
        return [inputs] * len(sizes)
    return [{**inputs, "attention_mask": part} for part in mask.split(sizes, dim=0)]
