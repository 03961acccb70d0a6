"""Quantize a checkpoint, one tensor at a time: compressed-tensors, which vLLM and ``transformers`` load, or GGUF."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from torchtune.checkpoints._export import MAX_SHARD_BYTES, write_tensors
from torchtune.checkpoints._gguf import export_gguf
from torchtune.checkpoints._load import ModelSource, detect_format
from torchtune.checkpoints._model_weights import spec_and_description
from torchtune.checkpoints._quantized_files import PACKED, SHAPE
from torchtune.checkpoints._save import TensorGroup, TensorSlice
from torchtune.checkpoints._small_files import config_of
from torchtune.checkpoints._weight_files import SCALE, CheckpointError, WeightFiles, read_json
from torchtune.models import Group
from torchtune.modules import text_decoder
from torchtune.modules.conversion import ConversionError, apply_conversions
from torchtune.modules.low_precision import quantizers
from torchtune.modules.low_precision.quantizers import (
    EXPORT_QUANTIZERS,
    GGUFQuantizer,
    QATQuantizer,
    Quantizer,
    check_group_size,
    fake_quantization,
    quantizable_layers,
)
from torchtune.utils import UserError, atomic_directory, get_logger, sign_of_life, write_json

# Converts a weight to the tensors that store it quantized, by name.
_Compress = Callable[[torch.Tensor], dict[str, torch.Tensor]]
# Modules that configs may name for quantizers.
_QUANTIZER_MODULES = ("torchtune.training.quantization", quantizers.__name__)


def check_quantizer(quantizer: Any, model: nn.Module, source: ModelSource | None = None) -> None:
    """Check that a quantizer fits a model, before weights and data are read.

    Args:
        quantizer: the quantizer of the config.
        model: model on the meta device; converted if ``source`` is None.
        source: checkpoint to quantize; None for quantization-aware training.

    Raises:
        UserError: ``quantizer`` does not fit or is not a quantizer, or the checkpoint is already quantized.
    """
    _refuse_composite(model)
    if source is None:
        apply_conversions(model, [fake_quantization(quantizer, None, lambda: 0, 1)])
        return
    _require_quantizer(quantizer)
    _refuse_quantized(source)
    if isinstance(quantizer, Quantizer):
        check_group_size(quantizable_layers(model), quantizer.group_size)


def _require_quantizer(quantizer: Any) -> None:
    if isinstance(quantizer, Quantizer | GGUFQuantizer):
        return
    choices = ", ".join(quantizer_class.__name__ for quantizer_class in EXPORT_QUANTIZERS)
    raise UserError(f"quantizer: {type(quantizer).__name__} is not a quantizer: choose out of {choices}.")


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
        >>> source = torchtune.checkpoints.ModelSource(checkpoint)
        >>> quantizer = torchtune.training.quantization.Int8WeightOnlyQuantizer()
        >>> torchtune.checkpoints.quantize_checkpoint(source, model, quantizer, folder / "int8")
        >>> (folder / "int8" / "config.json").is_file()
        True
    """
    _require_quantizer(quantizer)
    folder = Path(output_dir)
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_new:
        raise UserError(f"output_dir: {folder} is there already and is not overwritten: name a new folder.")
    if isinstance(quantizer, GGUFQuantizer):
        export_gguf(source, model, _checked_groups(source, model), quantizer.file_type, folder, dtype=dtype)
    else:
        write_compressed(source, model, quantizer, folder, device=device, dtype=dtype)
    trained_for = _quantizer_of_training(source.checkpoint_dir)
    if trained_for is None:
        return
    is_trained_for = isinstance(quantizer, Quantizer) and quantizer.layout == trained_for.layout
    if not is_trained_for:
        get_logger().warning(
            f"{source.checkpoint_dir} was trained for {type(trained_for).__name__} with group_size "
            f"{trained_for.group_size}, and {folder} is quantized otherwise: expect other outputs than in training."
        )


