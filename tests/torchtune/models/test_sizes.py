"""Every named size, on the meta device: names, shapes and counts of transformers and of the published tables."""

import copy
import importlib
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import torchtune.models
from tests.torchtune.checkpoints.small import OF_TEXT
from tests.torchtune.models.conftest import on_disk
from tests.torchtune.models.published import OF_SIZES, PUBLISHED, STATED
from torchtune._lazy import packages_in
from torchtune.models import Description, get_spec
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.peft import LoRA

# Builder -> number of parameters, as published.
PARAMETERS = {
    "gemma_2b": 2_506_172_416,
    "gemma_7b": 8_537_680_896,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "phi3_mini": 3_821_079_552,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304,
    "gemma4_e2b": 4_628_569_379,
    "gemma4_e4b": 7_463_013_418,
    "gemma4_26b_a4b": 25_233_141_790,
    "gemma4_31b": 30_697_345_340,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "olmo2_32b": 32_234_279_936,
    "smollm3_3b": 3_075_098_624,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "granite3_1_2b": 2_533_531_648,
    "granite3_1_8b": 8_170_848_256,
    "granite4_micro": 3_402_836_480,
    "nemotron3_nano_30b_a3b": 31_577_940_288,
    "granite4_h_micro": 3_191_396_096,
    "granite4_h_tiny": 6_939_037_248,
    "granite4_h_small": 32_207_337_984,
    "ernie4_5_0_3b": 360_748_032,
    "ministral3_3b": 3_429_006_336,
    "ministral3_8b": 8_489_553_920,
    "exaone4_1_2b": 1_279_391_488,
    "exaone4_32b": 32_003_216_384,
    "minimax_m2": 228_689_764_864,
    "olmoe_1b_7b": 6_919_161_856,
    "glm4_9b_0414": 9_400_279_040,
    "glm4_32b_0414": 33_141_749_760,
    "phi4_14b": 14_659_507_200,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama2_reward_7b": 6_607_347_712,
    "mistral_reward_7b": 7_110_664_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "llama3_1_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "mistral_7b": 7_241_732_096,
    "mistral_7b_v0_3": 7_248_023_552,
    "mistral_nemo_12b": 12_247_782_400,
    "mistral_small_22b": 22_247_282_688,
    "mistral_small_24b": 23_572_403_200,
    "mistral_small_3_1_24b": 23_572_403_200,
    "ministral_8b": 8_019_808_256,
    "code_llama2_7b": 6_738_546_688,
    "code_llama2_13b": 13_016_028_160,
    "code_llama2_34b": 33_743_970_304,
    "olmo3_7b": 7_298_011_136,
    "olmo3_32b": 32_233_522_176,
    "seed_oss_36b": 36_151_104_512,
    "qwen2_7b": 7_615_616_512,
    "qwen2_0_5b": 494_032_768,
    "qwen2_1_5b": 1_543_714_304,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b_base": 1_543_714_304,
    "qwen2_5_1_5b_instruct": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b_base": 7_615_616_512,
    "qwen2_5_7b_instruct": 7_615_616_512,
    "qwen2_5_14b_base": 14_770_033_664,
    "qwen2_5_14b_instruct": 14_770_033_664,
    "qwen2_5_32b_base": 32_763_876_352,
    "qwen2_5_32b_instruct": 32_763_876_352,
    "qwen2_5_72b_base": 72_706_203_648,
    "qwen2_5_72b_instruct": 72_706_203_648,
    "qwen3_0_6b_base": 596_049_920,
    "qwen3_0_6b_instruct": 596_049_920,
    "qwen3_1_7b_base": 1_720_574_976,
    "qwen3_1_7b_instruct": 1_720_574_976,
    "qwen3_4b_base": 4_022_468_096,
    "qwen3_4b_instruct": 4_022_468_096,
    "qwen3_8b_base": 8_190_735_360,
    "qwen3_8b_instruct": 8_190_735_360,
    "qwen3_14b_base": 14_768_307_200,
    "qwen3_14b_instruct": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "mixtral_8x22b_instruct": 140_630_071_296,
    "qwen3_30b_a3b_base": 30_532_122_624,
    "qwen3_30b_a3b_instruct": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_5_9b": 8_953_803_264,
    "qwen3_5_27b": 26_895_998_464,
    "qwen3_5_35b_a3b": 34_660_610_688,
    "qwen3_next_80b_a3b": 79_674_391_296,
    "glm4_5_air": 106_852_251_264,
    "glm4_5": 352_797_829_024,
    "llama4_scout_17b_16e": 108_641_793_536,
    "llama4_maverick_17b_128e": 401_583_781_376,
    "glm4_7_flash": 29_943_393_920,
    "deepseek_v3": 671_026_419_200,
    "moonlight_16b_a3b": 15_960_110_208,
    "mistral4_119b": 118_972_826_624,
    "lfm2_350m": 354_483_968,
    "lfm2_700m": 742_489_344,
    "lfm2_1_2b": 1_170_340_608,
    "lfm2_8b_a1b": 8_339_930_560,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1_7b": 1_711_376_384,
}


