"""Frozen bases in four and eight bits: what is stored, what is computed and trained with it, and what is saved."""

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
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.modules.conversion import ConversionError, apply_conversions
from torchtune.modules.low_precision import FrozenFloat8Linear, FrozenInt8Linear, FrozenNF4Linear, QuantizeBase
from torchtune.modules.low_precision._formats import NF4, NF4_LEVELS, Float8, Int8
from torchtune.modules.peft import LoRA, LoRALinear

BLOCK = 8  # the small models are 32 wide
SIZES = {"num_hidden_layers": 2}


def nf4(**options: Any) -> QuantizeBase:
    return QuantizeBase("nf4", block_size=BLOCK, **options)


def lora(**options: Any) -> LoRA:
    return LoRA(rank=4, alpha=8, attn_modules=["q_proj", "output_proj"], apply_to_mlp=True, **options)


def in_float64(weight: torch.Tensor, block: int) -> torch.Tensor:
    """NF4 of ``weight`` by the definition: nearest level times the scale, which is quantized to 8 bits in its row."""
    blocks = weight.double().unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1)
    low, high = scale.amin(-1, keepdim=True), scale.amax(-1, keepdim=True)
    step = (high - low) / 255
    scale = torch.where(step > 0, low + step * ((scale - low) / step).round(), low).unsqueeze(-1)
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float64, device=weight.device)
    nearest = (blocks.unsqueeze(-1) / scale.unsqueeze(-1) - levels).abs().argmin(-1)
    return (levels[nearest] * scale).flatten(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_is_the_nearest_level(dtype):
    torch.manual_seed(0)
    weight = (torch.randn(3, 5, 128) * torch.rand(3, 5, 1)).to(dtype)
    weight[0, 0] = 0.0
    form = NF4(dtype)
    tensors = form.encode(weight)
    assert [tuple(tensor.shape) for tensor in tensors] == [(3, 5, 64), (3, 5, 2), (3, 5, 2)]
    exact = torch.nan_to_num(in_float64(weight, 64))
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(form.decode(*tensors).double(), exact, rtol=tolerance, atol=1e-9)


def test_nf4_of_torchao():
    """The same levels where both double quantizations are exact, and as near elsewhere."""
    torchao = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    weight = torch.randn(64, 1024)
    theirs = torchao.to_nf4(weight, 64, 256).get_original_weight()
    ours = NF4(torch.float32).decode(*NF4(torch.float32).encode(weight))
    assert (ours - weight).norm() < 1.005 * (theirs - weight).norm()
    assert (ours - theirs).norm() < 0.2 * (theirs - weight).norm()


@pytest.mark.parametrize(("form", "largest"), [(Int8, 127), (Float8, 448)])
def test_eight_bits(form, largest):
    torch.manual_seed(0)
    weight = torch.randn(6, 32)
    scale = weight.double().abs().amax(1, keepdim=True) / largest
    scaled = weight.double() / scale
    exact = (scaled.round() if form is Int8 else scaled.to(torch.float8_e4m3fn).double()) * scale
    made = form(torch.float32)
    torch.testing.assert_close(made.decode(*made.encode(weight)).double(), exact, rtol=1e-6, atol=0)


def losses(model: nn.Module, steps: int = 3) -> list[float]:
    """Losses of some steps of AdamW on the same tokens."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    tokens, found = some_tokens(), []
    for _ in range(steps):
        loss = F.cross_entropy(model.train()(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def saved(model: nn.Module, folder: Path, name: str, **contents: Any) -> Path:
    return FullModelHFCheckpointer(str(folder / "in"), output_dir=str(folder / name)).save("step_1", model, **contents)


def resumed_from(model: nn.Module, folder: Path, adapter: LoRA) -> nn.Module:
    """A model on NF4 that a checkpoint of ``model`` has become."""
    resumed, progress = build(folder / "in", nf4(), adapter), {"step": 0}
    saved(model, folder, "run", contents="adapter", state={"progress": {"step": 3}})
    store = FullModelHFCheckpointer(str(folder / "in"), output_dir=str(folder / "run"))
    store.load_model(resumed)
    store.resume(store.find_resume_point(), resumed, {"progress": progress})
    assert progress == {"step": 3}
    assert same_bits(dict(resumed.named_parameters()), dict(model.named_parameters()))
    return resumed


@pytest.mark.parametrize("base", ["nf4", "int8", "float8"])
@pytest.mark.parametrize(
    ("shape", "option"), [("qwen2_tied", "use_rslora"), ("qwen2_tied", "use_dora"), ("qwen3_moe", "")]
)
def test_training_is_lora_on_the_rounded_base(base, shape, option, tmp_path):
    """Exactly, and so are the files."""
    options = {option: True} if option else {}
    quantize = nf4 if base == "nf4" else lambda: QuantizeBase(base)
    write_folder(tmp_path / "in", shape, **SIZES)
    rounded = saved(load(tmp_path / "in", quantize()), tmp_path, "rounded")
    model, plain = load(tmp_path / "in", quantize(), lora(**options)), load(rounded, lora(**options))
    both = {"quantized": model, "plain": plain}
    for one in both.values():
        randomize_adapter(one)
    trained = losses(model)
    assert trained == losses(plain)
    assert trained[-1] < trained[0]
    folders = [saved(one, tmp_path, name, contents=("adapter", "merged")) for name, one in both.items()]
    assert same_bits(*map(stored, folders))
    assert same_bits(*(load_file(folder / "adapter" / "adapter_model.safetensors") for folder in folders))
    if base != "nf4" or shape == "qwen3_moe":
        return
    resumed = resumed_from(model, tmp_path, lora(**options))
    assert losses(resumed, 1) == losses(model, 1)


def test_the_rounded_base(tmp_path):
    """The export of a quantized model has NF4 of what was read, and the rest as it was."""
    write_folder(tmp_path / "in", "qwen2_tied", **SIZES)
    before, after = stored(tmp_path / "in"), stored(saved(load(tmp_path / "in", nf4()), tmp_path, "out"))
    for name, tensor in before.items():
        exact = in_float64(tensor, BLOCK).float() if name.endswith("proj.weight") else tensor
        torch.testing.assert_close(after[name], exact, rtol=1e-6, atol=0, msg=name)


class Watched(QuantizeBase):
    """Looks how many full weights are alive while a model is read."""

    seen: list[weakref.ref]

    def from_full(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        assert not [ref for ref in self.seen if ref() is not None], name
        self.seen.append(weakref.ref(tensor))
        return super().from_full(name, tensor)


def test_one_full_weight_at_a_time(tmp_path):
    write_folder(tmp_path / "in", "qwen3_moe", **SIZES)
    conversion = Watched(block_size=BLOCK)
    conversion.seen = []
    model = load(tmp_path / "in", conversion)
    assert len(conversion.seen) == 2 * (4 + 3)  # projections of attention and stacks of experts, in both layers
    assert {parameter.dtype for parameter in model.layers.parameters() if parameter.dim() == 3} == {
        torch.uint8,
        torch.int32,
    }
    assert type(model.layers[0].mlp.router.gate) is nn.Linear


@pytest.mark.parametrize("kind", [FrozenNF4Linear, FrozenInt8Linear, FrozenFloat8Linear])
@pytest.mark.parametrize("adapted", [False, True])
def test_nothing_of_the_full_weight_is_kept_for_the_backward_pass(kind, adapted):
    torch.manual_seed(0)
    layer = kind(128, 64, bias=True)
    x, kept = torch.randn(2, 3, 128, requires_grad=True), []
    weight = layer.full_weight().requires_grad_()
    F.linear(x, weight, layer.bias).sum().backward()
    wanted, x.grad = x.grad, None
    layer = LoRALinear.from_linear(layer, rank=2, alpha=4) if adapted else layer
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x).sum().backward()
    assert all(tensor.dtype in (torch.uint8, torch.int8, torch.int32) for tensor in kept if tensor.numel() >= 64 * 64)
    torch.testing.assert_close(x.grad, wanted)


def test_a_layer_of_ones_own():
    """``LoRALinear(quantize_base=True)``, as older code calls it."""
    torch.manual_seed(0)
    layer = LoRALinear(64, 32, rank=4, alpha=8, use_bias=True, quantize_base=True, scaler_block_size=256)
    assert isinstance(layer, FrozenNF4Linear)
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["lora_a.weight", "lora_b.weight"]
    layer.to(torch.bfloat16)  # scales are no floating point tensors
    assert layer.weight_range.dtype == torch.int32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype is 'int4', choose out of nf4, int8, float8"),
        ({"dtype": "int8", "block_size": 8}, "int8 has a scale for every row"),
        ({"block_size": 7}, "block_size is 7"),
        ({"block_size": 64}, r"the block size 64 does not divide 32, the width of 'layers\.0\.attn\.q_proj'"),
        ({"block_size": 8, "target_modules": ["q_prj"]}, r"matches 'q_prj', the nearest names are layers\.\*\.attn"),
        ({"block_size": 32, "target_modules": ["w2"]}, r"does not divide 48, the width of 'layers\.0\.mlp\.w2'"),
    ],
)
def test_refused(options, message, tmp_path):
    write_folder(tmp_path, "llama", num_hidden_layers=1)
    with pytest.raises(ConversionError, match=message) as error:
        build(tmp_path, QuantizeBase(**options))
    assert str(error.value).endswith(".")


def test_layers_that_stay_are_named(tmp_path, caplog):
    write_folder(tmp_path, "llama", num_hidden_layers=1)
    with torch.device("meta"):
        model = build(tmp_path)
    (report,) = apply_conversions(model, [QuantizeBase(block_size=32)])
    assert "1 keep their dtype, because the block size 32 does not divide 48: layers.*.mlp.w2" in str(report)
    with pytest.raises(ConversionError, match="a base weight is quantized once"):
        apply_conversions(model, [QuantizeBase("int8")])
    with pytest.raises(ConversionError, match="is quantized already"):
        QuantizeBase("int8").convert(model)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_starts_as_a_part_of_its_weight(init, tmp_path):
    write_folder(tmp_path / "in", "qwen2_tied", **SIZES)
    plain, model = load(tmp_path / "in"), load(tmp_path / "in", lora(init=init))
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["down_proj"], init_lora_weights=init)
    theirs = peft.get_peft_model(hf_model("qwen2_tied", **SIZES), config)
    layer, other = model.layers[1].mlp.w2, theirs.base_model.model.model.layers[1].mlp.down_proj
    torch.testing.assert_close(layer.weight, other.base_layer.weight, rtol=1e-4, atol=1e-5)
    for ours, found in ((layer.lora_a, other.lora_A), (layer.lora_b, other.lora_B)):  # up to signs
        torch.testing.assert_close(ours.weight.abs(), found["default"].weight.abs(), rtol=1e-3, atol=1e-4)
    losses(model)
    adapter = saved(model, tmp_path, "adapter", contents="adapter")
    theirs = peft.PeftModel.from_pretrained(hf_model("qwen2_tied", **SIZES), adapter)
    torch.testing.assert_close(logits(model.eval()), logits(theirs), rtol=1e-3, atol=1e-3)
    # Quantized, the base is rounded without what the adapter took; of PiSSA the sum is nearer to the weight.
    torch.manual_seed(0)
    model = load(tmp_path / "in", nf4(), lora(init=init))
    layer, weight = model.layers[1].mlp.w2, plain.layers[1].mlp.w2.weight
    rounded = NF4(torch.float32, BLOCK)
    usual = rounded.decode(*rounded.encode(weight.detach())) - weight
    assert (layer.merged_weight(layer.full_weight()) - weight).norm() < (
        0.95 if init == "pissa" else 1.0
    ) * usual.norm()
    losses(model)
    resumed_from(model, tmp_path, lora(init=init))
