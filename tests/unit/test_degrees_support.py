"""--oases-degrees and --oases-plan against the other flags: each mistake is refused by name, with the legal values."""

import json

import pytest

from megatron.oases.arguments import OasesConfig
from megatron.oases.cost.workload import ModelShape
from megatron.oases.degrees_support import check_block_flags
from megatron.oases.errors import UsageError
from megatron.oases.plan import BlockPlan, LayerPlan, Plan, write_plan
from megatron.oases.support import check_schedule
from tests.unit.megatron_parser import shared_parser

_FLAGS = (
    "--transformer-impl local --num-layers 2 --hidden-size 96 --num-attention-heads 8 --ffn-hidden-size 384 "
    "--seq-length 32 --tensor-model-parallel-size 4 --micro-batch-size 8 --global-batch-size 16"
)


def _parse(flags: str):
    """What Megatron's validation makes of the flags, on eight ranks."""
    args = shared_parser().parse_args(f"{_FLAGS} {flags}".split())
    args.world_size, args.data_parallel_size = 8, 8 // args.tensor_model_parallel_size
    args.kv_channels, args.padded_vocab_size = args.hidden_size // args.num_attention_heads, 256
    args.eval_micro_batch_size = args.eval_micro_batch_size or args.micro_batch_size
    return args


def _check(flags: str) -> OasesConfig:
    args = _parse(flags)
    config = OasesConfig.from_args(args, device="cpu")
    check_schedule(args, config)
    check_block_flags(args, config)
    return config


@pytest.mark.parametrize("schedule", ["vanilla", "oases"])
def test_what_can_run_passes(schedule):
    config = _check(f"--oases-schedule {schedule} --oases-degrees 4/2,1")
    assert config.is_scheduled and config.degrees == ((4, 2), (1, 1))
    # Checkpoints of plain degrees are Megatron's own.
    _check(f"--oases-schedule {schedule} --oases-degrees 4x2 --save there")
    assert not _check("").is_scheduled


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--oases-degrees 4,3", "layer 2 of 2, attention: degree 3 does not divide --tensor-model-parallel-size 4; legal here: 1, 2, 4"),
        ("--oases-degrees 4/8,4", "layer 1 of 2, mlp: degree 8 does not divide --tensor-model-parallel-size 4; legal here: 1, 2, 4"),
        (
            "--oases-degrees 4,4/1 --oases-schedule oases --micro-batch-size 4",
            "layer 2 of 2, mlp: degree 1 makes 4 / 1 = 4 sub-groups, among which --micro-batch-size 4 in sub-batches of "
            "2 + 2 samples cannot be divided; legal here: 2, 4",
        ),
        (
            "--oases-degrees 2x2 --oases-schedule oases --micro-batch-size 6",
            "degree 2 makes 4 / 2 = 2 sub-groups, among which --micro-batch-size 6 in sub-batches of 3 + 3 samples "
            "cannot be divided; legal here: 4",
        ),
        ("--oases-degrees 2x2 --eval-micro-batch-size 1", "among which --eval-micro-batch-size 1 in sub-batches of 1 samples"),
        ("--oases-degrees 4,4/2 --ffn-hidden-size 385", "degree 4 does not divide --ffn-hidden-size 385: 385 = 96 x 4 + 1; legal here: 1"),
        (
            "--oases-degrees 6,2 --tensor-model-parallel-size 6 --num-attention-heads 12 --hidden-size 96 "
            "--micro-batch-size 6 --global-batch-size 6 --group-query-attention --num-query-groups 3",
            "layer 2 of 2, attention: degree 2 and --num-query-groups 3: neither divides the other; legal here: 1, 3, 6",
        ),
        ("--oases-degrees 4,2 --oases-schedule oases --oases-split sequence", "--oases-split sequence: --oases-degrees 4,2 divides"),
        ("--oases-degrees 4,2 --oases-only compute --oases-report r.json", "--oases-only compute knows one tensor-parallel group"),
        ("--oases-degrees 4,2 --softmax-type learnable", "--softmax-type learnable: --oases-degrees 4,2"),
        ("--oases-degrees 4,2 --num-experts 4", "--num-experts 4: --oases-degrees 4,2 does not run with mixture of experts"),
        ("--oases-degrees 4", "--oases-degrees 4 names 1 layers, --num-layers is 2"),
        ("--oases-degrees 4,2 --oases-sub-batches 2", "--oases-sub-batches 2 has no effect with --oases-schedule vanilla"),
        ("--oases-plan-force", "--oases-plan-force has no effect without --oases-plan FILE"),
    ],
)  # fmt: skip
def test_what_cannot_is_refused(flags, said):
    with pytest.raises(UsageError) as refused:
        _check(flags)
    assert said in str(refused.value)


