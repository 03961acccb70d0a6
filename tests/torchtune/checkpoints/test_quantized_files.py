"""float8 weights with scales, and MXFP4: what the formats say, what transformers makes of them, published models."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import FineGrainedFP8Config

from tests.torchtune.checkpoints.small import (
    close,
    hf_model,
    in_transformers,
    load,
    logits,
    open_files,
    read,
    same_bits,
    started,
    stored,
    write_folder,
    write_weights,
)
from torchtune.checkpoints import CheckpointError
from torchtune.checkpoints._weight_files import dequantize_mxfp4
from torchtune.models import ModelError, from_hf_config

DEEPSEEK = (
    "DeepseekV3",
    {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    | {"moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 8}
    | {"qk_rope_head_dim": 8, "num_key_value_heads": 4, "num_hidden_layers": 2, "rope_interleave": True},
)


def written(folder: Path, tensors: dict[str, torch.Tensor], blocks: list[int] | None = None) -> Path:
    """A folder of tensors, with the size of blocks in its config."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": blocks}}))
    write_weights(folder, tensors)
    return folder / "model.safetensors"


def random(*shape: int) -> torch.Tensor:
    """Every float8 but NaN, in disorder."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return codes.masked_fill(codes % 128 == 127, 0).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(11, 10), (3, 11, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_scaled_weights_are_dequantized_wholly_and_in_slices(tmp_path, shape, dtype):
    values = random(*shape)
    scales = torch.rand(*shape[:-2], 3, 2, generator=torch.Generator().manual_seed(1)).to(dtype)
    path = written(tmp_path / "a", {"w": values, "w_scale_inv": scales, "w.activation_scale": torch.ones(1)}, [4, 8])
    spread = scales.double().repeat_interleave(4, -2)[..., :11, :].repeat_interleave(8, -1)[..., :10]
    expected = (values.double() * spread).float().bfloat16()
    source = open_files([path])
    assert source.names() == ["w"]
    assert source.shape("w") == shape
    assert torch.equal(source.read("w"), expected)
    for rows, columns in [((0, 11), (3, 9)), ((3, 5), (0, 10)), ((5, 6), (7, 10)), ((8, 11), (8, 9))]:
        part = (*([slice(1, 3)] if len(shape) > 2 else []), slice(*rows), slice(*columns))
        assert torch.equal(source.read("w", part), expected[part])


@pytest.mark.parametrize(("shape", "scale"), [((6, 5), ()), ((6, 5), (1,)), ((2, 6, 5), (2,)), ((2, 6, 5), (2, 1, 1))])
def test_weight_with_one_scale_per_matrix_is_dequantized(tmp_path, shape, scale):
    values = random(*shape)
    scales = torch.rand(scale)
    source = open_files([written(tmp_path / "a", {"w": values, "w_scale_inv": scales})])
    expected = values.double() * scales.double().view(*shape[:-2], 1, 1)
    assert torch.equal(source.read("w"), expected.float().bfloat16())


def test_scales_that_do_not_fit_their_weight_are_named(tmp_path):
    ones = torch.ones(9, 6)
    path = written(tmp_path / "a", {"w": random(9, 6), "w_scale_inv": torch.ones(2, 1)}, [4, 8])
    with pytest.raises(
        CheckpointError,
        match=r"'w_scale_inv' \[2, 1\] of torch.float32 does not fit the shape \[9, 6\] .* of 4 x 8: use",
    ):
        open_files([path]).read("w")
    with pytest.raises(
        CheckpointError, match=r"'w' has scales, but holds torch.float32 \[9, 6\] for a weight of shape"
    ):
        open_files([written(tmp_path / "b", {"w": ones, "w_scale_inv": ones[:1, :1].clone()})]).read("w")
    with pytest.raises(CheckpointError, match=r"cannot be read \(there is no 'w'\)"):
        open_files([written(tmp_path / "c", {"w_scale_inv": ones})])
    with pytest.raises(CheckpointError, match=r"weight_block_size is \[4\], which cannot be read"):
        open_files([written(tmp_path / "d", {"w": ones, "w_scale_inv": ones[:1, :1].clone()}, [4])])


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small DeepSeek V3 as it is published: matrices of layers in float8, and a layer of multi-token prediction."""
    folder = write_folder(tmp_path_factory.mktemp("deepseek"), DEEPSEEK, torch.bfloat16)
    tensors = stored(folder)
    tensors |= {name.replace("layers.1", "layers.2"): t.clone() for name, t in tensors.items() if "layers.1" in name}
    tensors["model.layers.2.eh_proj.weight"] = torch.randn(32, 64, dtype=torch.bfloat16)
    for name, tensor in list(tensors.items()):
        if name.endswith("proj.weight") or "proj_with" in name:
            blocks = tensor.float().unflatten(0, (-1, 8)).unflatten(-1, (-1, 8))
            scale = blocks.abs().amax((1, 3)) / 448
            tensors[name] = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
    write_weights(folder, tensors)
    config = read(folder / "config.json")
    quantization = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [8, 8]}
    sizes = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1}
    config |= {"quantization_config": quantization, "num_nextn_predict_layers": 1, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_published_deepseek_is_read_as_transformers_reads_it_and_saved_whole(published, tmp_path):
    dequantized = FineGrainedFP8Config(dequantize=True)
    hf_model = in_transformers(published, dtype=torch.bfloat16, quantization_config=dequantized)
    checkpointer, model = started(published, output=tmp_path / "out", dtype=torch.bfloat16)
    saved = checkpointer.save("epoch_0", model)
    config = read(saved / "config.json")
    assert "quantization_config" not in config
    weights = stored(saved)
    source = open_files([published / "model.safetensors"])
    assert weights.keys() == set(source.names())
    assert all(torch.equal(weights[name], source.read(name)) for name in weights if "layers.2." in name)
    assert {tensor.dtype for name, tensor in weights.items() if "scale" not in name and "bias" not in name} == {
        torch.bfloat16
    }
    again = in_transformers(saved, dtype=torch.bfloat16)
    assert same_bits(dict(hf_model.named_parameters()), dict(again.named_parameters()))
    close(logits(load(published)), logits(again.float()))


def test_a_scheme_that_is_not_known_is_refused_by_name(published, tmp_path):
    config = read(published / "config.json")
    for scheme in ({"quant_method": "modelopt"}, {"quant_method": "fp8", "fmt": "e3m4"}):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
        with pytest.raises(ModelError, match=r"has quantization_config = \{'quant_method'"):
            from_hf_config(tmp_path)


# MXFP4


def packed(*shape: int, low: int = 110, high: int = 140) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks ``[*shape, 16]`` and scales ``[*shape]``."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def test_mxfp4_weights_are_dequantized_as_in_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = packed(30, 10, 2, low=2, high=252)
    assert len(blocks.unique()) == 256
    expected = convert_moe_packed_tensors(blocks, scales)  # [e, in, out]
    assert torch.equal(dequantize_mxfp4(blocks, scales).transpose(1, 2), expected)


def test_slices_of_mxfp4_weights_equal_those_of_the_full_weight(tmp_path):
    blocks, scales = packed(3, 10, 4)
    save_file({"a.experts.w_blocks": blocks, "b": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"a.experts.w_scales": scales}, tmp_path / "2.safetensors")
    source = open_files([tmp_path / "1.safetensors", tmp_path / "2.safetensors"])
    assert sorted(source.names()) == ["a.experts.w", "b"]
    assert source.shape("a.experts.w") == (3, 128, 10)
    full_weight = source.read("a.experts.w")
    assert torch.equal(full_weight, dequantize_mxfp4(blocks, scales).transpose(1, 2))
    for box in [(1, 3, 0, 128, 0, 10), (0, 1, 37, 99, 2, 9), (2, 3, 32, 64, 0, 1), (0, 3, 127, 128, 9, 10)]:
        part = tuple(slice(*ends) for ends in zip(box[::2], box[1::2], strict=True))
        assert torch.equal(source.read("a.experts.w", part), full_weight[part])
    with pytest.raises(CheckpointError, match=r"but no file 'a.experts.w_scales'"):
        open_files([tmp_path / "1.safetensors"])


def quantized_folder(folder: Path) -> tuple[Path, torch.nn.Module]:
    """A small gpt-oss with experts in MXFP4, as it is published, and the model that it means."""
    write_folder(folder, "gpt_oss", torch.bfloat16)
    model = hf_model("gpt_oss", torch.bfloat16)
    tensors = stored(folder)
    for number, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            key = f"model.layers.{number}.mlp.experts.{name}"
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
    source, hf_model = quantized_folder(tmp_path / "in")
    checkpointer, model = started(source, dtype=torch.bfloat16)
    saved = checkpointer.save("epoch_0", model)
    weights = stored(saved)
    assert all(torch.equal(weights[name], parameter) for name, parameter in hf_model.named_parameters())
    assert "quantization_config" not in read(saved / "config.json")
    close(logits(load(source)), logits(in_transformers(saved, dtype=torch.float32)))


def test_packed_weights_must_fit_the_model(tmp_path):
    source, _ = quantized_folder(tmp_path / "in")
    tensors = stored(source)
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"][:, :-1].contiguous()
    write_weights(source, tensors)
    message = rf"'{name}' has the shape \[4, 64, 31\] where the model needs \[4, 64, 32\]"
    with pytest.raises(CheckpointError, match=message):
        load(source)


@pytest.mark.parametrize(
    ("ending", "shape", "dtype"),
    [
        ("blocks", (4, 64, 2, 8), torch.uint8),
        ("blocks", (64,), torch.uint8),
        ("blocks", (4, 64, 2, 16), torch.float32),
        ("scales", (4, 64, 3), torch.uint8),
        ("scales", (), torch.uint8),
        ("scales", (4, 64, 2), torch.float32),
    ],
)
def test_packed_experts_of_other_shapes_are_named(ending, shape, dtype, tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    blocks = torch.zeros(4, 64, 2, 16, dtype=torch.uint8)
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": blocks[..., 0].contiguous()}
    tensors[f"{name}_{ending}"] = torch.zeros(shape, dtype=dtype)
    path = written(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"down_proj_blocks' \[.* of U8: download the file again"):
        open_files([path]).read(name)
