"""Public builders look and behave like functions written by hand."""

import importlib
import inspect
import subprocess
import sys

import pytest
import torch

from torchtune.models import Description, ModelError, build
from torchtune.models.llama2 import llama2, llama2_7b
from torchtune.models.llama3 import llama3, llama3_8b, lora_llama3, lora_llama3_8b, qlora_llama3_8b
from torchtune.models.llama3_1 import llama3_1, llama3_1_8b
from torchtune.models.llama3_2 import llama3_2, llama3_2_1b, lora_llama3_2_1b
from torchtune.models.mistral import mistral, mistral_7b
from torchtune.models.qwen2 import qwen2, qwen2_7b
from torchtune.models.qwen3 import qwen3, qwen3_4b_base
from torchtune.models.smol import smollm2, smollm2_360m
from torchtune.modules.low_precision import FrozenNF4Linear
from torchtune.modules.peft import LoRALinear
from torchtune.utils import UserError

_FAMILIES = ("llama2", "llama3", "llama3_1", "llama3_2", "llama3_3", "mistral", "qwen2", "qwen2_5", "qwen3", "smol")
_TINY = {"vocab_size": 97, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 64}


def _on_meta(builder: object, *args: object, **kwargs: object) -> torch.nn.Module:
    with torch.device("meta"):
        return builder(*args, **kwargs)


@pytest.mark.parametrize("family", _FAMILIES)
def test_builders_are_ordinary_functions(family):
    module = importlib.import_module(f"torchtune.models.{family}")
    builders = [
        name for name in module.__all__ if name.startswith(("llama", "lora_", "qlora_", "mistral", "qwen", "smol"))
    ]
    assert builders
    for name in builders:
        if name.endswith(("_tokenizer", "_to_tune", "_to_hf")):
            continue
        builder = getattr(module, name)
        assert inspect.isfunction(builder)
        assert builder.__name__ == name or family == "llama3_3" or name == "lora_qwen2_5_7b"  # older names of others
        assert builder.__doc__.startswith("Build")
        assert getattr(sys.modules[builder.__module__], builder.__name__) is builder
        kind = "Module" if "classifier" in name else "TransformerDecoder"
        assert inspect.signature(builder).return_annotation.__name__ == kind
        assert all(p.annotation is not p.empty for p in inspect.signature(builder).parameters.values())


def test_signatures_have_the_arguments_of_earlier_releases():
    lora = "lora_attn_modules apply_lora_to_mlp apply_lora_to_output lora_rank lora_alpha lora_dropout "
    lora += "use_dora quantize_base"
    assert list(inspect.signature(llama3_8b).parameters) == []
    assert list(inspect.signature(lora_llama3_8b).parameters) == [*lora.split(), "train_modules"]
    assert inspect.signature(lora_llama3_8b).parameters["lora_rank"].default == 8
    assert inspect.signature(qlora_llama3_8b).parameters["quantize_base"].default is True
    assert list(inspect.signature(llama3_2_1b).parameters) == ["tie_word_embeddings"]
    tied = list(inspect.signature(lora_llama3_2_1b).parameters)
    assert tied == [*lora.split(), "tie_word_embeddings", "train_modules"]
    component = inspect.signature(lora_llama3).parameters
    assert component["vocab_size"].kind is inspect.Parameter.KEYWORD_ONLY
    assert component["lora_rank"].default is inspect.Parameter.empty
    assert component["rope_base"].default == 500_000


def test_modules_are_trained_whole_beside_the_adapters_of_a_builder():
    model = _on_meta(lora_llama3_2_1b, ["q_proj"], train_modules=["tok_embeddings"])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {"tok_embeddings.weight"}


