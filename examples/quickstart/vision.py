"""A language model that learns to see: what `make vision` runs.

SmolLM2-135M-Instruct knows text alone. Here it gets a vision tower of four small layers and a projector, both with
random weights, in the layout of Mistral 3. First the tower learns alone: the tokens of a picture shall resemble the
embedding of its text, which is cheap, because the language model does not run. Then the language model learns to
answer from them, by the ordinary recipe of LoRA with a frozen tower. Before and after, it reads held-out pictures:
scikit-learn's handwritten digits, and rendered words. The report shows all of them.
"""

import base64
import csv
import gzip
import json
import random
import shutil
import zipfile
from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import save_file
from steps import HERE, MODEL, OUT, download_wheel, fetch_model, run_recipe, say

import torchtune
from torchtune.data import Images, Message, open_image
from torchtune.models import from_hf_config

RUN = OUT / "vision"
PICTURES = OUT / "pictures"
WITH_EYES, ALIGNED = OUT / "SmolLM2-135M-vision", OUT / "SmolLM2-135M-aligned"
DIGITS = OUT / "digits.csv"
WORDS = (  # each is one token
    "apple bear bird blue boat book bread brown chair city cloud corn dark door fire fish game gold grass green hand "
    "home horse iron king lake milk moon night ocean paper rain red river salt ship snow song star stone sugar table "
    "tree wall water wind winter wood"
).split()
TRAIN, HELD_OUT = 3000, 100  # pictures of each kind
ALIGN_STEPS, ALIGN_SIZE, STEPS = 600, 64, 64
PATCH, MERGE, WIDTH = 4, 4, 192  # a token for 16 x 16 pixels
# Tokens that no text has become those of images.
TOKENS = {"<jupyter_script>": "[IMG]", "<jupyter_output>": "[IMG_BREAK]", "<empty_output>": "[IMG_END]"}
QUESTION = "Read it."


def fetch_digits() -> None:
    """Take the table of scikit-learn's digits, 8 x 8 pixels each, out of its wheel."""
    if DIGITS.exists():
        return
    downloads, wheel = download_wheel("scikit-learn", "scikit_learn")
    with zipfile.ZipFile(wheel) as archive:
        table = gzip.decompress(archive.read("sklearn/datasets/data/digits.csv.gz"))
    shutil.rmtree(downloads)
    DIGITS.write_bytes(table)


def draw_digits() -> Iterator[tuple[Image.Image, str]]:
    """Yield pictures of digits, and the digits."""
    with DIGITS.open() as file:
        rows = [[int(float(value)) for value in row] for row in csv.reader(file)]
    random.Random(0).shuffle(rows)
    for *pixels, digit in rows:
        small = Image.fromarray(np.array(pixels, np.uint8).reshape(8, 8) * 15)
        yield small.resize((16, 16), Image.Resampling.BICUBIC), str(digit)


