"""Every family's adapters are PEFT's, both ways through files."""

import copy
import json
import shutil
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.torchtune.models.conftest import make_hf_model
from tests.torchtune.models.families import ARCHITECTURES, FAMILIES
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.models import ModelError, from_hf_config
from torchtune.modules import TransformerDecoder
from torchtune.modules.conversion import ConversionError, apply_conversions
from torchtune.modules.moe import GroupedExperts
from torchtune.modules.peft import LoRA, get_adapter_params
from torchtune.modules.peft.adapters import ATTENTION_TARGETS, MIXER_INPUTS

ATTENTION = ("output_proj", *MIXER_INPUTS, *chain.from_iterable(ATTENTION_TARGETS.values()))
MLPS = ("w1", "w2", "w3")
PARTS = (*ATTENTION, *MLPS)
TOKENS = torch.randint(1, 97, (2, 30), generator=torch.Generator().manual_seed(1))


# Families with a mixture of experts.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
MIXTURES = []
for _name, (_, _fields) in FAMILIES.items():
    _num_experts = max(_fields.get(count, 0) for count in _COUNTS)
    if _num_experts:
        MIXTURES.append(_name)


# One row of each architecture, and those whose layers have other matrices than that one's.
ROWS = [
    *ARCHITECTURES,
    "llama3",
    "gemma4",
    "gemma4_experts",
    "granite4",
    "phi3",
    "qwen2_tied",
    "deepseek_v3",
]


def adaptable(model: TransformerDecoder) -> list[str]:
    """The layers whose adapters the family can save, by path: attention and MLP, but no experts."""
    targets = []
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and path.rpartition(".")[2] in PARTS:
            try:
                model.spec.check_adapters([path], model.description)
            except ModelError:
                continue
            targets.append(path)
    return targets


def test_experts_in_one_tensor_and_the_mlp_beside_them_take_adapters():
    from torchtune.models.gemma4 import gemma4_26b_a4b

    for target, parameters in (("*.shared_expert.w1", 2816 + 2112), ("*.experts", 128 * 3 * (2816 + 704))):
        with torch.device("meta"):
            (report,) = apply_conversions(gemma4_26b_a4b(), [LoRA(rank=2, target_modules=[target])])
        assert report.num_parameters == 30 * 2 * parameters


def test_layers_that_peft_refuses_get_no_adapter_and_are_reported():
    from torchtune.models.nemotron_h import nemotron3_nano_30b_a3b

    with torch.device("meta"):
        model = nemotron3_nano_30b_a3b()
    with pytest.raises(ModelError, match=r"'layers.0.attn.output_proj': peft adapts no such module of nemotron_h"):
        LoRA(target_modules=["output_proj"]).convert(model)
    report = LoRA(attn_modules=["q_proj", "output_proj"]).convert(model)
    assert "no adapter for layers.0.attn.output_proj and its like (23), which peft refuses" in report.note
    outputs = [path for path in report.replaced if path.endswith("output_proj")]
    assert outputs == [f"layers.{i}.attn.output_proj" for i in model.description.attn_layers]


def load(folder: Path, output: Path, conversion: LoRA) -> tuple[FullModelHFCheckpointer, TransformerDecoder]:
    """Base and, where the folder has one, adapter."""
    with torch.device("meta"):
        model = from_hf_config(folder)
        apply_conversions(model, [conversion])
    checkpointer = FullModelHFCheckpointer(str(folder), output_dir=str(output))
    checkpointer.load_model(model)
    return checkpointer, model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out = model(TOKENS)
    return out if isinstance(out, torch.Tensor) else out.logits


def randomize(model: TransformerDecoder) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in get_adapter_params(model).items():
            parameter.normal_(std=0.1 if name.endswith(("lora_b.weight", "_b")) else 0.2)


