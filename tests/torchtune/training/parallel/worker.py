"""What torchrun starts: runs every case of ``cases.json`` and writes how far it is from one process."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.torchtune.training.parallel.compositions import CPU, run
from torchtune.training import ParallelDims


def differences(found: Any, wanted: Any) -> dict[str, float]:
    """Largest relative differences of losses, norms and gradients."""
    (losses, gradients, norms), (losses_one, gradients_one, norms_one) = found, wanted
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, losses_one, strict=True)),
        "norm": max(abs(a - b) / abs(b) for a, b in zip(norms, norms_one, strict=True)),
        "gradient": max(
            float((gradients[name] - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
            for name, wanted in gradients_one.items()
        ),
        "missing": len(gradients.keys() ^ gradients_one.keys()),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    alone: dict[str, Any] = {}
    outcomes = {}
    for name, (sizes, settings, options) in json.loads((folder / "cases.json").read_text()).items():
        settings = dict(settings)
        checkpoint = folder / settings.pop("source", f"tied_{settings.pop('tied', True)}")
        dims = ParallelDims.start(CPU, **{"dp_shard": 1, **sizes})
        found = run(checkpoint, dims, **settings, **options)
        key = f"{checkpoint} {settings}"
        if key not in alone:
            alone[key] = run(checkpoint, ParallelDims(), **settings)
        outcomes[name] = differences(found, alone[key])
    if dist.get_rank() == 0:
        (folder / "outcomes.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
