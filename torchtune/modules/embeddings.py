"""Token embeddings: resizing the vocabulary, trained rows of new tokens, and embeddings of every layer (Gemma 4).

New tokens also have rows in the output projection: :class:`GrownLinear` trains these.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules.output_projection import TiedLinear, soft_cap

NEW_ROWS = "new_rows"  # name of the parameter with the trained rows of new tokens
# Rows of a weight that are read at a time.
_ROWS_AT_A_TIME = 8192


@dataclasses.dataclass(frozen=True)
class VocabularyGrowth:
    """New rows of a model's vocabulary, which the weight files of the model do not have.

    Attributes:
        rows_in_files: number of rows in the files.
        first_new: index of the first new row: the number of rows of tokens in the files, behind which rows only pad
            the vocabulary.
        descriptions: for each new token, the token ids of the text that describes it; empty: none.
    """

    rows_in_files: int
    first_new: int
    descriptions: tuple[tuple[int, ...], ...] = ()

    def initial_rows(self, num_new: int, read_rows: Callable[[int, int], Tensor]) -> Tensor:
        """Compute the initial values of the new rows, in float32.

        Args:
            num_new: n, number of new rows.
            read_rows: returns the rows of the files from a first one up to an end, ``[rows, ...]``.

        Returns:
            ``[n, ...]``: the mean of the rows of the description's tokens; without a description, the mean of all rows
            of tokens.
        """
        # By blocks of rows, so that no float32 copy of the whole weight is in memory.
        block_sums = []
        for start in range(0, self.first_new, _ROWS_AT_A_TIME):
            end = min(start + _ROWS_AT_A_TIME, self.first_new)
            block_sum = read_rows(start, end).float().sum(dim=0)
            block_sums.append(block_sum)
        mean = sum(block_sums) / self.first_new
        initial = mean.expand(num_new, *mean.shape).clone()
        for index, token_ids in enumerate(self.descriptions):
            if not token_ids:  # this row keeps the mean of all
                continue
            rows = []
            for token_id in token_ids:
                row = read_rows(token_id, token_id + 1)[0]
                rows.append(row.float())
            initial[index] = torch.stack(rows).mean(dim=0)
        return initial


def vocabulary_weights(model: nn.Module) -> list[str]:
    """Return the names of the weights of a text decoder with a row for each token; the head of a classifier has none.

    Args:
        model: model with ``tok_embeddings``, and an ``output`` that is a linear layer or tied.
    """
    names = ["tok_embeddings.weight"]
    if getattr(model, "layer_embeddings", None) is not None:
        names.append("layer_embeddings.embeddings.weight")
    description = getattr(model, "description", None)
    is_classifier = description is not None and description.is_classifier
    if isinstance(model.output, nn.Module) and not is_classifier:
        names.append("output.weight")
        if getattr(model.output, "bias", None) is not None:
            names.append("output.bias")
    return names


@torch.no_grad()
def resize_token_embeddings(
    model: nn.Module,
    num_embeddings: int,
    num_trained: int | None = None,
    descriptions: Sequence[Sequence[int]] = (),
) -> None:
    """Resize the token embedding and the output projection in place.

    Existing rows are unchanged; new rows are initialized with the mean of the old rows, or of those of the tokens that
    describe them. A tied output shares the new embedding. Per-layer embeddings are resized too; the head of a
    classifier is not. A model on the meta device gets the values of new rows when its weights are loaded.

    Args:
        model: model with ``tok_embeddings``, and an ``output`` that is a linear layer or tied.
        num_embeddings: new size of the vocabulary, at least 1.
        num_trained: number of old rows that tokens have, so that they were trained before; rows behind them, which only
            pad the vocabulary, count as new. By default all old rows.
        descriptions: for each new token, the ids of tokens that describe it, or none.

    Raises:
        ValueError: ``num_embeddings`` is below 1.

    Example:
        >>> torchtune.modules.resize_token_embeddings(model, 300)
        >>> model(torch.tensor([[299]])).shape
        torch.Size([1, 1, 300])
    """
    if num_embeddings < 1:
        raise ValueError(f"A vocabulary needs at least one token, got {num_embeddings}.")
    old_rows = model.tok_embeddings.weight.shape[0]
    # num_trained counts the rows that tokens used before, not rows that this run trains.
    first_new = old_rows if num_trained is None else num_trained
    growth = VocabularyGrowth(
        rows_in_files=old_rows,
        first_new=min(first_new, num_embeddings),  # a smaller vocabulary has no new rows
        descriptions=tuple(tuple(token_ids) for token_ids in descriptions),
    )
    for name in vocabulary_weights(model):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        resized = _resize_parameter(getattr(module, leaf), num_embeddings, growth)
        setattr(module, leaf, resized)
        if isinstance(module, nn.Embedding):
            module.num_embeddings = num_embeddings
        else:
            module.out_features = num_embeddings
    model.vocabulary_growth = growth  # with it, loading onto the meta device initializes the rows that files lack
    description = getattr(model, "description", None)
    if description is not None:  # checkpoints record the description's size
        sizes = {"vocab_size": num_embeddings}
        if getattr(model, "layer_embeddings", None) is not None:
            sizes["layer_embed_vocab"] = num_embeddings
        model.description = dataclasses.replace(description, **sizes)


def _resize_parameter(parameter: nn.Parameter, rows: int, growth: VocabularyGrowth) -> nn.Parameter:
    """Return a parameter with another number of ``rows``, whose new rows have their initial values unless on meta."""
    old = parameter.data
    new = old.new_empty((rows, *old.shape[1:]))
    first_new = growth.first_new
    if not old.is_meta:
        new[:first_new] = old[:first_new]
        num_new = rows - first_new
        if num_new > 0:
            initial_rows = growth.initial_rows(num_new, lambda start, end: old[start:end])
            new[first_new:] = initial_rows.to(old.dtype)
    return nn.Parameter(new, requires_grad=parameter.requires_grad)


class GrownEmbedding(nn.Module):
    """Token embedding with frozen first rows and trainable last rows.

    ``weight`` [v, d] is the embedding before training; ``new_rows`` [n, d] replace its last n rows. The class does not
    inherit from ``nn.Embedding``, so that no code mistakes ``weight`` for the complete embedding.

    Args:
        embedding: the embedding with all v rows.
        num_new: n, number of trainable rows.
    """

    def __init__(self, embedding: nn.Embedding, num_new: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.weight = embedding.weight.requires_grad_(False)
        self.new_rows = nn.Parameter(self.weight.detach()[-num_new:].clone())

    @torch.no_grad()
    def initialize_parameters(self) -> None:
        """Copy the last rows of the weight, which the checkpoint has filled."""
        self.new_rows.copy_(self.weight[-len(self.new_rows) :])

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed token ids ``[...]`` to ``[..., d]``."""
        first_new = self.num_embeddings - len(self.new_rows)
        # All tokens by both, because the host does not know which of them are new.
        new = F.embedding((tokens - first_new).clamp(min=0), self.new_rows)  # [..., d]
        old = F.embedding(tokens, self.weight)  # [..., d]
        is_new = tokens >= first_new  # [...]
        return torch.where(is_new.unsqueeze(-1), new, old)


