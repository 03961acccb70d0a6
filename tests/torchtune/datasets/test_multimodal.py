"""Datasets of text and images, from files of this machine."""

import base64
import json

import pytest
import torch
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

from tests.tiny import OPENAI
from tests.torchtune.models.tokenizer_files import write_ranks
from tests.torchtune.modules.transforms.test_vision import photo
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX as IGNORE
from torchtune.data import DataError, Message, padded_collate_sft
from torchtune.datasets import (
    PackedDataset,
    SFTDataset,
    alpaca_dataset,
    chat_dataset,
    instantiate_collate,
    preparing,
    preview,
    size_of,
)
from torchtune.datasets.multimodal import (
    llava_instruct_dataset,
    multimodal_chat_dataset,
    the_cauldron_dataset,
    the_cauldron_transform,
    vqa_dataset,
)
from torchtune.models.llama3 import Llama3Tokenizer
from torchtune.models.llama3_2_vision import Llama3VisionTransform

SIZES = [(28, 28), (20, 60), (90, 30)]


@pytest.fixture(scope="module")
def transform(tmp_path_factory):
    ranks = write_ranks(tmp_path_factory.mktemp("llama3") / "tokenizer.model")
    return Llama3VisionTransform(ranks, tile_size=28, patch_size=14, max_seq_len=60, dtype=torch.float32)


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i, size in enumerate(SIZES):
        photo(*size, seed=i).save(folder / f"{i}.png")
    return folder


def llava(image, *turns):
    """A row of LLaVA: an image or a list of them, and turns of a human and the model."""
    conversation = []
    for i, text in enumerate(turns):
        speaker = ("human", "gpt")[i % 2]
        conversation.append({"from": speaker, "value": text})
    return {"image": image, "conversations": conversation}


def write(path, rows):
    """Write lines of JSON, or a list."""
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        path.write_text(json.dumps(rows))
    return str(path)


ROWS = [
    llava("0.png", "<image>\nWhere is the cat?", "big", "one two", "red"),
    llava("1.png", "What is\n<image>", "blue"),
    llava(None, "Where is the dog?", "small"),
    llava("2.png", "<image>three", "green"),
]


def expected(transform, image, *turns):
    """The row by hand: ``turns`` are texts, and None where the image is."""
    messages = []
    for i, turn in enumerate(turns):
        parts = []
        for text in turn:  # None is the place of the image
            if text is None:
                parts.append({"type": "image", "content": image})
            else:
                parts.append({"type": "text", "content": text})
        messages.append(Message("assistant" if i % 2 else "user", parts, masked=i % 2 == 0))
    row = transform({"messages": messages})
    labels = []
    for next_token, is_masked in zip(row["tokens"][1:], row["mask"][1:], strict=True):
        labels.append(IGNORE if is_masked else next_token)
    row["labels"] = [*labels, IGNORE]
    return row


def assert_same(row, expected_row):
    assert row["tokens"] == expected_row["tokens"]
    assert row["labels"] == expected_row["labels"]
    for name in ("images", "aspect_ratio"):
        tensors = row["encoder_input"][name]
        expected_tensors = expected_row["encoder_input"][name]
        assert len(tensors) == len(expected_tensors)
        assert all(map(torch.equal, tensors, expected_tensors))
    assert all(map(torch.equal, row["encoder_mask"], expected_row["encoder_mask"]))


def sizes_of(dataset, index):
    return [size_of(image) for image in dataset.images(index)]


@pytest.mark.parametrize("file", ["rows.json", "rows.jsonl"])
def test_llava_rows_are_tokenized_with_their_images(transform, pictures, tmp_path, file):
    dataset = llava_instruct_dataset(
        transform, source="json", data_files=write(tmp_path / file, ROWS), image_dir=str(pictures)
    )
    first = [[None, "\nWhere is the cat?"], ["big"], ["one two"], ["red"]]
    assert_same(dataset[0], expected(transform, photo(*SIZES[0], seed=0), *first))
    assert_same(dataset[1], expected(transform, photo(*SIZES[1], seed=1), ["What is\n", None], ["blue"]))
    assert_same(dataset[2], expected(transform, None, ["Where is the dog?"], ["small"]))
    assert dataset.lengths.tolist() == [len(dataset[i]["tokens"]) for i in range(4)]
    assert dataset.num_images == 3
    assert sizes_of(dataset, 1) == [(60, 20)]
    assert sizes_of(dataset, 2) == []
    collate = instantiate_collate("torchtune.data.padded_collate_tiled_images_and_mask", transform)
    batch = collate([dataset[i] for i in range(4)])
    assert batch.inputs["encoder_input"]["images"].shape == (4, 1, 3, 3, 28, 28)  # 90 x 30 is three tiles high


