"""What it takes to bring x, or its gradient, from one number of sub-groups to another.

Each of `before` sub-groups has an equal share of the samples, and each of `after` wants one. Where there become more,
everyone keeps a slice. Where there become fewer, those whose shares make one together all-gather them along the batch;
where neither number divides the other, as much as the slice wanted lies in. With sequence parallelism a rank has only
its part of the sequence, too, a longer one for fewer samples: one all-to-all takes x there.
"""

import math
from dataclasses import dataclass

from megatron.oases.cost.model import Collective, CostModel, Group
from megatron.oases.cost.workload import Workload


@dataclass(frozen=True, slots=True)
class Redistribution:
    """From `before` to `after` sub-groups."""

    before: int
    after: int

    def reversed(self) -> "Redistribution":
        return Redistribution(self.after, self.before)

    def group(self, workload: Workload) -> Group:
        """The ranks that exchange something."""
        common = math.gcd(self.before, self.after)
        if workload.sequence_parallel:
            least_multiple = self.before * self.after // common
            return Group(least_multiple // common, stride=workload.tensor // least_multiple)
        return Group(self.before // common, stride=workload.tensor // self.before)

    def received_bytes(self, workload: Workload, samples: int) -> int:
        """What a rank gets of a sub-batch of that many samples, its own share included. Nothing where it slices."""
        if self.group(workload).size == 1:
            return 0
        whole_bytes = workload.hidden_bytes(samples)
        if workload.sequence_parallel:
            return whole_bytes // workload.tensor
        return whole_bytes // math.gcd(self.before, self.after)

    def ms(self, cost: CostModel, workload: Workload, samples: int) -> float:
        """The collective alone."""
        collective = Collective.ALL_TO_ALL if workload.sequence_parallel else Collective.ALL_GATHER
        return cost.collective_ms(collective, self.group(workload), self.received_bytes(workload, samples))
