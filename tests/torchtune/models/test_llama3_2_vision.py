"""Llama 3.2 Vision against ``transformers``: logits, gradients, files, adapters, decoding."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import MllamaConfig, MllamaForConditionalGeneration

import torchtune
from tests import tiny_vision
from tests.tiny_vision import IMAGE_TOKEN as IMG
from tests.tiny_vision import images, logits_of_transformers, sees
from torchtune.checkpoints import FullModelMetaCheckpointer, ModelSource
from torchtune.models import llama3_2_vision as vision
from torchtune.models.llama3_2_vision import SPEC
from torchtune.modules.model_fusion import get_fusion_params
from torchtune.modules.peft import LoRA, get_adapter_params


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_vision.write_vision_checkpoint(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def theirs():
    return tiny_vision.mllama()


def ours(folder):
    with torch.device("meta"):
        model = torchtune.models.from_hf_config(folder)
    ModelSource(folder).read(model, torch.device("cpu"))
    return model.eval()


TOKENS = torch.tensor([[1, IMG, 5, 9, IMG, 7, 3], [1, 8, 5, IMG, 6, 7, 3], [1, 8, 5, 9, 6, 7, 3]])
ROWS = [(2, 1), (1, 3)], [(2, 2)], []


def test_logits_and_gradients_are_those_of_transformers(folder, theirs):
    model = ours(folder)
    image_inputs = images(*ROWS)
    mask = sees(TOKENS, image_inputs["aspect_ratio"])
    expected = logits_of_transformers(theirs, TOKENS, image_inputs, mask)
    logits = model(TOKENS, encoder_input=image_inputs, encoder_mask=mask)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (expected * weight).sum().backward()
    (logits * weight).sum().backward()
    named = dict(theirs.named_parameters())
    compared = 0
    for group in SPEC.weight_map("hf_modules").groups(model.description):
        if type(group.op).__name__ == "TileTable":  # one place of ours is several numbers of theirs
            continue
        back = group.to_tune([named[name].grad for name in group.external])
        for name, value in zip(group.tune, back, strict=True):
            grad = model.get_parameter(name).grad
            scale = value.abs().max().clamp(min=1e-3)
            torch.testing.assert_close(
                grad / scale, value / scale, atol=2e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
            )
            compared += 1
    assert compared == len(list(model.parameters())) - 3
    theirs.zero_grad()


def test_features_depend_on_the_image_alone(folder):
    """Not on the images beside it, nor on how many tiles the batch has room for."""
    encoder = ours(folder).encoder
    image_inputs = images([(1, 2), (2, 2)])
    both = encoder(**image_inputs).unflatten(1, (2, 4, 5))
    alone = {"images": image_inputs["images"][:, :1, :2], "aspect_ratio": image_inputs["aspect_ratio"][:, :1]}
    torch.testing.assert_close(encoder(**alone).unflatten(1, (2, 5)), both[:, 0, :2], atol=1e-6, rtol=1e-5)


def test_text_alone_skips_the_encoder_and_cross_attention(folder, theirs):
    model = ours(folder).train()
    with torch.no_grad():
        expected = theirs(input_ids=TOKENS[2:], use_cache=False).logits
    logits = model(TOKENS[2:])
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
    logits.sum().backward()
    assert all(parameter.grad is None for parameter in model.encoder.parameters())


def test_text_alone_with_a_frozen_decoder_runs_the_encoder_on_a_blank_image(folder):
    """The loss would reach no trained parameter otherwise; the logits stay those of the text."""
    model = ours(folder).train()
    expected = model(TOKENS[2:]).detach()
    fusion_params = get_fusion_params(model.decoder)
    for name, parameter in model.decoder.named_parameters():
        parameter.requires_grad_(name in fusion_params)
    logits = model(TOKENS[2:])
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
    logits.sum().backward()
    gradients = [parameter.grad for parameter in model.encoder.parameters() if parameter.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)


def test_decoding_with_caches_is_decoding_without(folder):
    model = ours(folder)
    image_inputs = images([(2, 1)])
    tokens = torch.tensor([[1, IMG, 5, 9]])
    expected = tokens
    with torch.no_grad():
        for _ in range(4):
            mask = sees(expected, image_inputs["aspect_ratio"])
            logits = model(expected, encoder_input=image_inputs, encoder_mask=mask)
            expected = torch.cat([expected, logits[:, -1:].argmax(-1)], dim=1)
        model.setup_caches(1, torch.float32, decoder_max_seq_len=8)
        causal = torch.ones(8, 8, dtype=torch.bool).tril()
        generated = tokens
        start = 0
        first_inputs = {"encoder_input": image_inputs}
        for _ in range(4):
            positions = torch.arange(start, generated.shape[1])
            seen = sees(generated, image_inputs["aspect_ratio"])[:, start:]
            logits = model(
                generated[:, start:],
                mask=causal[positions][None],
                input_pos=positions[None],
                encoder_mask=seen,
                **first_inputs,
            )
            start = generated.shape[1]
            first_inputs = {}
            generated = torch.cat([generated, logits[:, -1:].argmax(-1)], dim=1)
    assert generated.tolist() == expected.tolist()
    model.reset_caches()
    assert model.decoder.layers[1].fusion_layer.attn.kv_cache.size == 0


def both_logits(model, reference):
    image_inputs = images(*ROWS)
    mask = sees(TOKENS, image_inputs["aspect_ratio"])
    with torch.no_grad():
        expected = logits_of_transformers(reference, TOKENS, image_inputs, mask)
        return model(TOKENS, encoder_input=image_inputs, encoder_mask=mask), expected


def test_files_are_equal_bit_for_bit(folder, tmp_path):
    model, _ = torchtune.load(folder, device="cpu")
    torchtune.save(model, tmp_path / "out")
    first, second = (load_file(at / "model.safetensors") for at in (folder, tmp_path / "out"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    config, again = (json.loads((at / "config.json").read_text()) for at in (folder, tmp_path / "out"))
    assert again == config


def test_config_of_a_description_is_read_by_transformers(folder):
    d = ours(folder).description
    hf_config = MllamaConfig(**SPEC.to_hf_config(d)).to_dict()
    hf_config["vision_config"]["tie_word_embeddings"] = True  # as in the checkpoints of 2024
    assert SPEC.from_hf_config({**hf_config, "architectures": ["MllamaForConditionalGeneration"]}) == d


@pytest.mark.parametrize("way", ["adapter", "merged"])
def test_adapters_are_those_of_peft(folder, tmp_path, way):
    lora = LoRA(rank=2, attn_modules=["q_proj", "v_proj"], apply_to_mlp=True, apply_to_output=True)
    model, _ = torchtune.load(folder, adapter=lora, device="cpu")
    with torch.no_grad():
        for parameter in get_adapter_params(model).values():
            parameter.normal_(0.0, 0.2)
    torchtune.save(model, tmp_path / "out", contents=way)
    if way == "merged":
        reference = MllamaForConditionalGeneration.from_pretrained(tmp_path / "out")
    else:
        reference = PeftModel.from_pretrained(tiny_vision.mllama(), tmp_path / "out").base_model.model
        again, _ = torchtune.load(folder, adapter=tmp_path / "out", device="cpu")
        assert torch.equal(again.encoder.projection.output.lora_b.weight, model.encoder.projection.output.lora_b.weight)
    logits, expected = both_logits(model, reference.eval())
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3)
    _, plain = both_logits(model, tiny_vision.mllama())
    assert (logits - plain).abs().max() > 0.1


def test_an_adapter_of_peft_is_read(folder, tmp_path):
    torch.manual_seed(1)
    names = ["q_proj", "v_proj", "fc1", "multi_modal_projector"]
    reference = get_peft_model(tiny_vision.mllama(), LoraConfig(r=2, target_modules=names, init_lora_weights=False))
    reference.save_pretrained(tmp_path)
    model, _ = torchtune.load(folder, adapter=tmp_path, device="cpu")
    logits, expected = both_logits(model, reference.base_model.model.eval())
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3)


def test_embeddings_trained_by_aspect_ratio_are_refused(folder, tmp_path):
    hf_model = tiny_vision.mllama()
    hf_model.model.vision_model.gated_positional_embedding.tile_embedding.weight.data[3, 0] += 1.0
    hf_model.save_pretrained(tmp_path)
    with pytest.raises(torchtune.models.WeightMapError, match="differ from one aspect ratio to another"):
        ours(tmp_path)


def of_parts(model):
    """Trained parameters by part: decoder, encoder, fusion."""
    fusion = get_fusion_params(model)
    counts = dict.fromkeys(("decoder", "encoder", "fusion"), 0)
    for name, parameter in model.named_parameters():
        part = "fusion" if name in fusion else name.partition(".")[0]
        counts[part] += parameter.numel() * parameter.requires_grad
    return counts


def test_sizes_and_trained_parts_of_the_builders():
    """Counts of the reference: models.md, 3."""
    every = ["q_proj", "k_proj", "v_proj", "output_proj"]
    with torch.device("meta"):
        model = vision.llama3_2_vision_11b()
        adapted = vision.lora_llama3_2_vision_11b(every)
        large = vision.lora_llama3_2_vision_90b(every)
        decoder = vision.llama3_2_vision_11b(True, False, False)
    assert sum(parameter.numel() for parameter in model.parameters()) == 10_629_184_035
    assert sum(parameter.numel() for parameter in adapted.parameters()) == 10_634_164_771
    assert sum(parameter.numel() for parameter in large.parameters()) == 88_563_787_323
    assert sum(of_parts(adapted).values()) == 4_980_736
    text = 8_030_261_248  # Llama 3.1 8B
    clip, fusion = of_parts(model)["encoder"], of_parts(model)["fusion"]
    assert of_parts(model)["decoder"] == 0
    assert clip + fusion == 10_629_184_035 - text
    assert of_parts(decoder) == {"decoder": text, "encoder": 0, "fusion": 0}
    names = set(dict(model.named_parameters()))
    assert {
        "decoder.tok_embeddings.fusion_embedding.weight",
        "decoder.layers.3.attn.q_proj.weight",
        "decoder.layers.3.fusion_layer.attn.q_norm.scale",
        "decoder.layers.31.fusion_layer.ca_scale.scale",
        "encoder.clip.token_pos_embedding.global_token_positional_embedding",
        "encoder.clip.layers.0.mlp.w1.bias",
        "encoder.projection.layers.7.sa_scale.scale",
    } <= names


def test_a_part_that_an_adapter_cannot_hold_is_refused():
    with torch.device("meta"), pytest.raises(torchtune.models.ModelError, match="decoder_trainable is 'full'"):
        vision.lora_llama3_2_vision_11b(["q_proj"], decoder_trainable="full")


def test_meta_files_are_read(folder, tmp_path):
    model = ours(folder)
    weights = ((name, value.detach()) for name, value in model.named_parameters())
    torch.save(dict(SPEC.weight_map("meta").to_external(weights, model.description)), tmp_path / "consolidated.00.pth")
    with torch.device("meta"):
        again = torchtune.models.from_hf_config(folder)
    settings = {"checkpoint_files": ["consolidated.00.pth"], "model_type": "LLAMA3_VISION"}
    source = FullModelMetaCheckpointer(checkpoint_dir=str(tmp_path), output_dir=str(tmp_path / "out"), **settings)
    source.load_model(again, device=torch.device("cpu"))
    assert all(torch.equal(value, again.get_parameter(name)) for name, value in model.named_parameters())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"encoder_mask": torch.ones(1, 7, 20, dtype=torch.bool)}, r"encoder_mask is torch.bool \[1, 7, 20\]"),
        ({"encoder_mask": torch.ones(1, 7, 40)}, "encoder_mask is torch.float32"),
        ({"encoder_input": None}, "give encoder_input, the images, as well"),
        ({"encoder_input": {**images([(2, 2)]), "images": torch.zeros(1, 1, 2, 3, 28, 28)}}, "aspect_ratio says"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(folder, change, sentence):
    image_inputs = images([(2, 1), (1, 3)])
    arguments = {"encoder_input": image_inputs, "encoder_mask": sees(TOKENS[:1], image_inputs["aspect_ratio"])} | change
    with pytest.raises(ValueError, match=sentence):
        ours(folder)(TOKENS[:1], **arguments)


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("text_config", "cross_attention_layers", [1, 5]),
        ("text_config", "tie_word_embeddings", True),
        ("text_config", "hidden_size", 0),
        ("vision_config", "intermediate_size", 65),
        ("vision_config", "supported_aspect_ratios", [[1, 1], [2, 1]]),
        ("vision_config", "max_num_tiles", 0),
        ("vision_config", "intermediate_layers_indices", [2, 1]),
        ("vision_config", "something_new", 3),
    ],
)
def test_a_config_that_cannot_be_built_is_refused_by_its_field(folder, part, field, value):
    config = json.loads((folder / "config.json").read_text())
    config[part][field] = value
    # A description calls the layers whose inputs are projected otherwise than the file.
    name = "hidden_layers" if field == "intermediate_layers_indices" else field
    with pytest.raises(torchtune.models.ModelError, match=name):
        SPEC.from_hf_config(config)


def test_a_tile_that_is_not_of_whole_patches_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["image_size"] = 30
    with pytest.raises(torchtune.models.ModelError, match=r"tile_size \(30\) must be a multiple of patch_size \(14\)"):
        SPEC.from_hf_config(config)


def test_dropout_of_attention_has_one_of_two_names(folder):
    config = json.loads((folder / "config.json").read_text())
    for name in ("dropout", "attention_dropout"):
        text = {**config["text_config"], "dropout": 0.0, name: 0.25}
        description = SPEC.from_hf_config({**config, "text_config": text})
        assert description.attn_dropout == 0.25
        assert SPEC.to_hf_config(description)["text_config"]["dropout"] == 0.25
    with pytest.raises(torchtune.models.ModelError, match=r"attention_dropout = 0\.5"):
        SPEC.from_hf_config({**config, "text_config": {**text, "dropout": 0.25, "attention_dropout": 0.5}})


def test_cross_attention_has_the_activation_of_the_text(folder):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["hidden_act"] = "gelu"
    description = SPEC.from_hf_config(config)
    with torch.device("meta"):
        fused = torchtune.models.build(description, SPEC).decoder.layers[1]
    assert isinstance(fused.mlp.activation, torch.nn.GELU)
    assert isinstance(fused.fusion_layer.mlp.activation, torch.nn.GELU)


def test_a_decoder_of_text_refuses_what_an_encoder_gives(folder):
    text = torchtune.models.build(ours(folder).description.text)
    with pytest.raises(ValueError, match="reads text only"):
        text(TOKENS, encoder_input=torch.zeros(3, 5, 32))
