"""MXFP4 weights: what transformers makes of them, and gpt-oss trained from them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.torchtune.checkpoints.small import (
    close,
    hf_model,
    in_transformers,
    load,
    logits,
    read,
    started,
    stored,
    write_folder,
    write_weights,
)
from torchtune.checkpoints import CheckpointError
from torchtune.checkpoints._open_source import open_source
from torchtune.checkpoints._quantized_files import dequantize_mxfp4


def packed(*shape: int, low: int = 110, high: int = 140) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks ``[*shape, 16]`` and scales ``[*shape]``."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def test_equals_what_transformers_makes_of_it():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = packed(30, 10, 2, low=2, high=252)
    assert len(blocks.unique()) == 256
    theirs = convert_moe_packed_tensors(blocks, scales)  # [e, in, out]
    assert torch.equal(dequantize_mxfp4(blocks, scales).transpose(1, 2), theirs)


def test_any_part_is_the_part_of_the_whole(tmp_path):
    blocks, scales = packed(3, 10, 4)
    save_file({"a.experts.w_blocks": blocks, "b": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"a.experts.w_scales": scales}, tmp_path / "2.safetensors")
    source = open_source([tmp_path / "1.safetensors", tmp_path / "2.safetensors"])
    assert sorted(source.names()) == ["a.experts.w", "b"]
    assert source.shape("a.experts.w") == (3, 128, 10)
    whole = source.read("a.experts.w")
    assert torch.equal(whole, dequantize_mxfp4(blocks, scales).transpose(1, 2))
    for box in [(1, 3, 0, 128, 0, 10), (0, 1, 37, 99, 2, 9), (2, 3, 32, 64, 0, 1), (0, 3, 127, 128, 9, 10)]:
        part = tuple(slice(*ends) for ends in zip(box[::2], box[1::2], strict=True))
        assert torch.equal(source.read("a.experts.w", part), whole[part])
    with pytest.raises(CheckpointError, match=r"but no file 'a.experts.w_scales'"):
        open_source([tmp_path / "1.safetensors"])


def quantized_folder(folder: Path) -> tuple[Path, torch.nn.Module]:
    """A small gpt-oss with experts in MXFP4, as it is published, and the model that it means."""
    write_folder(folder, "gpt_oss", torch.bfloat16)
    model = hf_model("gpt_oss", torch.bfloat16)
    tensors = stored(folder)
    for number, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight, key = getattr(layer.mlp.experts, name), f"model.layers.{number}.mlp.experts.{name}"
            experts, rows, columns = weight.shape
            blocks, scales = packed(experts, columns, rows // 32, low=122, high=126)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            del tensors[key]
            weight.data.copy_(dequantize_mxfp4(blocks, scales).transpose(1, 2))
    write_weights(folder, tensors)
    config = read(folder / "config.json")
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


def test_gpt_oss_is_read_from_mxfp4_and_saved_as_bfloat16(tmp_path):
    source, theirs = quantized_folder(tmp_path / "in")
    checkpointer, model = started(source, dtype=torch.bfloat16)
    saved = checkpointer.save("epoch_0", model)
    weights = stored(saved)
    assert all(torch.equal(weights[name], parameter) for name, parameter in theirs.named_parameters())
    assert "quantization_config" not in read(saved / "config.json")
    close(logits(load(source)), logits(in_transformers(saved, dtype=torch.float32)))


def test_what_is_packed_must_fit_the_model(tmp_path):
    source, _ = quantized_folder(tmp_path / "in")
    tensors = stored(source)
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"][:, :-1].contiguous()
    write_weights(source, tensors)
    message = rf"'{name}' has the shape \[4, 64, 31\] where the model needs \[4, 64, 32\]"
    with pytest.raises(CheckpointError, match=message):
        load(source)
