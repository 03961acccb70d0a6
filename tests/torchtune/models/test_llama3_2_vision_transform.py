"""Text and images of Llama 3.2 Vision to rows, and rows to batches."""

from typing import Any

import pytest
import torch
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from tests.torchtune.models.tokenizer_files import write_ranks
from tests.torchtune.modules.transforms.test_vision import photo
from torchtune.data import Batch, DataError, Message, padded_collate_tiled_images_and_mask
from torchtune.datasets import instantiate_collate
from torchtune.models.clip import CLIP_MEAN, CLIP_STD
from torchtune.models.llama3_2_vision import Llama3VisionTransform, llama3_2_vision_transform

TILE, POSITIONS = 28, 5  # 2 x 2 patches and the class token
IMAGE = 128256


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_ranks(tmp_path_factory.mktemp("llama3") / "tokenizer.model")


def transform_of(ranks: str, **settings: Any) -> Llama3VisionTransform:
    settings = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, "dtype": torch.float32} | settings
    return Llama3VisionTransform(ranks, tile_size=TILE, patch_size=14, **settings)


def turns(*content: Any, answer: str = "a cat") -> dict[str, Any]:
    parts = []
    for part in content:
        kind = "text" if isinstance(part, str) else "image"
        parts.append({"type": kind, "content": part})
    return {"messages": [Message("user", parts, masked=True), Message("assistant", answer)]}


PHOTOS = [photo(28, 84, 1), photo(40, 20, 2), photo(10, 10, 3)]
ROWS = [
    turns(PHOTOS[0], "What is it?"),
    turns("one", PHOTOS[1], PHOTOS[2], "two three", answer="red green blue"),
    turns("Where is the cat?"),
    turns(*PHOTOS[::-1], "one", PHOTOS[1]),
]


def test_text_is_that_of_llama3_and_images_those_of_transformers(ranks):
    transform = transform_of(ranks)
    row = transform({**ROWS[1], "id": 3})
    text = (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\none<|image|><|image|>two three<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nred green blue<|eot_id|><|end_of_text|>"
    )
    assert row["tokens"] == transform.tt_model.tt_model.encode(text, allowed_special="all")
    answer = transform.encode("red green blue", add_bos=False, add_eos=False)
    trained = [token for token, masked in zip(row["tokens"], row["mask"], strict=True) if not masked]
    assert trained[-len(answer) - 1 : -1] == answer
    assert (row["id"], transform.vocab_size, transform.image_seq_len) == (3, IMAGE + 1, 4 * POSITIONS)
    assert transform.decode(row["tokens"]) == "onetwo threered green blue"
    assert [ratio.tolist() for ratio in row["encoder_input"]["aspect_ratio"]] == [[2, 1], [1, 1]]
    assert {mask.untyped_storage().nbytes() for mask in row["encoder_mask"]} == {len(row["tokens"])}
    open_row = transform(ROWS[0], inference=True)
    assert row["mask"][-1]
    assert open_row["tokens"][-1] != row["tokens"][-1]


def test_the_token_of_an_image_is_never_trained_on(ranks):
    answer_with_image = Message(
        "assistant", [{"type": "text", "content": "red"}, {"type": "image", "content": PHOTOS[0]}]
    )
    row = transform_of(ranks)({"messages": [Message("user", "one", masked=True), answer_with_image]})
    assert [masked for token, masked in zip(row["tokens"], row["mask"], strict=True) if token == IMAGE] == [True]
    assert row["mask"].count(False) > 2


def test_a_row_of_text_has_no_images(ranks):
    for inference in (False, True):
        row = transform_of(ranks)(ROWS[2], inference=inference)
        assert (row["encoder_input"], row["encoder_mask"]) == ({"images": [], "aspect_ratio": []}, [])


def test_images_are_never_cut_off(ranks):
    full_row = transform_of(ranks)(ROWS[1])
    for length in range(2, len(full_row["tokens"])):
        transform = transform_of(ranks, max_seq_len=length)
        if length <= full_row["tokens"].index(IMAGE) + 2:  # the last place that is kept ends a cut row
            columns = full_row["tokens"][:length].count(IMAGE) - (full_row["tokens"][length - 1] == IMAGE)
            with pytest.raises(DataError, match=f"max_seq_len={length} cuts off {2 - columns} of the row's 2 images"):
                transform(ROWS[1])
        else:
            assert transform(ROWS[1])["tokens"][:-1] == full_row["tokens"][: length - 1]


def test_builder_of_the_transform_and_text_without_images(ranks, tmp_path):
    built = llama3_2_vision_transform(ranks, image_size=56, prompt_template={"user": ["one ", " two"]})
    row = built(turns(torch.zeros(3, 10, 200, dtype=torch.uint8), "cat"))
    assert row["encoder_input"]["images"][0].shape == (4, 3, 56, 56)
    assert row["encoder_input"]["images"][0].dtype == torch.bfloat16
    assert (built.max_seq_len, built.image_seq_len) == (8192, 4 * 17)
    assert built.decode(row["tokens"]).startswith("one")
    entries = [
        '{"content": "<|%s|>", "id": %d}' % (name, 600 + i)  # noqa: UP031
        for i, name in enumerate(
            ["begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag"]
        )
    ]
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [%s]}' % ", ".join(entries))  # noqa: UP031
    with pytest.raises(DataError, match=r"tokenizer.json lacks <\|image\|>"):
        llama3_2_vision_transform(ranks, special_tokens_path=str(tmp_path / "tokenizer.json"))


