"""Measure the memory of loading images: page-size photographs of documents, packed or in batches of rows.

    python benchmarks/bench_images.py --checkpoint FOLDER                       # 10,000 images, 50 steps
    python benchmarks/bench_images.py --checkpoint FOLDER --packed --steps 200

FOLDER is a checkpoint of a model with image tokens; its tokenizer, processor and config.json are read, no weights.
Eight distinct JPEG files of 1,700 x 2,200 pixels (a page with 200 dots an inch) stand behind all file names. The
dataset is prepared as for a run, then steps are loaded one after the other, of as many images as a step of the
configs has (2 rows, 8 micro-batches). Printed are the seconds of both, the bytes of images in a step, the bound on
them that follows from max_seq_len, and the peak of the process's resident memory, beside that before preparation.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

WIDTH, HEIGHT, FILES = 1700, 2200, 8
MIB = 2**20


def write_pages(folder: Path, count: int) -> Path:
    """Rows of a question about a page, whose files are links to a few."""
    from PIL import Image, ImageDraw

    rng = np.random.default_rng(0)
    for number in range(FILES):
        page = Image.new("RGB", (WIDTH, HEIGHT), "white")
        draw = ImageDraw.Draw(page)
        for line in range(60):
            draw.text((100, 60 + 35 * line), " ".join(rng.integers(0, 99_999, 28).astype(str)), "black")
        page.save(folder / f"page_{number}.jpg", quality=90)
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(count):
            os.link(folder / f"page_{number % FILES}.jpg", folder / f"{number}.jpg")
            file.write(json.dumps({"input": "What is written?", "output": "Numbers.", "image": f"{number}.jpg"}) + "\n")
    return folder / "rows.jsonl"


def peak() -> float:
    """Largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="folder of a checkpoint")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--max-seq-len", type=int, default=8192)
    parser.add_argument("--packed", action="store_true")
    given = parser.parse_args()

    from torchtune.data import BatchLoader, collate_documents
    from torchtune.datasets.multimodal import vqa_dataset
    from torchtune.models import image_text_transform

    with tempfile.TemporaryDirectory() as folder:
        rows = write_pages(Path(folder), given.rows)
        transform = image_text_transform(given.checkpoint, max_seq_len=given.max_seq_len)
        before, started = peak(), time.perf_counter()
        dataset = vqa_dataset(transform, source=str(rows), image_dir=folder, packed=given.packed)
        prepared = time.perf_counter() - started
        print(f"prepared    {given.rows:,} rows in {prepared:.1f} s; peak {peak():,.0f} MiB, {before:,.0f} before")
        loader = BatchLoader(
            dataset, batch_size=given.batch_size, collate_fn=collate_documents, shuffle=True, seed=0,
            accumulation_steps=given.accumulation,
        )  # fmt: skip
        started, largest, images, after_ten = time.perf_counter(), 0, 0, 0.0
        for step, batches in enumerate(loader, 1):
            found = [batch.inputs["encoder_input"]["images"] for batch in batches]
            largest = max(largest, sum(one.pixels.numel() * one.pixels.element_size() for one in found))
            images += sum(len(one.grids) for one in found)
            loader.peek()
            after_ten = peak() if step == min(10, given.steps) else after_ten
            if step == given.steps:
                break
        seconds = time.perf_counter() - started
        processor = transform.processor
        of_token = 3 * (processor.patch_size * processor.merge) ** 2
        bound = given.batch_size * given.accumulation * given.max_seq_len * of_token
        print(f"loaded      {images:,} images in {step:,} steps, {seconds / images:.3f} s an image")
        print(f"a step      {largest / MIB:,.0f} MiB of pixels at most; bound by max_seq_len {bound / MIB:,.0f} MiB")
        print(f"peak        {peak():,.0f} MiB; after the first ten steps {after_ten:,.0f} MiB")


if __name__ == "__main__":
    main()
