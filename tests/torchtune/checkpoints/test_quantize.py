"""Quantized checkpoints: read by ``transformers`` and by us, and equal to what torchao makes of the weights."""

import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from tests.torchtune.checkpoints.small import build, in_transformers, load, logits, read, write_folder
from torchtune.checkpoints import GGUFFile, ModelSource
from torchtune.modules.conversion import ConversionError
from torchtune.modules.torchao_formats import torchao_quantization
from torchtune.training import FullModelHFCheckpointer, quantize_checkpoint
from torchtune.training import quantization as q
from torchtune.utils import UserError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With widths that blocks of 32 divide."""
    return write_folder(tmp_path_factory.mktemp("source"), intermediate_size=64)


def quantize(source: Path, quantizer: object, folder: Path) -> Path:
    quantize_checkpoint(ModelSource(source), build(source), quantizer, folder)
    return folder


@pytest.mark.parametrize(
    ("quantizer", "storage"),
    [
        (q.Int4WeightOnlyQuantizer(groupsize=16), "pack-quantized"),
        (q.Int8WeightOnlyQuantizer(), "pack-quantized"),
        (q.Int8DynActInt4WeightQuantizer(groupsize=16), "int-quantized"),
        (q.Float8Quantizer(dynamic_activations=False), "naive-quantized"),
        (q.Float8Quantizer(), "float-quantized"),
    ],
)
def test_quantized_files_are_read_with_the_values_of_torchao(quantizer, storage, source, tmp_path):
    folder = quantize(source, quantizer, tmp_path / "out")
    config = read(folder / "config.json")["quantization_config"]
    assert (config["quant_method"], config["format"], config["ignore"]) == (
        "compressed-tensors",
        storage,
        ["lm_head", "score"],
    )
    loaded, converted = load(folder), load(source)
    for path, layer in converted.named_modules():  # float64 on the values and scales that torchao makes
        if "layers." in path and isinstance(layer, nn.Linear):
            ao_layer = nn.Sequential(nn.Linear(*reversed(layer.weight.shape), bias=False))
            ao_layer[0].weight = layer.weight
            torchao_quantization().quantize_(ao_layer, quantizer.base_config)
            ao_weight = ao_layer[0].weight
            scale = ao_weight.scale.double().repeat_interleave(layer.weight.shape[1] // ao_weight.scale.shape[1], 1)
            wanted = ao_weight.qdata.double() * scale
            assert torch.allclose(loaded.get_submodule(path).weight.double(), wanted, rtol=1e-6, atol=1e-9)
    hf_model = in_transformers(folder, dtype=torch.float32)
    if quantizer.activations is None:
        assert torch.allclose(logits(hf_model), logits(loaded), atol=1e-4)
    elif quantizer.activations == "int8":
        prepared = q.Int8DynActInt4WeightQATQuantizer(groupsize=16).prepare(converted)
        assert torch.allclose(logits(hf_model), logits(prepared), atol=1e-4)
    assert torch.allclose(logits(hf_model), logits(load(source)), atol=4.0)
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_0", "BF16"])
def test_a_gguf_file_holds_what_llama_cpps_package_quantises(file_type, source, tmp_path):
    folder = quantize(source, q.GGUFQuantizer(file_type), tmp_path / "out")
    path = folder / f"model-{file_type}.gguf"
    file = GGUFFile(path)
    plain = load(source)
    back = build(source)
    FullModelHFCheckpointer(folder, [path.name]).load_model(back)
    kind = gguf.GGMLQuantizationType[file_type]
    for name in ("layers.0.mlp.w2.weight", "layers.1.attn.q_proj.weight"):
        weight = plain.get_parameter(name).detach()
        wanted = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
        assert torch.equal(back.get_parameter(name), torch.from_numpy(wanted).view_as(weight))
    error = (logits(back) - logits(plain)).abs().max()
    assert 0 < error < {"Q8_0": 0.3, "Q4_0": 4.0, "BF16": 0.2}[file_type]
    # the tokenizer comes back out of the file as it went in
    files = file.tokenizer_files()
    expected, written = (
        Tokenizer.from_str(json.dumps(files["tokenizer.json"])),
        Tokenizer.from_file(str(source / "tokenizer.json")),
    )
    text = "<|im_start|>a dog sees 123 cats, isn't it?<|im_end|>\n"
    assert expected.encode(text).ids == written.encode(text).ids
    assert "chat_template" in files["tokenizer_config.json"]


def test_model_that_cannot_be_quantized_is_refused(source, tmp_path, caplog):
    folder = quantize(source, q.Int4WeightOnlyQuantizer(groupsize=16), tmp_path / "out")
    with pytest.raises(UserError, match=r"the weights are quantized already \(compressed-tensors\): give the folder"):
        quantize(folder, q.Int8WeightOnlyQuantizer(), tmp_path / "again")
    with pytest.raises(UserError, match="is there already and is not overwritten: name a new folder"):
        quantize(source, q.Int8WeightOnlyQuantizer(), folder)
    with pytest.raises(ConversionError, match=r"groupsize 24 does not divide the 32 inputs of 'layers.0"):
        quantize(source, q.Int4WeightOnlyQuantizer(groupsize=24), tmp_path / "bad")
    with pytest.raises(UserError, match=r"int is not a quantizer: choose out of Float8Quantizer"):
        quantize(source, 3, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_other_quantizer_than_in_training_is_logged(source, tmp_path, caplog):
    trained = shutil.copytree(source, tmp_path / "trained")
    component = f"{q.__name__}.Int4WeightOnlyQATQuantizer"
    (trained / "torchtune_config.yaml").write_text(f"quantizer:\n  _component_: {component}\n  groupsize: 16\n")
    quantize(trained, q.Int4WeightOnlyQuantizer(groupsize=16), tmp_path / "same")
    assert "trained for" not in caplog.text
    quantize(trained, q.Int8WeightOnlyQuantizer(), tmp_path / "other")
    assert "was trained for Int4WeightOnlyQATQuantizer with group_size 16" in caplog.text
