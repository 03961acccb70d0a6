"""Embeddings of tokens that every layer of a decoder adds to its output (Gemma 4 E2B and E4B)."""

from torch import Tensor, nn


class LayerEmbeddings(nn.Module):
    """One embedding of each token for each layer: ``(norm(projection(h) / √d) + √p * embeddings[token]) / √2``.

    Args:
        embeddings: ``[v, l * p]``, for l layers.
        projection: ``d -> l * p``, of the token's embedding at the input of the decoder.
        norm: of the width p.
    """

    def __init__(self, *, embeddings: nn.Embedding, projection: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.projection = projection
        self.norm = norm

    def forward(self, tokens: Tensor | None, h: Tensor) -> Tensor:
        """Embeddings of every layer.

        Args:
            tokens: int64 ``[b, s]``.
            h: ``[b, s, d]``, input of the first layer.

        Returns:
            Tensor ``[b, s, l, p]``.

        Raises:
            ValueError: there are no tokens.
        """
        if tokens is None:
            raise ValueError("The layers of this model embed tokens: give tokens instead of input_embeds.")
        width = self.norm.normalized_shape[0]
        projected = (self.projection(h) * h.shape[-1] ** -0.5).unflatten(-1, (-1, width))
        embedded = (self.embeddings(tokens) * width**0.5).unflatten(-1, (-1, width))
        return (self.norm(projected) + embedded) * 2**-0.5


class LayerEmbedding(nn.Module):
    """Adds the embeddings of one layer: ``h + norm(embed_proj(activation(embed_gate(h)) * embedded))``.

    Args:
        embed_gate: ``d -> p``.
        embed_proj: ``p -> d``.
        norm: of the width d.
        activation: elementwise.
    """

    def __init__(self, *, embed_gate: nn.Module, embed_proj: nn.Module, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.embed_gate = embed_gate
        self.embed_proj = embed_proj
        self.norm = norm
        self.activation = activation

    def forward(self, h: Tensor, embedded: Tensor) -> Tensor:
        """``[b, s, d]`` and ``[b, s, p]`` to ``[b, s, d]``."""
        return h + self.norm(self.embed_proj(self.activation(self.embed_gate(h)) * embedded))
