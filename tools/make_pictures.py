"""Draw docs/pictures: peak memory by lever, a device mesh, and loss curves, as SVG for light and dark pages.

python tools/make_pictures.py               # from the numbers in docs/tables
python tools/make_pictures.py --simulate    # simulate the levers again, about ten seconds each
python tools/make_pictures.py --log quickstart/run/logs/log.jsonl   # take the loss of a run of `make quickstart`
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import yaml

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
LEVERS = ROOT / "docs" / "tables" / "levers.yaml"
LOSSES = ROOT / "docs" / "tables" / "quickstart_loss.yaml"

# (label, config, overrides); each lever of full fine-tuning includes those above it.
_FULL = "llama3_1/8B_full_single_device"
_ROWS = ("tokenizer.max_seq_len=2048", "batch_size=2")
_ADAMW = ("optimizer=torch.optim.AdamW", *_ROWS)
_8_BIT = ("optimizer=torchao.optim.AdamW8bit", "~optimizer.fused", *_ROWS)
RUNS = (
    ("full fine-tuning", _FULL, (*_ADAMW, "optimizer_in_bwd=False", "enable_activation_checkpointing=False")),
    ("+ activation checkpointing", _FULL, (*_ADAMW, "optimizer_in_bwd=False")),
    ("+ 8-bit optimizer states", _FULL, (*_8_BIT, "optimizer_in_bwd=False")),
    ("+ optimizer in the backward pass", _FULL, (*_8_BIT, "optimizer_in_bwd=True")),
    ("LoRA", "llama3_1/8B_lora_single_device", _ROWS),
    ("QLoRA", "llama3_1/8B_qlora_single_device", _ROWS),
)
COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "other")
COLORS = "abcde"  # classes of the style, one for each component

STYLE = """
    svg { --text: #1d2733; --soft: #5a6773; --line: #d9dee4; --page: #ffffff;
          --a: #4a82bd; --b: #d98a3d; --c: #6fa56b; --d: #b5699e; --e: #9aa4ae; }
    @media (prefers-color-scheme: dark) {
      svg { --text: #dde3e9; --soft: #9aa6b2; --line: #343d47; --page: #14181d;
            --a: #6ba3de; --b: #e8a25c; --c: #86bf80; --d: #cc86b8; --e: #7f8b97; }
    }
    text { font: 14px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--text); }
    .small { font-size: 12.5px; fill: var(--soft); }
    .head { font-weight: 600; stroke: var(--page); stroke-width: 4; paint-order: stroke; }
    .on.head { stroke: none; }
    .end { text-anchor: end; }
    .middle { text-anchor: middle; }
    .line { stroke: var(--line); stroke-width: 1; fill: none; }
    .limit { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 5 4; }
    .curve { stroke: var(--a); stroke-width: 2; fill: none; }
    .frame { stroke: var(--soft); stroke-width: 1.2; fill: none; }
    .a { fill: var(--a); } .b { fill: var(--b); } .c { fill: var(--c); } .d { fill: var(--d); } .e { fill: var(--e); }
    .on { fill: var(--page); }"""


def _svg(width: int, height: int, title: str, body: Sequence[str]) -> str:
    """Return a picture of some elements."""
    lines = "\n".join(f"  {line}" for line in body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">\n'
        f"  <title>{escape(title)}</title>\n  <style>{STYLE}\n  </style>\n{lines}\n</svg>\n"
    )


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    """Draw a text on the baseline at ``y``; ``kind`` has classes of the style."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str, radius: int = 2) -> str:
    """Draw a rectangle with rounded corners."""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}"/>'


def _line(x: float, y: float, to_x: float, to_y: float, kind: str = "line") -> str:
    """Draw a straight line."""
    return f'<path class="{kind}" d="M {x:.1f} {y:.1f} L {to_x:.1f} {to_y:.1f}"/>'


def memory(levers: Sequence[dict[str, Any]]) -> str:
    """Draw a stacked bar of GiB by component for each lever."""
    left = 262  # the labels are on the left of it
    top = 62
    row = 44  # from a bar to the next one
    bar = row - 16  # height
    scale = 560 / 110  # pixels per GiB
    bottom = top + row * len(levers)
    body = []
    for index, component in enumerate(COMPONENTS):  # the legend
        x = left + index * 112
        body += [_box(x, 14, 12, 12, COLORS[index]), _text(x + 18, 25, component)]
    for gib in (24, 80):  # of common cards
        x = left + scale * gib
        body += [_line(x, top - 14, x, bottom, "limit"), _text(x, top - 18, f"{gib} GiB", "small middle")]
    for number, lever in enumerate(levers):
        x = float(left)
        y = top + number * row
        body.append(_text(left - 12, y + 19, lever["label"], "end"))
        for color, component in zip(COLORS, COMPONENTS, strict=True):
            part = scale * lever["gib"][component]
            if part > 0.5:  # thinner parts cannot be seen
                body.append(_box(x, y, part, bar, color))
            x += part
        body.append(_text(x + 8, y + 19, f"{sum(lever['gib'].values()):.1f} GiB", "head"))
    body.append(_line(left, top - 8, left, bottom))
    return _svg(830, bottom + 8, "Peak memory of fine-tuning Llama 3.1 8B by lever; the page has the numbers", body)


