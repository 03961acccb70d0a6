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
from torchtune.checkpoints import CheckpointError, FullModelHFCheckpointer, GGUFFile, ModelSource, quantize_checkpoint
from torchtune.modules.conversion import ConversionError
from torchtune.modules.low_precision.torchao_interface import torchao_quantization
from torchtune.training import quantization
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
        (quantization.Int4WeightOnlyQuantizer(groupsize=16), "pack-quantized"),
        (quantization.Int8WeightOnlyQuantizer(), "pack-quantized"),
        (quantization.Int8DynActInt4WeightQuantizer(groupsize=16), "int-quantized"),
        (quantization.Float8Quantizer(dynamic_activations=False), "naive-quantized"),
        (quantization.Float8Quantizer(), "float-quantized"),
    ],
)
def test_transformers_and_this_library_read_what_torchao_computes(quantizer, storage, source, tmp_path):
    folder = quantize(source, quantizer, tmp_path / "out")
    config = read(folder / "config.json")["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["format"] == storage
    assert config["ignore"] == ["lm_head", "score"]
    model = load(folder)
    plain = load(source)
    for path, layer in plain.named_modules():
        if "layers." not in path or not isinstance(layer, nn.Linear):
            continue
        # In float64, of the values and scales that torchao makes.
        out_dim, in_dim = layer.weight.shape
        torchao_model = nn.Sequential(nn.Linear(in_dim, out_dim, bias=False))
        torchao_model[0].weight = layer.weight
        torchao_quantization().quantize_(torchao_model, quantizer.base_config)
        quantized = torchao_model[0].weight
        scale = quantized.scale.double().repeat_interleave(in_dim // quantized.scale.shape[1], 1)
        expected = quantized.qdata.double() * scale
        assert torch.allclose(model.get_submodule(path).weight.double(), expected, rtol=1e-6, atol=1e-9)
    logits_of_transformers = logits(in_transformers(folder, dtype=torch.float32))
    if quantizer.activations is None:
        assert torch.allclose(logits_of_transformers, logits(model), atol=1e-4)
    elif quantizer.activations == "int8":
        prepared = quantization.Int8DynActInt4WeightQATQuantizer(groupsize=16).prepare(plain)
        assert torch.allclose(logits_of_transformers, logits(prepared), atol=1e-4)
    assert torch.allclose(logits_of_transformers, logits(load(source)), atol=4.0)
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_0", "BF16"])
def test_a_gguf_file_holds_what_the_package_of_llama_cpp_quantizes(file_type, source, tmp_path):
    folder = quantize(source, quantization.GGUFQuantizer(file_type), tmp_path / "out")
    path = folder / f"model-{file_type}.gguf"
    plain = load(source)
    model = build(source)
    FullModelHFCheckpointer(folder, [path.name]).load_model(model)
    quantization_type = gguf.GGMLQuantizationType[file_type]
    for name in ("layers.0.mlp.w2.weight", "layers.1.attn.q_proj.weight"):
        weight = plain.get_parameter(name).detach()
        quantized = gguf.quants.quantize(weight.numpy(), quantization_type)
        expected = torch.from_numpy(gguf.quants.dequantize(quantized, quantization_type))
        assert torch.equal(model.get_parameter(name), expected.view_as(weight))
    error = (logits(model) - logits(plain)).abs().max()
    assert 0 < error < {"Q8_0": 0.3, "Q4_0": 4.0, "BF16": 0.2}[file_type]

    # The file also holds the tokenizer.
    files = GGUFFile(path).tokenizer_files()
    tokenizer_of_file = Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    text = "<|im_start|>a dog sees 123 cats, isn't it?<|im_end|>\n"
    assert tokenizer_of_file.encode(text).ids == tokenizer.encode(text).ids
    assert "chat_template" in files["tokenizer_config.json"]


def test_checkpoints_and_settings_that_do_not_fit_are_refused_before_anything_is_written(source, tmp_path):
    folder = quantize(source, quantization.Int4WeightOnlyQuantizer(groupsize=16), tmp_path / "out")
    with pytest.raises(UserError, match=r"the weights are quantized already \(compressed-tensors\): give the folder"):
        quantize(folder, quantization.Int8WeightOnlyQuantizer(), tmp_path / "again")
    with pytest.raises(UserError, match="is there already and is not overwritten: name a new folder"):
        quantize(source, quantization.Int8WeightOnlyQuantizer(), folder)
    with pytest.raises(ConversionError, match=r"groupsize 24 does not divide the 32 inputs of 'layers.0"):
        quantize(source, quantization.Int4WeightOnlyQuantizer(groupsize=24), tmp_path / "bad")
    with pytest.raises(UserError, match=r"int is not a quantizer: choose out of Float8Quantizer, GGUFQ"):
        quantize(source, 3, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_a_tokenizer_of_more_tokens_than_the_model_is_not_written_as_gguf(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "in")
    path = folder / "tokenizer.json"
    contents = json.loads(path.read_text())
    contents["model"]["vocab"]["beyond"] = 100_000
    path.write_text(json.dumps(contents))
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json gives 'beyond' the id 100000, but the model has \d+ tok"
    ):
        quantize(folder, quantization.GGUFQuantizer("F16"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_quantizer_than_in_training_is_warned_of(source, tmp_path, caplog):
    trained = shutil.copytree(source, tmp_path / "trained")
    component = f"{quantization.__name__}.Int4WeightOnlyQATQuantizer"
    (trained / "torchtune_config.yaml").write_text(f"quantizer:\n  _component_: {component}\n  groupsize: 16\n")
    quantize(trained, quantization.Int4WeightOnlyQuantizer(groupsize=16), tmp_path / "same")
    assert "trained for" not in caplog.text
    quantize(trained, quantization.Int8WeightOnlyQuantizer(), tmp_path / "other")
    assert "was trained for Int4WeightOnlyQATQuantizer with group_size 16" in caplog.text


def test_float8_is_not_int8_that_a_model_was_trained_for(source, tmp_path, caplog):
    trained = shutil.copytree(source, tmp_path / "trained")
    component = f"{quantization.__name__}.Int8WeightOnlyQATQuantizer"
    (trained / "torchtune_config.yaml").write_text(f"quantizer:\n  _component_: {component}\n")
    quantize(trained, quantization.Int8WeightOnlyQuantizer(), tmp_path / "int8")
    assert "trained for" not in caplog.text
    quantize(trained, quantization.Float8Quantizer(dynamic_activations=False), tmp_path / "float8")
    assert "was trained for Int8WeightOnlyQATQuantizer" in caplog.text


def test_a_config_beside_the_checkpoint_calls_no_class_of_another_package(source, tmp_path, caplog):
    folder = shutil.copytree(source, tmp_path / "downloaded")
    (folder / "torchtune_config.yaml").write_text("quantizer:\n  _component_: os.mkdir\n  path: called\n")
    quantize(folder, quantization.Int8WeightOnlyQuantizer(), tmp_path / "out")
    assert not Path("called").exists()
    assert "trained for" not in caplog.text
