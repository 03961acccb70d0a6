"""Projections of the last layer's output to logits and to scores of classes, and pooling to a vector per document."""

import importlib
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.data import Batch, DataError
from torchtune.utils import UserError, fill_from_cpu


class CappedLinear(nn.Linear):
    """Output projection with a soft cap.

    Args:
        in_features: d.
        out_features: v.
        softcap: logits become ``softcap * tanh(logits / softcap)``, in float32.
    """

    def __init__(self, in_features: int, out_features: int, softcap: float) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.softcap = softcap

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits: ``[..., d]`` to ``[..., v]``."""
        return soft_cap(super().forward(x), self.softcap)


def soft_cap(logits: Tensor, softcap: float | None) -> Tensor:
    """Compute ``softcap * tanh(logits / softcap)`` in at least float32; with None, return the logits unchanged."""
    if softcap is None:
        return logits
    compute = torch.promote_types(logits.dtype, torch.float32)
    return softcap * torch.tanh(logits.to(compute) / softcap)


class TiedLinear:
    """Output projection with the weight of another module; a callable, not a module.

    It adds no key to the state dict. The weight is read at every call, so ``to_empty``, conversions and resizing of
    the other module take effect.

    Args:
        tied_module: module with a ``weight`` ``[v, d]``, for example the token embedding.
        softcap: logits become ``softcap * tanh(logits / softcap)``, in float32.

    Raises:
        AttributeError: ``tied_module`` has no ``weight``.

    Example:
        >>> embedding = torch.nn.Embedding(50, 8)
        >>> torchtune.modules.TiedLinear(embedding)(torch.ones(1, 3, 8)).shape
        torch.Size([1, 3, 50])
    """

    def __init__(self, tied_module: nn.Module, softcap: float | None = None) -> None:
        if not hasattr(tied_module, "weight"):
            raise AttributeError(f"{type(tied_module).__name__} has no attribute 'weight' to tie to.")
        self.tied_module = tied_module
        self.softcap = softcap
        self.linear = F.linear  # replaced by generation

    @property
    def weight(self) -> Tensor:
        """The shared weight ``[v, d]``."""
        return self.tied_module.weight

    def __call__(self, x: Tensor) -> Tensor:
        """Compute logits: ``[..., d]`` to ``[..., v]``."""
        weight = self.tied_module.weight
        if hasattr(weight, "device_mesh"):  # sharded over the vocabulary
            from torchtune.modules.parallel.collectives import vocabulary_parallel_linear  # slow to import

            logits = vocabulary_parallel_linear(x, weight)
        else:
            logits = self.linear(x, weight)
        return soft_cap(logits, self.softcap)


class ClassifierHead(nn.Linear):
    """Classification head without a bias, ``[..., d]`` to ``[..., num_classes]``.

    Args:
        width: d.
        num_classes: number of classes.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__(width, num_classes, bias=False)

    def initialize_parameters(self) -> None:
        """Draw the weight from a normal distribution of variance 1 / (d + 1) (Stiennon et al. 2020, 2009.01325)."""
        std = (self.in_features + 1) ** -0.5
        fill_from_cpu(self.weight, partial(nn.init.normal_, std=std))


def classifier_model(num_classes: int, base_model_path: str, **base_model_kwargs: Any) -> nn.Module:
    """Build a model with a classification head, ``nn.Linear(d, num_classes)`` without a bias, as its output layer.

    Args:
        num_classes: number of classes; 1 for a reward model.
        base_model_path: dotted path of a builder, for example ``"torchtune.models.llama3_2.llama3_2_1b"``.
        **base_model_kwargs: arguments of the builder.

    Returns:
        The model, on the default device and in the default dtype.

    Raises:
        UserError: there is no such builder, or ``num_classes`` is below 1.

    Example:
        >>> with torch.device("meta"):
        ...     model = torchtune.modules.classifier_model(3, "torchtune.models.llama3_2.llama3_2_1b")
        >>> tuple(model.output.weight.shape)
        (3, 2048)
    """
    if num_classes < 1:
        raise UserError(f"num_classes is {num_classes}: it must be at least 1.")
    module, _, name = base_model_path.rpartition(".")
    try:
        builder = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: a path without a dot has an empty module
        raise UserError(
            f"base_model_path: there is no builder '{base_model_path}' ({error}): write it like "
            "torchtune.models.llama3_2.llama3_2_1b."
        ) from error
    model = builder(**base_model_kwargs)
    width = model.tok_embeddings.weight.shape[1]
    output = model.output
    if hasattr(output, "adapter_params"):  # an adapter of the output becomes one of the head
        adapter = {"rank": output.rank, "alpha": output.alpha, "dropout": output.dropout.p}
        model.output = type(output)(width, num_classes, **adapter)
    else:
        model.output = ClassifierHead(width, num_classes)
    description = getattr(model, "description", None)
    if description is not None:  # checkpoints record the description's classes
        if description.num_classes != num_classes:  # another head, whose classes have no names yet
            description = replace(description, num_classes=num_classes, class_names=(), problem_type=None)
        model.description = description
    return model


