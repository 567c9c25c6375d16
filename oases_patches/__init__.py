"""One file for each Megatron module that is patched. Each has `apply()` and `revert()`, both safe to call twice.

Every file says what it replaces, why, for which megatron-core versions, and when it can go. Nothing is patched on
import, and nothing at all in a vanilla run on a GPU.
"""
