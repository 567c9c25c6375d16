"""From command lines of pretrain_gpt.py to predictions of them."""

from argparse import Namespace
from collections.abc import Callable, Sequence

from megatron.oases.arguments import OasesConfig, choose_device
from megatron.oases.available import Available
from megatron.oases.cost.iteration import Simulator
from megatron.oases.cost.result import Prediction
from megatron.oases.cost.sources import CostSource
from megatron.oases.launch import complete_environment
from megatron.oases.quiet import silence
from megatron.oases.report.systems import system_flags


class FlagParser:
    """Megatron's own parser, brought up once in a process: with a GPU where there is one, whatever is planned for."""

    def __init__(self):
        complete_environment()
        silence()
        if choose_device(()) == "cpu":
            from megatron.oases.host import activate

            activate()

    def parse(
        self, flags: Sequence[str], *, available: Available, world_size: int
    ) -> tuple[Namespace, OasesConfig]:
        """See `parse_flags`."""
        from megatron.oases.cost.flags import parse_flags

        return parse_flags(flags, available=available, world_size=world_size)


def predict(
    flags: Sequence[str],
    systems: Sequence[str],
    source: CostSource,
    *,
    parser: FlagParser,
    world_size: int,
    record: bool,
    announce: Callable[[str], None],
) -> dict[str, Prediction]:
    """The predictions, by system.

    Args:
        flags: of pretrain_gpt.py, without those that a system adds.
        systems: names, see `system_flags`.
        source: of the costs.
        parser: brought up before.
        world_size: number of devices.
        record: whether timelines are wanted.
        announce: is given, once each, what the user has to know of how sure the costs are.

    Raises:
        UsageError: the flags or the source cannot be honoured.
    """
    from megatron.oases.cost.flags import system_of, workload_of

    predictions, announced = {}, set()
    for name in systems:
        args, config = parser.parse(
            [*flags, *system_flags(name)], available=source.available, world_size=world_size
        )
        workload = workload_of(args, config, on_cpu=source.on_cpu)
        system = system_of(config, host_sees_completion=source.on_cpu)
        cost = source.cost(workload, args, system)
        predictions[name] = Simulator(cost).predict(workload, system, record=record)
        for line in source.announcements(cost) - announced:
            announced.add(line)
            announce(line)
    return predictions
