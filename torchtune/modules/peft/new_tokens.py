"""Conversion that trains rows of new tokens in a frozen model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from torchtune.modules.conversion import Conversion, ConversionError, ConversionReport, Phase, apply_conversions
from torchtune.modules.embeddings import (
    NEW_ROWS,
    GrownEmbedding,
    GrownLinear,
    TiedGrownLinear,
    resize_token_embeddings,
    vocabulary_weights,
)
from torchtune.modules.output_projection import TiedLinear

if TYPE_CHECKING:  # DTensor is slow to import
    from torch.distributed.tensor.parallel import ParallelStyle


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