class GrownLinear(nn.Module):
    """Output projection with trainable last rows; see :class:`GrownEmbedding`.

    Args:
        linear: the projection [v, d] without a bias.
        num_new: n, number of trainable rows.
    """

    def __init__(self, linear: nn.Linear, num_new: int) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.weight = linear.weight.requires_grad_(False)
        self.new_rows = nn.Parameter(self.weight.detach()[-num_new:].clone())

    @torch.no_grad()
    def initialize_parameters(self) -> None:
        """Copy the last rows of the weight, which the checkpoint has filled."""
        self.new_rows.copy_(self.weight[-len(self.new_rows) :])

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits: ``[..., d]`` to ``[..., v]``."""
        return _project_grown(x, self)


class TiedGrownLinear(TiedLinear):
    """Output projection tied to a :class:`GrownEmbedding`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Compute logits: ``[..., d]`` to ``[..., v]``."""
        logits = _project_grown(x, self.tied_module)
        return soft_cap(logits, self.softcap)


def _project_grown(x: Tensor, grown: GrownEmbedding | GrownLinear) -> Tensor:
    """Compute logits ``[..., v]`` of ``[..., d]``; with a weight sharded over the vocabulary they are all-gathered.

    The gradient of ``x`` is then a partial sum.
    """
    if hasattr(grown.weight, "device_mesh"):
        return _project_shard(x, grown)
    old = F.linear(x, grown.weight[: -len(grown.new_rows)])  # [..., v - n]
    new = F.linear(x, grown.new_rows)  # [..., n]
    return torch.cat([old, new], dim=-1)


def _project_shard(x: Tensor, grown: GrownEmbedding | GrownLinear) -> Tensor:
    """Compute this rank's columns of the logits, some of them of old and some of new rows, and all-gather them."""
    from torchtune.modules.parallel.collectives import gather_vocabulary, sum_gradients  # slow to import

    if grown.weight.device_mesh.mesh_dim_names != ("tp",):
        raise RuntimeError("The output projection is sharded by FSDP: call it after the forward pass of its model.")
    group = grown.weight.device_mesh.get_group()
    weight = grown.weight.to_local()  # [v / ranks, d]
    new_rows = sum_gradients(grown.new_rows.to_local(), group)  # [n, d], on every rank
    # This rank's columns, counted from the first new one: those below 0 are old.
    num_old = grown.weight.shape[0] - len(new_rows)
    start = group.rank() * len(weight) - num_old
    end = start + len(weight)
    old_logits = F.linear(x, weight[: max(0, -start)])
    new_logits = F.linear(x, new_rows[max(0, start) : max(0, end)])
    logits = torch.cat([old_logits, new_logits], dim=-1)  # [..., v / ranks]
    return gather_vocabulary(logits, group)


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
        width = self.norm.normalized_shape[0]  # p
        by_layer = (-1, width)
        projected = self.projection(h) * h.shape[-1] ** -0.5  # [b, s, l * p]
        projected = self.norm(projected.unflatten(-1, by_layer))  # [b, s, l, p]
        embedded = self.embeddings(tokens) * width**0.5
        return (projected + embedded.unflatten(-1, by_layer)) * 2**-0.5


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
        gate = self.activation(self.embed_gate(h))  # [b, s, p]
        added = self.embed_proj(gate * embedded)  # [b, s, d]
        return h + self.norm(added)
