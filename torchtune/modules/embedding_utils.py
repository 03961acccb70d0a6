"""Resize the vocabulary of a model."""

import dataclasses

import torch
from torch import nn


@torch.no_grad()
def resize_token_embeddings(model: nn.Module, num_embeddings: int) -> None:
    """Resize the token embedding and the output projection in place.

    Existing rows are unchanged; new rows are initialized with the mean of the old rows. A tied output shares the new
    embedding. Per-layer embeddings are resized too.

    Args:
        model: model with ``tok_embeddings``, and an ``output`` that is a linear layer or tied.
        num_embeddings: new size of the vocabulary, at least 1.

    Raises:
        ValueError: ``num_embeddings`` is below 1.

    Example:
        >>> torchtune.modules.resize_token_embeddings(model, 300)
        >>> model(torch.tensor([[299]])).shape
        torch.Size([1, 1, 300])
    """
    if num_embeddings < 1:
        raise ValueError(f"A vocabulary needs at least one token, got {num_embeddings}.")
    of_layers = getattr(model, "layer_embeddings", None)
    for embedding in (model.tok_embeddings, *(() if of_layers is None else (of_layers.embeddings,))):
        embedding.weight = _resize_parameter(embedding.weight, num_embeddings)
        embedding.num_embeddings = num_embeddings
    output = model.output
    if isinstance(output, nn.Module):
        output.weight = _resize_parameter(output.weight, num_embeddings)
        if getattr(output, "bias", None) is not None:
            output.bias = _resize_parameter(output.bias, num_embeddings)
        output.out_features = num_embeddings
    description = getattr(model, "description", None)
    if description is not None:
        more = {} if of_layers is None else {"layer_embed_vocab": num_embeddings}
        model.description = dataclasses.replace(description, vocab_size=num_embeddings, **more)


def _resize_parameter(parameter: nn.Parameter, rows: int) -> nn.Parameter:
    old = parameter.data
    new = old.new_empty((rows, *old.shape[1:]))
    kept = min(rows, old.shape[0])
    new[:kept] = old[:kept]
    if rows > kept:
        new[kept:] = old.float().mean(dim=0).to(old.dtype)
    return nn.Parameter(new, requires_grad=parameter.requires_grad)
