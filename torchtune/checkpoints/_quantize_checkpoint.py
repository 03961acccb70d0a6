"""Quantize a checkpoint: compressed-tensors or one GGUF file, a tensor at a time."""

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from torchtune.checkpoints._gguf_export import export_gguf
from torchtune.checkpoints._model_source import ModelSource
from torchtune.checkpoints._quantize import refuse_parts, refuse_quantized, write_compressed
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.fake_quant import check_group_size, quantizable_layers
from torchtune.training import quantization
from torchtune.training.quantization import GGUFQuantizer, QATQuantizer, Quantizer, fake_quantization
from torchtune.utils import UserError, get_logger


def check_quantizer(quantizer: Any, model: nn.Module, source: ModelSource | None = None) -> None:
    """Check that a quantizer fits a model, before weights and data are read.

    Args:
        quantizer: the quantizer of the config.
        model: model on the meta device; converted if ``source`` is None.
        source: checkpoint to quantize; None for quantization-aware training.

    Raises:
        UserError: it does not fit or is not a quantizer, or the checkpoint is already quantized.
    """
    refuse_parts(model)
    if source is None:
        apply_conversions(model, [fake_quantization(quantizer, None, lambda: 0, 1)])
        return
    _require_quantizer(quantizer)
    refuse_quantized(source)
    if isinstance(quantizer, Quantizer):
        check_group_size(quantizable_layers(model), quantizer.group_size)


def _require_quantizer(quantizer: Any) -> None:
    if not isinstance(quantizer, Quantizer | GGUFQuantizer):
        names = [name for name in quantization.__all__ if name.endswith("Quantizer") and "QAT" not in name]
        known = ", ".join(name for name in names if name != "Quantizer")
        raise UserError(f"quantizer: {type(quantizer).__name__} is no quantizer: choose out of {known}.")


def quantize_checkpoint(
    source: ModelSource,
    model: nn.Module,
    quantizer: Any,
    output_dir: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> None:
    """Write a quantized checkpoint, one tensor at a time, with its tokenizer and other small files.

    Args:
        source: the checkpoint, with Hugging Face names.
        model: model of the checkpoint, on the meta device; its values are not read.
        quantizer: a :class:`Quantizer`, for compressed-tensors, or a :class:`GGUFQuantizer`.
        output_dir: new folder, written atomically.
        device: device that quantizes the weights.
        dtype: dtype of the other weights, and of weights before they are quantized; by default the checkpoint's.

    Raises:
        UserError: the folder is not empty, ``quantizer`` is not a quantizer, or the checkpoint does not fit it.

    Example:
        >>> source = torchtune.training.ModelSource(checkpoint)
        >>> quantizer = torchtune.training.quantization.Int8WeightOnlyQuantizer()
        >>> torchtune.training.quantize_checkpoint(source, model, quantizer, folder / "int8")
        >>> (folder / "int8" / "config.json").is_file()
        True
    """
    _require_quantizer(quantizer)
    folder = Path(output_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"output_dir: {folder} is there already and is not overwritten: name a new folder.")
    if isinstance(quantizer, GGUFQuantizer):
        export_gguf(source, model, quantizer.file_type, folder, dtype=dtype)
    else:
        write_compressed(source, model, quantizer, folder, device=device, dtype=dtype)
    trained_for = _trained_for(source.checkpoint_dir)
    if trained_for and trained_for.layout != getattr(quantizer, "layout", None):
        get_logger().warning(
            f"{source.checkpoint_dir} was trained for {type(trained_for).__name__} with group_size "
            f"{trained_for.group_size}, and {folder} is quantized otherwise: expect other outputs than in training."
        )


def _trained_for(folder: Path) -> QATQuantizer | None:
    """Return the QAT quantizer that trained a checkpoint of this library."""
    path = folder / "torchtune_config.yaml"
    node = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("quantizer") if path.is_file() else None
    if not isinstance(node, dict):
        return None
    options = {key: value for key, value in node.items() if key != "_component_"}
    kind = vars(quantization).get(str(node.get("_component_")).removeprefix(f"{quantization.__name__}."))
    return kind(**options) if isinstance(kind, type) and issubclass(kind, QATQuantizer) else None
