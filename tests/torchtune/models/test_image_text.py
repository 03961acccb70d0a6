"""Models with image tokens against ``transformers``: tower, positions, logits, gradients, decoding, packing, files."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import torchtune
from tests.tiny_images import (
    END,
    IMAGE,
    START,
    VIDEO,
    image_text_model,
    qwen2_5_vl_config,
    qwen3_5_config,
    qwen3_5_moe_config,
    qwen3_vl_config,
    qwen3_vl_moe_config,
    write_image_checkpoint,
)
from torchtune.data import DataError, Documents, Images, grid_positions
from torchtune.training import ModelSource

FAMILIES = {
    "qwen3_vl": qwen3_vl_config,
    "qwen3_vl_moe": qwen3_vl_moe_config,
    "qwen3_5_vl": qwen3_5_config,
    "qwen3_5_vl_moe": qwen3_5_moe_config,
    "qwen2_5_vl": qwen2_5_vl_config,
}
VALUES = 3 * 2 * 4 * 4


def picture(rows: int, columns: int, token: int = IMAGE) -> list[int]:
    return [START, *[token] * (rows * columns // 4), END]


# Rows of tokens with the grids of their images.
TEXT = ([1, 5, 9, 7, 3], ())
FIRST = ([*picture(4, 6), 5, 6], ((1, 4, 6),))
ADJACENT = ([1, START, *[IMAGE] * 2, *[IMAGE] * 6, END, 4], ((1, 2, 4), (1, 6, 4)))
LAST = ([4, 8, *picture(2, 2), 9, *picture(2, 8)[:-1]], ((1, 2, 2), (1, 2, 8)))
VIDEOS = ([7, *picture(4, 2, VIDEO), 12, *picture(4, 2, VIDEO), 5], ((2, 4, 2),))
ROWS = {"text": TEXT, "first": FIRST, "adjacent": ADJACENT, "last": LAST, "video": VIDEOS}


@pytest.fixture(scope="module", params=FAMILIES)
def theirs(request):
    return image_text_model(FAMILIES[request.param]())


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    return write_image_checkpoint(theirs, tmp_path_factory.mktemp("images"))


def read(folder):
    with torch.device("meta"):
        model = torchtune.models.from_hf_config(folder, images=True)
    ModelSource(folder).read(model, torch.device("cpu"))
    return model.eval()


@pytest.fixture
def ours(folder):
    return read(folder)


def patches_of(grids, seed: int = 5):
    count = sum(t * h * w for t, h, w in grids)
    return torch.randn(count, VALUES, generator=torch.Generator().manual_seed(seed))


def images_of(grids, **tensors) -> dict[str, Images]:
    return {"encoder_input": {"images": Images(patches_of(grids), grids, **tensors)}} if grids else {}


def logits_of_transformers(theirs, tokens, grids):
    """Logits of one row; grids of several frames are a video."""
    inputs = {}
    if grids:
        video = grids[0][0] > 1
        names = ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
        kinds = torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in tokens]])
        values = (patches_of(grids), torch.tensor(grids), kinds)
        inputs = dict(zip((*names, "mm_token_type_ids"), values, strict=True))
    return theirs(input_ids=torch.tensor([tokens]), **inputs).logits


GRIDS = {"one": ((1, 4, 6),), "three sizes": ((1, 2, 2), (1, 12, 4), (1, 4, 6)), "video": ((3, 4, 2), (1, 2, 2))}


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_tower_on_a_ragged_set(theirs, ours, grids):
    with torch.no_grad():
        wanted = theirs.model.visual(patches_of(grids), grid_thw=torch.tensor(grids), return_dict=True)
        found = ours.encoder(Images(patches_of(grids), grids))
    both = [wanted.pooler_output, *getattr(wanted, "deepstack_features", ())]
    assert len(found) == len(both)
    for one, other in zip(found, both, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def skip_video(theirs, name):
    if name == "video" and theirs.config.model_type == "qwen2_5_vl":
        pytest.skip("only images: a video's positions depend on its frame rate")


@pytest.mark.parametrize("name", ROWS)
def test_positions_are_those_of_transformers(theirs, name):
    tokens, grids = ROWS[name]
    skip_video(theirs, name)
    if name == "adjacent":  # transformers needs text between images: its own rule, image by image
        first = grid_positions(tokens[:4], [IMAGE], grids[:1], 2)
        assert first.tolist() == [[0, 1, 2, 2], [0, 1, 2, 2], [0, 1, 2, 3]]
        whole = grid_positions(tokens, [IMAGE], grids, 2)
        assert whole[:, 4].tolist() == [4, 4, 4]  # after the larger side of the first image
        assert whole[:, -2].tolist() == [7, 7, 7]
        return
    kinds = torch.tensor([[{IMAGE: 1, VIDEO: 2}.get(token, 0) for token in tokens]])
    given = torch.tensor(grids) if grids else None
    wanted, _ = theirs.model.get_rope_index(
        torch.tensor([tokens]), kinds, **{"video_grid_thw" if name == "video" else "image_grid_thw": given}
    )
    assert grid_positions(tokens, [IMAGE, VIDEO], grids, 2).tolist() == wanted[:, 0].tolist()


@pytest.mark.parametrize("name", [name for name in ROWS if name != "adjacent"])
def test_logits_are_those_of_transformers(theirs, ours, name):
    tokens, grids = ROWS[name]
    skip_video(theirs, name)
    with torch.no_grad():
        wanted = logits_of_transformers(theirs, tokens, grids)
        found = ours(torch.tensor([tokens]), **images_of(grids))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_gradients_are_those_of_transformers(theirs, ours, folder, tmp_path):
    tokens, grids = LAST
    (logits_of_transformers(theirs, tokens, grids) ** 2).sum().backward()
    (ours(torch.tensor([tokens]), **images_of(grids)) ** 2).sum().backward()
    gradients = copy.deepcopy(theirs)
    for parameter, original in zip(gradients.parameters(), theirs.parameters(), strict=True):
        parameter.data = torch.zeros_like(parameter) if original.grad is None else original.grad
    gradients.save_pretrained(tmp_path)
    wanted = dict(read(tmp_path).named_parameters())
    assert wanted.keys() == dict(ours.named_parameters()).keys()
    for name, found in ours.named_parameters():
        scale = wanted[name].detach().abs().max().clamp(min=1e-3)
        one, other = found.grad / scale, wanted[name] / scale
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3, msg=lambda m, n=name: n + m)
    theirs.zero_grad()


def test_decoding_with_caches_is_decoding_without(ours):
    tokens, grids = LAST[0] + [END], LAST[1]
    wanted, found = torch.tensor([tokens]), torch.tensor([tokens])
    given = images_of(grids)
    with torch.no_grad():
        for _ in range(4):
            wanted = torch.cat([wanted, ours(wanted, **given)[:, -1:].argmax(-1)], dim=1)
        ours.setup_caches(1, torch.float32, decoder_max_seq_len=24)
        causal, start, more = torch.ones(24, 24, dtype=torch.bool).tril(), 0, given
        for _ in range(4):
            place = torch.arange(start, found.shape[1])
            logits = ours(found[:, start:], mask=causal[place][None], input_pos=place[None], **more)
            start, more = found.shape[1], {}
            found = torch.cat([found, logits[:, -1:].argmax(-1)], dim=1)
    assert found.tolist() == wanted.tolist()


def packed(ours, rows):
    """Sum of squared logits of several rows as one packed batch."""
    tokens = torch.tensor([[token for row, _ in rows for token in row]])
    grids = tuple(grid for _, own in rows for grid in own)
    patches = torch.cat([patches_of(own) for _, own in rows if own])
    given = {"encoder_input": {"images": Images(patches, grids)}}
    return ours(tokens, documents=Documents.from_lengths([len(row) for row, _ in rows]), **given)


def test_packed_is_alone_in_loss_and_gradients(ours):
    rows = [FIRST, TEXT, LAST, ADJACENT]
    alone = torch.cat([ours(torch.tensor([tokens]), **images_of(grids)) for tokens, grids in rows], dim=1)
    together = packed(ours, rows)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    names, parameters = zip(*ours.named_parameters(), strict=True)
    wanted = torch.autograd.grad((alone**2).sum(), parameters)
    found = torch.autograd.grad((together**2).sum(), parameters)
    for name, one, other in zip(names, found, wanted, strict=True):
        scale = other.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(one / scale, other / scale, atol=1e-4, rtol=1e-3, msg=lambda m, n=name: n + m)


def test_files_go_there_and_back(ours, folder, tmp_path, theirs):
    before = load_file(folder / "model.safetensors")
    torchtune.save(ours, tmp_path / "out", base=folder)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        wanted = logits_of_transformers(theirs, *FIRST)
        assert torch.equal(logits_of_transformers(again, *FIRST), wanted)


def test_config_is_written_from_the_description(ours, folder):
    config = json.loads((folder / "config.json").read_text())
    written = ours.spec.to_hf_config(ours.description)
    assert ours.spec.from_hf_config(written) == ours.spec.from_hf_config(config) == ours.description
    assert written["vision_config"].items() <= {**config["vision_config"], **written["vision_config"]}.items()


def test_each_difference_of_the_families_matters(ours, theirs):
    """Logits change if a rotated axis, the order of rows and columns, or the layer of DeepStack is wrong."""
    tokens, grids = FIRST
    with torch.no_grad():
        wanted = logits_of_transformers(theirs, tokens, grids)
        rope = next(m for m in ours.decoder.modules() if getattr(m, "axes", None))
        axes, rope.axes = rope.axes, sorted(rope.axes, reverse=rope.axes == sorted(rope.axes))
        assert (ours(torch.tensor([tokens]), **images_of(grids)) - wanted).abs().max() > 1e-3
        rope.axes = axes
        ours.encoder.rope.axes = ours.encoder.rope.axes[::-1]
        assert (ours(torch.tensor([tokens]), **images_of(grids)) - wanted).abs().max() > 1e-3
        ours.encoder.rope.axes = ours.encoder.rope.axes[::-1]
        if ours.encoder.deep_layers:
            ours.encoder.deep_layers = tuple(layer + 1 for layer in ours.encoder.deep_layers)
            assert (ours(torch.tensor([tokens]), **images_of(grids)) - wanted).abs().max() > 1e-3


WRONG = {
    "too few placeholders": ([1, *picture(4, 4)[:-2], 5], ((1, 4, 4),), "3 image tokens, but its 1 image"),
    "too many placeholders": ([1, *picture(4, 4), IMAGE], ((1, 4, 4),), "5 image tokens"),
    "text inside": ([1, IMAGE, 7, IMAGE, IMAGE, IMAGE], ((1, 4, 4),), "text inside the 4 tokens of an image"),
}


@pytest.mark.parametrize("name", WRONG)
def test_placeholders_that_do_not_fit_are_refused(name):
    tokens, grids, message = WRONG[name]
    with pytest.raises(DataError, match=message):
        grid_positions(tokens, [IMAGE], grids, 2)


def test_a_flat_config_describes_the_same_model(ours, folder):
    """Files of 2025 have the fields of the text beside those of the images."""
    config = json.loads((folder / "config.json").read_text())
    inner = {name: value for name, value in config.pop("text_config").items() if name not in config}
    rope = inner.pop("rope_parameters")
    base, share = rope.pop("rope_theta"), {k: rope.pop(k) for k in ("partial_rotary_factor",) if k in rope}
    flat = {**inner, **config, **share, "rope_theta": base, "rope_scaling": rope}
    assert ours.spec.from_hf_config(flat) == ours.description
