"""How long a collective takes on a cluster's links, with all groups of its shape communicating at once.

A collective is a number of steps. In each step every rank of every group sends some bytes to others: a set of flows. A
flow loads the links on its way, each direction apart. A step takes the latency of the slowest of its links, plus

    max over links (bytes over the link in one direction / payload bandwidth of the link)

For a ring of n ranks this is the usual alpha-beta model: an all-reduce has 2(n-1) steps of bytes/n, an all-gather or a
reduce-scatter n-1 of them. That groups share a link, such as the NIC of a server, is not a case of its own: their flows
add up on it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.oases.cost.cluster import Cluster, Link
from megatron.oases.cost.model import Collective, Group

# Which link, whose (device or server), and in which direction.
_Lane = tuple[str, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a collective, in which every flow carries the same number of bytes.

    Args:
        latency_ms: of the slowest link.
        ms_per_byte: time on the bottleneck link for each byte of a flow, its sharers counted.
    """

    latency_ms: float
    ms_per_byte: float


class Topology:
    """The ranks of a job on a cluster.

    Args:
        cluster: on whose first devices the ranks are, server by server.
        world_size: number of ranks.
    """

    def __init__(self, cluster: Cluster, world_size: int):
        if not 1 <= world_size <= cluster.world_size:
            raise ValueError(f"{world_size} ranks on {cluster.world_size} devices")
        self._cluster = cluster
        self._world_size = world_size
        self._steps: dict[tuple[Collective, Group], Step] = {}

    def collective_ms(self, collective: Collective, group: Group, size_bytes: int) -> float:
        """The time of one collective.

        Args:
            collective: which.
            group: on which ranks; with one rank it takes no time.
            size_bytes: as `CostModel.collective_ms` takes it; for an all-to-all what one rank puts in, with the part
                that it keeps.
        """
        if size_bytes < 0:
            raise ValueError(f"a collective of {size_bytes} bytes")
        if group.size == 1 or size_bytes == 0:
            return 0.0
        step, n = self.step(collective, group), group.size
        match collective:
            case Collective.ALL_REDUCE:
                steps, flow_bytes = 2 * (n - 1), size_bytes / n
            case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
                steps, flow_bytes = n - 1, size_bytes / n
            case Collective.ALL_TO_ALL:  # all pairs at once, but a rank sets up its messages one after the other
                return (n - 1) * step.latency_ms + size_bytes / n * step.ms_per_byte
            case Collective.SEND:
                steps, flow_bytes = 1, size_bytes
        return steps * (step.latency_ms + flow_bytes * step.ms_per_byte)

    def step(self, collective: Collective, group: Group) -> Step:
        """One step of a collective, for groups of at least two ranks."""
        if (collective, group) not in self._steps:
            self._steps[collective, group] = self._load(collective, group)
        return self._steps[collective, group]

    def _load(self, collective: Collective, group: Group) -> Step:
        flows_over: Counter[_Lane] = Counter()
        for source, target in _flows(self._world_size, collective, group):
            flows_over.update(self._way(source, target))
        links = {lane: self._link(lane) for lane in flows_over}
        return Step(
            latency_ms=max(link.latency_us for link in links.values()) / 1e3,
            ms_per_byte=max(flows / links[lane].bytes_per_ms for lane, flows in flows_over.items()),
        )

    def _way(self, source: int, target: int) -> list[_Lane]:
        """The links that a flow goes over."""
        links, size = self._cluster.links, self._cluster.devices_per_server
        from_server, to_server = source // size, target // size
        # Pairs do not reach over servers: where there are bridges, servers have an even number of devices.
        if links.bridge is not None and source // 2 == target // 2:
            return [("bridge", source, "out")]
        way = [("port", source, "out"), ("port", target, "in"), ("host", from_server, "through")]
        if from_server != to_server:
            way += [("nic", from_server, "out"), ("nic", to_server, "in"), ("host", to_server, "through")]
        return [lane for lane in way if getattr(links, lane[0]) is not None]

    def _link(self, lane: _Lane) -> Link:
        return getattr(self._cluster.links, lane[0])


def _flows(world_size: int, collective: Collective, group: Group) -> Iterator[tuple[int, int]]:
    for ranks in group.ranks(world_size):
        match collective:
            case Collective.ALL_TO_ALL:
                yield from ((a, b) for a in ranks for b in ranks if a != b)
            case Collective.SEND:
                yield from zip(ranks, ranks[1:])
            case _:  # a ring
                yield from zip(ranks, ranks[1:] + ranks[:1])
