"""Per-layer token embeddings, which every decoder layer adds to its output (Gemma 4 E2B and E4B)."""

from torch import Tensor, nn


class LayerEmbeddings(nn.Module):
    """Per-layer token embeddings: ``(norm(projection(h) / √d) + √p * embeddings[token]) / √2``.

    Args:
        embeddings: ``[v, l * p]``, for l layers.
        projection: ``d -> l * p``, applied to the input of the first layer.
        norm: norm of width p.
    """

    def __init__(self, *, embeddings: nn.Embedding, projection: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.projection = projection
        self.norm = norm

    def forward(self, tokens: Tensor | None, h: Tensor) -> Tensor:
        """Compute the embeddings of every layer.

        Args:
            tokens: int64 ``[b, s]``.
            h: ``[b, s, d]``, input of the first layer.

        Returns:
            Tensor ``[b, s, l, p]``.

        Raises:
            ValueError: ``tokens`` is None.
        """
        if tokens is None:
            raise ValueError("The layers of this model embed tokens: give tokens instead of input_embeds.")
        width = self.norm.normalized_shape[0]
        projected = (self.projection(h) * h.shape[-1] ** -0.5).unflatten(-1, (-1, width))
        embedded = (self.embeddings(tokens) * width**0.5).unflatten(-1, (-1, width))
        return (self.norm(projected) + embedded) * 2**-0.5


class LayerEmbedding(nn.Module):
    """Addition of one layer's embeddings: ``h + norm(embed_proj(activation(embed_gate(h)) * embedded))``.

    Args:
        embed_gate: ``d -> p``.
        embed_proj: ``p -> d``.
        norm: norm of width d.
        activation: elementwise activation.
    """

    def __init__(self, *, embed_gate: nn.Module, embed_proj: nn.Module, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.embed_gate = embed_gate
        self.embed_proj = embed_proj
        self.norm = norm
        self.activation = activation

    def forward(self, h: Tensor, embedded: Tensor) -> Tensor:
        """Add embeddings ``[b, s, p]`` to the layer's output ``[b, s, d]``."""
        return h + self.norm(self.embed_proj(self.activation(self.embed_gate(h)) * embedded))