def draw_words(seed: int) -> Iterator[tuple[Image.Image, str]]:
    """Yield pictures of words in several sizes, places and shades, with noise, and the words."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    fonts = [ImageFont.load_default(size) for size in (11, 12, 13)]
    while True:
        word, font = rng.choice(WORDS), rng.choice(fonts)
        left, top, _, bottom = font.getbbox(word)
        paper, ink = rng.randrange(170, 256), rng.randrange(100)
        image = Image.new("L", (64, 16), paper)
        place = rng.randint(1 - left, 4 - left), rng.randint(1 - top, max(15 - bottom, 1 - top))
        ImageDraw.Draw(image).text(place, word, fill=ink, font=font)
        pixels = np.asarray(image, np.float32) + noise.normal(0, 8, (16, 64))
        yield Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), word


def write_data() -> None:
    """Write pictures and their texts, to learn from and to score on."""
    digits = list(draw_digits())
    parts = {"held_out": (digits[:HELD_OUT], 1, HELD_OUT), "train": (digits[HELD_OUT:], 2, TRAIN)}
    for name, (own, seed, size) in parts.items():
        (PICTURES / name).mkdir(parents=True, exist_ok=True)
        words, lines = draw_words(seed), []
        for index in range(size):
            for kind, (image, text) in (("digit", own[index % len(own)]), ("word", next(words))):
                path = PICTURES / name / f"{kind}_{index}.png"
                image.save(path)
                lines.append(json.dumps({"input": QUESTION, "output": text, "image": str(path), "kind": kind}))
        (PICTURES / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def write_model() -> None:
    """Write the checkpoint of SmolLM2 with a tower and a projector of random weights."""
    if WITH_EYES.exists():
        return
    folder = WITH_EYES.with_suffix(".part")
    folder.mkdir(exist_ok=True)
    tokens = (MODEL / "tokenizer.json").read_text()
    for old, new in TOKENS.items():
        tokens = tokens.replace(json.dumps(old), json.dumps(new))
    ids = {token["content"]: token["id"] for token in json.loads(tokens)["added_tokens"]}
    text = json.loads((MODEL / "config.json").read_text())
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    more = ("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta")
    text = {name: text[name] for name in (*sizes, *more, "tie_word_embeddings") if name in text}
    tower = {"patch_size": PATCH, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 4}
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": ids["[IMG]"],
        "spatial_merge_size": MERGE,
        "tie_word_embeddings": True,
        "text_config": {**text, "model_type": "mistral", "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **tower, "num_attention_heads": 6, "hidden_act": "gelu"},
    }
    colors = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor = {"patch_size": PATCH, "size": {"longest_edge": 64}, **colors}
    (folder / "tokenizer.json").write_text(tokens)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    shutil.copy(MODEL / "tokenizer_config.json", folder)
    shutil.copy(HERE / "data" / "vision.jinja", folder / "chat_template.jinja")
    torch.manual_seed(0)
    model = from_hf_config(folder, images=True)
    model.decoder.load_state_dict(torchtune.load(MODEL, device="cpu", dtype="fp32")[0].state_dict())
    weights = ((name, weight.detach()) for name, weight in model.named_parameters())
    names = model.spec.weight_map("hf")
    save_file(dict(names.to_external(weights, model.description)), folder / "model.safetensors", {"format": "pt"})
    folder.rename(WITH_EYES)


def align() -> None:
    """Train tower and projector: the tokens of a picture shall resemble the embedding of its text."""
    if ALIGNED.exists():
        return
    model, transform = torchtune.load(WITH_EYES, device="cpu", dtype="fp32", images=True)
    texts = [*map(str, range(10)), *WORDS]
    ids = [transform.encode(text, add_bos=False, add_eos=False)[0] for text in texts]
    answers = model.tok_embeddings.weight.detach()[ids]
    rows, processor = read_rows("train"), transform.processor
    tower = model.encoder.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(tower.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=ALIGN_STEPS)
    for step in range(ALIGN_STEPS):
        some = [rows[(step * ALIGN_SIZE + index) % len(rows)] for index in range(ALIGN_SIZE)]
        some.sort(key=lambda row: row["kind"])  # attention runs once for pictures of a size
        pictures = [open_image(row["image"]) for row in some]
        plans = [processor.plan(picture.size) for picture in pictures]
        pixels = torch.from_numpy(np.concatenate([processor.pixels(picture) for picture in pictures]))
        grids = tuple(grid for plan in plans for grid in plan.grids)
        (tokens,) = tower(Images(pixels, grids, colors=processor.colors))
        right = torch.tensor([texts.index(row["output"]) for row in some])
        right = right.repeat_interleave(torch.tensor([plan.tokens for plan in plans]))
        loss = torch.nn.functional.cross_entropy(tokens @ answers.T, right)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 49:
            print(f"step {step + 1} of {ALIGN_STEPS}, loss {loss.item():.3f}", flush=True)
    torchtune.save(model, ALIGNED)


def train() -> Path:
    """Run the recipe as a user does."""
    return run_recipe(
        "lora_finetune_single_device",
        "smol/135M_lora_single_device",
        ALIGNED,
        RUN,
        [
            "model._component_=torchtune.models.lora_image_text_model",
            f"model.checkpoint_dir={ALIGNED}",
            "tokenizer._component_=torchtune.models.image_text_transform",
            "dataset._component_=torchtune.datasets.multimodal.vqa_dataset",
            f"dataset.source={PICTURES / 'train.jsonl'}",
            "batch_size=16",
            "epochs=1",
            f"max_steps_per_epoch={STEPS}",
            "dtype=fp32",
            "optimizer.lr=1e-3",
            "lr_scheduler.num_warmup_steps=5",
        ],
    )


def score(folder: Path) -> tuple[dict[str, float], list[str]]:
    """Return the share of right readings of held-out digits and words, and all readings."""
    model, transform = torchtune.load(folder, device="cpu", dtype="fp32", images=True)
    rows = read_rows("held_out")
    questions = [
        [Message("user", [{"type": "image", "content": row["image"]}, {"type": "text", "content": QUESTION}])]
        for row in rows
    ]
    read = torchtune.generate(model, transform, questions, max_new_tokens=6, temperature=0)
    right = [(row["kind"], text.strip() == row["output"]) for row, text in zip(rows, read, strict=True)]
    shares = {kind: sum(is_right for k, is_right in right if k == kind) / HELD_OUT for kind in ("digit", "word")}
    return shares, read


def read_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of "train" or "held_out"."""
    return [json.loads(line) for line in (PICTURES / f"{name}.jsonl").read_text().splitlines()]


