"""The transform of models with image tokens."""

import json
import shutil

import pytest
from PIL import Image
from transformers import AutoTokenizer

import torchtune
from tests.tiny_images import (
    CONFIGS,
    END,
    IMAGE,
    START,
    TILED,
    image_text_model,
    qwen3_vl_config,
    write_image_checkpoint,
)
from tests.torchtune.models.test_image_processors import picture
from torchtune.data import DataError, image_size, open_image
from torchtune.models import image_text_transform


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_image_checkpoint(image_text_model(qwen3_vl_config()), tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def transform(folder):
    return image_text_transform(str(folder))


def turns(*images, answer="so"):
    content = []
    for image in images:
        content.append({"type": "text", "content": "See "})
        content.append({"type": "image", "content": image})
    content.append({"type": "text", "content": " Why?"})
    user = torchtune.data.Message(role="user", content=content, masked=True)
    return {"messages": [user, torchtune.data.Message(role="assistant", content=answer)]}


def test_tokens_are_those_of_transformers(folder, transform):
    images = [picture(40, 20), picture(16, 16)]
    row = transform(turns(*images))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    content = [{"type": "text", "text": "See "}, {"type": "image"}] * 2 + [{"type": "text", "text": " Why?"}]
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": "so"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    counts = [transform.processor.plan(image.size).tokens for image in images]
    for count in counts:
        text = text.replace("<|image_pad|>", "<|here|>" * count, 1)
    wanted = tokenizer(text.replace("<|here|>", "<|image_pad|>"), add_special_tokens=False)["input_ids"]
    assert row["tokens"] == wanted
    assert row["tokens"].count(IMAGE) == sum(counts) > 8
    assert all(masked for token, masked in zip(row["tokens"], row["mask"], strict=True) if token in (IMAGE, START, END))
    trained = [token for token, masked in zip(row["tokens"], row["mask"], strict=True) if not masked]
    assert transform.decode(trained, skip_special_tokens=False) == "so<|im_end|>"
    assert row["encoder_input"]["images"].places.tolist() == [i for i, token in enumerate(wanted) if token == IMAGE]


def test_a_row_that_would_be_cut_inside_an_image_is_refused(folder):
    short = image_text_transform(str(folder), max_seq_len=12)
    with pytest.raises(DataError, match=r"max_seq_len=12 would cut .* tokens of images off a row of"):
        short(turns(picture(40, 20)))
    row = image_text_transform(str(folder), max_seq_len=30)(turns(picture(8, 8), answer="so " * 30))
    assert len(row["tokens"]) == 30  # text is cut


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_sizes_from_headers_are_those_of_decoded_images(kind, orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned"
    picture(40, 20).save(path, kind, exif=exif)
    assert image_size(str(path)) == open_image(str(path)).size == ((40, 20) if orientation < 5 else (20, 40))


def test_images_of_the_assistant_are_refused(transform):
    answer = [{"type": "image", "content": picture(8, 8)}]
    messages = [torchtune.data.Message(role="user", content="Draw."), torchtune.data.Message("assistant", answer)]
    with pytest.raises(DataError, match="a turn of the assistant holds an image"):
        transform({"messages": messages})


def test_text_that_spells_a_placeholder_is_text(transform):
    row = transform({"messages": [*turns(picture(8, 8), answer="<|image_pad|>")["messages"]]})
    assert row["tokens"].count(IMAGE) == transform.processor.plan((8, 8)).tokens


@pytest.mark.parametrize("family", TILED)
def test_texts_reach_a_template_that_reads_parts(family, tmp_path):
    """The published templates of SmolVLM and Idefics 3 iterate over parts, and write nothing for a plain text."""
    transform = image_text_transform(str(write_image_checkpoint(image_text_model(CONFIGS[family]()), tmp_path)))
    system = torchtune.data.Message(role="system", content="Be brief.", masked=True)
    question = torchtune.data.Message(role="user", content="A dog?", masked=True)
    messages = [system, *turns(picture(8, 8))["messages"], question, torchtune.data.Message("assistant", "a cat")]
    row = transform({"messages": messages})
    trained = [token for token, masked in zip(row["tokens"], row["mask"], strict=True) if not masked]
    answers = " so<end_of_utterance> a cat<end_of_utterance>"
    assert transform.decode(trained, skip_special_tokens=False) == answers
    text = transform.decode(row["tokens"], skip_special_tokens=False)
    begin = "<|im_start|>" if family == "smolvlm" else "<|begin_of_text|>"
    assert text.startswith(f"{begin}System: Be brief.<end_of_utterance>\nUser: See <fake_token_around_image>")
    end = " Why?<end_of_utterance>\nAssistant: so<end_of_utterance>\nUser: A dog?<end_of_utterance>\nAssistant:"
    assert text.endswith(f"{end} a cat<end_of_utterance>\n")
    messages[-1] = torchtune.data.Message("assistant", "")
    prompt = transform({"messages": messages}, inference=True)["tokens"]
    assert transform.decode(prompt, skip_special_tokens=False).endswith(end)
    assert row["tokens"][: len(prompt)] == prompt


@pytest.mark.parametrize(
    ("file", "settings", "place"),
    [
        ("preprocessor_config.json", {"do_resize": False}, "preprocessor_config.json: do_resize"),
        ("processor_config.json", {"do_resize": False}, "/processor_config.json: do_resize"),
        ("processor_config.json", {"image_processor": {"do_resize": False}}, "/processor_config.json: do_resize"),
        ("processor_config.json", {"video_processor": 3}, "/processor_config.json: video_processor is not an object"),
        (
            "processor_config.json",
            {"video_processor": {"do_resize": False}},
            "/processor_config.json: video_processor: do_resize",
        ),
        ("video_preprocessor_config.json", {"do_resize": False}, "video_preprocessor_config.json: do_resize"),
    ],
)
def test_a_setting_that_is_not_supported_is_reported_with_its_file(folder, tmp_path, file, settings, place):
    shutil.copytree(folder, tmp_path / "model")
    image_settings = json.loads((tmp_path / "model" / "preprocessor_config.json").read_text())
    if file == "processor_config.json":
        (tmp_path / "model" / "preprocessor_config.json").unlink()
    (tmp_path / "model" / file).write_text(json.dumps({**image_settings, **settings}))
    with pytest.raises(DataError, match=place):
        image_text_transform(str(tmp_path / "model"))
