"""How a world of ranks may be laid out: tensor, pipeline and data parallelism, and the size of a micro-batch."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.oases.command_line import OneLineParser
from megatron.oases.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes as Megatron's flags have them; the data-parallel size follows."""

    tensor: int
    pipeline: int
    data: int
    micro_batch: int

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            *("--tensor-model-parallel-size", str(self.tensor)),
            *("--pipeline-model-parallel-size", str(self.pipeline)),
            *("--micro-batch-size", str(self.micro_batch)),
        )


def layouts(flags: Sequence[str], *, world_size: int) -> Iterator[Layout]:
    """Every layout that uses all ranks, and whose micro-batches make up the global batch.

    Args:
        flags: a training command's. What it says of a size is the only one that is tried.
        world_size: number of ranks.

    Raises:
        UsageError: --global-batch-size is missing, or no layout is left.
    """
    parser = OneLineParser(add_help=False, argument_default=argparse.SUPPRESS)
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size", "global-batch-size"):
        parser.add_argument(f"--{name}", type=int)
    said = vars(parser.parse_known_args(flags)[0])
    if said.get("global_batch_size", 0) < 1:
        raise UsageError("--search-layout needs --global-batch-size among MEGATRON FLAGS, of at least 1")
    global_batch = said.pop("global_batch_size")
    found = False
    for layout in _all(world_size, global_batch):
        asked = {
            "tensor_model_parallel_size": layout.tensor,
            "pipeline_model_parallel_size": layout.pipeline,
            "micro_batch_size": layout.micro_batch,
        }
        if said.items() <= asked.items():
            found = True
            yield layout
    if not found:
        fixed = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in said.items()) or "any sizes"
        raise UsageError(
            f"--world-size {world_size} and --global-batch-size {global_batch}: no TP x PP x DP = {world_size} with "
            f"{fixed} whose micro-batches make up the global batch"
        )


def _all(world_size: int, global_batch: int) -> Iterator[Layout]:
    for tensor in _divisors(world_size):
        for pipeline in _divisors(world_size // tensor):
            data = world_size // (tensor * pipeline)
            if global_batch % data == 0:
                for micro_batch in _divisors(global_batch // data):
                    yield Layout(tensor=tensor, pipeline=pipeline, data=data, micro_batch=micro_batch)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