def mesh(replicas: int = 2, shards: int = 2, parts: int = 2) -> str:
    """Draw the ranks of two machines, with replicas, shards and tensor-parallel groups."""
    size = 150  # width of a rank
    height = 66  # of a rank
    gap = 12  # between two ranks
    left = 20
    step = 206  # from a machine to the next one
    group = parts * (size + gap) - gap + 24  # width of a shard's ranks, with a margin
    width = shards * (group + 16) + 16  # of a machine
    body = []
    for replica in range(replicas):
        top = 34 + replica * step
        body.append(_box(left, top, width, height + 84, "frame", 8))
        body.append(_text(left, top - 10, f"machine {replica}: replica {replica} of the model", "head"))
        for shard in range(shards):
            x = left + 16 + shard * (group + 16)
            rows = "ABCD"[replica * shards + shard]
            body.append(_box(x, top + 14, group, height + 56, "frame", 6))
            body.append(_text(x + 12, top + height + 58, f"half {shard + 1} of the parameters, rows {rows}", "small"))
            for part in range(parts):
                middle = x + 12 + part * (size + gap) + size / 2
                rank = (replica * shards + shard) * parts + part
                heads = "first heads" if part == 0 else "other heads"
                body.append(_box(middle - size / 2, top + 26, size, height, COLORS[part], 6))
                body.append(_text(middle, top + 54, f"rank {rank}", "head middle on"))
                body.append(_text(middle, top + 76, heads, "middle on"))
    note = "data_parallel_replicate_dim=2, data_parallel_shard_dim=2, tensor_parallel_dim=2"
    bottom = 34 + replicas * step - 40
    body.append(_text(left, bottom + 16, note, "small"))
    title = "Eight ranks: two replicas of two shards of two tensor-parallel ranks"
    return _svg(width + 2 * left, bottom + 26, title, body)


def loss(values: Sequence[float]) -> str:
    """Draw a loss curve with a logarithmic axis."""
    left = 70
    top = 24
    width = 700
    height = 270
    # The powers of ten around all values.
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))

    def x_of(step: int) -> float:
        return left + width * step / max(len(values) - 1, 1)

    def y_of(value: float) -> float:
        return top + height * (high - math.log10(value)) / (high - low)

    body = []
    for power in range(low, high + 1):
        y = y_of(10.0**power)
        body += [_line(left, y, left + width, y), _text(left - 10, y + 5, f"{10.0**power:g}", "small end")]
    for step in (1, *range(20, len(values) + 1, 20)):
        body.append(_text(x_of(step - 1), top + height + 22, str(step), "small middle"))
    points = " L ".join(f"{x_of(step):.1f} {y_of(value):.1f}" for step, value in enumerate(values))
    body.append(f'<path class="curve" d="M {points}"/>')
    body.append(_text(left + width, top + height + 42, "step", "small end"))
    return _svg(800, top + height + 54, "Loss of the quickstart by step", body)


def pictures() -> dict[str, str]:
    """Return the text of every picture by file name."""
    texts = {"mesh.svg": mesh()}
    if LEVERS.exists():
        texts["memory.svg"] = memory(yaml.safe_load(LEVERS.read_text()))
    if LOSSES.exists():
        texts["loss.svg"] = loss(yaml.safe_load(LOSSES.read_text())["loss"])
    return texts


def simulate(label: str, config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the peak memory of a run in GiB by component."""
    from torchtune._recipe_registry import recipe_named_by, resolve_config
    from torchtune.config import load_and_check
    from torchtune.estimate import estimate_run

    path = resolve_config(config)
    recipe_main = recipe_named_by(path).load_main()
    estimate = estimate_run(recipe_main, load_and_check(path, list(overrides), recipe_main))
    peak = max(estimate.peaks.values(), key=lambda phase_peak: phase_peak.total)
    gib = {name: round(peak.components[name] / 2**30, 2) for name in COMPONENTS}
    return {"label": label, "run": f"{config} {' '.join(overrides)}", "gib": gib}


def main() -> None:
    """Write all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="simulate the levers again")
    parser.add_argument("--log", type=Path, help="log.jsonl of the quickstart's run")
    args = parser.parse_args()
    if args.simulate:
        LEVERS.write_text(yaml.safe_dump([simulate(*run) for run in RUNS], sort_keys=False, width=200))
    if args.log:
        losses = []
        for line in args.log.read_text().splitlines():
            metrics = json.loads(line)
            if "loss" in metrics:  # not a validation
                losses.append(round(metrics["loss"], 4))
        LOSSES.write_text(yaml.safe_dump({"loss": losses}, default_flow_style=None))
    PICTURES.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (PICTURES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
