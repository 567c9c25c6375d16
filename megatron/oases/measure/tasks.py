"""Which measurements make a profile, in which order, and how each is taken."""

import copy
import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.oases.arguments import OasesConfig
from megatron.oases.cost.model import Collective, Group
from megatron.oases.cost.profile_file import ContentionCell, MemoryCell, OperationCell, Overhead, VanillaCell
from megatron.oases.cost.records import to_json
from megatron.oases.errors import UsageError
from megatron.oases.measure.clock import clock_of
from megatron.oases.measure.collectives import measure_collective, sizes_bytes
from megatron.oases.measure.contention import measure_contention
from megatron.oases.measure.operations import (
    expected_cells,
    measure_memory,
    measure_operations,
    measure_overhead,
    missing_cells,
    sub_batch_sizes,
)
from megatron.oases.measure.ranks import gathered, new_group
from megatron.oases.measure.session import Session
from megatron.oases.measure.vanilla import measure_vanilla
from megatron.oases.schedule import Role

PASSES = 2
# Two, so that what a layer finds in the caches was not left there by itself.
_LAYERS = 2


@dataclass(frozen=True)
class Task:
    """One measurement: its name, unique in a pass, and what takes it, as JSON by section of the file."""

    name: str
    measure: Callable[[], dict]