def test_images_of_hub_datasets_are_decoded(transform, pictures, tmp_path):
    from datasets import Dataset, Features, Image, List, Value

    texts = [[{"user": "Where?", "assistant": "one", "source": "a"}, {"user": "What?", "assistant": "two"}]] * 2
    features = {
        "images": List(Image()),
        "texts": List(Features({name: Value("string") for name in ("user", "assistant", "source")})),
    }
    names = [[str(pictures / "1.png"), str(pictures / "2.png")], [str(pictures / "0.png")]]
    rows = Dataset.from_dict({"images": names, "texts": texts}, Features(features))
    rows.to_parquet(tmp_path / "rows.parquet")
    images = [photo(*SIZES[i], seed=i) for i in (1, 2, 0)]
    for source in (rows, str(tmp_path / "rows.parquet")):
        dataset = the_cauldron_dataset(transform, source=source, new_system_prompt="one")
        assert [len(dataset[i]["encoder_input"]["images"]) for i in range(2)] == [2, 1]
        read = [*dataset[0]["encoder_input"]["images"], *dataset[1]["encoder_input"]["images"]]
        for decoded, image in zip(read, images, strict=True):
            assert torch.equal(decoded, transform.transform_image({"image": image})["image"])
        assert transform.decode(dataset[1]["tokens"]) == "oneWhere?oneWhat?two"
        trained = transform.decode([label for label in dataset[1]["labels"] if label != IGNORE])
        assert (trained, dataset.num_images) == ("onetwo", 3)
    messages = the_cauldron_transform(transform, new_system_prompt="one")(rows[1])
    assert_same(messages, dataset[1])


SEVERAL = ["0.png", "1.png"]
SEVERAL_SIZES = [(28, 28), (60, 20)]


def text_of(transform, dataset):
    """The first row with its control tokens."""
    return transform.decode(dataset[0]["tokens"], skip_special_tokens=False)


def test_question_with_several_images_has_all_of_them(transform, pictures, tmp_path):
    rows = [{"q": "What?", "a": "cat", "image": SEVERAL}] * 2
    dataset = vqa_dataset(
        transform,
        source=write(tmp_path / "vqa.jsonl", rows),
        column_map={"input": "q", "output": "a"},
        image_dir=str(pictures),
    )
    assert sizes_of(dataset, 0) == SEVERAL_SIZES
    assert text_of(transform, dataset).count("<|image|><|image|>What?") == 1


def test_images_are_paths_data_urls_or_bytes(transform, pictures):
    content = (pictures / "1.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    row = {"input": "What?", "output": "cat", "image": ["0.png", url, content]}
    dataset = vqa_dataset(transform, source=[row], image_dir=str(pictures))
    assert sizes_of(dataset, 0) == [*SEVERAL_SIZES, SEVERAL_SIZES[1]]


def test_images_stand_where_their_tag_is(transform, pictures):
    row = llava(SEVERAL, "one <image> two <image>", "red")
    dataset = multimodal_chat_dataset(transform, source=[row], image_tag="<image>", image_dir=str(pictures))
    assert text_of(transform, dataset).count("one<|image|>two<|image|>") == 1
    with pytest.raises(DataError, match="a turn has '<image>' in its text, but image_tag is not set"):
        multimodal_chat_dataset(transform, source=[row], image_dir=str(pictures))


def test_parts_of_openai_messages_may_be_images(transform, pictures):
    content = [
        {"type": "image_url", "image_url": {"url": str(pictures / "1.png")}},
        {"type": "text", "text": "What?"},
        {"type": "image", "image": str(pictures / "0.png")},
    ]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]
    dataset = chat_dataset(transform, source=[{"messages": messages}], **OPENAI)
    assert sizes_of(dataset, 0) == SEVERAL_SIZES[::-1]


