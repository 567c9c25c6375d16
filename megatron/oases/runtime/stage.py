"""A GPT, or the pipeline stage of one, under a schedule: one autograd function around the whole chain."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import lcm

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.oases.runtime.block import Block
from megatron.oases.runtime.cell import Cell, Inputs, Tape
from megatron.oases.runtime.chunks import Chunk, chunk_of_mask
from megatron.oases.runtime.ends import Embedding, Exit, Head
from megatron.oases.runtime.executor import Executor, Observer, unobserved
from megatron.oases.runtime.interleaving import Interleaving
from megatron.oases.runtime.redistribution import Redistribution
from megatron.oases.schedule import (
    Filler,
    Idea,
    Operation,
    Ordering,
    Schedule,
)
from megatron.oases.sizes import sub_batch_sizes


class ScheduledStage:
    """Runs a chain of parts in the order of a system.

    Args:
        parts: the chain.
        into: for the places whose number of sub-groups differs from that before them, what brings x there.
        out_of: likewise, what brings its gradient back.
        tensor_rank: this rank's number in the tensor-parallel group.
        tensor_size: the number of its ranks.
        ordering: the system's.
        sub_batches: number of sub-batches of a micro-batch in training.
        pieces: into how many pieces a GEMM is cut that feeds a collective.
        along_sequence: whether they are cut along the sequence instead of the batch.
        filler: what may fill waits.
        sequence_parallel: whether what lies between blocks is split along the sequence.
        micro_batches: tells, during training, how many micro-batches the present iteration has.
        last_apart: whether the last micro-batch's forward pass may not be interleaved.
        without: ideas of the schedule to leave out.
        observer: stands around every operation that runs.
    """

    def __init__(
        self,
        parts: Sequence[Embedding | Block | Head | Exit],
        *,
        into: Mapping[int, Redistribution],
        out_of: Mapping[int, Redistribution],
        tensor_rank: int,
        tensor_size: int,
        ordering: Ordering,
        sub_batches: int,
        pieces: int,
        along_sequence: bool,
        filler: Filler,
        sequence_parallel: bool,
        micro_batches: Callable[[], int],
        last_apart: bool,
        without: frozenset[Idea],
        observer: Observer = unobserved,
    ):
        self._without = without
        self._ordering = ordering
        self._pieces = pieces
        self._tensor_rank, self._tensor_size = tensor_rank, tensor_size
        self._chain = tuple(part.part for part in parts)
        self._chunked = {place for place, part in enumerate(parts) if part.chunked_attention is not None}
        self._sub_batches = sub_batches
        self._along_sequence = along_sequence
        self._sequence_parallel = sequence_parallel
        self._executor = Executor(
            parts,
            into=into,
            out_of=out_of,
            filler=filler,
            sequence_parallel=sequence_parallel,
            repeats_collectives=ordering.repeats_collectives,
            observer=observer,
        )
        self._schedules: dict[int, Schedule] = {}
        self.schedule = self._schedule_for(sub_batches)
        has_both_ends = self.schedule.layout.has_embedding and self.schedule.layout.has_head
        interleaves = has_both_ends and ordering.has_ideas and Idea.INTERLEAVE not in without
        self._interleaving = Interleaving(micro_batches if interleaves else lambda: 1, last_apart=last_apart)

    def __call__(self, *, hidden_states: Tensor | None, inputs: Inputs, labels: Tensor | None) -> Tensor:
        """Runs the stage on a micro-batch.

        Args:
            hidden_states: [s, b, h], output of the previous stage; None where the chain begins with the embedding.
            inputs: tokens and positions [b, s] for the embedding; for the attention, its keyword arguments. An
                `attention_mask` [b, 1, s, s] is cut with the batch.
            labels: [b, s], where the chain ends with the head.

        Returns:
            The loss of every token [b, s] where the chain ends with the head, else hidden states [s, b, h].
        """
        if not torch.is_grad_enabled():
            return self._forward(hidden_states, inputs, labels, keep=False)[0]
        if hidden_states is None or not hidden_states.requires_grad:
            # Autograd calls the backward of a function only if one of its inputs wants a gradient.
            anchor = torch.zeros((), requires_grad=True)
            return _Stage.apply(hidden_states, anchor, self, inputs, labels)
        return _Stage.apply(hidden_states, None, self, inputs, labels)

    def _forward(
        self, hidden_states: Tensor | None, inputs: Inputs, labels: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tape]:
        tape = self._tape(hidden_states, inputs, labels, keep=keep)
        schedule = self._schedule_for(len(tape.sizes))
        put_off = self._interleaving.begin(tape) if keep else None
        if put_off is None:
            self._run(schedule.forward, tape)
        elif len(put_off.sizes) == len(tape.sizes):
            self._run(schedule.steady, put_off, tape)
        else:
            self._run_backward(put_off)
            self._run(schedule.forward, tape)
        if tape.loss is not None:
            output, tape.loss = tape.loss, None
        else:
            output, tape.xs = tape.joined(tape.xs), [None] * len(tape.xs)
        return output, tape

    def _backward(self, tape: Tape, gradient: Tensor) -> Tensor | None:
        """The gradient of `hidden_states`, or None where the chain begins with the embedding."""
        if self.schedule.layout.has_head:
            tape.loss_gradient = gradient
        else:
            tape.gradients = tape.cut(gradient)
        if self._interleaving.puts_off(tape):
            return None
        self._run_backward(tape)
        return tape.joined(tape.gradients) if not self.schedule.layout.has_embedding else None

    def _run_backward(self, tape: Tape) -> None:
        self._run(self._schedule_for(len(tape.sizes)).backward, tape)

    def _run(self, order: Sequence[Operation], *tapes: Tape) -> None:
        try:
            # Each rank has its own part of the sequence, and so draws its own dropout masks, as in Megatron.
            with get_cuda_rng_tracker().fork() if self._sequence_parallel else nullcontext():
                self._executor.run(order, *tapes)
        except BaseException:
            self._interleaving.reset()
            raise

    def end_iteration(self) -> None:
        """To be called when all micro-batches of an iteration have run, before their gradients are used."""
        self._interleaving.end_iteration()

    def _tape(self, hidden_states: Tensor | None, inputs: Inputs, labels: Tensor | None, *, keep: bool) -> Tape:
        dim = 0 if self._along_sequence else 1  # of [s, b, h]
        whole = hidden_states.shape[dim] if hidden_states is not None else inputs["tokens"].shape[1 - dim]
        sizes = self._sizes(whole, keep=keep)
        device = (hidden_states if hidden_states is not None else inputs["tokens"]).device
        cut = _cut_sequence(inputs, sizes, device) if self._along_sequence else _cut_batch(inputs, sizes)
        layout = self._schedule_for(len(sizes)).layout
        cells = {}
        for place, part in enumerate(self._chain):
            chunks: list[Chunk] = []
            for i in range(len(sizes)):
                cell = Cell(
                    _share(cut[i], self._tensor_rank * part.sub_groups // self._tensor_size, part.sub_groups),
                    keep_graph=keep and not part.recomputed,
                    keep_x=keep and not layout.is_recomputed_from_inside(place),
                )
                if place in self._chunked:
                    cell.chunk = Chunk(earlier=list(chunks))
                    chunks.append(cell.chunk)
                cells[place, i] = cell
        tape = Tape(cells, sizes=sizes, dim=dim, keep=keep, labels=labels)
        if hidden_states is not None:
            tape.xs = tape.cut(hidden_states)
        return tape

    def _sizes(self, whole: int, *, keep: bool) -> list[int]:
        """Of each sub-batch. Evaluation may bring fewer samples, and then has fewer sub-batches."""
        what = "positions" if self._along_sequence else "samples"
        if keep and whole < self._sub_batches:
            raise ValueError(f"a micro-batch of {whole} {what} cannot be cut into {self._sub_batches} sub-batches")
        sub_groups = lcm(*(part.sub_groups for part in self._chain))
        for count in [self._sub_batches] if keep else range(min(self._sub_batches, whole), 0, -1):
            sizes = sub_batch_sizes(whole, count)
            if all(size % sub_groups == 0 for size in sizes):
                return list(sizes)
        raise ValueError(f"sub-batches of {' + '.join(map(str, sizes))} {what} cannot be shared by {sub_groups} sub-groups")

    def _schedule_for(self, sub_batches: int) -> Schedule:
        if sub_batches not in self._schedules:
            layout = self._ordering.layout(
                self._chain,
                sub_batches=sub_batches,
                pieces=self._pieces,
                along_sequence=self._along_sequence,
                sequence_parallel=self._sequence_parallel,
                without=self._without,
            )
            self._schedules[sub_batches] = self._ordering.build(layout, without=self._without)
        return self._schedules[sub_batches]


class _Stage(torch.autograd.Function):
    """The boundary to autograd: what is inside keeps its own graphs and accumulates parameters' gradients itself."""

    @staticmethod
    def forward(ctx, hidden_states, anchor, stage: ScheduledStage, inputs: Inputs, labels) -> Tensor:
        output, ctx.tape = stage._forward(hidden_states, inputs, labels, keep=True)
        ctx.stage = stage
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tape, ctx.tape = ctx.tape, None
        input_gradient = ctx.stage._backward(tape, gradient)
        return (input_gradient if ctx.needs_input_grad[0] else None), None, None, None, None


