"""The short form of a plan's degrees: `4x8,2x16` is degree 4 for eight layers, then 2 for sixteen.

An entry without a number is one layer, so `4,2,2,4` are four. `4/2` gives attention degree 4 and the MLP degree 2.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from megatron.oases.errors import UsageError
from megatron.oases.sizes import sub_batch_sizes

_ENTRY = re.compile(r"([1-9]\d*)(?:/([1-9]\d*))?(?:x([1-9]\d*))?")


class LayerDegrees(NamedTuple):
    """TP degrees of one layer."""

    attention: int
    mlp: int

    def __str__(self) -> str:
        return str(self.attention) if self.attention == self.mlp else f"{self.attention}/{self.mlp}"


def parse_degrees(text: str, *, layers: int, flag: str = "--oases-degrees") -> tuple[LayerDegrees, ...]:
    """The degrees of every layer.

    Args:
        text: the short form.
        layers: how many it must name.
        flag: for the message.

    Raises:
        UsageError: an entry is none, or they are not as many as there are layers.
    """
    degrees: list[LayerDegrees] = []
    counts = []
    for entry in text.split(","):
        found = _ENTRY.fullmatch(entry.strip())
        if found is None:
            raise UsageError(f"{flag} {text}: {entry.strip()!r} is not like 4, 4x8, 4/2 or 4/2x8")
        attention, mlp, times = found.groups()
        counts.append(int(times or 1))
        if sum(counts) <= layers:  # a number with a dozen digits is an error, not an attempt
            degrees += [LayerDegrees(int(attention), int(mlp or attention))] * counts[-1]
    if sum(counts) != layers:
        arithmetic = " + ".join(map(str, counts))
        total = f"{arithmetic} = {sum(counts)}" if len(counts) > 1 else arithmetic
        raise UsageError(f"{flag} {text} names {total} layers, --num-layers is {layers}")
    return tuple(degrees)


def format_degrees(degrees: Sequence[LayerDegrees]) -> str:
    """The short form of these layers' degrees, as short as it can be."""
    runs = [(layer, len(list(run))) for layer, run in groupby(degrees)]
    return ",".join(f"{layer}x{count}" if count > 1 else str(layer) for layer, count in runs)


def legal_degrees(tensor: int, *, micro_batch: int, sub_batches: int) -> tuple[int, ...]:
    """The degrees that a block can have: divisors of T whose T/t sub-groups divide every sub-batch.

    Args:
        tensor: T.
        micro_batch: its samples.
        sub_batches: that it is cut into.
    """
    sizes = sub_batch_sizes(micro_batch, sub_batches)
    divisors = [degree for degree in range(1, tensor + 1) if tensor % degree == 0]
    return tuple(degree for degree in divisors if not any(size % (tensor // degree) for size in sizes))


def refusal(
    degree: int, tensor: int, *, micro_batch: int, sub_batches: int, flag: str = "--micro-batch-size"
) -> str | None:
    """Why a block cannot have that degree, if it cannot.

    Args:
        degree: the block's.
        tensor, micro_batch, sub_batches: see `legal_degrees`.
        flag: that says `micro_batch`.
    """
    if degree in legal_degrees(tensor, micro_batch=micro_batch, sub_batches=sub_batches):
        return None
    if degree < 1 or tensor % degree:
        return f"does not divide --tensor-model-parallel-size {tensor}"
    sizes = " + ".join(map(str, sub_batch_sizes(micro_batch, sub_batches)))
    return (
        f"makes {tensor} / {degree} = {tensor // degree} sub-groups, among which {flag} {micro_batch} in sub-batches of "
        f"{sizes} samples cannot be divided"
    )
