"""One file for each Megatron module that is patched. Each has `apply()` and `revert()`, both safe to call twice;
`patching` is what they share, and `tensor_parallel_mappings` what `tensor_parallel_layers` puts in their place.

Every file says what it replaces, why, for which megatron-core versions, and when it can go. Nothing is patched on
import. A vanilla run with Transformer Engine or apex that loads no checkpoint has no patch at all; without them, see
`optimizer_distrib_optimizer` and `torch_norm`, which mend what Megatron cannot do there.
"""
