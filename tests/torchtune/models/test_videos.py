"""Videos as frames against ``transformers``: plans, patches, text, positions, logits, gradients, answers; packs."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as resize_frame
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

import torchtune
from tests.devices import DEVICE
from tests.tiny_images import (
    CONFIGS,
    GEMMA,
    GEMMA_PROCESSOR,
    IMAGE,
    PROCESSOR,
    image_text_model,
    inputs_of,
    write_image_checkpoint,
)
from tests.torchtune.models.test_image_processors import picture
from tests.torchtune.models.test_image_text import compare_gradients
from torchtune.data import DataError, Message, Video, collate_documents
from torchtune.datasets import chat_dataset
from torchtune.generation import generate_tokens, images_of_row, stream
from torchtune.models import image_text_transform
from torchtune.models.qwen3_vl import QwenImageProcessor

OLD = {"model_type": "qwen2_5_vl", "vision_config": {"tokens_per_second": 2}}
LEAST, MOST = 1024, 6144
OF_VIDEOS = {**PROCESSOR, "size": {"shortest_edge": LEAST, "longest_edge": MOST}}
COLORS = {"do_normalize": True, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
OF_GEMMA = {**GEMMA_PROCESSOR, **COLORS, "max_soft_tokens": 6}


@pytest.fixture(
    scope="module",
    params=["qwen3_vl", "qwen3_5_vl", "qwen2_5_vl", "gemma4_vl", "gemma4_vl_small", "gemma4_unified_vl"],
)
def theirs(request):
    return image_text_model(CONFIGS[request.param]()).to(DEVICE)


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    folder = write_image_checkpoint(theirs, tmp_path_factory.mktemp("videos"))
    settings = OF_GEMMA if theirs.config.model_type in GEMMA else OF_VIDEOS
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def video(count: int, size: tuple[int, int] = (40, 20), seed: int = 0) -> list:
    return [picture(*size, seed=seed + i) for i in range(count)]


def turns(*parts, answer="so"):
    content = []
    for part in parts:
        content.append(part if isinstance(part, dict) else {"type": "image", "content": part})
    content.append({"type": "text", "content": "Why?"})
    return {"messages": [Message("user", content, masked=True), Message("assistant", answer)]}


def part(frames, fps=2.0) -> dict:
    return {"type": "video", "content": frames, "fps": fps}


@pytest.mark.parametrize("model", [{}, OLD], ids=["timestamps", "positions"])
def test_plan_is_that_of_transformers(model):
    processor = QwenImageProcessor.from_config({**PROCESSOR, "video_processor": OF_VIDEOS}, model)
    rng = random.Random(0)
    refused = 0
    for _ in range(5000):
        height, width = (int(2 ** rng.uniform(0, 9)) for _ in "hw")
        count = rng.randrange(2, 14)
        try:
            if model:
                wanted = resize_frame(height, width, 8, LEAST, MOST)
            else:
                wanted = smart_resize(count, height, width, 2, 8, LEAST, MOST)
        except ValueError:
            refused += 1
            with pytest.raises(DataError, match="too long"):
                processor.plan((width, height, count, 2.0))
            continue
        plan = processor.plan((width, height, count, 2.0))
        assert (plan.height, plan.width) == wanted, (count, height, width)
        assert plan.grids == (((count + 1) // 2, wanted[0] // 4, wanted[1] // 4),)
        assert plan.tokens == (count + 1) // 2 * wanted[0] * wanted[1] // 64
    assert refused


@pytest.mark.parametrize("count", [2, 5])
def test_patches_are_those_of_transformers(count):
    processor = QwenImageProcessor.from_config(PROCESSOR, OLD)
    frames = video(count, (37, 50))
    settings = {key: value for key, value in PROCESSOR.items() if "_type" not in key}
    images = [Qwen2VLImageProcessorPil(**settings)([frame], return_tensors="np") for frame in frames]
    rows, columns = images[0]["image_grid_thw"][0][1:]
    blocks = np.stack([image["pixel_values"] for image in images])
    blocks = blocks.reshape(count, rows // 2, columns // 2, 2, 2, 3, 2, 4, 4)
    pixels = blocks[:, :, :, :, :, :, 0].transpose(0, 5, 1, 3, 6, 2, 4, 7).reshape(1, count, 3, rows * 4, columns * 4)
    wanted, *grid = Qwen3VLVideoProcessor.patchify(None, torch.from_numpy(pixels), 4, 2, 2)
    assert processor.plan((37, 50, count, 2.0)).grids == (tuple(grid),)
    values = processor.colors.values(torch.from_numpy(processor.pixels(Video(tuple(frames), 2.0))))
    assert (values - wanted[0]).abs().max() * min(processor.std) <= 2 / 255


def inputs_of_row(theirs, row, fps) -> dict:
    """What ``transformers`` takes for a row with images and videos."""
    tokens = torch.tensor([row["tokens"]])
    images = row["encoder_input"]["images"]
    inputs = {"input_ids": tokens}
    parts = images.patches.split([t * h * w for t, h, w in images.grids])
    for videos in (False, True):
        chosen = [i for i, grid in enumerate(images.grids) if (grid[0] > 1) == videos]
        if chosen:
            grids = [images.grids[i] for i in chosen]
            inputs |= inputs_of(theirs, tokens, torch.cat([parts[i] for i in chosen]), grids)
    return {**inputs, **({} if fps is None else {"second_per_grid_ts": [2 / rate for rate in fps]})}


ROWS = {
    "alone": ([part(video(4), 2.0)], [2.0]),
    "an odd number of frames, and an image": ([picture(30, 50), part(video(5), 3.0)], [3.0]),
    "two": ([part(video(6), 30.0), part(video(3, (16, 16), 9), 0.012)], [30.0, 0.012]),
}


@pytest.mark.parametrize("name", ROWS)
def test_text_positions_and_logits_are_those_of_transformers(name, theirs, folder):
    model, transform = torchtune.load(folder, device="cpu", images=True)
    row, inputs = prepared(name, theirs, transform)
    images = row["encoder_input"]["images"]
    text = transform.decode(row["tokens"], skip_special_tokens=False)
    videos = [video for video in ROWS[name][0] if isinstance(video, dict)]
    for video, grid in zip(videos, [grid for grid in images.grids if grid[0] > 1], strict=True):
        wanted = written(video, grid, theirs.config.model_type)
        assert text.count(wanted) == 1
        assert f"<|vision_start|>{wanted}" not in text  # the first releases of the processor replace the template's
    if model.grid_positions:
        other_inputs = {key: value for key, value in inputs.items() if "pixel" not in key}
        assert images.positions.tolist() == theirs.model.get_rope_index(**other_inputs)[0].tolist()
    with torch.no_grad():
        wanted = theirs(**inputs).logits
        logits = model.eval()(inputs["input_ids"], encoder_input=row["encoder_input"])
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    assert all(masked for token, masked in zip(row["tokens"], row["mask"], strict=True) if token >= IMAGE)


def prepared(name, theirs, transform, **options) -> tuple[dict, dict]:
    """A row of ``ROWS``, and what ``transformers`` takes for it."""
    parts, fps = ROWS[name]
    row = transform(turns(*parts), **options)
    return row, inputs_of_row(theirs, row, fps if theirs.config.model_type == "qwen2_5_vl" else None)


@pytest.mark.parametrize("name", ["an odd number of frames, and an image", "two"])
def test_gradients_are_those_of_transformers(name, theirs, folder, tmp_path):
    model, transform = torchtune.load(folder, device="cpu", images=True)
    row, inputs = prepared(name, theirs, transform)
    (theirs(**inputs).logits ** 2).sum().backward()
    (model(inputs["input_ids"], encoder_input=row["encoder_input"]) ** 2).sum().backward()
    compare_gradients(theirs, model, tmp_path)


def test_answers_about_videos_are_those_of_transformers(theirs, folder):
    """Alone with and without caches, and together in the continuous batch, where answers end at different times."""
    model, transform = torchtune.load(folder, device="cpu", images=True)
    rows, wanted = [], []
    for name in ROWS:
        row, inputs = prepared(name, theirs, transform, inference=True)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        tokens = theirs.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=-1)
        wanted.append(tokens[0, len(row["tokens"]) :].tolist())
        rows.append(row)
    assert len(set(map(tuple, wanted))) > 1, wanted
    with torch.no_grad():
        for use_cache in (True, False):
            for row, answer in zip(rows, wanted, strict=True):
                options = {"max_generated_tokens": 6, "temperature": 0.0, "use_cache": use_cache}
                images = images_of_row(row, torch.device("cpu"))
                assert list(stream(model.eval(), torch.tensor(row["tokens"]), **options, **images)) == answer
    images = [{"encoder_input": row["encoder_input"]} for row in rows]
    prompts = [row["tokens"] for row in rows]
    limits = [6, 2, 4]
    together = generate_tokens(model, prompts, max_new_tokens=limits, temperature=0.0, images=images, max_sequences=2)
    assert [tokens.tolist() for tokens in together.tokens] == [a[:n] for a, n in zip(wanted, limits, strict=True)]


def written(one, grid, kind) -> str:
    """The text of a video, as ``transformers`` writes it."""
    if kind in GEMMA:
        tokens = {"boi_token": "<|image>", "video_token": "<|video|>", "eoi_token": "<image|>"}
        merge = GEMMA[kind]["merge"]
        times = [number / one["fps"] for number in range(len(one["content"]))]
        inputs = {"num_soft_tokens_per_video": [grid[1] * grid[2] // merge**2]}
        inputs["video_metadata"] = [SimpleNamespace(fps=one["fps"], timestamps=times)]
        return Gemma4Processor.replace_video_token(SimpleNamespace(**tokens), inputs, 0)
    start, pad, end = "<|vision_start|>", "<|video_pad|>", "<|vision_end|>"
    if kind == "qwen2_5_vl":
        return f"{start}{pad * (np.prod(grid) // 4)}{end}"
    metadata = SimpleNamespace(fps=one["fps"], frames_indices=list(range(len(one["content"]))))
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token=start,
        video_token=pad,
        vision_end_token=end,
        _calculate_timestamps=lambda *given: Qwen3VLProcessor._calculate_timestamps(None, *given),
    )
    inputs = {"video_grid_thw": np.array([grid]), "video_metadata": [metadata]}
    return Qwen3VLProcessor.replace_video_token(processor, inputs, 0)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file of rows with videos, images and text."""
    folder = tmp_path_factory.mktemp("rows")
    lines = []
    for i in range(6):
        names = []
        for number, frame in enumerate(video(2 + i, seed=i)):
            frame.save(folder / f"{i}_{number}.png")
            names.append(str(folder / f"{i}_{number}.png"))
        media = [{"type": "video", "video": names, "fps": 2.0}, {"type": "image", "image": names[0]}, None][i % 3]
        content = [*([media] if media else []), {"type": "text", "text": "?"}]
        lines.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "so"}]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


