"""Patches the parallel linears and the vocabulary-parallel embedding (megatron.core.tensor_parallel.layers).

What: while a schedule runs one of them (`oases_scheduling`), `RowParallelLinear.forward` and
    `VocabParallelEmbedding.forward` leave their output unreduced, and `_forward_impl` of both linears hands over to the
    schedule's linear. Otherwise, and for every other layer, they are Megatron's own.
Why: Megatron's linear reduces the input gradient and computes the weight gradient within one backward; a schedule runs
    them apart, and starts the collectives itself. The column-parallel linear's mapping (`copy_to_tensor_model_parallel_region`, or
    the all-reduce of its gradient) falls away with it.
Versions: megatron-core 0.19.
Can go: when Megatron's linears offer unreduced outputs, and deferred weight gradients without TransformerEngine.
"""

import functools

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from torch import Tensor

from oases_patches.patching import Patch, Replacement
from oases_patches.tensor_parallel_mappings import without_collectives


def _is_scheduled(layer) -> bool:
    scheduling = getattr(layer, "oases_scheduling", None)
    return scheduling is not None and scheduling.active


def _unreduced_while_scheduled(original):
    unreduced = without_collectives(original)

    @functools.wraps(original)
    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        return unreduced(self, input_) if _is_scheduled(self) else original(self, input_)

    return forward


def _looked_up_or_answered_while_scheduled(original):
    unreduced = without_collectives(original)

    @functools.wraps(original)
    def forward(self, input_: Tensor) -> Tensor:
        if not _is_scheduled(self):
            return original(self, input_)
        answer = self.oases_scheduling.answer
        return unreduced(self, input_) if answer is None else answer

    return forward


def _handed_over_while_scheduled(original, *, row_parallel: bool):
    @functools.wraps(original)
    def _forward_impl(self, input, weight, *args, **kwargs) -> Tensor:
        if not _is_scheduled(self):
            return original(self, input, weight, *args, **kwargs)
        return self.oases_scheduling(
            input,
            weight,
            kwargs["bias"],
            row_parallel=row_parallel,
            fused_wgrad=kwargs["gradient_accumulation_fusion"],
        )

    return _forward_impl


_patch = Patch(
    Replacement(
        ColumnParallelLinear, "_forward_impl", functools.partial(_handed_over_while_scheduled, row_parallel=False)
    ),
    Replacement(
        RowParallelLinear, "_forward_impl", functools.partial(_handed_over_while_scheduled, row_parallel=True)
    ),
    Replacement(RowParallelLinear, "forward", _unreduced_while_scheduled),
    Replacement(VocabParallelEmbedding, "forward", _looked_up_or_answered_while_scheduled),
)
apply, revert = _patch.apply, _patch.revert