Pooling = Literal["last", "mean"]


def last_hidden_states(hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the hidden state at the last token of every document, and whether this token is on this rank.

    Args:
        hidden: ``[b, s, d]``.
        batch: batch with documents, which define the ends of texts; token ids are not used.

    Returns:
        Hidden states ``[n, d]``, of another token where the last one is not on this rank, and bool ``[n]``.

    Raises:
        DataError: the batch has no documents.

    Example:
        >>> batch = torchtune.data.collate_documents([{"tokens": [5, 6], "labels": [6, -100]}])
        >>> last, is_local = torchtune.modules.last_hidden_states(torch.tensor([[[1.0], [2.0]]]), batch)
        >>> last, is_local
        (tensor([[2.]]), tensor([True]))
    """
    if batch.documents is None:
        raise DataError(
            "collate_fn: a score is read at the end of a document, but the batch has none: use collate_preference."
        )
    rank, _ = batch.shard
    num_tokens = batch.tokens.numel()  # of this rank
    last_token = batch.documents.ends()[: batch.num_documents].to(hidden.device)  # [n], in the whole batch
    last_token = last_token - rank * num_tokens  # among the tokens of this rank
    is_local = (last_token >= 0) & (last_token < num_tokens)
    # Indexed without a selection, whose size the host would wait for.
    indices = last_token.masked_fill(~is_local, 0)
    return hidden.flatten(0, -2)[indices], is_local


def pooled_embeddings(hidden: Tensor, batch: Batch, pooling: Pooling) -> Tensor:
    """Return the embedding of every document, not normalized.

    Args:
        hidden: hidden states from ``model(..., output="hidden")`` ``[b, s, d]``.
        batch: batch with documents.
        pooling: ``"last"``, the hidden state of the last token, or ``"mean"``, the mean over all tokens.

    Returns:
        ``[n, d]``, float32 or wider; for a batch split over context-parallel ranks, this rank's partial sums.

    Raises:
        DataError: the batch has no documents.

    Example:
        >>> batch = torchtune.data.collate_documents([{"tokens": [5, 6], "labels": [6, -100]}])
        >>> torchtune.modules.pooled_embeddings(model(**batch.model_inputs(), output="hidden"), batch, "mean").shape
        torch.Size([1, 32])
    """
    compute = torch.promote_types(hidden.dtype, torch.float32)
    if pooling == "last":
        last_hidden, is_local = last_hidden_states(hidden, batch)
        embeddings = last_hidden.masked_fill(~is_local[:, None], 0.0)
        # The second term keeps the graph connected on ranks without a last token.
        embeddings = embeddings + 0.0 * hidden.sum()
        return embeddings.to(compute)
    if batch.documents is None:
        raise DataError("collate_fn: a mean is over a document, but the batch has none: use collate_embedding.")
    # Sums of many tokens lose digits in half precision.
    wide = hidden.flatten(0, -2).to(compute)  # [b * s, d]
    rank, size = batch.shard
    ids_of_all_ranks = batch.documents.document_ids().to(hidden.device)
    document_ids = ids_of_all_ranks.chunk(size)[rank]  # [b * s]
    zeros = wide.new_zeros(len(batch.documents.lengths), wide.shape[1])  # [documents, d]
    sums = zeros.index_add(0, document_ids, wide)
    lengths = torch.tensor(batch.documents.lengths, device=hidden.device)
    means = sums / lengths[:, None]
    return means[: batch.num_documents]  # padding documents are the last