def _plan(**changes) -> Plan:
    layers = tuple(
        LayerPlan(attention=BlockPlan(degree=a, recomputed=True), mlp=BlockPlan(degree=b, recomputed=False))
        for a, b in ((4, 2), (1, 4))
    )
    fields = dict(
        version=1, model=ModelShape.from_args(_parse("")), costs="a cluster", tensor=4, data=2, micro_batch=8, micro_batches=1,
        schedule="oases", sub_batches=2, layers=layers, predicted=None, solver=None,
    )  # fmt: skip
    return Plan(**{**fields, **changes})


@pytest.fixture
def plan_file(tmp_path):
    def write(**changes) -> str:
        write_plan(tmp_path / "plan.json", _plan(**changes))
        return str(tmp_path / "plan.json")

    return write


def test_the_plan_is_what_runs(plan_file):
    config = _check(f"--oases-plan {plan_file()}")
    assert (config.schedule, config.sub_batches, config.degrees) == ("oases", 2, ((4, 2), (1, 4)))
    assert config.plan == _plan()
    config = _check(f"--oases-plan {plan_file()} --oases-schedule oases --oases-sub-batches 2")
    assert config.sub_batches == 2
    config = _check(f"--oases-plan {plan_file(schedule='vanilla', sub_batches=1)}")
    assert (config.schedule, config.sub_batches) == ("vanilla", 1)


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--oases-schedule vanilla", "--oases-schedule vanilla: --oases-plan {} has schedule oases; leave the flag out"),
        ("--oases-sub-batches 1", "--oases-sub-batches 1: --oases-plan {} has sub_batches 2; leave the flag out"),
        ("--oases-degrees 4,4", "--oases-degrees 4,4: --oases-plan {} has the degrees; give one of them"),
        ("--recompute-granularity full", "--recompute-granularity full: --oases-plan {} recomputes 2 of 4 blocks, and says which: leave it out"),
        ("--num-layers 3", "--num-layers 3: --oases-plan {} is a plan for 2"),
        ("--tensor-model-parallel-size 8", "--tensor-model-parallel-size 8: --oases-plan {} is a plan for 4"),
        ("--micro-batch-size 16", "--micro-batch-size 16: --oases-plan {} is a plan for 8"),
    ],
)
def test_a_flag_that_contradicts_the_plan_is_refused(plan_file, flags, said):
    path = plan_file()
    for force in ("", "--oases-plan-force"):  # which is about what can be run at all
        with pytest.raises(UsageError) as refused:
            _check(f"--oases-plan {path} {flags} {force}")
        assert said.format(path) in str(refused.value)


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--hidden-size 192 --swiglu", "is a plan for another model: hidden_size is 96, here 192; --oases-plan-force"),
        ("--global-batch-size 32", "--global-batch-size 32: --oases-plan {} is a plan for 1 micro-batches of 8 samples on each of 2"),
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 2: --oases-plan {} is a plan for 1; --oases-plan-force"),
    ],
)  # fmt: skip
def test_a_plan_for_something_else_runs_only_by_force(plan_file, flags, said):
    def check(more: str) -> None:
        args = _parse(f"--oases-plan {path} {flags} {more}")
        args.data_parallel_size //= args.pipeline_model_parallel_size
        check_block_flags(args, OasesConfig.from_args(args, device="cpu"))

    path = plan_file()
    with pytest.raises(UsageError) as refused:
        check("")
    assert said.format(path) in str(refused.value)
    check("--oases-plan-force")


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(schedule="fast"), "schedule 'fast' is none of vanilla, wang, merak, domino, oases"),
        (dict(schedule="vanilla"), "sub_batches 2 with schedule vanilla, which does not cut micro-batches"),
    ],
)
def test_a_plan_that_nothing_runs_is_refused(plan_file, changes, said):
    with pytest.raises(UsageError, match=said):
        _check(f"--oases-plan {plan_file(**changes)}")


def test_a_plan_file_is_named(tmp_path):
    with pytest.raises(UsageError, match="plan.json cannot be read"):
        _check(f"--oases-plan {tmp_path / 'plan.json'}")
    (tmp_path / "plan.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(UsageError, match="plan.json"):
        _check(f"--oases-plan {tmp_path / 'plan.json'}")