def test_images_may_be_in_a_column_of_their_own(transform, pictures):
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}, {"type": "image", "text": None, "index": 1}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}]}
    paths = [str(pictures / name) for name in SEVERAL]
    dataset = chat_dataset(transform, source=[{**row, "images": paths}], **OPENAI)
    assert sizes_of(dataset, 0) == SEVERAL_SIZES
    with pytest.raises(DataError, match="the row has 1 images, but its turns have 2 parts"):
        chat_dataset(transform, source=[{**row, "images": paths[:1]}], **OPENAI)
    with pytest.raises(DataError, match="must have an 'image'"):
        chat_dataset(transform, source=[{**row, "images": []}], **OPENAI)


def test_the_transform_of_a_vision_model_takes_text_alone(transform):
    dataset = alpaca_dataset(transform, source=[{"instruction": "one", "output": "two"}])
    assert dataset[0]["encoder_input"]["images"] == []
    assert dataset.num_images == 0


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (llava("0.png", "What?", "red"), "1 image(s) have no place: each needs a '<image>' in a user turn"),
        (llava(None, "<image> What?", "red"), "a turn has 1 '<image>' but 0 image(s)"),
        (llava(["0.png", "1.png"], "<image> What?", "red"), "1 image(s) have no place"),
        (llava("0.png", "What?", "<image>"), "1 image(s) have no place"),
        (llava("text.png", "<image>", "red"), "text.png cannot be read (it is of no kind that is read"),
        (llava("0.png", "cat " * 60 + "<image>", "red"), "max_seq_len=60 cuts off 1 of the row's 1 images"),
        (llava("0.png", "<image>" + "cat " * 60, "red"), "no label is left within max_seq_len=60"),
    ],
)
def test_a_bad_row_is_named_before_training(transform, pictures, row, reason):
    (pictures / "text.png").write_text("no image")
    with pytest.raises(DataError) as error:
        llava_instruct_dataset(transform, source=[ROWS[0], row, ROWS[1]], image_dir=str(pictures))
    assert "row 1: " in str(error.value)
    assert reason in str(error.value)
    remaining = llava_instruct_dataset(
        transform, source=[ROWS[0], row, ROWS[1]], image_dir=str(pictures), on_bad_row="skip"
    )
    assert len(remaining) == 2
    assert remaining.origins(1)[0]["row"] == 2
    assert sizes_of(remaining, 1) == [(60, 20)]
    assert remaining[1]["tokens"][-8:] == remaining.store.lists(1)["tokens"][-8:]


def test_a_broken_image_is_named_when_it_is_read(transform, pictures, tmp_path):
    image_bytes = (pictures / "1.png").read_bytes()
    (pictures / "1.png").write_bytes(image_bytes[:2000] + image_bytes[-64:])
    source = write(tmp_path / "rows.jsonl", ROWS)
    settings = {"source": source, "image_dir": str(pictures)}
    dataset = llava_instruct_dataset(transform, **settings)
    assert len(dataset[0]["encoder_input"]["images"]) == 1
    with pytest.raises(DataError, match=r"rows.jsonl, row 1 .*line 2.*1.png cannot be read .*on_bad_row=skip"):
        dataset[1]
    assert len(llava_instruct_dataset(transform, **settings, on_bad_row="skip")) == 3
    (pictures / "1.png").write_bytes(image_bytes)
    assert len(llava_instruct_dataset(transform, **settings, on_bad_row="skip")) == 4


def test_a_changed_image_changes_the_fingerprint(transform, pictures):
    """A run does not go on with other images under the same words."""
    settings = {"image_dir": str(pictures)}
    first = llava_instruct_dataset(transform, source=ROWS, **settings).fingerprint
    changed_rows = [{**ROWS[0], "image": "2.png"}, *ROWS[1:]]
    assert llava_instruct_dataset(transform, source=ROWS, **settings).fingerprint == first
    assert llava_instruct_dataset(transform, source=changed_rows, **settings).fingerprint != first