SETTINGS = {"conversation_column": "messages", "conversation_style": "openai"}


def test_packed_rows_are_the_rows_alone(theirs, folder, rows):
    model, _ = torchtune.load(folder, device="cpu", images=True)
    transform = image_text_transform(str(folder), max_seq_len=300)
    dataset = chat_dataset(transform, source=str(rows), packed=True, **SETTINGS)
    documents = []
    for index in range(len(dataset)):
        documents += dataset[index]
    assert len(documents) == 6
    assert len(dataset) < 6
    for i in range(len(dataset)):  # the numbers of tokens were known before frames were decoded
        assert dataset.lengths[i] == sum(len(document["tokens"]) for document in dataset[i])
    with torch.no_grad():
        together = model(**collate_documents(documents).model_inputs())
        alone = torch.cat(
            [model(**collate_documents([packed_document]).model_inputs()) for packed_document in documents], dim=1
        )
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


WRONG = {
    "no frames": ([], 2.0, "a video must be a list of one or more images"),
    "a file": ("clip.mp4", 2.0, "video files are not decoded: extract the frames first"),
    "no rate": (video(2), None, "a video has fps = None"),
    "other sizes": (video(2) + video(1, (8, 9)), 2.0, r"different sizes, \(40, 20\) and \(8, 9\)"),
    "missing": ([*video(1), "none.png"], 2.0, "frame 2 of 2: the image none.png cannot be read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_videos_that_cannot_be_trained_on_are_named(name, folder):
    frames, fps, message = WRONG[name]
    asked = [{"type": "video", "content": frames, "fps": fps}, {"type": "text", "content": "?"}]
    row = {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "so"}]}
    good = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "so"}]}
    with pytest.raises(DataError, match=f"row 1: .*{message}"):
        chat_dataset(image_text_transform(str(folder)), source=[good, row], **SETTINGS)


def test_a_video_for_a_family_without_videos_is_refused(tmp_path):
    transform = image_text_transform(str(write_image_checkpoint(image_text_model(CONFIGS["mistral3"]()), tmp_path)))
    with pytest.raises(DataError, match=r"image 1 of 1: .* no videos"):
        transform(turns(part(video(2))))