class Tasks:
    """All measurements of one pass, in order. All ranks take each of them together.

    Args:
        args: Megatron's validated arguments; torch.distributed is up.
        config: the Oases flags.
        repeats: training steps that are timed for each number of samples in all passes.
        degrees: TP degrees to measure; all that divide the user's, if None.

    Raises:
        UsageError: a degree does not divide the user's, or that is not among them.
    """

    def __init__(
        self, args: Namespace, config: OasesConfig, *, repeats: int, degrees: Sequence[int] | None = None
    ):
        self._args, self._config, self._repeats = args, config, -(-repeats // PASSES)
        self._base = copy.copy(args)
        self._clock = clock_of(config.device)
        self._device = torch.device("cpu")
        if config.device == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._session: Session | None = None
        self._groups: dict[Group, dist.ProcessGroup] = {}
        self._tensor, self._pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        self._data = args.world_size // (self._tensor * self._pipeline)
        self._degrees = [t for t in range(self._tensor, 0, -1) if self._tensor % t == 0]
        if degrees is not None:
            _check_degrees(degrees, self._tensor, self._degrees)
            self._degrees = [t for t in self._degrees if t in degrees]
        self._samples = sub_batch_sizes(args.micro_batch_size)
        self._shapes = group_shapes(
            tensor=self._tensor,
            pipeline=self._pipeline,
            data=self._data,
            degrees=self._degrees,
            tied_embeddings=not args.untie_embeddings_and_output_weights,
        )

    def __iter__(self) -> Iterator[Task]:
        for shape, collectives in self._shapes.items():
            for collective in collectives:
                yield Task(f"{collective.value}, {shape}", lambda c=collective, s=shape: self._collective(c, s))
        for degree in self._degrees:
            for kept in (False, True):
                for samples in reversed(self._samples):
                    yield self._operations_task(degree, kept, samples)
                if not kept:
                    yield from self._shared_tasks(degree)
                if degree == self._tensor:
                    how = "graphs kept" if kept else "recomputed"
                    yield Task(f"Megatron itself, {how}", lambda kept=kept: self._vanilla(kept))
        # With one degree only, the optimizer needs another size of the model.
        yield self._operations_task(self._tensor, False, 1, layers=1)

    def _operations_task(self, degree: int, kept: bool, samples: int, layers: int = _LAYERS) -> Task:
        how = "graphs kept" if kept else "recomputed"
        name = f"operations, degree {degree}, {how}, {samples} samples, {layers} layers"
        return Task(name, lambda: self._operations(degree, kept, samples, layers))

    def _shared_tasks(self, degree: int) -> Iterator[Task]:
        """What needs the model of a degree, recomputed, but no other number of samples."""
        if degree == self._tensor:
            yield Task("overhead of an iteration", lambda: self._overhead(degree))
        tensor_shapes = {Group(t) for t in self._degrees}
        for shape, collectives in self._shapes.items():
            runs_beside = Collective.ALL_GATHER in collectives  # what joins pipeline stages does not
            if runs_beside and (shape == Group(degree) or (degree == self._tensor and shape not in tensor_shapes)):
                yield Task(f"contention, {shape}", lambda s=shape: self._contention(degree, s))

    def _collective(self, collective: Collective, shape: Group) -> dict:
        used = {self._activation_bytes(samples) for samples in self._samples}
        series = measure_collective(
            collective, shape, self._group(shape), sizes=sizes_bytes(used), device=self._device
        )
        return {"collectives": [to_json(series)]}

    def _operations(self, degree: int, kept: bool, samples: int, layers: int) -> dict:
        def measured() -> dict:
            session = self._open_session(degree, layers, kept)
            cells, optimizer = measure_operations(session, samples=samples, repeats=self._repeats)
            result = {}
            if samples == min(self._samples) and not kept:  # once for each number of parameters
                result["optimizer"] = [to_json(optimizer)]
            if layers == _LAYERS:
                result["operations"] = [to_json(cell) for cell in cells if self._belongs(cell, kept)]
            if samples == max(self._samples):
                result["memory"] = [to_json(measure_memory(session, samples=samples))]
            return result

        def missing(reason: str) -> dict:
            if layers != _LAYERS:
                return {}
            keys = expected_cells(degree=degree, kept=kept, sequence_parallel=self._base.sequence_parallel)
            cells = missing_cells(sorted(keys, key=str), degree=degree, samples=samples, reason=reason)
            result = {"operations": [to_json(cell) for cell in cells if self._belongs(cell, kept)]}
            if samples == max(self._samples):
                memory = MemoryCell(
                    degree=degree, layers=layers, kept=kept, samples=samples,
                    parameters_bytes=None, peak_bytes=None, missing=reason,
                )  # fmt: skip
                result["memory"] = [to_json(memory)]
            return result

        return self._unless_out_of_memory(measured, missing)

    @staticmethod
    def _belongs(cell: OperationCell, kept: bool) -> bool:
        """Embedding and head keep their graphs in both kinds of session: one of them is enough."""
        return not (kept and cell.role in (Role.EMBEDDING, Role.HEAD))

    def _overhead(self, degree: int) -> dict:
        def measured() -> dict:
            session = self._open_session(degree, _LAYERS, False)
            overhead = measure_overhead(session, samples=max(self._samples), repeats=self._repeats)
            return {"overhead": [to_json(overhead)]}

        def missing(reason: str) -> dict:
            return {"overhead": [to_json(Overhead(fixed_ms=None, per_micro_batch_ms=None, missing=reason))]}

        return self._unless_out_of_memory(measured, missing)

    def _contention(self, degree: int, shape: Group) -> dict:
        def measured() -> dict:
            cell = measure_contention(
                self._open_session(degree, _LAYERS, False),
                shape,
                self._group(shape),
                size_bytes=self._activation_bytes(max(1, max(self._samples) // 2)),
                samples=max(self._samples),
                repeats=self._repeats,
                device=self._device,
            )
            return {"contention": [to_json(cell)]}

        def missing(reason: str) -> dict:
            cell = ContentionCell(
                group_size=shape.size, stride=shape.stride, compute=None, communication=None, missing=reason
            )
            return {"contention": [to_json(cell)]}

        return self._unless_out_of_memory(measured, missing)

    def _vanilla(self, kept: bool) -> dict:
        degree, samples = self._tensor, max(self._samples)

        def measured() -> dict:
            executor = self._open_session(degree, _LAYERS, kept)
            megatron = self._new_session(degree, _LAYERS, kept, vanilla=True)
            cell = measure_vanilla(executor, megatron, samples=samples, repeats=self._repeats)
            megatron.close()
            return {"vanilla": [to_json(cell)]}

        def missing(reason: str) -> dict:
            cell = VanillaCell(degree=degree, samples=samples, kept=kept, factor=None, missing=reason)
            return {"vanilla": [to_json(cell)]}

        return self._unless_out_of_memory(measured, missing)

    def _unless_out_of_memory(self, measured: Callable[[], dict], missing: Callable[[str], dict]) -> dict:
        result = reason = None
        try:
            result = measured()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = f"out of memory: {str(error).splitlines()[0]}"
            self.close()
        reasons = [each for each in gathered(reason) if each is not None]
        return missing(reasons[0]) if reasons else result

    def _open_session(self, degree: int, layers: int, kept: bool) -> Session:
        session = self._session
        if session is None or (session.degree, session.layers, session.kept) != (degree, layers, kept):
            self.close()
            self._session = self._new_session(degree, layers, kept, vanilla=False)
        return self._session

    def _new_session(self, degree: int, layers: int, kept: bool, *, vanilla: bool) -> Session:
        return Session(
            self._args,
            self._base,
            self._config,
            degree=degree,
            layers=layers,
            kept=kept,
            vanilla=vanilla,
            clock=self._clock,
        )

    def close(self) -> None:
        """Gives the model's memory back."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _group(self, shape: Group) -> dist.ProcessGroup | None:
        if shape not in self._groups:
            self._groups[shape] = new_group(shape)
        return self._groups[shape]

    def _activation_bytes(self, samples: int) -> int:
        args = self._base
        element_bytes = 2 if args.fp16 or args.bf16 else 4
        return args.seq_length * samples * args.hidden_size * element_bytes


def group_shapes(
    *, tensor: int, pipeline: int, data: int, degrees: Sequence[int], tied_embeddings: bool
) -> dict[Group, tuple[Collective, ...]]:
    """The groups that communicate, and which collectives they are asked for.

    Args:
        tensor, pipeline, data: sizes of the layout.
        degrees: TP degrees that blocks may have.
        tied_embeddings: whether the first and the last stage share the embedding, and so its gradient.
    """
    plain = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    shapes = {Group(t): (*plain, Collective.ALL_TO_ALL) for t in degrees}
    for t in degrees:  # a block of a lower degree runs in T/t sub-groups
        shapes.setdefault(Group(tensor // t, stride=t), plain)
    for low, high in itertools.combinations(sorted(degrees), 2):  # sub-groups that exchange activations
        if high % low == 0:
            shapes.setdefault(Group(high // low, stride=low), (*plain, Collective.ALL_TO_ALL))
    shapes[Group(data, tensor)] = plain
    shapes[Group(pipeline, tensor * data)] = (Collective.ALL_REDUCE, Collective.SEND)
    if tied_embeddings and pipeline > 2:  # of two stages they are the pipeline's groups
        shapes[Group(2, tensor * data * (pipeline - 1))] = (Collective.ALL_REDUCE,)
    return {shape: collectives for shape, collectives in shapes.items() if shape.size > 1}


def is_out_of_memory(error: RuntimeError) -> bool:
    """On the CPU torch has no type of its own for it."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _check_degrees(degrees: Sequence[int], tensor: int, possible: Sequence[int]) -> None:
    shown = " ".join(map(str, degrees))
    for degree in degrees:
        if degree not in possible:
            raise UsageError(f"--degrees {shown}: {degree} does not divide --tensor-model-parallel-size {tensor}")
    if tensor not in degrees:
        raise UsageError(f"--degrees {shown} must have --tensor-model-parallel-size {tensor} among them")