def labelled(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "labels": [*row["tokens"][1:], -100]}


@pytest.mark.parametrize("direction", ["right", "left"])
def test_a_batch_is_that_of_transformers(ranks, direction):
    transform = transform_of(ranks)
    rows = [labelled(transform(row)) for row in ROWS]
    out = padded_collate_tiled_images_and_mask(
        rows, padding_idx=7, pad_direction=direction, pad_max_tiles=4, pad_max_images=4, pad_to_multiple_of=8
    )
    length = -(-max(len(row["tokens"]) for row in rows) // 8) * 8
    processor = MllamaImageProcessorPil(
        size={"height": TILE, "width": TILE}, max_image_tiles=4, image_mean=CLIP_MEAN, image_std=CLIP_STD
    )
    hf_out = processor(images=[[PHOTOS[0]], PHOTOS[1:]], return_tensors="pt")
    pixels = out["encoder_input"]["images"]
    assert pixels.shape == (4, 4, 4, 3, TILE, TILE)
    torch.testing.assert_close(pixels[:2, :2], hf_out["pixel_values"], rtol=0, atol=1 / 255 / min(CLIP_STD) + 1e-5)
    assert not pixels[2].any()
    ratios = out["encoder_input"]["aspect_ratio"][:, :2].tolist()
    assert ratios == [[[1, 3], [1, 1]], [[2, 1], [1, 1]], [[1, 1]] * 2, [[1, 1], [2, 1]]]
    # The text padded as transformers pads it, with its masks.
    texts = []
    for row in rows:
        padding = [7] * (length - len(row["tokens"]))
        if direction == "right":
            texts.append(row["tokens"] + padding)
        else:
            texts.append(padding + row["tokens"])
    assert out["tokens"].tolist() == texts
    assert (out["labels"] != -100).sum() == sum(len(row["tokens"]) - 1 for row in rows)
    sparse = [get_cross_attention_token_mask(row["tokens"], IMAGE) for row in rows]
    tiles = [[3], [2, 1], [], [1, 2, 3, 2]]
    for i, row in enumerate(rows):
        dense = convert_sparse_cross_attention_mask_to_dense([sparse[i] or [[0, 0]]], [tiles[i] or [0]], 4, length)[0]
        mask_of_row = out["encoder_mask"][i].view(length, 4, 4, POSITIONS)
        columns = slice(len(row["tokens"])) if direction == "right" else slice(length - len(row["tokens"]), length)
        expected = torch.tensor(dense[: len(row["tokens"]), :, :, None]).bool().expand(-1, -1, -1, POSITIONS)
        assert torch.equal(mask_of_row[columns, : expected.shape[1]], expected)
        assert mask_of_row.sum() == expected.sum()


def test_a_batch_goes_through_the_recipes_collate(ranks):
    transform = transform_of(ranks)
    collate = instantiate_collate("torchtune.data.padded_collate_tiled_images_and_mask", transform)
    batch = collate([labelled(transform(row)) for row in ROWS[:2]])
    assert isinstance(batch, Batch)
    assert batch.tokens[0, -1] == transform.pad_id
    assert batch.model_inputs().keys() == {"tokens", "encoder_input", "encoder_mask"}
    assert batch.to("meta").inputs["encoder_input"]["images"].device.type == "meta"
    text = {**ROWS[2], "tokens": [1], "labels": [2], "encoder_input": {"images": [], "aspect_ratio": []}}
    assert padded_collate_tiled_images_and_mask([{**text, "encoder_mask": []}]).keys() == {"tokens", "labels"}


def test_batches_that_do_not_fit_are_refused(ranks):
    row = labelled(transform_of(ranks)(ROWS[1]))
    small = labelled(Llama3VisionTransform(ranks, tile_size=14, patch_size=14, dtype=torch.float32)(ROWS[0]))
    fewer_images = {**row["encoder_input"], "images": row["encoder_input"]["images"][:1]}
    for rows, settings, reason in (
        ([row], {"pad_max_tiles": 1}, "pad_max_tiles=1 is less than the 2 tiles of an image"),
        ([row], {"pad_max_images": 1}, "pad_max_images=1 is less than the 2 images of a row"),
        ([row], {"pad_direction": "up"}, "must be 'left' or 'right'"),
        ([row, small], {}, "does not fit the others"),
        ([{**row, "encoder_input": fewer_images}], {}, "1 images, 2 aspect ratios and 2 masks"),
        ([{"tokens": [1], "labels": [1]}], {}, "use the transform of a vision model as the tokenizer"),
        ([{"tokens": [1]}], {}, "no 'labels'"),
    ):
        with pytest.raises(DataError, match=reason):
            padded_collate_tiled_images_and_mask(rows, **settings)
