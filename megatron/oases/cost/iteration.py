"""A training iteration out of simulated lists: micro-batches, pipeline stages, data parallelism, optimizer.

What no list knows is put together here: stages that wait for each other, gradients reduced over the data-parallel
group, the gradient of tied embeddings, the optimizer, and what an iteration takes besides.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from megatron.oases.cost.data_parallel import (
    beside_first_forward,
    beside_last_backward,
    copies_ms,
    gather_ms,
    norm_gradients_ms,
    reduce_ms,
    tied_embedding_ms,
)
from megatron.oases.cost.memory import stage_parameters, static_memory
from megatron.oases.cost.model import Collective, CostModel
from megatron.oases.cost.pipeline import PlacedStep, Step, pipeline_steps, run_pipeline, single_stage_steps
from megatron.oases.cost.result import Prediction, StagePrediction
from megatron.oases.cost.simulator import DataParallel, PassResult, Span, StageSimulator
from megatron.oases.cost.system import System
from megatron.oases.cost.workload import Workload
from megatron.oases.schedule import Layout, Schedule


def send_ms(cost: CostModel, workload: Workload) -> float:
    """A micro-batch to the next pipeline stage, or its gradient back."""
    if workload.pipeline == 1:
        return 0.0
    size_bytes = workload.hidden_bytes(workload.micro_batch)
    if workload.sequence_parallel:
        size_bytes //= workload.tensor
    return cost.collective_ms(Collective.SEND, workload.pipeline_group, size_bytes)


class Simulator:
    """Predicts iterations on one cluster. Keeps the lists that it has built, so that the next prediction is quicker.

    Args:
        cost: times of single operations.
    """

    def __init__(self, cost: CostModel):
        self._cost = cost
        self._schedules: dict[tuple[System, Layout], Schedule] = {}

    def predict(self, workload: Workload, system: System, *, record: bool = False) -> Prediction:
        """One iteration in the steady state of training.

        Args:
            workload: what is trained.
            system: who orders it.
            record: whether the timeline and memory over time are wanted.
        """
        return _Iteration(self._cost, self._schedule, workload, system, record=record).predict()

    def _schedule(self, system: System, layout: Layout) -> Schedule:
        if (system, layout) not in self._schedules:
            self._schedules[system, layout] = system.build(layout)
        return self._schedules[system, layout]


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """What is needed to run a stage's lists."""

    simulator: StageSimulator
    schedule: Schedule
    first: DataParallel  # beside the first forward pass of an iteration
    last: DataParallel  # beside its last backward pass


@dataclass(frozen=True, kw_only=True)
class _Tail:
    """What a stage does after its last list, in ms."""

    reduce: float
    norms: float
    copies: float
    embedding: float
    optimizer: float
    gather: float


