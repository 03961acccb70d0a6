"""``tune data prepare``."""

import time
from pathlib import Path
from typing import Any

from torchtune.utils import UserError


def prepare_config(cfg: Any, output: Path, processes: int | None) -> None:
    """Tokenize the datasets of a recipe's settings into a folder.

    Args:
        cfg: settings of a training recipe.
        output: the folder; matching files in it are reused.
        processes: number of worker processes; by default one per core.

    Raises:
        DataError: rows cannot be trained on or written; no partial files are left.
    """
    from torchtune import config
    from torchtune.datasets import instantiate_dataset, preparing, workers
    from torchtune.estimate import nodes_of
    from torchtune.supervision import count_tokens
    from torchtune.training import context_length

    tokenizer, longest = config.instantiate(cfg.tokenizer), context_length(cfg)
    parts = {"dataset": cfg.dataset, "dataset_val": cfg.dataset_val}
    for name, node in parts.items():
        if node is None:
            continue
        started = time.monotonic()
        with preparing(output), workers(processes):
            dataset = instantiate_dataset(node, tokenizer, longest)
        tokens = count_tokens(dataset)
        if tokens is None:
            if dataset.is_stream:
                raise UserError(f"{name}: a stream is tokenized during training: remove streaming to prepare it.")
            raise UserError(f"{name}: rows with images are tokenized during training: train without preparing them.")
        kind = "packs" if dataset.is_packed else "rows"
        took = time.monotonic() - started
        print(f"{name}: {len(dataset):,} {kind}, {tokens:,} tokens in {output}, {took:.1f} s. Use them with")
        alone = nodes_of(node)[0] is node
        print(f"  {name}.prepared={output}" if alone else f"  prepared: {output}  # in every node of {name}")
