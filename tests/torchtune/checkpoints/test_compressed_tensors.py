"""Quantized checkpoints that the package compressed-tensors writes read as it decompresses them, or are refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from tests.torchtune.checkpoints.small import hf_model, load, open_files, read, stored, write_folder, write_weights
from torchtune.checkpoints import CheckpointError

INT, FLOAT = ({"type": kind, "num_bits": 8, "symmetric": True, "dynamic": False} for kind in ("int", "float"))
INT4 = {**INT, "num_bits": 4, "strategy": "group", "group_size": 32}
SIZES = {"hidden_size": 64, "intermediate_size": 96}


def ranges(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest value that each scale covers."""
    if args.strategy == "tensor":
        return weight.min(), weight.max()
    rows, columns = args.block_structure or (1, args.group_size or weight.shape[1])
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def write(folder: Path, weights: dict[str, Any], storage: str, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write a small model as the library stores it; return its parameters as the library decompresses them."""
    model = hf_model("llama", **SIZES)
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=None if inputs is None else QuantizationArgs(**inputs)
    )
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=storage)
    apply_quantization_config(model, config)
    for layer in model.modules():
        if not hasattr(layer, "weight_scale"):
            continue
        if (second := getattr(layer, "weight_global_scale", None)) is not None:
            second.data = generate_gparam(layer.weight.min(), layer.weight.max())
        scale, zero = calculate_qparams(*ranges(layer.weight.data, args), args, global_scale=second)
        layer.weight_scale.data = scale.reshape(layer.weight_scale.shape).to(layer.weight_scale.dtype)
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.data = zero.reshape(layer.weight_scale.shape).to(layer.weight_zero_point.dtype)
        if hasattr(layer, "input_scale"):
            layer.input_scale.data.fill_(0.5)
        layer.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    compressor.decompress_model(model)
    return {name: value.data for name, value in model.named_parameters() if name.endswith(".weight")}


def change(folder: Path, scales: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = stored(folder)
    tensors |= {name: scales(tensor).contiguous() for name, tensor in tensors.items() if name.endswith("weight_scale")}
    write_weights(folder, tensors)


# name -> weights, storage, change of the scales
READ: dict[str, tuple[dict[str, Any], str, Callable[[torch.Tensor], torch.Tensor] | None]] = {
    "fp8, a scale [1]": ({**FLOAT, "strategy": "tensor"}, "float-quantized", None),
    "fp8, a scale []": ({**FLOAT, "strategy": "tensor"}, "float-quantized", lambda scale: scale.view(())),
    "fp8, scales [n, 1]": ({**FLOAT, "strategy": "channel"}, "float-quantized", None),
    "fp8, scales [n]": ({**FLOAT, "strategy": "channel"}, "float-quantized", lambda scale: scale.view(-1)),
    "fp8, blocks": ({**FLOAT, "strategy": "block", "block_structure": [16, 32]}, "float-quantized", None),
    "fp8, blocks cut off": ({**FLOAT, "strategy": "block", "block_structure": [20, 40]}, "float-quantized", None),
    "int8, a scale [1]": ({**INT, "strategy": "tensor"}, "int-quantized", None),
    "int8, scales [n, 1]": ({**INT, "strategy": "channel"}, "int-quantized", None),
    "int4, groups": (INT4, "pack-quantized", None),
    "int4, rows": ({**INT, "num_bits": 4, "strategy": "channel"}, "pack-quantized", None),
    "int4, groups by importance": ({**INT4, "actorder": "weight"}, "pack-quantized", None),
    "int8, packed": ({**INT4, "num_bits": 8}, "pack-quantized", None),
}


@pytest.mark.parametrize("name", READ)
def test_weights_are_those_that_the_library_decompresses(name, tmp_path):
    weights, storage, scales = READ[name]
    inputs = {**FLOAT, "strategy": "tensor"} if "a scale" in name and "fp8" in name else None
    wanted = write(tmp_path, weights, storage, inputs)
    if scales is not None:
        change(tmp_path, scales)
    files = open_files([tmp_path / "model.safetensors"])
    assert set(files.names()) == wanted.keys()  # scales of activations are not tensors of the model
    for weight, value in wanted.items():
        assert torch.equal(files.read(weight), value), weight
        if value.dim() == 2:
            assert files.shape(weight) == tuple(value.shape)
            part = (slice(5, 27), slice(7, 50))
            assert torch.equal(files.read(weight, part), value[part]), weight
    assert torch.equal(load(tmp_path).layers[1].mlp.w2.weight, wanted["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize(
    ("weights", "storage"),
    [
        ({**INT4, "symmetric": False}, "pack-quantized"),
        ({**INT4, "num_bits": 3}, "pack-quantized"),
        (
            {**FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn},
            "nvfp4-pack-quantized",
        ),
        (
            {**FLOAT, "num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
            "mxfp4-pack-quantized",
        ),
    ],
    ids=["zero points", "3 bits", "nvfp4", "mxfp4"],
)
@pytest.mark.parametrize("has_config", [True, False])  # the tensors say it, too
def test_compressed_formats_that_cannot_be_read_are_refused(weights, storage, has_config, tmp_path):
    write(tmp_path, weights, storage)
    if not has_config:
        (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read.*: use the checkpoint|does not fit the shape"):
        open_files([tmp_path / "model.safetensors"]).read("model.layers.0.mlp.down_proj.weight")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("quant_method", "modelopt"),
        ("format", "marlin-24"),
        ("transform_config", {"config_groups": {"R1": {}}}),
        ("sparsity_config", [1]),
        ("sparsity_config.format", "sparse-24-bitmask"),
        ("config_groups", [1]),
        ("config_groups.group_0.format", "nvfp4-pack-quantized"),
        ("config_groups.group_0.weights.block_structure", [0, 128]),
        ("config_groups.group_0.weights.block_structure", "128x128"),
    ],
)
def test_unsupported_value_of_quantization_config_is_named(path, value, tmp_path):
    write_packed(tmp_path)
    config = read(tmp_path / "config.json")
    *places, key = path.split(".")
    node = config["quantization_config"]
    for setting in places:
        node = node.setdefault(setting, {})
    node[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = "has a value of another type" if value == [1] else re.escape(f".{path} is {value!r}")
    with pytest.raises(CheckpointError, match=f"quantization_config{'' if value != [1] else ' '}{words}"):
        open_files([tmp_path / "model.safetensors"])


def write_packed(folder: Path) -> None:
    write(folder, INT4, "pack-quantized")


@pytest.mark.parametrize(
    ("ending", "tensor", "says"),
    [
        (".weight_scale", torch.ones(3), r"'[^']+\.weight_scale' \[3\] of torch.float32 does not fit the shape"),
        (".weight_scale", torch.ones(64, 7), r"\[64, 7\] of torch.float32 does not fit"),
        (".weight_scale", torch.ones(64, 2, dtype=torch.uint8), "of torch.uint8 does not fit"),
        (".weight_packed", torch.zeros(64, 32, dtype=torch.uint8), r"torch.uint8 \[64, 32\] for a weight of shape"),
        (
            ".weight_packed",
            torch.zeros(512, dtype=torch.int32),
            r"torch.int32 \[512\] for a weight of shape \[64, 64\]",
        ),
        (".weight_packed", torch.zeros(0, 8, dtype=torch.int32), r"torch.int32 \[0, 8\] for a weight"),
        (".weight_packed", torch.zeros((), dtype=torch.int32), r"torch.int32 \[\] for a weight"),
        (".weight_packed", torch.zeros(32, 8, dtype=torch.int32), r"torch.int32 \[32, 8\] for a weight"),
        (".weight_g_idx", torch.arange(64), r"there is '[^']+\.weight_g_idx'"),
        (".weight_shape", None, r"there is no '[^']+\.weight_shape'"),
        (
            ".weight_shape",
            torch.tensor([64.0, 64.0]),
            r"weight_shape' is \[64\.0, 64\.0\] of torch.float32, but .* integers",
        ),
        (".weight_shape", torch.tensor(64), "is 64 of torch.int64, but the shape of a weight is two positive integers"),
        (".weight_shape", torch.tensor([64, 64, 1]), r"is \[64, 64, 1\] of torch.int64, but"),
        (".weight_shape", torch.tensor([-64, 64]), r"is \[-64, 64\] of torch.int64, but"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(ending, tensor, says, tmp_path):
    write_packed(tmp_path)
    tensors = stored(tmp_path)
    name = f"model.layers.0.self_attn.q_proj{ending}"
    tensors = {key: value for key, value in tensors.items() if key != name} | ({} if tensor is None else {name: tensor})
    write_weights(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path)


def test_scales_of_an_unquantized_weight_are_refused(tmp_path):
    write_folder(tmp_path)
    tensors = stored(tmp_path)
    tensors["model.layers.0.self_attn.q_proj.weight_scale"] = torch.ones(1)
    write_weights(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"q_proj.weight' has scales, but holds torch.float32 \[32, 32\] for a"):
        load(tmp_path)
