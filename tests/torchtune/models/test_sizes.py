"""Every named size, on the meta device: names, shapes and counts of transformers and of the published tables."""

import copy
import importlib
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.torchtune.checkpoints.small import OF_TEXT
from tests.torchtune.models.conftest import on_disk
from tests.torchtune.models.published import OF_SIZES, PUBLISHED, STATED
from torchtune.models import get_spec
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.peft import LoRA

# family, builder, parameters, parameters of a rank-8 adapter on the four projections of attention (None: not published)
SIZES = [
    ("gemma", "gemma_2b", 2_506_172_416, 1843200),
    ("gemma", "gemma_7b", 8_537_680_896, 6422528),
    ("gemma2", "gemma2_2b", 2_614_341_888, 3194880),
    ("gemma2", "gemma2_9b", 9_241_705_984, 8945664),
    ("gemma2", "gemma2_27b", 27_227_128_320, 11304960),
    ("phi3", "phi3_mini", 3_821_079_552, 6291456),
    ("gemma3", "gemma3_1b", 999_885_952, None),
    ("gemma3", "gemma3_4b", 3_880_263_168, None),
    ("gemma3", "gemma3_12b", 11_766_034_176, None),
    ("gemma3", "gemma3_27b", 27_009_346_304, None),
    ("gemma4", "gemma4_e2b", 4_628_569_379, None),
    ("gemma4", "gemma4_e4b", 7_463_013_418, None),
    ("gemma4", "gemma4_26b_a4b", 25_233_141_790, None),
    ("gemma4", "gemma4_31b", 30_697_345_340, None),
    ("olmo2", "olmo2_1b", 1_484_916_736, None),
    ("olmo2", "olmo2_7b", 7_298_617_344, None),
    ("olmo2", "olmo2_13b", 13_716_198_400, None),
    ("olmo2", "olmo2_32b", 32_234_279_936, None),
    ("smol3", "smollm3_3b", 3_075_098_624, None),
    ("gpt_oss", "gpt_oss_20b", 20_914_757_184, None),
    ("gpt_oss", "gpt_oss_120b", 116_829_156_672, None),
    ("granite", "granite3_1_2b", 2_533_531_648, None),
    ("granite", "granite3_1_8b", 8_170_848_256, None),
    ("granite4", "granite4_micro", 3_402_836_480, None),
    ("nemotron_h", "nemotron3_nano_30b_a3b", 31_577_940_288, None),
    ("granite4", "granite4_h_micro", 3_191_396_096, None),
    ("granite4", "granite4_h_tiny", 6_939_037_248, None),
    ("granite4", "granite4_h_small", 32_207_337_984, None),
    ("ernie4_5", "ernie4_5_0_3b", 360_748_032, None),
    ("ministral3", "ministral3_3b", 3_429_006_336, None),
    ("ministral3", "ministral3_8b", 8_489_553_920, None),
    ("exaone4", "exaone4_1_2b", 1_279_391_488, None),
    ("exaone4", "exaone4_32b", 32_003_216_384, None),
    ("minimax_m2", "minimax_m2", 228_689_764_864, None),
    ("olmoe", "olmoe_1b_7b", 6_919_161_856, None),
    ("glm4", "glm4_9b_0414", 9_400_279_040, None),
    ("glm4", "glm4_32b_0414", 33_141_749_760, None),
    ("phi4", "phi4_14b", 14_659_507_200, 10649600),
    ("llama2", "llama2_7b", 6_738_415_616, 8388608),
    ("llama2", "llama2_13b", 13_015_864_320, 13107200),
    ("llama2", "llama2_70b", 68_976_648_192, 32768000),
    ("llama2", "llama2_reward_7b", 6_607_347_712, 8388608),
    ("mistral", "mistral_reward_7b", 7_110_664_192, 6815744),
    ("llama3", "llama3_8b", 8_030_261_248, 6815744),
    ("llama3", "llama3_70b", 70_553_706_496, 32768000),
    ("llama3_1", "llama3_1_8b", 8_030_261_248, 6815744),
    ("llama3_1", "llama3_1_70b", 70_553_706_496, 32768000),
    ("llama3_1", "llama3_1_405b", 405_853_388_800, 101154816),
    ("llama3_2", "llama3_2_1b", 1_235_814_400, 1703936),
    ("llama3_2", "llama3_2_3b", 3_212_749_824, 4587520),
    ("mistral", "mistral_7b", 7_241_732_096, 6815744),
    ("mistral", "mistral_7b_v0_3", 7_248_023_552, None),
    ("mistral", "mistral_nemo_12b", 12_247_782_400, None),
    ("mistral", "mistral_small_22b", 22_247_282_688, None),
    ("mistral", "mistral_small_24b", 23_572_403_200, None),
    ("mistral", "mistral_small_3_1_24b", 23_572_403_200, None),
    ("mistral", "ministral_8b", 8_019_808_256, None),
    ("code_llama2", "code_llama2_7b", 6_738_546_688, None),
    ("code_llama2", "code_llama2_13b", 13_016_028_160, None),
    ("code_llama2", "code_llama2_34b", 33_743_970_304, None),
    ("olmo3", "olmo3_7b", 7_298_011_136, None),
    ("olmo3", "olmo3_32b", 32_233_522_176, None),
    ("seed_oss", "seed_oss_36b", 36_151_104_512, None),
    ("qwen2", "qwen2_7b", 7_615_616_512, 5046272),
    ("qwen2", "qwen2_0_5b", 494_032_768, 1081344),
    ("qwen2", "qwen2_1_5b", 1_543_714_304, 2179072),
    ("qwen2_5", "qwen2_5_0_5b", 494_032_768, 1081344),
    ("qwen2_5", "qwen2_5_1_5b_base", 1_543_714_304, 2179072),
    ("qwen2_5", "qwen2_5_1_5b_instruct", 1_543_714_304, 2179072),
    ("qwen2_5", "qwen2_5_3b", 3_085_938_688, 3686400),
    ("qwen2_5", "qwen2_5_7b_base", 7_615_616_512, 5046272),
    ("qwen2_5", "qwen2_5_7b_instruct", 7_615_616_512, 5046272),
    ("qwen2_5", "qwen2_5_14b_base", 14_770_033_664, 12582912),
    ("qwen2_5", "qwen2_5_14b_instruct", 14_770_033_664, 12582912),
    ("qwen2_5", "qwen2_5_32b_base", 32_763_876_352, 16777216),
    ("qwen2_5", "qwen2_5_32b_instruct", 32_763_876_352, 16777216),
    ("qwen2_5", "qwen2_5_72b_base", 72_706_203_648, 32768000),
    ("qwen2_5", "qwen2_5_72b_instruct", 72_706_203_648, 32768000),
    ("qwen3", "qwen3_0_6b_base", 596_049_920, 2293760),
    ("qwen3", "qwen3_0_6b_instruct", 596_049_920, 2293760),
    ("qwen3", "qwen3_1_7b_base", 1_720_574_976, 3211264),
    ("qwen3", "qwen3_1_7b_instruct", 1_720_574_976, 3211264),
    ("qwen3", "qwen3_4b_base", 4_022_468_096, 5898240),
    ("qwen3", "qwen3_4b_instruct", 4_022_468_096, 5898240),
    ("qwen3", "qwen3_8b_base", 8_190_735_360, 7667712),
    ("qwen3", "qwen3_8b_instruct", 8_190_735_360, 7667712),
    ("qwen3", "qwen3_14b_base", 14_768_307_200, 10485760),
    ("qwen3", "qwen3_14b_instruct", 14_768_307_200, 10485760),
    ("qwen3", "qwen3_32b", 32_762_123_264, 19922944),
    ("mixtral", "mixtral_8x7b", 46_702_792_704, None),
    ("mixtral", "mixtral_8x22b", 140_620_634_112, None),
    ("mixtral", "mixtral_8x22b_instruct", 140_630_071_296, None),
    ("qwen3_moe", "qwen3_30b_a3b_base", 30_532_122_624, None),
    ("qwen3_moe", "qwen3_30b_a3b_instruct", 30_532_122_624, None),
    ("qwen3_moe", "qwen3_235b_a22b", 235_093_634_560, None),
    ("qwen3_5", "qwen3_5_9b", 8_953_803_264, None),
    ("qwen3_5", "qwen3_5_27b", 26_895_998_464, None),
    ("qwen3_5_moe", "qwen3_5_35b_a3b", 34_660_610_688, None),
    ("qwen3_next", "qwen3_next_80b_a3b", 79_674_391_296, None),
    ("glm4_moe", "glm4_5_air", 106_852_251_264, None),
    ("glm4_moe", "glm4_5", 352_797_829_024, None),
    ("llama4", "llama4_scout_17b_16e", 108_641_793_536, 12_582_912),
    ("llama4", "llama4_maverick_17b_128e", 401_583_781_376, None),
    ("glm4_moe_lite", "glm4_7_flash", 29_943_393_920, None),
    ("deepseek_v3", "deepseek_v3", 671_026_419_200, None),
    ("deepseek_v3", "moonlight_16b_a3b", 15_960_110_208, None),
    ("mistral4", "mistral4_119b", 118_972_826_624, None),
    ("lfm2", "lfm2_350m", 354_483_968, None),
    ("lfm2", "lfm2_700m", 742_489_344, None),
    ("lfm2", "lfm2_1_2b", 1_170_340_608, None),
    ("lfm2_moe", "lfm2_8b_a1b", 8_339_930_560, None),
    ("smol", "smollm2_135m", 134_515_008, None),
    ("smol", "smollm2_360m", 361_821_120, None),
    ("smol", "smollm2_1_7b", 1_711_376_384, None),
]


