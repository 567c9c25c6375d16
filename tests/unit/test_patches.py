"""A patch stands on what Megatron's code looks like: a changed signature upstream fails here, and by name."""

import inspect

import pytest


def _signatures():
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import layers, mappings, random
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.training import checkpointing

    forward_impl = "(self, input, weight, *args, **kwargs)"
    return {
        layers.ColumnParallelLinear._forward_impl: forward_impl,
        layers.RowParallelLinear._forward_impl: forward_impl,
        layers.RowParallelLinear.forward: "(self, input_)",
        layers.VocabParallelEmbedding.forward: "(self, input_)",
        mappings.reduce_from_tensor_model_parallel_region: "(input_, group)",
        mappings.reduce_scatter_to_sequence_parallel_region: "(input_, group, input_split_sizes, use_global_buffer)",
        GPTModel.forward: "(self, input_ids, position_ids, attention_mask, decoder_input, labels, inference_context, "
        "packed_seq_params, extra_block_kwargs, runtime_gather_output, *, inference_params, loss_mask, padding_mask, "
        "output_processor, output_processor_context)",
        GPTModel._preprocess: "(self, input_ids, position_ids, decoder_input, inference_context, packed_seq_params, "
        "padding_mask)",
        WrappedTorchNorm.__new__: "(cls, config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, normalization)",
        checkpointing._load_base_checkpoint: "(load_dir, args, rank0, sharded_state_dict, checkpointing_context, dp_cp_group, "
        "expt_dp_group, gpt_compat_layer_maps)",
        random._get_all_rng_states: "()",
        random._set_all_rng_states: "(cpu_rng_state, cuda_rng_state, cuda_rng_state_tracker)",
    }


def _names(function) -> str:
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names, keyword_only = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            names.append("*")
            keyword_only = True
        keyword_only |= parameter.kind is inspect.Parameter.VAR_POSITIONAL
        names.append(marks.get(parameter.kind, "") + parameter.name)
    return f"({', '.join(names)})"


def test_upstream_signatures():
    for function, expected in _signatures().items():
        assert _names(function) == expected, f"{function.__module__}.{function.__qualname__} has changed"


def test_the_mappings_are_taken_out_of_the_code_that_uses_them():
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from oases_patches.tensor_parallel_mappings import without_collectives

    names = without_collectives(RowParallelLinear.forward).__globals__
    assert names["reduce_from_tensor_model_parallel_region"]("as it is", group=None) == "as it is"
    assert RowParallelLinear.forward.__globals__["reduce_from_tensor_model_parallel_region"] is not names
    with pytest.raises(AssertionError, match="uses none of"):
        without_collectives(ColumnParallelLinear.sharded_state_dict)


@pytest.mark.parametrize("name", ["tensor_parallel_layers", "gpt_model", "torch_norm"])
def test_apply_and_revert_leave_nothing_behind(name):
    import importlib

    patch = importlib.import_module(f"oases_patches.{name}")
    before = list(map(id, _signatures()))
    patch.revert()
    patch.apply()
    patch.apply()
    assert list(map(id, _signatures())) != before
    patch.revert()
    patch.revert()
    assert list(map(id, _signatures())) == before
