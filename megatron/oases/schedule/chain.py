"""The parts of a pipeline stage, in order: the same for whoever runs it and whoever only predicts it."""

from collections.abc import Iterable

from megatron.oases.schedule.operation import Part, Role


def enclose(blocks: Iterable[Part], *, embedding: bool, head: bool) -> tuple[Part, ...]:
    """The chain of a stage with these blocks.

    Args:
        blocks: attention and MLP of every layer.
        embedding: whether the stage begins with the embedding.
        head: whether it ends with the head. A stage that does not hands whole micro-batches on.
    """
    chain = [Part(Role.EMBEDDING)] if embedding else []
    chain += blocks
    if head:
        chain.append(Part(Role.HEAD))
    elif chain[-1].sub_groups > 1:
        chain.append(Part(Role.EXIT))
    return tuple(chain)


def build_chain(
    *,
    layers: int,
    recomputed_layers: int,
    recomputes_mlps: bool = False,
    embedding: bool,
    head: bool,
    keeps_last_layer: bool,
) -> tuple[Part, ...]:
    """The chain of one pipeline stage.

    Args:
        layers: transformer layers of the stage.
        recomputed_layers: how many of them, from the first on, are recomputed.
        recomputes_mlps: whether the MLPs of the others are.
        embedding: whether the stage begins with the embedding.
        head: whether it ends with the head.
        keeps_last_layer: whether the layer below the head keeps its graphs in any case. Backward begins with it as soon
            as the loss is there, so recomputing it would spare memory for no longer than that.
    """
    if keeps_last_layer and head and recomputed_layers == layers:
        recomputed_layers -= 1
    blocks = []
    for layer in range(layers):
        recomputed = layer < recomputed_layers
        blocks += [Part(Role.ATTENTION, recomputed), Part(Role.MLP, recomputed or recomputes_mlps)]
    return enclose(blocks, embedding=embedding, head=head)
