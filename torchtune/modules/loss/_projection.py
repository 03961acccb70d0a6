"""The output projection, as losses read it."""

from collections.abc import Callable

from torch import Tensor, nn

from torchtune.modules.tied_linear import CappedLinear, TiedLinear

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


def linear_parts(projection: Projection) -> tuple[Tensor | None, Tensor | None, float | None]:
    """Weight [v, d], bias [v] and soft cap of a projection that is nothing else; no weight for any other."""
    softcap = getattr(projection, "softcap", None)
    weight = plain_weight(projection)
    if weight is not None:
        return weight, None, softcap
    if type(projection) is nn.Linear and type(projection).forward is nn.Linear.forward:
        return projection.weight, projection.bias, None
    tied_to_embedding = type(projection) is TiedLinear and type(projection.tied_module) in (nn.Embedding, nn.Linear)
    if type(projection) is CappedLinear or tied_to_embedding:
        return projection.weight, None, softcap
    return None, None, None
