"""The conversion that quantizes a base: what training computes with it, what is loaded and saved, what is refused."""

import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from tests.torchtune.checkpoints.small import (
    build,
    hf_model,
    load,
    logits,
    randomize_adapter,
    same_bits,
    some_tokens,
    stored,
    write_folder,
)
from tests.torchtune.modules.low_precision.small import nf4_in_float64
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.modules.conversion import ConversionError, apply_conversions
from torchtune.modules.low_precision import QuantizeBase, reparametrize_as_dtype_state_dict_post_hook
from torchtune.modules.low_precision.formats import NF4
from torchtune.modules.peft import LoRA

BLOCK_SIZE = 8  # the small models are 32 wide
SIZES = {"num_hidden_layers": 2}


def nf4(**options: Any) -> QuantizeBase:
    return QuantizeBase("nf4", block_size=BLOCK_SIZE, **options)


def lora(**options: Any) -> LoRA:
    return LoRA(rank=4, alpha=8, attn_modules=["q_proj", "output_proj"], apply_to_mlp=True, **options)


def train(model: nn.Module, steps: int = 3) -> list[float]:
    """Train some steps of AdamW on the same tokens, and return the losses."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    tokens = some_tokens()
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model.train()(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(model: nn.Module, folder: Path, name: str, **contents: Any) -> Path:
    return FullModelHFCheckpointer(str(folder / "in"), output_dir=str(folder / name)).save("step_1", model, **contents)


def resume(model: nn.Module, folder: Path, adapter: LoRA) -> nn.Module:
    """Save a model on NF4 with its adapter and return the one that is made of the checkpoint."""
    save(model, folder, "run", contents="adapter", state={"progress": {"step": 3}})
    resumed = build(folder / "in", nf4(), adapter)
    progress = {"step": 0}
    checkpointer = FullModelHFCheckpointer(str(folder / "in"), output_dir=str(folder / "run"))
    checkpointer.load_model(resumed)
    checkpointer.resume(checkpointer.find_resume_point(), resumed, {"progress": progress})
    assert progress == {"step": 3}
    assert same_bits(dict(resumed.named_parameters()), dict(model.named_parameters()))
    return resumed


@pytest.mark.parametrize("base", ["nf4", "int8", "float8"])
@pytest.mark.parametrize(
    ("shape", "option"), [("qwen2_tied", "use_rslora"), ("qwen2_tied", "use_dora"), ("qwen3_moe", "")]
)
def test_training_on_a_quantized_base_is_training_on_the_rounded_base(base, shape, option, tmp_path):
    """Exactly, and so are the files."""
    options = {option: True} if option else {}
    quantize_base = nf4() if base == "nf4" else QuantizeBase(base)
    write_folder(tmp_path / "in", shape, **SIZES)
    rounded = save(load(tmp_path / "in", quantize_base), tmp_path, "rounded")
    quantized = load(tmp_path / "in", nf4() if base == "nf4" else QuantizeBase(base), lora(**options))
    plain = load(rounded, lora(**options))
    randomize_adapter(quantized)
    randomize_adapter(plain)
    losses = train(quantized)
    assert losses == train(plain)
    assert losses[-1] < losses[0]
    of_quantized = save(quantized, tmp_path, "quantized", contents=("adapter", "merged"))
    of_plain = save(plain, tmp_path, "plain", contents=("adapter", "merged"))
    assert same_bits(stored(of_quantized), stored(of_plain))
    adapter_file = Path("adapter") / "adapter_model.safetensors"
    assert same_bits(load_file(of_quantized / adapter_file), load_file(of_plain / adapter_file))
    if base == "nf4" and shape != "qwen3_moe":
        resumed = resume(quantized, tmp_path, lora(**options))
        assert train(resumed, 1) == train(quantized, 1)


def test_an_export_holds_the_rounded_weights_and_the_others_as_they_were(tmp_path):
    write_folder(tmp_path / "in", "qwen2_tied", **SIZES)
    exported = stored(save(load(tmp_path / "in", nf4()), tmp_path, "out"))
    for name, expected in stored(tmp_path / "in").items():
        if name.endswith("proj.weight"):
            expected = nf4_in_float64(expected, BLOCK_SIZE).float()
        torch.testing.assert_close(exported[name], expected, rtol=1e-6, atol=0, msg=name)


class CountingFullWeights(QuantizeBase):
    """Asserts that no other full weight is alive when one is quantized."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.full_weights: list[weakref.ref] = []

    def from_full(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        assert not [ref for ref in self.full_weights if ref() is not None], name
        self.full_weights.append(weakref.ref(tensor))
        return super().from_full(name, tensor)


def test_loading_quantizes_one_full_weight_at_a_time_and_no_router(tmp_path):
    write_folder(tmp_path / "in", "qwen3_moe", **SIZES)
    conversion = CountingFullWeights(block_size=BLOCK_SIZE)
    model = load(tmp_path / "in", conversion)
    assert len(conversion.full_weights) == 2 * (4 + 3)  # projections of attention and stacks of experts, in both layers
    expert_dtypes = {parameter.dtype for parameter in model.layers.parameters() if parameter.dim() == 3}
    assert expert_dtypes == {torch.uint8, torch.int32}
    assert type(model.layers[0].mlp.router.gate) is nn.Linear


def test_the_state_dict_hook_puts_dequantized_weights_in_the_place_of_stored_tensors(tmp_path):
    write_folder(tmp_path / "in", "llama", num_hidden_layers=1)
    model = load(tmp_path / "in", nf4())
    names = load(tmp_path / "in").state_dict().keys()
    state_dict = model.state_dict(prefix="model.")
    reparametrize_as_dtype_state_dict_post_hook(model, state_dict, "model.", dtype=torch.float16)
    assert state_dict.keys() == {f"model.{name}" for name in names}
    layer = model.layers[0].attn.q_proj
    weight = state_dict["model.layers.0.attn.q_proj.weight"]
    assert torch.equal(weight, layer.full_weight().to(torch.float16))


def test_a_weight_that_is_not_finite_is_refused(tmp_path):
    write_folder(tmp_path / "in", "llama", num_hidden_layers=1)
    conversion = nf4()
    build(tmp_path / "in", conversion)
    with pytest.raises(ConversionError, match=r"'layers\.0\.mlp\.w1\.weight' has values that are not finite"):
        conversion.from_full("layers.0.mlp.w1.weight", torch.full((48, 32), torch.inf))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype is 'int4', choose out of nf4, int8, float8"),
        ({"dtype": "int8", "block_size": 8}, "int8 has a scale for every row"),
        ({"block_size": 7}, "block_size is 7"),
        ({"block_size": 16.0}, r"block_size is 16\.0, give an even number"),
        ({"block_size": "16"}, "block_size is '16', give an even number"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": "w2"}, r"target_modules is the text 'w2': give a list of patterns, for example \['w2'\]"),
        ({"block_size": 64}, r"the block size 64 does not divide 32, the width of 'layers\.0\.attn\.q_proj'"),
        ({"block_size": 8, "target_modules": ["q_prj"]}, r"matches 'q_prj', the nearest names are layers\.\*\.attn"),
        ({"block_size": 32, "target_modules": ["w2"]}, r"does not divide 48, the width of 'layers\.0\.mlp\.w2'"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(options, message, tmp_path):
    write_folder(tmp_path, "llama", num_hidden_layers=1)
    with pytest.raises(ConversionError, match=message) as error:
        build(tmp_path, QuantizeBase(**options))
    assert str(error.value).endswith(".")


class ScaledLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class TinyModel(nn.Module):
    """An embedding, a layer that computes more than a linear layer, and an output with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(16, 32)
        self.layers = nn.ModuleList([ScaledLinear(32, 32)])
        self.output = nn.Linear(32, 16, bias=False)
        self.output.weight = self.tok_embeddings.weight


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("output", "'output' shares its weight with the token embedding and cannot be quantized"),
        ("layers.0", "'layers.0' is a ScaledLinear, which is more than a linear layer"),
        ("attn", "no linear layer of the model matches 'attn'"),
    ],
)
def test_layers_that_are_more_than_a_weight_of_their_own_are_refused(target, message):
    model = TinyModel()
    with pytest.raises(ConversionError, match=message):
        QuantizeBase("int8", target_modules=[target]).convert(model)
    assert all(parameter.requires_grad for parameter in model.parameters()), "the model is unchanged"


def test_default_targets_of_an_unsupported_width_keep_their_dtype_and_are_reported(tmp_path):
    write_folder(tmp_path, "llama", num_hidden_layers=1)
    with torch.device("meta"):
        model = build(tmp_path)
    (report,) = apply_conversions(model, [QuantizeBase(block_size=32)])
    assert "1 keep their dtype, because the block size 32 does not divide 48: layers.*.mlp.w2" in str(report)
    assert type(model.layers[0].mlp.w2) is nn.Linear


def test_a_base_is_quantized_once(tmp_path):
    write_folder(tmp_path, "llama", num_hidden_layers=1)
    with torch.device("meta"):
        model = build(tmp_path)
    apply_conversions(model, [nf4()])
    with pytest.raises(ConversionError, match="a base weight is quantized once"):
        apply_conversions(model, [QuantizeBase("int8")])
    with pytest.raises(ConversionError, match="is quantized already"):
        QuantizeBase("int8").convert(model)


def test_a_quantized_base_is_reverted_on_meta_alone(tmp_path):
    write_folder(tmp_path, "llama", num_hidden_layers=1)
    quantize_base = nf4()
    with torch.device("meta"):
        model = build(tmp_path)
    names = [name for name, _ in model.named_parameters()]
    quantize_base.convert(model)
    quantize_base.revert(model)
    assert [name for name, _ in model.named_parameters()] == names
    with pytest.raises(ConversionError, match="apply it while the model is on the meta device"):
        quantize_base.revert(load(tmp_path, nf4()))


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_starts_as_a_part_of_its_weight_is_trained_on_the_rounded_remainder(init, tmp_path):
    write_folder(tmp_path / "in", "qwen2_tied", **SIZES)
    plain = load(tmp_path / "in")
    model = load(tmp_path / "in", lora(init=init))
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["down_proj"], init_lora_weights=init)
    peft_model = peft.get_peft_model(hf_model("qwen2_tied", **SIZES), config)
    layer = model.layers[1].mlp.w2
    peft_layer = peft_model.base_model.model.model.layers[1].mlp.down_proj
    torch.testing.assert_close(layer.weight, peft_layer.base_layer.weight, rtol=1e-4, atol=1e-5)
    for matrix, peft_matrix in ((layer.lora_a, peft_layer.lora_A), (layer.lora_b, peft_layer.lora_B)):
        # Singular vectors and columns of Q are defined up to their sign.
        torch.testing.assert_close(matrix.weight.abs(), peft_matrix["default"].weight.abs(), rtol=1e-3, atol=1e-4)
    train(model)
    adapter = save(model, tmp_path, "adapter", contents="adapter")
    peft_model = peft.PeftModel.from_pretrained(hf_model("qwen2_tied", **SIZES), adapter)
    torch.testing.assert_close(logits(model.eval()), logits(peft_model), rtol=1e-3, atol=1e-3)

    # Quantized, the base is rounded without what the adapter took; of PiSSA the sum is nearer to the weight.
    torch.manual_seed(0)
    model = load(tmp_path / "in", nf4(), lora(init=init))
    layer = model.layers[1].mlp.w2
    weight = plain.layers[1].mlp.w2.weight
    weight_format = NF4(torch.float32, BLOCK_SIZE)
    error_without_adapter = (weight_format.decode(*weight_format.encode(weight.detach())) - weight).norm()
    error = (layer.merged_weight(layer.full_weight()) - weight).norm()
    assert error < (0.95 if init == "pissa" else 1.0) * error_without_adapter
    train(model)
    resume(model, tmp_path, lora(init=init))