class _Iteration:
    def __init__(
        self,
        cost: CostModel,
        schedule: Callable[[System, Layout], Schedule],
        workload: Workload,
        system: System,
        *,
        record: bool,
    ):
        self._cost = cost
        self._workload = workload
        self._system = system
        self._record = record
        self._stages = [self._stage(stage, schedule) for stage in range(workload.pipeline)]
        # Stages that are alike run the same lists: each is simulated once.
        self._passes: dict[tuple, PassResult] = {}

    def _stage(self, stage: int, schedule: Callable[[System, Layout], Schedule]) -> _Stage:
        workload, system = self._workload, self._system
        layout = system.layout(workload, stage)
        return _Stage(
            simulator=StageSimulator(
                self._cost,
                workload,
                layout,
                system.sub_batch_sizes(workload),
                system.filler(workload),
                record=self._record,
            ),
            schedule=schedule(system, layout),
            first=beside_first_forward(self._cost, workload, layout, stage),
            last=beside_last_backward(self._cost, workload, layout, stage),
        )

    def predict(self) -> Prediction:
        placed = run_pipeline(
            [self._steps(stage) for stage in range(self._workload.pipeline)],
            elapsed_ms=lambda stage, step: self._pass(stage, step).elapsed_ms,
            send_ms=send_ms(self._cost, self._workload),
        )
        tails = [self._tail(stage, steps) for stage, steps in enumerate(placed)]
        # The norm of all gradients is known to all stages before any of them updates a parameter.
        reduced_ms = [
            steps[-1].free_ms + tail.reduce + tail.norms + tail.copies
            for steps, tail in zip(placed, tails, strict=True)
        ]
        if self._ties_stages:
            reduced_ms[0] = reduced_ms[-1] = max(reduced_ms[0], reduced_ms[-1])
        together_ms = max(end_ms + tail.embedding for end_ms, tail in zip(reduced_ms, tails, strict=True))
        overhead_ms = self._cost.iteration_overhead_ms(self._workload.micro_batches)
        iteration_ms = together_ms + max(tail.optimizer + tail.gather for tail in tails) + overhead_ms
        return Prediction(
            stages=tuple(
                self._stage_prediction(stage, placed[stage], tail, iteration_ms, overhead_ms)
                for stage, tail in enumerate(tails)
            ),
            iteration_ms=iteration_ms,
            tokens=self._workload.tokens,
            degree=self._workload.tensor,
            timeline=self._timeline(placed, tails, reduced_ms, together_ms) if self._record else (),
        )

    def _steps(self, stage: int) -> list[Step]:
        workload = self._workload
        if workload.pipeline > 1:
            return list(pipeline_steps(workload.micro_batches, stage=stage, stages=workload.pipeline))
        return list(
            single_stage_steps(
                workload.micro_batches,
                interleaves=self._system.interleaves(workload),
                last_apart=workload.overlap_grad_reduce,
            )
        )

    def _pass(self, stage: int, step: Step) -> PassResult:
        own = self._stages[stage]
        data = own.first if step.begins else own.last if step.ends else DataParallel()
        key = (own.schedule.layout, step.name, data)
        if key not in self._passes:
            self._passes[key] = own.simulator.run(getattr(own.schedule, step.name), data)
        return self._passes[key]

    @property
    def _ties_stages(self) -> bool:
        return self._workload.model.tied_embeddings and self._workload.pipeline > 1

    def _tail(self, stage: int, steps: list[PlacedStep]) -> _Tail:
        cost, workload, layout = self._cost, self._workload, self._stages[stage].schedule.layout
        parameters = stage_parameters(workload, stage)
        if workload.overlap_grad_reduce:
            reduce = self._pass(stage, steps[-1].step).data_left_ms
        else:
            reduce = reduce_ms(cost, workload, parameters)
        embedding = tied_embedding_ms(cost, workload) if stage in (0, workload.pipeline - 1) else 0.0
        updated = -(-parameters // workload.data) if workload.distributed_optimizer else parameters
        return _Tail(
            reduce=reduce,
            norms=norm_gradients_ms(cost, workload, layout),
            copies=copies_ms(cost, workload, layout.chain),
            embedding=embedding,
            optimizer=cost.optimizer_ms(updated),
            # Otherwise the next iteration's first forward pass has it beside it.
            gather=0.0 if workload.overlap_param_gather else gather_ms(cost, workload, parameters),
        )

    def _stage_prediction(
        self, stage: int, placed: list[PlacedStep], tail: _Tail, iteration_ms: float, overhead_ms: float
    ) -> StagePrediction:
        passes = [self._pass(stage, each.step) for each in placed]
        compute_ms = sum(result.compute_ms for result in passes)
        summed_ms = tail.norms + tail.copies
        exposed_ms = sum(result.exposed_ms for result in passes) + summed_ms
        data_parallel_ms = tail.reduce + tail.gather
        known_ms = compute_ms + exposed_ms + data_parallel_ms + tail.optimizer + overhead_ms
        data_ms = sum(result.data_ms for result in passes)
        data_ms += tail.gather + (0.0 if self._workload.overlap_grad_reduce else tail.reduce)
        static = static_memory(self._workload, stage)
        peak_bytes, memory = self._memory(placed, passes, static.total_bytes)
        return StagePrediction(
            compute_ms=compute_ms,
            exposed_ms=exposed_ms,
            pipeline_ms=max(iteration_ms - known_ms, 0.0),  # a rounding error where nothing is left
            data_parallel_ms=data_parallel_ms,
            optimizer_ms=tail.optimizer,
            overhead_ms=overhead_ms,
            communication_ms=sum(result.communication_ms for result in passes) + summed_ms + data_ms,
            in_flight_ms=sum(result.in_flight_ms for result in passes),
            waited_ms=sum(result.waited_ms for result in passes),
            static=static,
            peak_bytes=peak_bytes,
            memory=memory,
        )

    @staticmethod
    def _memory(
        placed: list[PlacedStep], passes: list[PassResult], allocated: int
    ) -> tuple[int, tuple[tuple[float, int], ...]]:
        peak, memory = allocated, []
        for each, result in zip(placed, passes, strict=True):
            peak = max(peak, allocated + result.peak_bytes)
            memory += [(each.start_ms + time_ms, allocated + size_bytes) for time_ms, size_bytes in result.memory]
            allocated += result.after_bytes
        return peak, tuple(memory)

    def _timeline(
        self, placed: list[list[PlacedStep]], tails: list[_Tail], reduced_ms: list[float], together_ms: float
    ) -> tuple[Span, ...]:
        spans = []
        for stage, (steps, tail) in enumerate(zip(placed, tails, strict=True)):
            for each in steps:
                spans += self._placed_spans(stage, each)
            at_ms = steps[-1].free_ms
            pieces = [("data", "reduce gradients", at_ms, tail.reduce)]
            if self._workload.overlap_grad_reduce:
                pieces = []  # they are in the last list's spans
            pieces.append(("communication", "sum gradients of norms", at_ms + tail.reduce, tail.norms))
            copied_at_ms = at_ms + tail.reduce + tail.norms
            pieces.append(("communication", "sum gradients of sub-groups", copied_at_ms, tail.copies))
            pieces.append(("pipeline", "sum gradient of embedding", reduced_ms[stage], tail.embedding))
            pieces.append(("compute", "optimizer", together_ms, tail.optimizer))
            pieces.append(("data", "gather parameters", together_ms + tail.optimizer, tail.gather))
            spans += [Span(lane, name, start, start + ms, stage) for lane, name, start, ms in pieces if ms > 0]
        return tuple(sorted(spans, key=lambda span: span.start_ms))

    def _placed_spans(self, stage: int, placed: PlacedStep) -> list[Span]:
        spans = []
        for span in self._pass(stage, placed.step).spans:
            micro_batch = placed.step.micro_batches[span.operation.micro_batch] if span.operation is not None else 0
            spans.append(
                dataclasses.replace(
                    span,
                    start_ms=placed.start_ms + span.start_ms,
                    end_ms=placed.start_ms + span.end_ms,
                    stage=stage,
                    micro_batch=micro_batch,
                )
            )
        if placed.free_ms > placed.end_ms:
            name = f"send {placed.step.name}"
            micro_batch = placed.step.micro_batches[0]
            spans.append(Span("pipeline", name, placed.end_ms, placed.free_ms, stage, micro_batch))
        return spans