def write_report(path: Path, before: list[str], after: list[str]) -> None:
    """Write a page with every held-out picture and what was read before and after."""
    lines = ["<!doctype html><meta charset=utf-8><title>Pictures that were read</title>"]
    lines.append("<table><tr><th>picture<th>right<th>after<th>before")
    for row, first, last in zip(read_rows("held_out"), before, after, strict=True):
        data = base64.b64encode(Path(row["image"]).read_bytes()).decode()
        color = "black" if last.strip() == row["output"] else "crimson"
        picture = f'<img height=48 src="data:image/png;base64,{data}">'
        cells = [picture, row["output"], f'<span style="color:{color}">{escape(last)}</span>', escape(first[:40])]
        lines.append("<tr>" + "".join(f"<td>{cell}" for cell in cells))
    path.write_text("\n".join(lines) + "\n</table>\n")


def main() -> None:
    """Run all steps."""
    fetch_model()
    fetch_digits()
    write_data()
    write_model()
    say(f"Scoring the model with untrained eyes on {HELD_OUT} digits and {HELD_OUT} words")
    before, first = score(WITH_EYES)
    say(f"{before['digit']:.0%} of the digits and {before['word']:.0%} of the words. The tower learns alone:\n")
    align()
    say("The language model learns to answer:\n")
    tuned = train()
    say("Scoring it on the same pictures")
    after, last = score(tuned)
    write_report(OUT / "vision.html", first, last)
    (OUT / "vision.json").write_text(json.dumps({"before": before, "after": after}, indent=2) + "\n")
    say(
        f"Exactly right: digits {before['digit']:.0%} before, {after['digit']:.0%} after; words "
        f"{before['word']:.0%} before, {after['word']:.0%} after."
    )
    print(f"""
  model with a vision tower      {tuned}
  every held-out picture         {OUT / "vision.html"}
  verdict and curves             {RUN / "report.html"}
  metrics of every step          {RUN / "logs" / "log.jsonl"}

Show it a picture yourself:
  .venv/bin/tune chat --model {tuned} --image {PICTURES / "held_out" / "word_0.png"} --temperature 0""")


if __name__ == "__main__":
    main()