@pytest.mark.parametrize("pair", ROWS, indirect=True)
def test_adapters_go_both_ways_through_files(pair, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    source = tmp_path / "base"
    shutil.copytree(pair.folder, source)
    conversion = LoRA(rank=3, alpha=5, target_modules=adaptable(pair.model))
    checkpointer, model = load(source, tmp_path / "out", conversion)
    base = logits(pair.hf)
    assert (logits(model) - base).abs().max() <= 1e-4, "it changes nothing yet"

    randomize(model)
    saved = checkpointer.save("epoch_0", model, contents="adapter")
    in_peft = PeftModel.from_pretrained(copy.deepcopy(pair.hf), saved).eval()
    assert (logits(model) - base).abs().max() > 0.01
    assert (logits(in_peft) - logits(model)).abs().max() <= 1e-4

    written = json.loads((saved / "adapter_config.json").read_text())
    targets = {key: written.get(key) for key in ("target_modules", "target_parameters")}
    torch.manual_seed(4)
    settings = LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **targets)
    peft_model = get_peft_model(copy.deepcopy(pair.hf), settings).eval()
    peft_model.save_pretrained(source)
    _, loaded = load(source, tmp_path / "other", conversion)
    assert (logits(peft_model) - base).abs().max() > 1e-3
    assert (logits(loaded) - logits(peft_model)).abs().max() <= 1e-4


# peft itself writes these patterns for parameters of experts, applies them, and looks for them among modules only; it
# warns, too, where an adapter is of parameters alone, and where files of other releases of transformers name modules.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:target_modules=.* were set but no module was matched:RuntimeWarning")
# It gives the experts of every layer an adapter, zero where the file has none, and says so.
@pytest.mark.filterwarnings("ignore:Found missing adapter keys while loading the checkpoint:UserWarning")
@pytest.mark.parametrize("name", MIXTURES)
def test_peft_reads_every_adapter_of_a_mixture(name, tmp_path):
    """Of experts, of MLPs and of both, scaled in one of the two ways each; and transformers reads the merged model."""
    from peft import PeftModel, set_peft_model_state_dict

    hf = make_hf_model(name)
    hf.save_pretrained(tmp_path)
    with torch.device("meta"):
        modules = dict(from_hf_config(tmp_path).named_modules())
    experts = [path for path, module in modules.items() if isinstance(module, GroupedExperts)]
    mlps = [path for path, module in modules.items() if isinstance(module, torch.nn.Linear) and path[-2:] in MLPS]
    scopes = {"experts": experts, "MLPs": mlps, "both": [*experts, *mlps], "first": [*experts[:1], *mlps[:1]]}
    adapters = [
        *(
            (scope, LoRA(3, 5, target_modules=paths, use_rslora=scope in ("MLPs", "both")))
            for scope, paths in scopes.items()
            if paths
        ),
        ("attention too", LoRA(3, 5, apply_to_mlp=True)),
    ]
    for number, (scope, conversion) in enumerate(adapters):
        checkpointer, model = load(tmp_path, tmp_path / "out", conversion)
        randomize(model)
        folder = checkpointer.save(f"epoch_{number}", model, contents=("adapter", "merged"))
        expected = logits(model)
        saved = folder / "adapter"
        checkpointer.close()
        in_peft = PeftModel.from_pretrained(copy.deepcopy(hf), saved).eval()
        assert not set_peft_model_state_dict(in_peft, load_file(saved / "adapter_model.safetensors")).unexpected_keys
        assert (expected - logits(hf)).abs().max() > 0.01
        assert (logits(in_peft) - expected).abs().max() <= 1e-4, scope
        if scope == "attention too":
            merged = type(hf).from_pretrained(folder).eval()
            assert (logits(merged) - expected).abs().max() <= 1e-4

        with torch.device("meta"):
            again = from_hf_config(tmp_path)
            apply_conversions(again, [conversion])
        FullModelHFCheckpointer(str(tmp_path), adapter_checkpoint=str(saved)).load_model(again)
        assert torch.equal(logits(again.eval()), expected)


def test_mlps_beside_experts_take_no_magnitudes_and_files_say_no_dropout(tmp_path):
    make_hf_model("glm4_moe").save_pretrained(tmp_path)
    dora = LoRA(use_dora=True, target_modules=["mlp.w1"])
    with pytest.raises(ConversionError, match=r"'layers.0.mlp.w1'.*use_dora"):
        load(tmp_path, tmp_path / "out", dora)
    checkpointer, model = load(tmp_path, tmp_path / "out", LoRA(dropout=0.1, target_modules=["shared_expert.w*"]))
    settings = json.loads((checkpointer.save("epoch_0", model, contents="adapter") / "adapter_config.json").read_text())
    assert settings["lora_dropout"] == 0  # peft refuses any other for parameters
    checkpointer.close()
