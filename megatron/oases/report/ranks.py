"""Which rank speaks for all."""

from megatron.core import parallel_state


def is_reporter() -> bool:
    """Whether this is one of the ranks that have the loss. No rank is, before there are groups."""
    return (
        parallel_state.model_parallel_is_initialized()
        and parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )
