"""LoRA as a conversion: what it adapts, what it freezes, what it refuses, how it leaves a model."""

import pytest
import torch
from torch import nn

from torchtune.models import Description, build
from torchtune.models.llama3 import llama3, lora_llama3_8b
from torchtune.models.qwen3 import lora_qwen3_0_6b_base
from torchtune.models.qwen3_moe import SPEC
from torchtune.modules import TiedLinear, TransformerDecoder
from torchtune.modules.conversion import ConversionError, apply_conversions
from torchtune.modules.low_precision import QuantizeBase
from torchtune.modules.output_projection import CappedLinear
from torchtune.modules.peft import (
    AdapterModule,
    DoRALinear,
    LoRA,
    LoRALinear,
    NewTokens,
    disable_adapter,
    get_adapter_params,
    get_merged_lora_ckpt,
    validate_missing_and_unexpected_for_lora,
)

TOKENS = torch.arange(20).view(2, 10)
MIXTURE = Description(
    vocab_size=40,
    num_layers=2,
    embed_dim=16,
    intermediate_dim=24,
    max_seq_len=32,
    num_heads=2,
    num_kv_heads=2,
    num_experts=4,
    experts_per_token=2,
    expert_dim=8,
)
EVERYTHING = {"apply_to_mlp": True, "apply_to_output": True}


def make(seed: int = 0, tied: bool = False) -> TransformerDecoder:
    """A small random decoder."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 41, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 16, "max_seq_len": 32}
    model = llama3(**sizes, intermediate_dim=24)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    if tied:
        del model.output
        model.output = TiedLinear(model.tok_embeddings)
    return model


def adapted(**options: object) -> TransformerDecoder:
    """The decoder with an adapter that changes its output."""
    model = make()
    apply_conversions(model, [LoRA(rank=3, alpha=6, **options)])
    torch.manual_seed(1)
    for parameter in get_adapter_params(model).values():
        nn.init.uniform_(parameter, 0.1, 0.5)
    return model


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"q_proj", "k_proj", "v_proj", "output_proj"}),
        ({"attn_modules": ["q_proj"]}, {"q_proj"}),
        ({"attn_modules": [], "apply_to_mlp": True}, {"w1", "w2", "w3"}),
        ({"attn_modules": ["v_proj"], **EVERYTHING}, {"v_proj", "w1", "w2", "w3", "output"}),
        ({"target_modules": ["*_proj", "mlp.w[12]"]}, {"q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2"}),
        ({"target_modules": ["*"]}, {"q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3", "output"}),
    ],
)
@pytest.mark.parametrize("use_dora", [False, True])
def test_conversion_adapts_the_chosen_layers_and_trains_only_these(options, expected, use_dora):
    with torch.device("meta"):
        model = make()
        before = {name: parameter.shape for name, parameter in model.named_parameters()}
        (report,) = apply_conversions(model, [LoRA(3, 6, use_dora=use_dora, **options)])
    layers = {path: module for path, module in model.named_modules() if isinstance(module, LoRALinear)}
    assert {path.rpartition(".")[2] for path in layers} == expected
    in_each_of_two_layers = expected - {"output"}
    assert len(layers) == 2 * len(in_each_of_two_layers) + len(expected & {"output"})
    assert report.replaced == list(layers)
    assert all(isinstance(module, DoRALinear) is use_dora for module in layers.values())
    adapter = get_adapter_params(model)
    assert report.num_parameters == sum(parameter.numel() for parameter in adapter.values())
    assert set(adapter) == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert model.conversions[0].owned_parameters(model) == set(adapter)
    assert before == {name: p.shape for name, p in model.named_parameters() if name not in adapter}
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(isinstance(module, AdapterModule) for module in layers.values())


def test_adapters_have_the_published_numbers_of_parameters():
    """Counts for adapters on q, k, v and output_proj with rank 8."""
    for builder, count in ((lora_llama3_8b, 6_815_744), (lora_qwen3_0_6b_base, 2_293_760)):
        with torch.device("meta"):
            model = builder(["q_proj", "k_proj", "v_proj", "output_proj"])
        assert sum(parameter.numel() for parameter in get_adapter_params(model).values()) == count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["q_prj"]}, r"'q_prj', the nearest names are layers\.\*\.attn\.q_proj"),
        ({"target_modules": ["layers.7.attn.q_proj"]}, r"'layers\.7\.attn\.q_proj', the nearest names"),
        ({"target_modules": []}, "no module is chosen"),
        ({"attn_modules": []}, "no module is chosen"),
        ({"attn_modules": "q_proj"}, "attn_modules is the text 'q_proj': give a list"),
        ({"attn_modules": ["o_proj"]}, "attn_modules has o_proj, choose out of q_proj"),
        ({"target_modules": ["q_proj"], "apply_to_mlp": True}, "give either the patterns or the other three"),
        ({"quantize_base": True}, "an argument of the lora_. builders"),
        ({"rank": 0}, "rank is 0"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"alpha": 0}, "alpha is 0"),
    ],
)
def test_wrong_arguments_and_targets_of_lora_are_refused(options, message):
    model = make()
    with pytest.raises(ConversionError, match=message) as error:
        apply_conversions(model, [LoRA(**options)])
    assert str(error.value).endswith(".")
    assert not get_adapter_params(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_tied_output_is_refused():
    with pytest.raises(ConversionError, match="tied to the token embedding"):
        apply_conversions(make(tied=True), [LoRA(apply_to_output=True)])
    model = make()
    model.output.weight = model.tok_embeddings.weight
    with pytest.raises(ConversionError, match="'output' is tied to the token embedding"):
        apply_conversions(model, [LoRA(target_modules=["output"])])
    model = make(tied=True)
    apply_conversions(model, [LoRA(target_modules=["*"])])
    assert len(model.conversions[0].adapted_paths(model)) == 14


@pytest.mark.parametrize("use_dora", [False, True])
def test_weights_are_merged_alike_one_by_one_and_in_a_state_dict(use_dora):
    model = adapted(use_dora=use_dora, **EVERYTHING)
    lora = model.conversions[0]
    base = {name: tensor for name, tensor in model.state_dict().items() if name not in get_adapter_params(model)}
    streamed = {name: lora.merged(name, tensor, model) for name, tensor in base.items()}
    state = get_merged_lora_ckpt(model.state_dict(), rank=3, alpha=6)
    assert state.keys() == streamed.keys() == make().state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in streamed.items())
    assert streamed["norm.scale"] is base["norm.scale"]
    merged = make()
    merged.load_state_dict(streamed)
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-4)
        assert (merged(TOKENS) - make()(TOKENS)).abs().max() > 1


def test_merge_of_half_an_adapter_is_refused():
    state = adapted(attn_modules=["q_proj"]).state_dict()
    del state["layers.1.attn.q_proj.lora_b.weight"]
    with pytest.raises(ConversionError, match=r"layers\.1\.attn\.q_proj: .* lacks layers\.1\.attn\.q_proj\.lora_b"):
        get_merged_lora_ckpt(state, rank=3, alpha=6)


def test_disabled_adapter_leaves_the_base_model_for_the_block_alone():
    model = adapted(apply_to_mlp=True)
    base = make()
    with torch.no_grad():
        different = model(TOKENS)
        with disable_adapter(model):
            assert torch.equal(model(TOKENS), base(TOKENS))
        assert torch.equal(model(TOKENS), different)
        with pytest.raises(KeyError), disable_adapter(model):
            raise KeyError
        assert torch.equal(model(TOKENS), different)


def test_adapter_config_has_the_dropout():
    model = adapted(attn_modules=["q_proj"], dropout=0.1)
    assert model.conversions[0].peft_config(model)["lora_dropout"] == 0.1


@pytest.mark.parametrize("base", [(), (QuantizeBase("int8"),)], ids=["plain", "quantized"])
def test_adapter_config_lists_paths_only_if_a_name_stands_for_other_layers_too(base):
    for name in ("q_proj", "layers.1.attn.q_proj"):
        with torch.device("meta"):
            model = make()
        lora = LoRA(target_modules=[name])
        apply_conversions(model, [lora, *base])
        assert lora.peft_config(model)["target_modules"] == [name]


def test_an_adapter_that_names_a_parameter_it_lacks_is_refused():
    class Wrong(nn.Linear):
        def adapter_params(self) -> list[str]:
            return ["lora_c"]

    with pytest.raises(ConversionError, match=r"^0: adapter_params\(\) names 'lora_c'"):
        get_adapter_params(nn.Sequential(Wrong(2, 2)))


def test_missing_and_unexpected_keys_of_base_and_adapter_are_named():
    model = adapted(attn_modules=["q_proj"])
    keys = list(model.state_dict())
    adapter_names = list(get_adapter_params(model))
    base = [key for key in keys if key not in adapter_names]
    validate = validate_missing_and_unexpected_for_lora
    validate(
        state_dict_keys=keys, base_missing=adapter_names, base_unexpected=[], lora_missing=base, lora_unexpected=[]
    )
    validate(state_dict_keys=keys, base_missing=adapter_names)
    for mistake, message in (
        ({"base_missing": [*adapter_names, "norm.scale"]}, r"base are missing from the checkpoint: norm\.scale;"),
        ({"base_unexpected": ["x"]}, "base checkpoint holds keys"),
        ({"lora_missing": [adapter_names[0]]}, "adapter are missing"),
        ({"lora_unexpected": ["x"]}, "adapter's checkpoint holds keys"),
    ):
        with pytest.raises(ConversionError, match=message):
            validate(state_dict_keys=keys, **mistake)
    with pytest.warns(FutureWarning, match="lora_attn_modules is deprecated"), pytest.raises(ConversionError):
        validate(lora_attn_modules=["v_proj"], base_missing=adapter_names)


def test_an_output_projection_that_bounds_its_logits_takes_no_adapter():
    model = nn.ModuleDict({"output": CappedLinear(4, 8, softcap=3.0)})
    with pytest.raises(ConversionError, match="LoRA: 'output' is a CappedLinear, which computes more"):
        apply_conversions(model, [LoRA(target_modules=["output"])])
    assert type(model["output"]) is CappedLinear


def test_modules_are_trained_whole_beside_adapters():
    model = make()
    (report,) = apply_conversions(
        model, [LoRA(3, attn_modules=["q_proj"], train_modules=["tok_embeddings", "layers.1.mlp", "norm"])]
    )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    trained_names = {"tok_embeddings.weight", "norm.scale", *(f"layers.1.mlp.w{number}.weight" for number in (1, 2, 3))}
    assert trained == trained_names | set(get_adapter_params(model))
    (conversion,) = model.conversions
    assert conversion.trained_weights(model) == trained_names
    assert conversion.owned_parameters(model) == set(get_adapter_params(model))
    count = sum(model.get_parameter(name).numel() for name in trained_names)
    assert f"tok_embeddings, layers.1.mlp, norm trained whole ({count:,} parameters)" in str(report)
    with (
        pytest.raises(ConversionError, match=r"'layers\.1\.mlp\.w1\.weight' is trained beside the adapter"),
        disable_adapter(model),
    ):
        pass


def test_tied_embedding_is_named_for_both():
    model = make(tied=True)
    (report,) = apply_conversions(model, [LoRA(3, train_modules=["tok_embeddings", "output"])])
    assert "the embedding as one with the output tied to it" in str(report)
    with pytest.raises(ConversionError, match=r"'output', which is tied to the .* name tok_embeddings"):
        apply_conversions(make(tied=True), [LoRA(3, train_modules=["output"])])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train_modules": "output"}, "train_modules is the text 'output': give a list"),
        (
            {"train_modules": ["lm_head"]},
            "matches 'lm_head' in train_modules, the nearest names are output",
        ),
        ({"train_modules": ["score"]}, "no module .* matches 'score'"),
        ({"train_modules": ["output"], "apply_to_output": True}, "'output' would have an adapter and be trained whole"),
        ({"train_modules": ["layers.0"]}, r"'layers\.0\.attn\.q_proj' would have an adapter and be trained whole"),
        ({"rank_pattern": {"q_prj": 4}}, r"matches 'q_prj' in rank_pattern, .*layers\.\*\.attn\.q_proj"),
        ({"alpha_pattern": {"mlp.w1": 4}}, r"no module with an adapter matches 'mlp\.w1' in alpha_pattern"),
        ({"rank_pattern": {"q_proj": 0}}, "rank is 0"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern has 2.5 for 'q_proj': give a whole number"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern has '8' for 'q_proj': give a number"),
        ({"alpha_pattern": {"q_proj": 0}}, "alpha is 0"),
        ({"rank_pattern": {"*.q_proj": 4}}, r"'\*\.q_proj', which is no regular expression"),
    ],
)
def test_trained_modules_and_patterns_that_cannot_be_meant_are_refused(options, words):
    with pytest.raises(ConversionError, match=words):
        apply_conversions(make(), [LoRA(3, **options)])


def test_quantized_modules_and_experts_are_not_trained_whole():
    with torch.device("meta"):
        quantized = make()
        mixture = build(MIXTURE, SPEC)
    conversions = [QuantizeBase(block_size=8), LoRA(3, attn_modules=["q_proj"], train_modules=["mlp"])]
    with pytest.raises(ConversionError, match=r"train_modules has 'layers\.0\.mlp', whose weight is quantized"):
        apply_conversions(quantized, conversions)
    with pytest.raises(ConversionError, match=r"train_modules has 'layers\.0\.mlp.*' with experts"):
        apply_conversions(mixture, [LoRA(3, attn_modules=["q_proj"], train_modules=["mlp"])])
    with pytest.raises(ConversionError, match="which peft takes for experts, all of one rank"):
        apply_conversions(mixture, [LoRA(3, apply_to_mlp=True, rank_pattern={"experts": 4})])


def test_the_first_matching_pattern_counts():
    model = make()
    patterns = {"layers.0.attn.*": 5, "q_proj": 2}
    apply_conversions(model, [LoRA(3, 6, rank_pattern=patterns, alpha_pattern={"v_proj": 7}, use_rslora=True)])
    layers = {path: module for path, module in model.named_modules() if isinstance(module, LoRALinear)}
    ranks = {path: layer.rank for path, layer in layers.items()}
    assert {path for path, rank in ranks.items() if rank == 5} == {path for path in ranks if "layers.0" in path}
    assert ranks["layers.1.attn.q_proj"] == 2
    assert ranks["layers.1.attn.k_proj"] == 3
    assert layers["layers.0.attn.v_proj"].scaling == 7 / 5**0.5
    assert layers["layers.1.attn.q_proj"].scaling == 6 / 2**0.5


def test_embedding_with_trained_rows_takes_no_further_ones():
    model = make().requires_grad_(False)
    apply_conversions(model, [NewTokens(2)])
    with pytest.raises(ConversionError, match="new rows of a GrownEmbedding cannot be trained alone"):
        NewTokens.check(model)