def _quantizer_of_training(folder: Path) -> QATQuantizer | None:
    """Return the QAT quantizer that trained a checkpoint of this library."""
    path = folder / "torchtune_config.yaml"
    if not path.is_file():
        return None
    settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    component = settings.get("quantizer")
    if not isinstance(component, dict):
        return None
    arguments = dict(component)
    # The folder may come from anywhere: a class of another package that its config names is not called.
    module, _, class_name = str(arguments.pop("_component_", "")).rpartition(".")
    if module not in _QUANTIZER_MODULES:
        return None
    quantizer_class = vars(quantizers).get(class_name)
    if not isinstance(quantizer_class, type) or not issubclass(quantizer_class, QATQuantizer):
        return None
    return quantizer_class(**arguments)


def write_compressed(
    source: ModelSource,
    model: nn.Module,
    quantizer: Quantizer,
    output_dir: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> None:
    """Write a quantized checkpoint in compressed-tensors format, with its tokenizer and other small files.

    Args:
        source: checkpoint with Hugging Face names.
        model: model of the checkpoint, on any device; its values are not read.
        quantizer: determines values and layout.
        output_dir: output folder, written atomically; an existing one is replaced.
        device: device that quantizes the weights, one at a time.
        dtype: dtype of the other weights, and of weights before they are quantized; by default the checkpoint's.

    Raises:
        CheckpointError: the checkpoint is already quantized, is multimodal, or does not fit the model.
        ConversionError: the group size does not divide a width, or the model has experts.
        UserError: the disk is full.
    """
    groups = _checked_groups(source, model)
    files = source.open(model)
    layers = quantizable_layers(model)
    check_group_size(layers, quantizer.group_size)
    quantized_names = _external_weights(groups, {f"{path}.weight" for path in layers})
    quantization_config = _quantization_config(quantizer)
    storage_format = quantization_config["format"]
    tensors = []
    kept_dtype = dtype  # of the weights that are not quantized
    for group in groups:
        for name in group.external:
            shape = files.shape(name)
            first_element = files.read(name, tuple(slice(0, 1) for _ in shape))  # for its dtype
            weight = torch.empty(shape, dtype=dtype or first_element.dtype, device="meta")
            if name in quantized_names:
                compress = partial(_compress, quantizer, storage_format, name)
                specs = _compressed_specs(compress, weight)
            else:
                compress = None
                specs = {name: weight}
                kept_dtype = weight.dtype
            # Values are read and quantized when the file is written, one weight at a time.
            compute = partial(_read_slices, files, name, device, dtype, compress)
            tensors.append(TensorGroup(specs, compute, weight.itemsize))
    spec, description = spec_and_description(model)
    config = config_of(spec, description, description.vocab_size, kept_dtype, source.checkpoint_dir)
    config = {**config, "quantization_config": quantization_config}
    with atomic_directory(output_dir) as folder:
        write_json(folder / "config.json", config)
        source.carry_files(folder)
        write_tensors(tensors, folder, MAX_SHARD_BYTES)


def _compressed_specs(compress: _Compress, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that store a weight, on the meta device."""
    # Quantize one row to find their dtypes and widths.
    row = torch.zeros(1, *weight.shape[1:], dtype=weight.dtype)
    specs = {}
    for key, tensor in compress(row).items():
        if key.endswith(SHAPE):  # the only tensor that is not by rows: two integers
            shape = (2,)
        else:
            shape = (len(weight), tensor.shape[1])
        specs[key] = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return specs


def _read_slices(
    files: WeightFiles,
    name: str,
    device: torch.device | str,
    dtype: torch.dtype | None,
    compress: _Compress | None,
) -> list[TensorSlice]:
    """Read a weight, and quantize it on the device with ``compress``; None leaves it as it is."""
    sign_of_life()
    weight = files.read(name)
    weight = weight.to(device, dtype or weight.dtype)
    tensors = {name: weight}
    if compress is not None:
        tensors = compress(weight)
    return [TensorSlice.of(key, tensor.cpu()) for key, tensor in tensors.items()]


def _compress(quantizer: Quantizer, storage_format: str, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that store a weight, as ``_quantized_files`` describes them."""
    values, scale = quantizer.quantized(weight)
    if storage_format != "pack-quantized":
        return {name: values, name + SCALE: scale}
    packed = _pack(values, quantizer.bits)
    shape = torch.tensor(weight.shape, dtype=torch.int64)  # of the packed values, the width follows only up to a word
    return {name + SHAPE: shape, name + PACKED: packed, name + SCALE: scale}


def _pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack int8 ``[out, in]`` of ``bits`` (4 or 8) each into int32 ``[out, ceil(in · bits / 32)]``."""
    per_word = 32 // bits
    num_missing = -values.shape[1] % per_word  # in the last word of a row
    unsigned = values.to(torch.int32).add_(1 << (bits - 1))
    unsigned = torch.nn.functional.pad(unsigned, (0, num_missing))
    unsigned = unsigned.view(len(values), -1, per_word)  # [out, words, values of a word]
    packed = torch.zeros(unsigned.shape[:2], dtype=torch.int32, device=values.device)
    for position in range(per_word):  # the first value in the lowest bits
        packed |= unsigned[:, :, position] << (position * bits)
    return packed


def _quantization_config(quantizer: Quantizer) -> dict[str, Any]:
    """Return ``quantization_config`` of ``config.json`` in the format of the package ``compressed-tensors``."""
    group_size = quantizer.group_size
    weights: dict[str, Any] = {
        "num_bits": quantizer.bits,
        "type": quantizer.weight_type,
        "symmetric": True,
        "dynamic": False,
    }
    if group_size is None:
        weights["strategy"] = "channel"
    else:
        weights["strategy"] = "group"
        weights["group_size"] = group_size
    # Integers are packed into int32, unless the activations are quantized as well: kernels for these read plain ones.
    if quantizer.activations is None:
        inputs = None
        storage_format = "naive-quantized" if quantizer.weight_type == "float" else "pack-quantized"
    else:
        is_float8 = quantizer.activations == "float8"
        inputs = {
            "num_bits": 8,
            "type": "float" if is_float8 else "int",
            "symmetric": is_float8,
            "dynamic": True,
            "strategy": "token",
        }
        storage_format = "float-quantized" if quantizer.weight_type == "float" else "int-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": storage_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "score"],
        "kv_cache_scheme": None,
    }


def _refuse_composite(model: nn.Module) -> None:
    """Raise ``CheckpointError`` for a composite model, which has layers that cannot be quantized."""
    if text_decoder(model) is not model:
        raise CheckpointError(
            "quantizer: a model of text and images is not written quantized: leave the quantizer out, or train an "
            "adapter over a quantized base (QuantizeBase, qlora_*)."
        )


def _refuse_quantized(source: ModelSource) -> None:
    """Raise ``CheckpointError`` if the weights of a checkpoint are already quantized."""
    path = source.checkpoint_dir / "config.json"
    config: Mapping[str, Any] = read_json(path) if path.is_file() else {}
    settings = config.get("quantization_config")
    if settings:
        raise CheckpointError(
            f"{path}: the weights are quantized already ({settings.get('quant_method', 'unknown method')}): give the "
            "folder of the model before that as checkpoint_dir."
        )


def _checked_groups(source: ModelSource, model: nn.Module) -> list[Group]:
    """Check a checkpoint before it is quantized; return the groups of its weight map.

    Raises:
        CheckpointError: it is already quantized, has other names than Hugging Face's, is multimodal, or does not fit
            the model.
    """
    _refuse_composite(model)
    _refuse_quantized(source)
    source.check(model)
    files = source.open(model)
    spec, description = spec_and_description(model)
    name_format = detect_format(files, spec, description)
    if name_format != "hf":
        raise CheckpointError(
            f"checkpoint_dir: {source.checkpoint_dir} has the names of the format '{name_format}': quantize a "
            "checkpoint in Hugging Face's layout, as every training recipe writes."
        )
    if source.enclosing_checkpoint(model) is not None:
        raise CheckpointError(
            f"checkpoint_dir: {source.checkpoint_dir} has more parts than a text decoder, which are not quantized: set "
            "checkpointer.text_only to True to write the decoder alone."
        )
    return spec.weight_map("hf").select(files.names(), description)


def _external_weights(groups: list[Group], weights: set[str]) -> set[str]:
    """Return the Hugging Face names of the tensors that hold ``weights``, names of this library.

    Raises:
        ConversionError: a tensor holds one of the weights together with a weight that is not among them.
    """
    names = set()
    for group in groups:
        weights_in_group = weights.intersection(group.tune)
        if not weights_in_group:
            continue
        if len(weights_in_group) < len(group.tune):
            raise ConversionError(
                f"quantizer: '{group.external[0]}' holds more than linear layers: it is not quantized."
            )
        names.update(group.external)
    return names