def test_settings_that_images_rule_out_are_refused(transform, pictures, tmp_path):
    build = {"source": ROWS, "image_dir": str(pictures)}
    for settings, reason in (
        ({"packed": True}, "Rows with images of this tokenizer cannot be packed: leave packed out"),
        ({"streaming": True}, "streaming=True is not possible with images: leave streaming out"),
        ({"image_dir": "nowhere/"}, "There is no folder nowhere/ .*: set image_dir"),
        ({"source": ROWS[2:3]}, "no row has an image: set column_map"),
        ({"column_map": {"conversations": "conversations", "image": "photo"}}, "there is no column 'photo'"),
    ):
        with pytest.raises(DataError, match=reason):
            llava_instruct_dataset(transform, **{**build, **settings})
    dataset = llava_instruct_dataset(transform, **build)
    with pytest.raises(DataError, match="Rows with images of this tokenizer cannot be packed"):
        PackedDataset(dataset, max_seq_len=200)
    with pytest.raises(DataError, match=r"collate_fn=torchtune.data.padded_collate_tiled_images_and_mask"):
        instantiate_collate("torchtune.data.collate_documents", transform)
    with pytest.raises(DataError, match="padded_collate_tiled_images_and_mask"):
        padded_collate_sft([dataset[0]])
    with pytest.raises(DataError, match="rows 0, 1, 3: a turn holds an image, but Llama3Tokenizer takes text only"):
        llava_instruct_dataset(Llama3Tokenizer(write_ranks(tmp_path / "ranks")), **build)
    with preview(1):  # whose rows may be without images
        llava_instruct_dataset(transform, source=write(tmp_path / "a.jsonl", ROWS[2:]), image_dir=str(pictures))


def test_prepared_rows_are_checked_and_measured_once(transform, pictures, tmp_path):
    settings = {"source": write(tmp_path / "a.jsonl", ROWS), "image_dir": str(pictures)}
    with preparing(tmp_path / "out"):
        live = llava_instruct_dataset(transform, **settings)
    (pictures / "0.png").unlink()
    dataset = llava_instruct_dataset(transform, **settings, prepared=str(tmp_path / "out"))
    assert dataset.lengths.tolist() == live.lengths.tolist()
    assert_same(dataset[1], live[1])
    with pytest.raises(DataError, match=r"row 0 .*there is no such file"):
        dataset[0]


class Processor:
    """A user's transform, on transformers: text of one token per character, pixels of the images."""

    def __init__(self):
        self.images = MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=4)

    def __call__(self, sample):
        row = {"tokens": [], "mask": []}
        images = []
        for message in sample["messages"]:
            length = len(message.text_content)
            row["tokens"] += [length] * length
            row["mask"] += [message.masked] * length
            images += message.get_media()
        if images:
            row["pixel_values"] = self.images(images=[images], return_tensors="pt")["pixel_values"]
        return row


def test_users_transform_receives_pillow_images(pictures, tmp_path):
    rows = [ROWS[2], *ROWS[:2]]  # the first row is text: what the others have besides is not lost
    settings = {"source": write(tmp_path / "a.jsonl", rows), "image_dir": str(pictures)}
    dataset = llava_instruct_dataset(Processor(), **settings)
    assert "pixel_values" not in dataset[0]
    expected_pixels = Processor().images(images=[[photo(*SIZES[1], seed=1)]], return_tensors="pt")["pixel_values"]
    assert torch.equal(dataset[2]["pixel_values"], expected_pixels)
    assert len(dataset) == 3
    assert dataset.num_images == 2
    assert sizes_of(dataset, 2) == [(60, 20)]
    (pictures / "0.png").unlink()
    with pytest.raises(DataError, match=r"row 1: .*0.png cannot be read"):
        llava_instruct_dataset(Processor(), **settings)
    remaining = llava_instruct_dataset(Processor(), **settings, on_bad_row="skip")
    assert [remaining.origins(i)[0]["row"] for i in range(len(remaining))] == [0, 2]
    assert isinstance(remaining, SFTDataset)
