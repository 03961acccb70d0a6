"""Quantize a checkpoint, one tensor at a time: compressed-tensors, which vLLM and ``transformers`` load, or GGUF.

GGUF files for llama.cpp are written by the optional package ``gguf``, with the architectures, names and layouts that
``_gguf`` reads; :func:`gguf_to_hf` converts them back.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from torch import nn

from torchtune.checkpoints._export import MAX_SHARD_BYTES, SaveView, WeightGroup, write_tensors
from torchtune.checkpoints._gguf import (
    ARCHITECTURES,
    CONTROL,
    NORMAL,
    SPECIAL_IDS,
    UNUSED,
    USER_DEFINED,
    GGUFFile,
    llama3_divisors,
    pre_tokenizers,
)
from torchtune.checkpoints._load import ModelSource, check_base, detect_format
from torchtune.checkpoints._model_weights import groups_by_weight, spec_and_description
from torchtune.checkpoints._save import TensorGroup, TensorSlice
from torchtune.checkpoints._small_files import config_of
from torchtune.checkpoints._weight_files import PACKED, SCALE, SHAPE, CheckpointError, WeightFiles, read_json
from torchtune.models import Description, Group, Llama3RopeScaling, build
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
from torchtune.training.parallel import LocalShard, full_slices
from torchtune.utils import UserError, atomic_directory, get_logger, require, sign_of_life, write_json

# Modules that configs may name for quantizers.
_QUANTIZER_MODULES = ("torchtune.training.quantization", quantizers.__name__)
# Texts that GGUF's known pre-tokenizers split differently.
_PROBES = ("It's 12345 o'clock,  isn't\n\n it? ", "naïve café 3.14 x=y+z;\t{a_b}", "WE'LL don't\r\n 2024年 日本語")
_GGUF_BLOCK = 32  # consecutive elements of a row per scale, in every supported type


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
        _export_gguf(source, model, _checked_groups(source, model), quantizer.file_type, folder, dtype=dtype)
    else:
        write_compressed(source, model, quantizer, folder, device=device, dtype=dtype)
    trained_for = _quantizer_of_training(source.checkpoint_dir)
    if trained_for is None:  # trained without fake quantization, so that no quantizer is expected
        return
    is_trained_for = isinstance(quantizer, Quantizer) and quantizer.layout == trained_for.layout
    if not is_trained_for:
        get_logger().warning(
            f"{source.checkpoint_dir} was trained for {type(trained_for).__name__} with group_size "
            f"{trained_for.group_size}, and {folder} is quantized otherwise: expect other outputs than in training."
        )


def _quantizer_of_training(folder: Path) -> QATQuantizer | None:
    """Return the QAT quantizer that trained a checkpoint of this library; None if none did, or it is not known."""
    path = folder / "torchtune_config.yaml"
    if not path.is_file():
        return None
    settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}  # None for an empty file
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
    kept_dtype = dtype  # of the weights that are not quantized, which is the dtype in config.json
    for group in groups:
        for name in group.external:
            shape = files.shape(name)
            first_element = files.read(name, tuple(slice(0, 1) for _ in shape))  # for the dtype that read() returns
            weight = torch.empty(shape, dtype=dtype or first_element.dtype, device="meta")
            if name in quantized_names:
                tensors.append(_QuantizedWeight(files, name, weight, device, quantizer, storage_format))
            else:
                tensors.append(_KeptWeight(files, name, weight, device))
                kept_dtype = weight.dtype
    spec, description = spec_and_description(model)
    config = config_of(spec, description, description.vocab_size, kept_dtype, source.checkpoint_dir)
    config = {**config, "quantization_config": quantization_config}
    with atomic_directory(output_dir) as folder:
        write_json(folder / "config.json", config)
        source.carry_files(folder)
        write_tensors(tensors, folder, MAX_SHARD_BYTES)


class _KeptWeight(TensorGroup):
    """A weight of the source that is not quantized; read when the file is written.

    Args:
        files: files of the source.
        name: name of the weight in the files.
        spec: the weight on the meta device, in the dtype to write.
        device: device that converts the weight.
    """

    def __init__(self, files: WeightFiles, name: str, spec: torch.Tensor, device: torch.device | str) -> None:
        self.specs = {name: spec}
        self.itemsize = spec.itemsize
        self.files = files
        self.name = name
        self.device = device
        self.dtype = spec.dtype

    def compute_slices(self) -> list[TensorSlice]:
        """Read the weight."""
        return [TensorSlice.of(self.name, self.read().cpu())]

    def read(self) -> torch.Tensor:
        """Read the weight to the device."""
        sign_of_life()
        return self.files.read(self.name).to(self.device, self.dtype)


class _QuantizedWeight(_KeptWeight):
    """A weight of the source to write as quantized values and scales; read and quantized when the file is written.

    Args:
        quantizer: determines values and scales.
        storage_format: ``format`` of the quantization config.
    """

    def __init__(
        self,
        files: WeightFiles,
        name: str,
        spec: torch.Tensor,
        device: torch.device | str,
        quantizer: Quantizer,
        storage_format: str,
    ) -> None:
        super().__init__(files, name, spec, device)
        self.quantizer = quantizer
        self.storage_format = storage_format
        # The file has several tensors for the weight. Quantize one row to find their dtypes and widths.
        row = torch.zeros(1, *spec.shape[1:], dtype=spec.dtype)
        self.specs = {}
        for key, tensor in self.quantize(row).items():
            if key.endswith(SHAPE):  # the only tensor that is not by rows: two integers
                shape = (2,)
            else:
                shape = (len(spec), tensor.shape[1])
            self.specs[key] = torch.empty(shape, dtype=tensor.dtype, device="meta")

    def compute_slices(self) -> list[TensorSlice]:
        """Read and quantize the weight."""
        tensors = self.quantize(self.read())
        return [TensorSlice.of(key, tensor.cpu()) for key, tensor in tensors.items()]

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors that store a weight, as ``_weight_files`` describes them."""
        values, scale = self.quantizer.quantized(weight)
        if self.storage_format != "pack-quantized":
            return {self.name: values, self.name + SCALE: scale}
        packed = _pack(values, self.quantizer.bits)
        # Of the packed values, the width follows only up to a word.
        shape = torch.tensor(weight.shape, dtype=torch.int64)
        return {self.name + SHAPE: shape, self.name + PACKED: packed, self.name + SCALE: scale}


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
            "symmetric": is_float8,  # torchao quantizes int8 inputs with a zero point
            "dynamic": True,  # scales are computed from the inputs at run time, one per token
            "strategy": "token",
        }
        storage_format = "float-quantized" if quantizer.weight_type == "float" else "int-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": storage_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "score"],  # heads keep their precision, see quantizable_layers
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
    if name_format != "hf":  # the quantized names are made of the names in the files
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