def _cut_batch(inputs: Inputs, sizes: Sequence[int]) -> list[Inputs]:
    """The inputs of each sub-batch. Tokens and positions are [b, s]; the mask is [b or 1, 1, s, s]."""
    cut = [dict(inputs) for _ in sizes]
    for name in ("tokens", "positions", "attention_mask"):
        whole = inputs.get(name)
        if whole is not None and whole.shape[0] == sum(sizes):
            for part, piece in zip(cut, whole.split(list(sizes), dim=0), strict=True):
                part[name] = piece
    return cut


def _share(inputs: Inputs, sub_group: int, sub_groups: int) -> Inputs:
    """A block's inputs for one of its sub-groups. Of what a block reads, only a mask [b, 1, s, s] has samples."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.shape[0] == 1 or sub_groups == 1:
        return inputs
    return {**inputs, "attention_mask": mask.chunk(sub_groups)[sub_group]}


def _cut_sequence(inputs: Inputs, sizes: Sequence[int], device: torch.device) -> list[Inputs]:
    """The inputs of each chunk. Rotary embeddings are [s, 1, 1, d]."""
    cut, start = [], 0
    for size in sizes:
        end, part = start + size, dict(inputs)
        for name in ("tokens", "positions"):
            if inputs.get(name) is not None:
                part[name] = inputs[name][:, start:end]
        for name, whole in inputs.items():
            if name.startswith("rotary") and whole is not None:
                part[name] = whole[start:end]
        part["attention_mask"] = chunk_of_mask(inputs.get("attention_mask"), start, end, device)
        cut.append(part)
        start = end
    return cut
