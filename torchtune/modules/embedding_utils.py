"""Token embeddings: resizing the vocabulary, and embeddings of every layer (Gemma 4 E2B and E4B)."""

import dataclasses

import torch
from torch import Tensor, nn


@torch.no_grad()
def resize_token_embeddings(model: nn.Module, num_embeddings: int, num_trained: int | None = None) -> None:
    """Resize the token embedding and the output projection in place.

    Existing rows are unchanged; new rows are initialized with the mean of the old rows. A tied output shares the new
    embedding. Per-layer embeddings are resized too.

    Args:
        model: model with ``tok_embeddings``, and an ``output`` that is a linear layer or tied.
        num_embeddings: new size of the vocabulary, at least 1.
        num_trained: number of old rows that tokens have; rows behind them, which only pad the vocabulary, count as
            new. By default all old rows.

    Raises:
        ValueError: ``num_embeddings`` is below 1.

    Example:
        >>> torchtune.modules.resize_token_embeddings(model, 300)
        >>> model(torch.tensor([[299]])).shape
        torch.Size([1, 1, 300])
    """
    if num_embeddings < 1:
        raise ValueError(f"A vocabulary needs at least one token, got {num_embeddings}.")
    layer_embeddings = getattr(model, "layer_embeddings", None)
    embeddings = [model.tok_embeddings]
    if layer_embeddings is not None:
        embeddings.append(layer_embeddings.embeddings)
    for embedding in embeddings:
        embedding.weight = _resize_parameter(embedding.weight, num_embeddings, num_trained)
        embedding.num_embeddings = num_embeddings
    output = model.output
    if isinstance(output, nn.Module):
        output.weight = _resize_parameter(output.weight, num_embeddings, num_trained)
        if getattr(output, "bias", None) is not None:
            output.bias = _resize_parameter(output.bias, num_embeddings, num_trained)
        output.out_features = num_embeddings
    description = getattr(model, "description", None)
    if description is not None:
        sizes = {"vocab_size": num_embeddings}
        if layer_embeddings is not None:
            sizes["layer_embed_vocab"] = num_embeddings
        model.description = dataclasses.replace(description, **sizes)


def _resize_parameter(parameter: nn.Parameter, rows: int, num_trained: int | None) -> nn.Parameter:
    old = parameter.data[:num_trained]
    new = old.new_empty((rows, *old.shape[1:]))
    num_common = min(rows, old.shape[0])
    new[:num_common] = old[:num_common]
    if rows > num_common:
        new[num_common:] = old.float().mean(dim=0).to(old.dtype)
    return nn.Parameter(new, requires_grad=parameter.requires_grad)


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
        projected = (self.projection(h) * h.shape[-1] ** -0.5).unflatten(-1, (-1, width))  # [b, s, l, p]
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
