"""What the memory model says is kept between forward and backward, against the tensors that are."""

import pytest

from megatron.oases.cost.memory import ActivationMemory
from megatron.oases.cost.system import System
from megatron.oases.cost.workload import ModelShape, Workload
from tests.distributed.models import ModelCase
from tests.distributed.test_exactness import BLOCK, FULL, SP, SWIGLU
from tests.distributed.test_memory import _kept_bytes

TOLERANCE = 0.05
SIZES = dict(layers=4, hidden=128, heads=4, sequence=64, batch=4, vocabulary=256)
GPT = ModelCase(**SIZES)
LLAMA = ModelCase(**SIZES, rope=True, rmsnorm=True, tied=False)


def _case(base: ModelCase, config: dict, **changes) -> ModelCase:
    return ModelCase(**{**vars(base), **changes, "config": {**(SWIGLU if base.rope else {}), **config}})


CASES = {
    "gpt full": _case(GPT, FULL),
    "gpt none": _case(GPT, {}),
    "gpt block": _case(GPT, BLOCK),
    "gpt none dropout": _case(GPT, dict(hidden_dropout=0.1, attention_dropout=0.1)),
    "gpt none sequence parallel": _case(GPT, SP),
    "llama full": _case(LLAMA, FULL),
    "llama none": _case(LLAMA, {}),
    "llama none sdpa": _case(LLAMA, {}, sdpa=True),
    "llama none grouped queries": _case(LLAMA, dict(num_query_groups=2)),
    "llama full sequence parallel": _case(LLAMA, {**FULL, **SP}),
}


def _workload(case: ModelCase) -> Workload:
    config = case.config
    recompute = {None: "none", "full": "full"}[config.get("recompute_granularity")]
    if config.get("recompute_method") == "block":
        recompute = "block"
    gated = config.get("gated_linear_unit", False)
    return Workload(
        model=ModelShape(
            layers=case.layers,
            hidden_size=case.hidden,
            ffn_hidden_size=4 * case.hidden,
            heads=case.heads,
            query_groups=config.get("num_query_groups", case.heads),
            head_size=case.hidden // case.heads,
            sequence=case.sequence,
            padded_vocabulary=case.vocabulary,
            gated_mlp=gated,
            bias=config.get("add_bias_linear", True),
            tied_embeddings=case.tied,
            learned_positions=not case.rope,
            rms_norm=case.rmsnorm,
            stores_scores=not case.sdpa,
            element_bytes=4,
        ),
        tensor=2,
        pipeline=1,
        data=1,
        micro_batch=case.batch,
        micro_batches=1,
        recompute=recompute,
        recompute_layers=config.get("recompute_num_layers", 0),
        sub_batches=2,
        sequence_parallel=config.get("sequence_parallel", False),
        hidden_dropout=config.get("hidden_dropout", 0) > 0,
        attention_dropout=config.get("attention_dropout", 0) > 0,
        unfused=True,
    )


def _predicted_bytes(case: ModelCase, system: System) -> int:
    workload = _workload(case)
    layout = system.layout(workload, 0)
    memory = ActivationMemory(workload, layout, system.sub_batch_sizes(workload))
    return sum(memory.effect(operation).after_bytes for operation in system.build(layout).forward)


def _counted_bytes(rank: int, case: ModelCase, scheduled: bool) -> int:
    return _kept_bytes(case, scheduled)


@pytest.mark.parametrize("scheduled", [False, True], ids=["megatron", "oases"])
@pytest.mark.parametrize("name", CASES)
def test_predicted_is_counted(world2, name, scheduled):
    case = CASES[name]
    counted = world2.run(_counted_bytes, case=case, scheduled=scheduled)
    predicted = _predicted_bytes(case, System(schedule="oases" if scheduled else "vanilla"))
    assert predicted == pytest.approx(counted[0], rel=TOLERANCE)
