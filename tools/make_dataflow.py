"""Draw docs/dataflow.svg, the picture of docs/overview.rst: how data and weights flow through a training run.

python tools/make_dataflow.py
"""

from pathlib import Path
from xml.sax.saxutils import escape

OUTPUT = Path(__file__).parents[1] / "docs" / "dataflow.svg"

# Per row, from left to right: (title, name in code) of each box.
DATA = (
    (
        ("a row of JSONL", "dataset.source"),
        ("messages → tokens, labels", "SFTDataset · SFTTransform"),
        ("documents of a micro-batch", "BatchLoader · collate_documents"),
        ("tokens, labels, boundaries", "Batch"),
    ),
    (
        ("hidden states", 'model(…, output="hidden")'),
        ("sum and count of the loss", "loss_fn.sum_and_count"),
        ("÷ labels of the global step", "compute_loss(batch) / num_labels"),
        ("gradients", "loss.backward"),
    ),
    (
        ("gradient norm ≤ limit", "clip_grad_norm_"),
        ("skip if not finite", "StepGuard.accepts"),
        ("new weights", "optimizer.step"),
        ("checkpoint due?", "RunControl.checkpoint_due"),
    ),
)
WEIGHTS = (
    (
        ("shard file", "model-00001-of-0000N.safetensors"),
        ("names and layouts", "WeightMap.select → Group"),
        ("stored form, e.g. quantized", "Conversion.from_full"),
        ("sharded parameter", "DTensor"),
    ),
    (
        ("Hugging Face or PEFT files", "model.safetensors · adapter/"),
        ("their names and layouts", "Group.to_external"),
        ("full or merged weight", "Conversion.to_full, merged"),
        ("state for resume", "training_state"),
    ),
)

WIDTH = 1160
LEFT = 14  # margin
BOX = 254  # width of a box
HEIGHT = 58  # of a box
GAP = 30  # between two boxes of a row
ROW = 96  # from the top of a row to the top of the next one
DATA_TOP = 44
WEIGHTS_TOP = 356

# Mid-gray arrows, and text on filled boxes: readable on light and dark pages.
STYLE = """
    text { font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; text-anchor: middle; }
    .title { font-size: 15px; font-weight: 600; fill: #102030; }
    .code { font-size: 12.5px; font-family: ui-monospace, "DejaVu Sans Mono", monospace; fill: #33475b; }
    .head { font-size: 16px; font-weight: 700; text-anchor: start; fill: #808890; }
    .note { font-size: 13px; fill: #808890; }
    .data { fill: #cfe3f7; stroke: #5b8fc4; }
    .weights { fill: #fbe0bd; stroke: #cc8f3d; }
    .arrow { fill: none; stroke: #808890; stroke-width: 2; marker-end: url(#tip); }"""


def _left(column: int) -> int:
    """Return the left edge of a box."""
    return LEFT + column * (BOX + GAP)


def _middle(column: int) -> int:
    """Return the horizontal middle of a box."""
    return _left(column) + BOX // 2


def _box(kind: str, column: int, top: int, title: str, code: str) -> list[str]:
    """Draw a box with its title and a name in code."""
    middle = _middle(column)
    return [
        f'<rect class="{kind}" x="{_left(column)}" y="{top}" width="{BOX}" height="{HEIGHT}" rx="7"/>',
        f'<text class="title" x="{middle}" y="{top + 25}">{escape(title)}</text>',
        f'<text class="code" x="{middle}" y="{top + 45}">{escape(code)}</text>',
    ]


def _arrow(*points: tuple[int, int]) -> str:
    """Draw an arrow along some points, with its tip at the last one."""
    line = " L ".join(f"{x} {y}" for x, y in points)
    return f'<path class="arrow" d="M {line}"/>'


def _rows(kind: str, rows: tuple, top: int) -> list[str]:
    """Draw the boxes of each row, with arrows from each to the next one on its right."""
    elements = []
    for number, row in enumerate(rows):
        row_top = top + number * ROW
        y = row_top + HEIGHT // 2
        for column, (title, code) in enumerate(row):
            elements += _box(kind, column, row_top, title, code)
            if column > 0:
                elements.append(_arrow((_left(column) - GAP, y), (_left(column) - 3, y)))
    return elements


def _back(top: int) -> str:
    """Draw an arrow from the last box of a row to the first one of the next row."""
    right = _middle(3)
    left = _middle(0)
    between = top + HEIGHT + (ROW - HEIGHT) // 2  # half-way between the rows
    return _arrow((right, top + HEIGHT), (right, between), (left, between), (left, top + ROW - 3))


def picture() -> str:
    """Return the text of the SVG."""
    load = WEIGHTS_TOP
    save = WEIGHTS_TOP + ROW
    save_row = []
    for column in range(4):
        save_row += _box("weights", column, save, *WEIGHTS[1][column])
    for column in (1, 2):  # from right to left: from the parameters to the files
        y = save + HEIGHT // 2
        save_row.append(_arrow((_left(column), y), (_left(column) - GAP + 3, y)))
    body = [
        f'<text class="head" x="{LEFT}" y="28">Data: from a row to an optimizer step</text>',
        *_rows("data", DATA, DATA_TOP),
        _back(DATA_TOP),
        _back(DATA_TOP + ROW),
        f'<text class="head" x="{LEFT}" y="{load - 14}">Weights: from a shard file to a parameter and back</text>',
        *_rows("weights", WEIGHTS[:1], load),
        *save_row,
        # The optimizer updates the parameters; both kinds of files are written from them.
        _arrow(
            (_middle(2), DATA_TOP + 2 * ROW + HEIGHT),
            (_middle(2), load - 30),
            (_middle(3) - 40, load - 30),
            (_middle(3) - 40, load - 3),
        ),
        f'<text class="note" x="{_middle(3) + 30}" y="{load - 14}">updates</text>',
        _arrow((_middle(3), load + HEIGHT), (_middle(3), save - 3)),
        _arrow(
            (_middle(3) - 60, load + HEIGHT),
            (_middle(3) - 60, save - 19),
            (_middle(2), save - 19),
            (_middle(2), save - 3),
        ),
    ]
    height = save + HEIGHT + 16
    lines = "\n".join(f"  {line}" for line in body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"  <title>How data and weights flow through a training run</title>\n  <style>{STYLE}\n  </style>\n"
        '  <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto">'
        '<path d="M 0 0 L 8 4 L 0 8 z" fill="#808890"/></marker>\n'
        f"{lines}\n</svg>\n"
    )


if __name__ == "__main__":
    OUTPUT.write_text(picture(), encoding="utf-8")
