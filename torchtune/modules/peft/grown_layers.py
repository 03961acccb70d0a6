"""Embeddings and output projections with trainable rows of new tokens.

Apart from their conversion, because tensor parallelism imports them, and the conversion imports tensor parallelism.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules.output_projection import TiedLinear, soft_cap

NEW_ROWS = "new_rows"


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
