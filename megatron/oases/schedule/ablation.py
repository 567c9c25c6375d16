"""What the oases schedule gains from each of its ideas is measured by leaving one out (`--oases-ablate`)."""

from enum import Enum


class Idea(Enum):
    """One idea of the schedule. The value is its name on the command line; leaving it out changes no result."""

    RECOMPUTE_WITHOUT_GEMM = "gemm"
    COLLECTIVE_FIRST = "wgrad"
    FILLER = "filler"
    ENDS = "ends"
    KEEP_LAST_LAYER = "last"
    INTERLEAVE = "interleave"


MEANING = {
    Idea.RECOMPUTE_WITHOUT_GEMM: "recomputation leaves out the row-parallel GEMM",
    Idea.COLLECTIVE_FIRST: "a gradient's collective starts before the weight gradients of its block",
    Idea.FILLER: "waits are filled with weight gradients and with recomputation ahead of its turn",
    Idea.ENDS: "embedding and head overlap with the blocks next to them",
    Idea.KEEP_LAST_LAYER: "the layer below the head is not recomputed, since backward begins with it",
    Idea.INTERLEAVE: "the backward pass of a micro-batch runs together with the next one's forward pass",
}
