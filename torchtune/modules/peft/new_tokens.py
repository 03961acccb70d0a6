"""Trainable embedding rows of new tokens in a frozen model: the conversion, and the layers that it puts in."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules.conversion import Conversion, ConversionError, ConversionReport, Phase, apply_conversions
from torchtune.modules.embeddings import resize_token_embeddings, vocabulary_weights
from torchtune.modules.output_projection import TiedLinear, soft_cap

if TYPE_CHECKING:  # DTensor is slow to import
    from torch.distributed.tensor.parallel import ParallelStyle


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


class NewTokens(Conversion):
    """Conversion that trains the last rows of a frozen embedding and output projection.

    ``peft`` and adapter files call this ``trainable_token_indices``.

    Args:
        num_new: number of rows to train, at least 1.

    Example:
        >>> from torchtune.modules.peft import LoRA, NewTokens
        >>> model, _ = torchtune.load(checkpoint, adapter=LoRA(rank=2), device="cpu")
        >>> NewTokens.check(model)
    """

    phase: ClassVar[Phase] = Phase.OBJECTIVE  # after all others, because it reads the values of the rows

    def __init__(self, num_new: int) -> None:
        self.num_new = num_new

    @classmethod
    def grow(
        cls,
        model: nn.Module,
        num_embeddings: int,
        num_new: int,
        num_trained: int | None = None,
        descriptions: Sequence[Sequence[int]] = (),
    ) -> None:
        """Enlarge the vocabulary of a frozen model in place, and train its last rows.

        Args:
            model: model with loaded weights, or on the meta device.
            num_embeddings: new size of the vocabulary, at least the present one.
            num_new: number of trainable rows.
            num_trained: see :func:`torchtune.modules.resize_token_embeddings`.
            descriptions: see :func:`torchtune.modules.resize_token_embeddings`.

        Raises:
            ConversionError: see :meth:`check`.
        """
        cls.check(model)
        if num_embeddings != model.tok_embeddings.num_embeddings or num_trained is not None:
            resize_token_embeddings(model, num_embeddings, num_trained, descriptions)
        apply_conversions(model, [cls(num_new)])

    @staticmethod
    def check(model: nn.Module) -> None:
        """Check that the last rows can be trained separately.

        Raises:
            ConversionError: embedding or output projection is not a plain module, or the model has per-layer
                embeddings or is sharded.
        """
        embedding_type = type(model.tok_embeddings)
        if embedding_type is not nn.Embedding:
            raise ConversionError(
                f"resize_token_embeddings: new rows of a {embedding_type.__name__} cannot be trained alone: use a full "
                "recipe."
            )
        output_type = type(model.output)
        has_plain_output = output_type in (nn.Linear, TiedLinear) and getattr(model.output, "bias", None) is None
        if not has_plain_output and not _is_classifier(model):  # the head of a classifier has no rows of tokens
            raise ConversionError(
                "resize_token_embeddings: new rows cannot be trained beside an output projection that is a "
                f"{output_type.__name__} or has a bias: leave out the adapter of the output, or use a full recipe."
            )
        if getattr(model, "layer_embeddings", None) is not None:
            raise ConversionError(
                "resize_token_embeddings: new rows of a model whose layers embed tokens too cannot be trained alone: "
                "use a full recipe."
            )
        if hasattr(model.tok_embeddings.weight, "device_mesh"):
            raise ConversionError(
                "resize_token_embeddings: a sharded model cannot get new rows: set resize_token_embeddings=True, so "
                "that it has them before it is sharded, or start from a model that has them."
            )

    def convert(self, model: nn.Module) -> ConversionReport:
        """Replace the embedding and the output projection.

        Raises:
            ConversionError: see :meth:`check`.
        """
        self.check(model)
        paths = ["tok_embeddings"]
        output = model.output  # may be tied to the embedding that is replaced now
        model.tok_embeddings = GrownEmbedding(model.tok_embeddings, self.num_new)
        if isinstance(output, TiedLinear):
            model.output = TiedGrownLinear(model.tok_embeddings, output.softcap)
        elif not _is_classifier(model):
            model.output = GrownLinear(output, self.num_new)
            paths.append("output")
        num_trained = sum(model.get_parameter(f"{path}.{NEW_ROWS}").numel() for path in paths)
        return ConversionReport("New tokens", paths, num_trained, f"their {self.num_new} rows are trained")

    def owned_parameters(self, model: nn.Module) -> set[str]:
        """Return the names of the trained rows."""
        return {rows for rows, _ in self.new_rows(model).values()}

    def merged(self, name: str, weight: Tensor, model: nn.Module) -> Tensor:
        """Write the trained rows into the weight ``name``; other tensors are returned unchanged."""
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf != "weight" or not isinstance(module, GrownEmbedding | GrownLinear):
            return weight
        rows = module.new_rows.detach().to(weight.device, weight.dtype)
        return torch.cat([weight[: -len(rows)], rows])

    def new_rows(self, model: nn.Module) -> dict[str, tuple[str, list[int]]]:
        """Return weight name -> (name of its trained rows, their token ids)."""
        size = model.tok_embeddings.num_embeddings
        ids = list(range(size - self.num_new, size))
        rows = {}
        for path, module in model.named_modules():
            if isinstance(module, GrownEmbedding | GrownLinear):
                rows[f"{path}.weight"] = (f"{path}.{NEW_ROWS}", ids)
        return rows

    def parallel_style(self, module: nn.Module, style: "ParallelStyle") -> "ParallelStyle":
        """Return the style of an embedding or a projection with new rows; other styles are unchanged."""
        if isinstance(module, GrownEmbedding | GrownLinear):
            from torchtune.modules.parallel.tensor_parallel import GrownVocabParallel  # slow to import

            return GrownVocabParallel()
        return style


def _is_classifier(model: nn.Module) -> bool:
    """Return whether the output projection is a head of classes, which has no rows of tokens."""
    return "output.weight" not in vocabulary_weights(model) and isinstance(model.output, nn.Module)