@pytest.mark.parametrize(
    ("builder", "component", "extra"),
    [
        (llama2_7b, llama2, {}),
        (llama3_8b, llama3, {"intermediate_dim": 14_336}),
        (llama3_1_8b, llama3_1, {"intermediate_dim": 14_336}),
        (llama3_2_1b, llama3_2, {"intermediate_dim": 8192}),
        (mistral_7b, mistral, {"intermediate_dim": 14_336}),
        (qwen2_7b, qwen2, {"intermediate_dim": 18_944, "norm_eps": 1e-6}),
        (
            qwen3_4b_base,
            qwen3,
            {
                "intermediate_dim": 9728,
                "head_dim": 128,
                "norm_eps": 1e-6,
                "tie_word_embeddings": True,
                "q_norm": True,
                "k_norm": True,
                "q_proj_bias": False,
                "k_proj_bias": False,
                "v_proj_bias": False,
            },
        ),
        (smollm2_360m, smollm2, {"intermediate_dim": 2560}),
    ],
)
def test_component_builder_builds_the_named_size(builder, component, extra):
    named = _on_meta(builder)
    numbers = {field: getattr(named.description, field) for field in _TINY}
    assert _on_meta(component, **numbers, **extra).description == named.description


def test_lora_builders_adapt_the_chosen_modules_over_a_base_of_any_dtype():
    model = _on_meta(lora_llama3, ["q_proj", "v_proj"], True, lora_rank=4, lora_alpha=8, **_TINY)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected_names = set()
    for module in ("attn.q_proj", "attn.v_proj", "mlp.w1", "mlp.w2", "mlp.w3"):
        expected_names |= {f"{module}.lora_a.weight", f"{module}.lora_b.weight"}
    assert {name.split(".", 2)[2] for name in names} == expected_names
    assert model.conversions[0].rank == 4
    with pytest.raises(UserError, match="tied"):
        _on_meta(lora_llama3_2_1b, ["q_proj"], apply_lora_to_output=True)
    untied = _on_meta(lora_llama3_2_1b, ["q_proj"], apply_lora_to_output=True, tie_word_embeddings=False)
    assert untied.output.lora_a.weight.shape == (8, 2048)
    quantized = _on_meta(qlora_llama3_8b, ["q_proj"])
    attention = quantized.layers[0].attn
    assert isinstance(attention.k_proj, FrozenNF4Linear)
    assert isinstance(attention.q_proj, LoRALinear)
    assert isinstance(attention.q_proj, FrozenNF4Linear)
    with pytest.raises(TypeError, match="rank"):
        _on_meta(lora_llama3_8b, ["q_proj"], rank=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"full_num_kv_heads": 3}, r"num_heads \(4\) must be a multiple of full_num_kv_heads \(3\)"),
        ({"shared_kv_layers": 2}, r"shared_kv_layers \(2\): a layer of each kind must come before"),
        ({"layer_embed_dim": 4}, r"layer_embed_dim \(got 4\) and layer_embed_vocab go together"),
        ({"expert_norms": True}, r"expert_norms \(True\) needs shared_expert_dim"),
        ({"num_kv_heads": 3}, r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"),
        ({"embed_dim": 30}, "not a multiple of num_heads"),
        ({"embed_dim": 12}, "head_dim must be even"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"attn_dropout": 2.0}, "attn_dropout"),
        ({"window": -1, "window_layers": (0,)}, "window must be at least 1"),
    ],
)
def test_impossible_descriptions_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        Description(**{**_TINY, "intermediate_dim": 48, **changes})
    with pytest.raises(ModelError, match="together"):
        qwen3(**_TINY, intermediate_dim=48, q_norm=True)


def test_smallest_window_is_the_token_itself():
    """A token that sees itself alone: the logits at a position do not depend on the tokens before it."""
    torch.manual_seed(0)
    model = build(Description(**_TINY, intermediate_dim=48, window=1, window_layers=tuple(range(_TINY["num_layers"]))))
    logits = model(torch.tensor([[1, 2, 3], [4, 5, 3]]))
    torch.testing.assert_close(logits[0, 2], logits[1, 2])
    assert not torch.equal(logits[0, 1], logits[1, 1])


def test_a_family_loads_neither_others_nor_data_packages():
    code = (
        "import sys, torchtune.models.qwen3\n"
        "heavy = ('pandas', 'pyarrow', 'datasets', 'torchvision', 'torchao', 'transformers')\n"
        "bad = [m for m in sys.modules if m in heavy"
        " or m.startswith(('torchtune.models.llama', 'torchtune.models.mistral', 'torchtune.models.smol'))]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