def _export_gguf(
    source: ModelSource,
    model: nn.Module,
    groups: Sequence[Group],
    file_type: str,
    output_dir: Path,
    *,
    dtype: torch.dtype | None,
) -> None:
    """Write a checkpoint as one GGUF file, one tensor at a time.

    Matrices are stored as ``file_type``; embedding and output projection with at least 8 bits; vectors in float32.

    Args:
        source: checkpoint with Hugging Face names and a ``tokenizer.json``.
        model: model of the checkpoint; its values are not read.
        groups: groups of the checkpoint's weight map.
        file_type: see :class:`torchtune.training.quantization.GGUFQuantizer`.
        output_dir: folder for ``model-<file_type>.gguf`` and the tokenizer's files, written atomically.
        dtype: dtype to which weights are rounded before they are quantized; None keeps the checkpoint's.

    Raises:
        CheckpointError: GGUF does not support the model or its tokenizer, or the checkpoint does not fit the model.
        UserError: the ``gguf`` package is not installed, or the disk is full.
    """
    gguf = require("gguf", extra="gguf", purpose="Writing GGUF")
    spec, description = spec_and_description(model)
    arch = None
    for name, hf_architecture in ARCHITECTURES.items():
        if hf_architecture in spec.architectures:
            arch = name
    if arch is None or "gguf" not in spec.weight_maps:
        raise CheckpointError(
            f"quantizer: the family '{spec.name}' cannot be written as GGUF, only {', '.join(ARCHITECTURES)}: choose "
            "another quantizer."
        )
    gguf_names = {group.tune[0]: group.external[0] for group in spec.weight_map("gguf").groups(description)}
    types = {}
    for group in groups:
        for name in group.tune:
            types[name] = _gguf_type(gguf, name, model.get_parameter(name).shape, file_type)
    metadata = _gguf_sizes(description, arch)
    metadata.update(_tokenizer_metadata(source.checkpoint_dir, description.vocab_size))
    files = source.open()
    with atomic_directory(output_dir) as folder:
        source.carry_files(folder)
        writer = gguf.GGUFWriter(folder / f"model-{file_type}.gguf", arch)
        writer.add_name(source.checkpoint_dir.resolve().name)
        name_of_type = "ALL_F32" if file_type == "F32" else f"MOSTLY_{file_type}"  # vectors are float32 in every file
        writer.add_file_type(gguf.LlamaFileType[name_of_type])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, value in metadata.items():
            _add_gguf_metadata(writer, key, value)
        # The writer needs name, shape and type of every tensor before the first values, and the values in this order.
        divisors = _rope_divisors(description)
        if divisors is not None:
            num_bytes = 4 * len(divisors)  # float32
            writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.numpy().dtype, num_bytes)
        # Quantized values are bytes for the writer, whatever their type.
        byte_dtype = torch.empty(0, dtype=torch.uint8).numpy().dtype
        for name, quantization_type in types.items():
            shape = tuple(model.get_parameter(name).shape)
            byte_shape = gguf.quants.quant_shape_to_byte_shape(shape, quantization_type)
            writer.add_tensor_info(gguf_names[name], byte_shape, byte_dtype, math.prod(byte_shape), quantization_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if divisors is not None:
            writer.write_tensor_data(divisors.numpy())
        for group in groups:
            external_tensors = [files.read(name) for name in group.external]
            if dtype is not None:
                external_tensors = [tensor.to(dtype) for tensor in external_tensors]
            # llama.cpp has the order of rows that this library has, and other names.
            for name, weight in zip(group.tune, group.to_tune(external_tensors), strict=True):
                sign_of_life()  # for the watchdog: a large model takes minutes
                values = weight.float().contiguous().numpy()
                writer.write_tensor_data(gguf.quants.quantize(values, types[name]))
        writer.close()


def _gguf_type(gguf: ModuleType, name: str, shape: torch.Size, file_type: str) -> Any:
    """Return the type of one tensor in a file of ``file_type``."""
    if len(shape) == 1:  # norms and biases, which are small
        return gguf.GGMLQuantizationType.F32
    if file_type.startswith("Q"):
        if shape[-1] % _GGUF_BLOCK:
            raise CheckpointError(
                f"quantizer: {file_type} stores rows in blocks of {_GGUF_BLOCK}, which do not divide the {shape[-1]} "
                f"inputs of '{name}': choose F16 or BF16."
            )
        if name in ("tok_embeddings.weight", "output.weight"):
            file_type = "Q8_0"  # their rounding reaches every token
    return gguf.GGMLQuantizationType[file_type]


def _add_gguf_metadata(writer: Any, key: str, value: Any) -> None:
    """Add a value with the type that llama.cpp expects."""
    if isinstance(value, bool):  # before integers, which bools are in Python
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _gguf_sizes(description: Description, arch: str) -> dict[str, Any]:
    """Return the metadata with the sizes of a model."""
    sizes = {
        "vocab_size": description.vocab_size,
        "context_length": description.max_seq_len,
        "embedding_length": description.embed_dim,
        "block_count": description.num_layers,
        "feed_forward_length": description.intermediate_dim,
        "attention.head_count": description.num_heads,
        "attention.head_count_kv": description.num_kv_heads,
        "attention.key_length": description.head_dim,
        "attention.value_length": description.head_dim,
        "attention.layer_norm_rms_epsilon": float(description.norm_eps),
        "rope.dimension_count": description.head_dim,
        "rope.freq_base": float(description.rope_base),
    }
    return {f"{arch}.{key}": value for key, value in sizes.items()}


def _rope_divisors(description: Description) -> torch.Tensor | None:
    """Return Llama 3.1's scaling as one divisor per frequency. Raises ``CheckpointError`` for another scaling."""
    scaling = description.rope_scaling
    if scaling is None:
        return None
    if not isinstance(scaling, Llama3RopeScaling):
        raise CheckpointError(f"quantizer: {type(scaling).__name__} cannot be written as GGUF.")
    return llama3_divisors(scaling, description.rope_base, description.head_dim)


def _tokenizer_metadata(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return the metadata of the tokenizer in ``tokenizer.json``, which must be a byte-level BPE."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"quantizer: there is no {path}, whose vocabulary a GGUF file needs: put it there.")
    contents = read_json(path)
    model = contents.get("model", {})
    pre = None
    if model.get("type") == "BPE":
        pre = _pre_tokenizer_name(Tokenizer.from_file(str(path)))
    if pre is None or model.get("byte_fallback"):
        raise CheckpointError(
            f"quantizer: {path} is not a byte-level BPE with a pre-tokenizer that GGUF has a name for: choose a "
            "quantizer that writes safetensors."
        )
    added_tokens = {token["content"]: token for token in contents.get("added_tokens", ())}
    vocab = dict(model["vocab"])
    for text, token in added_tokens.items():
        vocab[text] = token["id"]
    # The model may have more rows than the tokenizer has tokens; llama.cpp's converter gives them these names.
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for text, index in vocab.items():
        if index >= vocab_size:
            raise CheckpointError(
                f"quantizer: {path} gives '{text}' the id {index}, but the model has {vocab_size} tokens: use the "
                "tokenizer of the model."
            )
        tokens[index] = text
        if text not in added_tokens:
            types[index] = NORMAL
        # _gguf builds special tokens of the first kind, and other added tokens of the second.
        elif added_tokens[text]["special"]:
            types[index] = CONTROL
        else:
            types[index] = USER_DEFINED
    merges = []
    for merge in model["merges"]:
        is_pair = not isinstance(merge, str)  # in newer files; text in older ones
        merges.append(" ".join(merge) if is_pair else merge)
    # A post-processor with a template puts BOS before every text.
    adds_bos = "TemplateProcessing" in json.dumps(contents.get("post_processor"))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": adds_bos,
        **_tokenizer_settings(folder, vocab),
    }


def _tokenizer_settings(folder: Path, vocab: dict[str, int]) -> dict[str, Any]:
    """Return the metadata of special tokens and chat template in a folder."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    metadata: dict[str, Any] = {}
    for name, key in SPECIAL_IDS.items():
        token = settings.get(f"{name}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token in vocab:
            metadata[f"tokenizer.ggml.{key}_token_id"] = vocab[token]
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        metadata["tokenizer.chat_template"] = template_file.read_text(encoding="utf-8")
    elif isinstance(settings.get("chat_template"), str):
        metadata["tokenizer.chat_template"] = settings["chat_template"]
    return metadata


def _pre_tokenizer_name(tokenizer: Any) -> str | None:
    """Return the ``tokenizer.ggml.pre`` of a tokenizer's pre-tokenizer."""
    if tokenizer.pre_tokenizer is None:
        return None
    # Compare results: one pre-tokenizer can be written in several ways.
    cuts = [tokenizer.pre_tokenizer.pre_tokenize_str(text) for text in _PROBES]
    for name, make_pre_tokenizer in pre_tokenizers().items():
        pre_tokenizer = make_pre_tokenizer()
        if [pre_tokenizer.pre_tokenize_str(text) for text in _PROBES] == cuts:
            return name
    return None


def gguf_to_hf(gguf_file: str | Path, output_dir: str | Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model and tokenizer of a GGUF file as a folder that Hugging Face libraries load.

    Quantized weights are dequantized and rounded to ``dtype``, one tensor at a time.

    Args:
        gguf_file: GGUF file with the architecture llama, qwen2 or qwen3, and a byte-level BPE tokenizer.
        output_dir: output folder, written atomically; an existing one is replaced.
        dtype: dtype of the weights.

    Returns:
        ``output_dir``.

    Raises:
        CheckpointError: the file is corrupt or has unsupported contents.
        UserError: the ``gguf`` package is not installed, or the disk is full.
    """
    file = GGUFFile(gguf_file)
    spec = file.spec
    description = file.description
    with torch.device("meta"):
        model = build(description, spec).to(dtype)
    view = _GGUFView(model, file)
    check_base(view, file)
    tensors = [WeightGroup(view, group, turn=0) for group in spec.weight_map("hf").groups(description)]
    with atomic_directory(output_dir) as folder:
        config = config_of(spec, description, description.vocab_size, dtype, None)
        write_json(folder / "config.json", {**config, **file.special_token_ids()})
        for name, content in file.tokenizer_files().items():
            write_json(folder / name, content)
        write_tensors(tensors, folder, MAX_SHARD_BYTES)
    return Path(output_dir)


class _GGUFView(SaveView):
    """View of a model on the meta device that reads each weight from a GGUF file when it is written."""

    def __init__(self, model: nn.Module, file: GGUFFile) -> None:
        super().__init__(model, frozenset({"model"}))
        self._file = file
        self._gguf_groups = groups_by_weight(file.spec.weight_map("gguf"), file.description)

    def shard(self, name: str, turn: int) -> LocalShard:
        """Read a full weight."""
        group = self._gguf_groups[name]
        spec = self.specs[name]
        tensors = group.to_tune([self._file.read(external) for external in group.external])
        weight = tensors[group.tune.index(name)].to(spec.dtype)
        return LocalShard(spec, full_slices(weight.shape), weight, is_writer=True)