@pytest.fixture(scope="module", autouse=True)
def nothing_is_drawn() -> Iterator[None]:
    """On the meta device there are no values: what would be drawn at random took a quarter of the time."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.nn.Linear, torch.nn.Embedding):
            patch.setattr(kind, "reset_parameters", lambda module: None)
        yield


def _module(family: str) -> ModuleType:
    return importlib.import_module(f"torchtune.models.{family}")


def test_every_builder_is_in_the_table() -> None:
    named = {(family, name) for family, name, _, _ in SIZES}
    for family in {family for family, _ in named}:
        assert {(family, name) for name in _sizes(_module(family))} == {n for n in named if n[0] == family}
    assert all(callable(getattr(_module(family), f"lora_{name}")) for family, name in named)


def _sizes(module: ModuleType) -> list[str]:
    return [*getattr(module._model_builders, "SIZES", ()), *getattr(module._model_builders, "REWARD_SIZES", ())]


@pytest.mark.parametrize(("family", "name", "parameters", "adapter"), SIZES)
def test_named_size(family: str, name: str, parameters: int, adapter: int | None) -> None:
    with torch.device("meta"):
        model = getattr(_module(family), name)()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
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


@pytest.mark.parametrize(("family", "name"), [row[:2] for row in SIZES])
def test_every_number_is_the_published_one(family: str, name: str) -> None:
    module = _module(family)._model_builders
    description, spec = {**module.SIZES, **getattr(module, "REWARD_SIZES", {})}[name], module.SPEC
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


@pytest.mark.parametrize(
    ("family", "name", "parameters", "adapter"),
    [*{row[0]: row for row in SIZES if row[3] is None}.values(), *(row for row in SIZES if row[3] is not None)],
)
def test_adapter_size(family: str, name: str, parameters: int, adapter: int | None) -> None:
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
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total - trainable == parameters
    assert adapter is None or trainable == adapter
