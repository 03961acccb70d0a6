"""Weight, bias and soft cap of an output projection, for losses."""

from collections.abc import Callable

from torch import Tensor, nn

from torchtune.modules.capped_linear import CappedLinear
from torchtune.modules.tied_linear import TiedLinear

# Hidden states [..., d] -> logits [..., v].
Projection = Callable[[Tensor], Tensor]


def plain_weight(projection: Projection) -> Tensor | None:
    """Return the weight [v, d] of a projection that is only a matrix product; ``None`` for any other projection.

    A soft cap is allowed if tensor parallelism shards the vocabulary, because losses then apply it themselves.
    """
    if getattr(projection, "softcap", None) is not None:
        return projection.weight if hasattr(projection.weight, "device_mesh") else None
    if isinstance(projection, nn.Module):
        plain = type(projection).forward is nn.Linear.forward and projection.bias is None
        return projection.weight if plain else None
    tied = getattr(projection, "tied_module", None)
    return tied.weight if isinstance(tied, nn.Embedding | nn.Linear) else None


def linear_parts(projection: Projection) -> tuple[Tensor | None, Tensor | None, float | None]:
    """Return weight [v, d], bias [v] and soft cap of a plain projection; all None for any other projection."""
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