def _module(family: str) -> ModuleType:
    return importlib.import_module(f"torchtune.models.{family}")


def _sizes(family: str) -> dict[str, Description]:
    builders = getattr(_module(family), "_model_builders", None)
    return {**getattr(builders, "SIZES", {}), **getattr(builders, "REWARD_SIZES", {})}


# (family, builder)
SIZES = [(family, name) for family in packages_in(torchtune.models.__path__) for name in _sizes(family)]


@pytest.fixture(scope="module", autouse=True)
def nothing_is_drawn() -> Iterator[None]:
    """On the meta device there are no values: what would be drawn at random took a quarter of the time."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.nn.Linear, torch.nn.Embedding):
            patch.setattr(kind, "reset_parameters", lambda module: None)
        yield


def test_every_builder_is_in_the_table() -> None:
    assert sorted(name for _, name in SIZES) == sorted(PARAMETERS)
    assert all(callable(getattr(_module(family), f"lora_{name}")) for family, name in SIZES)


@pytest.mark.parametrize(("family", "name"), SIZES)
def test_named_size(family: str, name: str) -> None:
    with torch.device("meta"):
        model = getattr(_module(family), name)()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert model.spec is (get_spec("llama4_vl") if family == "llama4" else _module(family).SPEC)

    import transformers

    config = model.spec.to_hf_config(model.description)
    architecture = config["architectures"][0]
    with torch.device("meta"):
        kind = re.sub("For(CausalLM|SequenceClassification)$", "", architecture)
        kind = f"{kind}TextConfig" if kind.startswith(OF_TEXT) else f"{kind}Config"
        kind = re.sub("ForConditionalGeneration.*", "Config", kind)
        theirs = getattr(transformers, architecture)(getattr(transformers, kind)(**config))
    untrained = [
        (key, value)
        for key, value in theirs.named_buffers()
        if key.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar"))
    ]
    tensors = [*theirs.named_parameters(), *untrained]
    expected = {key: value.shape for key, value in on_disk(tensors, family).items()}
    ours = model.spec.weight_map("hf").to_external(model.state_dict().items(), model.description)
    assert {key: value.shape for key, value in ours} == expected
    assert model.spec.from_hf_config(config) == model.description
    assert model.spec.from_hf_config(theirs.config.to_dict()) == model.description


@pytest.mark.parametrize(("family", "name"), SIZES)
def test_every_number_is_the_published_one(family: str, name: str) -> None:
    description, spec = _sizes(family)[name], _module(family)._model_builders.SPEC
    assert (name in PUBLISHED) != (name in STATED)
    if name in STATED:
        assert {field: getattr(description, field) for field in STATED[name]} == STATED[name]
        defaults = spec.from_hf_config(_filled({"architectures": [*spec.architectures]}))
        rest = [field for field in vars(description) if field not in OF_SIZES]
        assert {field: getattr(description, field) for field in rest} == {f: getattr(defaults, f) for f in rest}
        assert description.embed_scale == description.embed_dim**0.5
        return
    assert spec.from_hf_config(_filled(PUBLISHED[name])) == description
    if "num_hidden_layers" in PUBLISHED[name]:
        assert spec.from_hf_config(PUBLISHED[name]) == description


def _filled(config: dict[str, Any]) -> dict[str, Any]:
    """A file with the defaults of transformers' config class."""
    import transformers

    transformers.logging.set_verbosity_error()
    (architecture,) = config["architectures"]
    stem = re.sub("For(CausalLM|SequenceClassification)$", "", architecture)
    kind = getattr(transformers, f"{stem}{'Text' if stem in OF_TEXT else ''}Config")
    return {**kind.from_dict(copy.deepcopy(config)).to_dict(), "architectures": [architecture]}


@pytest.mark.parametrize(("family", "name"), dict(SIZES).items())  # one of each family
def test_adapter_size(family: str, name: str) -> None:
    builder = getattr(_module(family), f"lora_{name}")
    with torch.device("meta"):
        if family in ("phi3", "phi4"):  # their files hold queries, keys and values in one matrix
            plain = getattr(_module(family), name)()
            (report,) = apply_conversions(plain, [LoRA(rank=8, alpha=16, target_modules=["w1"])])
            assert "mlp.w3 and its like" in str(report)
            trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
            assert len(trained) == 2 * len(plain.layers)
            assert all(".mlp.w1.lora_" in name for name in trained)
        model = builder(["q_proj", "k_proj", "v_proj", "output_proj"])
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    assert frozen == PARAMETERS[name]
