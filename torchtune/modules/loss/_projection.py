"""The output projection, as losses read it."""

from collections.abc import Callable

from torch import Tensor, nn

# Hidden states [..., d] -> logits [..., v].
Projection = Callable[[Tensor], Tensor]


def plain_weight(projection: Projection) -> Tensor | None:
    """The weight [v, d] of a projection that is a product with it and nothing else; ``None`` for any other.

    A soft cap is allowed where tensor parallelism shards the vocabulary: losses apply it themselves there.
    """
    if getattr(projection, "softcap", None) is not None:
        return projection.weight if hasattr(projection.weight, "device_mesh") else None
    if isinstance(projection, nn.Module):
        plain = type(projection).forward is nn.Linear.forward and projection.bias is None
        return projection.weight if plain else None
    tied = getattr(projection, "tied_module", None)
    return tied.weight if isinstance(tied, nn.Embedding | nn.Linear) else None
