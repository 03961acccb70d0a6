"""Models with image tokens against ``transformers``: tower, positions, logits, gradients, decoding, packing, files."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import torchtune
from tests.devices import DEVICE
from tests.tiny_images import (
    CONFIGS,
    END,
    IMAGE,
    START,
    VIDEO,
    gemma4_config,
    image_text_model,
    inputs_of,
    llama4_config,
    write_image_checkpoint,
)
from tests.torchtune.checkpoints.small import randomize_adapter
from torchtune.checkpoints import ModelSource
from torchtune.data import DataError, Documents, Images, collate_documents, grid_positions
from torchtune.generation import generate_tokens
from torchtune.models import get_spec
from torchtune.modules.model_fusion import EarlyFusionModel
from torchtune.modules.peft import LoRA, get_adapter_params
from torchtune.utils import UserError


def picture(rows: int, columns: int, token: int = IMAGE) -> list[int]:
    return [START, *[token] * (rows * columns), END]


# Rows of tokens, with frames, rows and columns of tokens of their images.
TEXT = ([1, 5, 9, 7, 3], ())
FIRST = ([*picture(2, 3), 5, 6], ((1, 2, 3),))
LARGE = ([1, *picture(5, 3), 6], ((1, 5, 3),))
ADJACENT = ([1, START, *[IMAGE] * 2, *[IMAGE] * 6, END, 4], ((1, 1, 2), (1, 3, 2)))
LAST = ([4, 8, *picture(1, 1), 9, *picture(1, 4)[:-1]], ((1, 1, 1), (1, 1, 4)))
VIDEOS = ([7, *picture(2, 1, VIDEO), 12, *picture(2, 1, VIDEO), 5], ((2, 2, 1),))
# Elsewhere, positions of a video depend on its frame rate (Qwen2.5-VL), or there are only images.
WITH_VIDEOS = ("qwen3", "gemma4")
ATTENTION = ["q_proj", "k_proj", "v_proj", "output_proj"]
ROWS = {"text": TEXT, "first": FIRST, "large": LARGE, "last": LAST}


@pytest.fixture(scope="module", params=CONFIGS)
def hf_model(request):
    return image_text_model(CONFIGS[request.param]()).to(DEVICE)


@pytest.fixture(scope="module")
def folder(hf_model, tmp_path_factory):
    return write_image_checkpoint(hf_model, tmp_path_factory.mktemp("images"))


def read(folder):
    with torch.device("meta"):
        model = torchtune.models.from_hf_config(folder, images=True)
    ModelSource(folder).read(model, torch.device(DEVICE))
    return model.eval()


@pytest.fixture
def model(folder):
    return read(folder)


def patches_of(model, sizes, seed: int = 5):
    """Random patches of images, and their grids."""
    v = model.description.vision
    grids = tuple((t, h * v.merge, w * v.merge) for t, h, w in sizes)
    count = sum(t * h * w for t, h, w in grids)
    return torch.randn(count, v.patch_values, generator=torch.Generator().manual_seed(seed)), grids


def fitting(model, row):
    """A row whose images are tiles of 2 x 2 tokens, if the model takes no other ones."""
    tokens, sizes = row
    if model.spec.name not in ("smolvlm", "idefics3", "llama4_vl"):
        return row
    new_tokens = []
    waiting_sizes = list(sizes)
    while tokens:
        count = waiting_sizes[0][1] * waiting_sizes.pop(0)[2] if tokens[0] == IMAGE else 1
        new_tokens += [IMAGE] * 4 if tokens[0] == IMAGE else tokens[:1]
        tokens = tokens[count:]
    return new_tokens, ((1, 2, 2),) * len(sizes)


def images_of(model, sizes) -> dict[str, Images]:
    return {"encoder_input": {"images": Images(*patches_of(model, sizes))}} if sizes else {}


def logits_of_transformers(hf_model, model, tokens, sizes):
    row = torch.tensor([tokens])
    return hf_model(input_ids=row, **(inputs_of(hf_model, row, *patches_of(model, sizes)) if sizes else {})).logits


def test_positions_after_an_image_that_follows_another():
    """The rule of ``transformers`` image by image: it needs text between images."""
    tokens = ADJACENT[0]
    grids = ((1, 2, 4), (1, 6, 4))
    first = grid_positions(tokens[:4], [IMAGE], grids[:1], 2)
    assert first.tolist() == [[0, 1, 2, 2], [0, 1, 2, 2], [0, 1, 2, 3]]
    positions = grid_positions(tokens, [IMAGE], grids, 2)
    assert positions[:, 4].tolist() == [4, 4, 4]  # after the larger side of the first image
    assert positions[:, -2].tolist() == [7, 7, 7]


def test_logits_are_those_of_transformers(hf_model, model):
    rows = dict(ROWS)
    if hf_model.config.model_type.startswith(WITH_VIDEOS):
        rows["video"] = VIDEOS
    for name, row in rows.items():
        tokens, sizes = fitting(model, row)
        with torch.no_grad():
            expected = logits_of_transformers(hf_model, model, tokens, sizes)
            logits = model(torch.tensor([tokens]), **images_of(model, sizes))
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_gradients_are_those_of_transformers(hf_model, model, tmp_path):
    tokens, sizes = fitting(model, LAST)
    (logits_of_transformers(hf_model, model, tokens, sizes) ** 2).sum().backward()
    (model(torch.tensor([tokens]), **images_of(model, sizes)) ** 2).sum().backward()
    compare_gradients(hf_model, model, tmp_path)


def compare_gradients(hf_model, model, folder):
    """Compare the gradients of all trained parameters, by way of a checkpoint of the gradients of ``transformers``."""
    gradients = copy.deepcopy(hf_model)
    for parameter, original in zip(gradients.parameters(), hf_model.parameters(), strict=True):
        parameter.data = torch.zeros_like(parameter) if original.grad is None else original.grad
    gradients.save_pretrained(folder)
    wanted = dict(read(folder).named_parameters())
    assert wanted.keys() == dict(model.named_parameters()).keys()
    # Biases of keys have no gradient in exact arithmetic without rotary embeddings.
    largest = max(parameter.detach().abs().max() for parameter in wanted.values() if parameter.isfinite().all())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = wanted[name].detach().abs().max().clamp(min=1e-3 * largest)
        actual = parameter.grad / scale
        expected = wanted[name] / scale
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3, msg=lambda m, n=name: n + m)
    hf_model.zero_grad()


@pytest.mark.parametrize("use_cache", [True, False])
def test_decoding_a_batch_is_decoding_every_prompt_alone(model, use_cache):
    rows = [fitting(model, row) for row in (FIRST, TEXT, LAST, (LAST[0] + [END], LAST[1]), ADJACENT)]
    images = []
    expected_answers = []
    for tokens, sizes in rows:
        inputs = images_of(model, sizes)
        generated = torch.tensor([tokens])
        with torch.no_grad():
            for _ in range(4):
                generated = torch.cat([generated, model(generated, **inputs)[:, -1:].argmax(-1)], dim=1)
        expected_answers.append(generated[0, len(tokens) :].tolist())
        placed = {}
        for name, images_of_row in inputs.get("encoder_input", {}).items():
            placed[name] = model._with_places(images_of_row, torch.tensor([tokens]), None)
        images.append({"encoder_input": placed} if placed else {})
    settings = {"max_new_tokens": [4, 2, 4, 3, 4], "temperature": 0.0, "images": images, "use_cache": use_cache}
    expected = []
    for answer, limit in zip(expected_answers, settings["max_new_tokens"], strict=True):
        expected += [answer[:limit]] * 2
    for most in (10, 4):
        result = generate_tokens(model, [row for row, _ in rows], num_samples=2, max_sequences=most, **settings)
        assert [tokens.tolist() for tokens in result.tokens] == expected


def test_answers_to_a_prompt_share_the_features_of_its_images(model):
    tokens, sizes = fitting(model, FIRST)
    images = model._with_places(Images(*patches_of(model, sizes)), torch.tensor([tokens]), None)
    documents = [{"tokens": [*tokens, *answer]} for answer in ([7], [8, 9, 3])]
    results = []
    for copies in (True, False):
        for document in documents:
            encoded = replace(images, pixels=images.pixels.clone()) if copies else images
            document |= {"labels": [-100] * len(document["tokens"]), "encoder_input": {"images": encoded}}
        batch = collate_documents(documents)
        results.append((model(**batch.model_inputs()), len(batch.inputs["encoder_input"]["images"].patches)))
    (expected, many), (shared, once) = results
    assert many == 2 * once == 2 * len(images.patches)
    torch.testing.assert_close(shared, expected, atol=1e-4, rtol=1e-4)


def packed(model, rows):
    """Logits of several rows as one packed batch."""
    tokens = []
    patches = []
    grids = ()
    for row, row_sizes in rows:
        tokens += row
        if row_sizes:
            patches_of_row, grids_of_row = patches_of(model, row_sizes)
            patches.append(patches_of_row)
            grids += grids_of_row
    images = Images(torch.cat(patches), grids)
    tokens = torch.tensor([tokens])
    documents = Documents.from_lengths([len(row) for row, _ in rows], DEVICE)
    return model(tokens, documents=documents, encoder_input={"images": images})


def test_packed_rows_have_the_loss_and_gradients_of_rows_alone(model):
    videos = [VIDEOS] if model.spec.name.startswith(WITH_VIDEOS) else []
    rows = [fitting(model, row) for row in (FIRST, TEXT, LAST, ADJACENT, *videos)]
    alone = torch.cat([model(torch.tensor([tokens]), **images_of(model, sizes)) for tokens, sizes in rows], dim=1)
    together = packed(model, rows)
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    names, parameters = zip(*trained, strict=True)
    expected_gradients = torch.autograd.grad((alone**2).sum(), parameters)
    gradients = torch.autograd.grad((together**2).sum(), parameters)
    largest = max(gradient.abs().max() for gradient in expected_gradients)
    for name, actual, expected in zip(names, gradients, expected_gradients, strict=True):
        scale = expected.abs().max().clamp(min=1e-3 * largest)
        torch.testing.assert_close(actual / scale, expected / scale, atol=1e-4, rtol=1e-3, msg=lambda m, n=name: n + m)


def test_saved_files_equal_the_original_ones(model, folder, tmp_path, hf_model):
    before = load_file(folder / "model.safetensors")
    torchtune.save(model, tmp_path / "out", base=folder)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        expected = logits_of_transformers(hf_model, model, *fitting(model, FIRST))
        logits = logits_of_transformers(again, model, *fitting(model, FIRST))
    torch.testing.assert_close(
        logits, expected, atol=1e-4, rtol=1e-4
    )  # kernels may depend on where weights lie in memory


def test_config_is_written_from_the_description(model, folder):
    config = json.loads((folder / "config.json").read_text())
    written = model.spec.to_hf_config(model.description)
    assert model.spec.from_hf_config(written) == model.spec.from_hf_config(config) == model.description
    assert written["vision_config"].items() <= {**config["vision_config"], **written["vision_config"]}.items()


WRONG = {
    "too few placeholders": ([1, *picture(2, 2)[:-2], 5], ((1, 4, 4),), "3 image tokens, but its 1 image"),
    "too many placeholders": ([1, *picture(2, 2), IMAGE], ((1, 4, 4),), "5 image tokens"),
    "text inside": ([1, IMAGE, 7, IMAGE, IMAGE, IMAGE], ((1, 4, 4),), "text inside the 4 tokens of an image"),
}


@pytest.mark.parametrize("name", WRONG)
def test_placeholders_that_do_not_fit_are_refused(name):
    tokens, grids, message = WRONG[name]
    with pytest.raises(DataError, match=message):
        grid_positions(tokens, [IMAGE], grids, 2)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("qwen")])
def test_a_flat_config_describes_the_same_model(name):
    """Files of 2025 have the fields of the text beside those of the images."""
    spec = get_spec(name.removesuffix("_moe"))
    config = CONFIGS[name]().to_dict()
    config["architectures"] = [type(image_text_model(CONFIGS[name]())).__name__]
    description = spec.from_hf_config(config)
    text = config.pop("text_config")
    rope = dict(text["rope_parameters"])
    flat = {key: value for key, value in text.items() if key != "rope_parameters"}
    flat |= config
    flat["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        flat["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    flat["rope_scaling"] = rope
    assert description.rope_axes
    assert spec.from_hf_config(flat) == description


def test_early_fusion_takes_tiles_by_the_name_of_its_encoder(tmp_path):
    hf_model = image_text_model(llama4_config())
    parts = read(write_image_checkpoint(hf_model, tmp_path))
    tokens = torch.tensor([[5, *[IMAGE] * 4, 6, *[IMAGE] * 4, 7]])
    tiles = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    model = EarlyFusionModel(parts.decoder, {"vision": parts.encoder}, {"vision": IMAGE})
    with torch.no_grad():
        expected = hf_model(input_ids=tokens, pixel_values=tiles).logits
        for images in (tiles, list(tiles.split(1))):
            logits = model(tokens, encoder_input={"vision": {"images": images}})
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match="must have the same names"):
        EarlyFusionModel(parts.decoder, {"vision": parts.encoder}, {"sound": IMAGE})
    with pytest.raises(UserError, match="one VisionTower"):
        EarlyFusionModel(parts.decoder, {"vision": torch.nn.Linear(1, 1)}, {"vision": IMAGE})


def test_builders_of_llama4_choose_what_is_trained():
    builder = torchtune.models.llama4.llama4_scout_17b_16e
    with torch.device("meta"):
        model, tower = builder(), builder(decoder_trainable=False, encoder_trainable=True)
    assert isinstance(model, EarlyFusionModel)
    for built, trains_decoder, trains_tower in ((model, True, False), (tower, False, True)):
        for name, parameter in built.named_parameters():
            expected = trains_decoder if name.startswith("decoder.") else trains_tower or ".projector." in name
            assert parameter.requires_grad == expected, name


# Names of earlier releases, of the reference (state_dict_keys.md), and of this release.
EARLIER = {
    "encoders.vision.clip.conv.weight": "encoder.patch_embed.weight",
    "encoders.vision.clip.token_pos_embedding.positional_embedding": "encoder.positions.table.weight",
    "encoders.vision.clip.cls_token_embedding.weight": "encoder.positions.class_token",
    "encoders.vision.clip.ln_pre.weight": "encoder.first_norm.weight",
    "encoders.vision.clip.ln_pre.bias": "encoder.first_norm.bias",
    "encoders.vision.clip.ln_post.weight": "encoder.norm.weight",
    "encoders.vision.clip.ln_post.bias": "encoder.norm.bias",
    "encoders.vision.projection.output.0": "encoder.projector.reduce.0",
    "encoders.vision.projection.output.2": "encoder.projector.mlp.w1",
    "encoders.vision.projection.output.4": "encoder.projector.mlp.w2",
}


def test_files_of_earlier_releases_of_llama4_are_read(tmp_path):
    folder = write_image_checkpoint(image_text_model(llama4_config()), tmp_path / "base")
    parts = {"vision_tower": "lora", "projector": "lora", "apply_lora_to_mlp": True}

    def built(device):
        with torch.device(device):
            return torchtune.models.lora_image_text_model(folder, ["q_proj"], **parts)

    def named(model, adapters):
        tensors = {}
        for name, value in model.state_dict().items():
            older = name.replace("encoder.layers.", "encoders.vision.clip.layers.")
            for earlier_part, part in EARLIER.items():
                older = older.replace(part, earlier_part)
            if (".lora_" in name) == adapters:
                tensors[older] = value.unflatten(1, (3, 4, 4)) if older.endswith("clip.conv.weight") else value
        assert not any(name.startswith("encoder.") for name in tensors)
        return tensors

    model = built("cpu")
    ModelSource(folder).read(model, torch.device(DEVICE))
    randomize_adapter(model)
    torch.save(named(model, False), folder / "earlier.pt")
    torch.save(named(model, True), tmp_path / "adapter_model.pt")
    again = built("meta")
    adapter = str(tmp_path / "adapter_model.pt")
    source = ModelSource(folder, ["earlier.pt"], adapter_checkpoint=adapter, model_type="LLAMA4")
    source.check_model_type(again)
    source.read(again, torch.device("cpu"))
    for (name, written), read_again in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(written, read_again), name


def shapes_of(module):
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def test_component_builders_of_llama4_make_its_sizes():
    """Numbers of the reference: models.md."""
    llama4 = torchtune.models.llama4
    shared = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "max_seq_len", "num_experts")
    rules = {"skip_rope_interval": 4, "attention_chunk_size": 8192, "hidden_dim": 8192}
    scout = {"use_scaled_rope": True}
    maverick = {"use_qk_norm": False, "moe_every_n_layers": 2, "mlp_hidden_dim": 16_384}
    tower = {"patch_size": 14, "num_heads": 16, "clip_num_layers": 34, "tile_size": 336, "max_num_tiles": 16}
    widths = {"clip_embed_dim": 1408, "projection_embed_dim": 4096, "decoder_embed_dim": 5120}
    with torch.device("meta"):
        for options, name in ((scout, "llama4_scout_17b_16e"), (maverick, "llama4_maverick_17b_128e")):
            expected = getattr(llama4, name)().description.text
            sizes = {field: getattr(expected, field) for field in shared}
            description = llama4.llama4_decoder(**sizes, **rules, **options).description
            assert replace(description, intermediate_dim=16_384) == expected
        model = llama4.llama4_scout_17b_16e()
        encoder = llama4.llama4_vision_encoder(**tower, **widths)
        head = llama4.llama4_vision_projection_head(**widths)
        assert shapes_of(encoder) == shapes_of(model.encoder)
        assert isinstance(encoder, llama4.Llama4VisionEncoder)
        assert isinstance(head, llama4.Llama4VisionProjectionHead)
        assert shapes_of(head) == shapes_of(encoder.projector)
    with pytest.raises(UserError, match="clip_hidden_states"):
        llama4.llama4_vision_encoder(**tower, **widths, clip_hidden_states=[1])


def test_adapters_of_llama4_are_on_the_chosen_parts():
    """Counts of the reference: models.md."""
    builder = torchtune.models.llama4.lora_llama4_scout_17b_16e
    with torch.device("meta"):
        model = builder(ATTENTION)
        all_parts = builder(["q_proj"], encoder_trainable="lora", apply_lora_to_mlp=True, apply_lora_to_output=True)
        projector = builder([], decoder_trainable="frozen", apply_lora_to_output=True)
        quantized = torchtune.models.llama4.qlora_llama4_maverick_17b_128e(["q_proj"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 108_654_376_448
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == 12_582_912
    assert all(name.startswith("decoder.layers.") for name in get_adapter_params(model))
    adapted = {name.rpartition(".lora_")[0] for name in get_adapter_params(all_parts)}
    heads = {f"encoder.projector.{name}" for name in ("reduce.0", "mlp.w1", "mlp.w2")}
    assert {name for name in adapted if ".layers." not in name} == heads | {"decoder.output"}
    assert {name for name in adapted if ".layers.33." in name} == {
        "encoder.layers.33.attn.q_proj",
        "encoder.layers.33.mlp.w1",
        "encoder.layers.33.mlp.w2",
        "decoder.layers.33.attn.q_proj",
        "decoder.layers.33.mlp.experts",
        "decoder.layers.33.mlp.shared_expert.w1",
        "decoder.layers.33.mlp.shared_expert.w2",
        "decoder.layers.33.mlp.shared_expert.w3",
    }
    assert {name.rpartition(".lora_")[0] for name in get_adapter_params(projector)} == heads
    assert [type(conversion).__name__ for conversion in quantized.conversions] == ["QuantizeBase", "LoRA"]
    with pytest.raises(UserError, match=r"encoder_trainable is 'full': choose 'lora' or 'frozen'"):
        builder(ATTENTION, encoder_trainable="full")
    with pytest.raises(UserError, match="all 'frozen': nothing would be trained"):
        builder(ATTENTION, decoder_trainable="frozen", fusion_trainable="frozen")


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("images", [True, False])
def test_adapters_are_those_of_peft(hf_model, folder, images, tmp_path):
    model, _ = torchtune.load(folder, adapter=[LoRA(rank=2, alpha=2, apply_to_mlp=True)], device="cpu", images=images)
    randomize_adapter(model)
    saved = torchtune.save(model, tmp_path / "adapter")
    reference = PeftModel.from_pretrained(copy.deepcopy(hf_model), saved).eval()
    tensors = load_file(saved / "adapter_model.safetensors")
    load_result = set_peft_model_state_dict(reference, tensors)
    assert not load_result.unexpected_keys
    assert not [name for name in load_result.missing_keys if "lora_" in name]
    tokens, sizes = fitting(model, FIRST if images else TEXT) if images else TEXT
    with torch.no_grad():
        wanted = logits_of_transformers(reference.base_model.model, model, tokens, sizes)
        assert (wanted - logits_of_transformers(hf_model, model, tokens, sizes)).abs().max() > 0.05
        logits = model(torch.tensor([tokens]), **(images_of(model, sizes) if images else {}))
    torch.testing.assert_close(logits, wanted, atol=2e-4, rtol=1e-3)


def test_projector_and_embedding_are_trained_whole_beside_adapters_as_in_peft(hf_model, folder, tmp_path):
    lora = LoRA(rank=2, alpha=2, attn_modules=["q_proj"], train_modules=["encoder.projector", "tok_embeddings"])
    model, _ = torchtune.load(folder, adapter=lora, device="cpu", images=True)
    with torch.no_grad():
        for name in lora.trained_weights(model):
            model.get_parameter(name).mul_(1.1)
    if getattr(
        hf_model.config.vision_config, "standardize", False
    ):  # two tensors of the projector belong to the whole tower there
        with pytest.raises(UserError, match=r"peft saves 'model\.vision_tower' whole"):
            torchtune.save(model, tmp_path / "adapter")
        return
    saved = torchtune.save(model, tmp_path / "adapter")
    reference = PeftModel.from_pretrained(copy.deepcopy(hf_model), saved).eval()
    tokens, sizes = fitting(model, FIRST)
    with torch.no_grad():
        expected = logits_of_transformers(reference.base_model.model, model, tokens, sizes)
        assert (expected - logits_of_transformers(hf_model, model, tokens, sizes)).abs().max() > 0.01
        logits = model(torch.tensor([tokens]), **images_of(model, sizes))
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)
    again, _ = torchtune.load(folder, adapter=saved, device="cpu", images=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name


def test_adapters_of_a_tied_output_are_refused(tmp_path):
    folder = write_image_checkpoint(image_text_model(gemma4_config()), tmp_path)
    with pytest.raises(UserError, match="output"):
        torchtune.models.lora_image_text_model(folder, ["q_proj"], apply_lora_to_output=True)


def test_a_tower_with_rotary_positions_needs_heads_of_a_multiple_of_4():
    sizes = {"num_layers": 1, "embed_dim": 12, "num_heads": 2, "intermediate_dim": 8, "patch_size": 2, "output_dim": 8}
    assert torchtune.models.VisionDescription(**sizes).head_dim == 6
    with pytest.raises(UserError, match=r"embed_dim \(12\) must be num_heads \(2\) times a multiple of 4"):
        torchtune.models.VisionDescription(**sizes, rope="axial")


def test_tensors_go_through_the_weight_map_both_ways_bit_for_bit(folder):
    """All at once; the loader reads slices instead."""
    model = read(folder)
    weight_map = model.spec.weight_map("hf")
    state = model.state_dict()
    external = list(weight_map.to_external(state.items(), model.description))
    again = dict(weight_map.to_tune(external, model.description))
    assert again.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(again[name], tensor), name
