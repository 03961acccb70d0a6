"""What torchrun starts on two ranks: a model that they share is measured as one process measures it."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchtune
from torchtune._facade import load_adapted_shard
from torchtune.evaluation import evaluate_answers, make_scores, perplexity, read_eval_rows
from torchtune.generation import model_digest
from torchtune.training.parallel import is_sharded, sequence_multiple
from torchtune.utils import UserError

TEXTS = [[5, 6, 7, 40, 41], [9, 11], [7, 7, 7, 7, 12, 30, 31]]
ROWS = [{"tokens": tokens, "labels": [*tokens[1:], -100]} for tokens in TEXTS]


def load(checkpoint: Path, shards: str | None, **options: object) -> tuple:
    return torchtune.load(checkpoint, dtype="fp32", device="cpu", shards=shards, **options)


def largest_share(model: torch.nn.Module) -> float:
    """The most that a rank has of a matrix; each has all of the narrow ones of adapters."""
    matrices = []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "lora" not in name:
            matrices.append(parameter)
    return max(matrix.to_local().numel() / matrix.numel() for matrix in matrices)


def is_measured_as_alone(folder: Path, name: str, shards: str, **options: object) -> None:
    alone, tokenizer = load(folder / name, None, **options)
    model, _ = load(folder / name, shards, **options)
    assert is_sharded(model)
    assert largest_share(model) == 0.5
    assert model_digest(model, tokenizer) == model_digest(alone, tokenizer)
    measured = perplexity(model, ROWS, batch_size=2)
    expected = perplexity(alone, ROWS, batch_size=2)
    assert measured.tokens == expected.tokens
    assert measured.loss == pytest.approx(expected.loss, rel=1e-5)
    rank = dist.get_rank()
    data = folder / "rows.jsonl"
    rows = read_eval_rows(data)
    settings = {
        "source": data,
        "max_new_tokens": 5,
        "temperature": 0.8,
        "seed": 3,
        "label": f"{name} {shards} {len(options)}",
    }
    together = evaluate_answers(model, tokenizer, rows, make_scores(["regex:a"]), folder=folder / "shared", **settings)
    by_one = evaluate_answers(
        alone, tokenizer, rows, make_scores(["regex:a"]), folder=folder / f"alone {rank}", **settings
    )
    assert together.scores == by_one.scores
    assert together.ends == by_one.ends
    dist.barrier()  # the first rank has written the file
    assert together.path.read_bytes() == by_one.path.read_bytes()
    # What one process has answered is not answered again by several.
    answers = [json.loads(line) for line in by_one.path.read_text().splitlines()]
    for answer in answers:
        answer["answer"] = "a"
    cached = folder / "kept" / by_one.path.name
    if rank == 0:
        cached.parent.mkdir(exist_ok=True)
        cached.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    dist.barrier()
    resumed = evaluate_answers(model, tokenizer, rows, make_scores(["regex:a"]), folder=cached.parent, **settings)
    assert resumed.mean("regex")[0] == 1.0


def adapter_shares_the_base(folder: Path) -> None:
    """``tune serve --adapter`` in several processes: an adapter beside the model, whose weights are there once."""
    model, _ = load(folder / "checkpoint", "layers")
    before = perplexity(model, ROWS, batch_size=2)
    adapted = load_adapted_shard(model, folder / "checkpoint", folder / "adapter", dtype="fp32", device="cpu")
    base = set(map(id, model.parameters()))
    own_names = {name for name, parameter in adapted.named_parameters() if id(parameter) not in base}
    assert own_names
    assert all("lora_" in name for name in own_names)
    alone, _ = load(folder / "checkpoint", None, adapter=folder / "adapter")
    expected = perplexity(alone, ROWS, batch_size=2)
    assert perplexity(adapted, ROWS, batch_size=2).loss == pytest.approx(expected.loss, rel=1e-5)
    assert perplexity(model, ROWS, batch_size=2).loss == before.loss != expected.loss
    sharded, _ = load(folder / "checkpoint", "parameters")
    with pytest.raises(UserError, match="merge the adapter with tune export"):
        load_adapted_shard(sharded, folder / "checkpoint", folder / "adapter", dtype="fp32", device="cpu")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    is_measured_as_alone(folder, "checkpoint", "layers")
    is_measured_as_alone(folder, "checkpoint", "parameters")
    is_measured_as_alone(folder, "checkpoint", "layers", adapter=folder / "adapter")
    adapter_shares_the_base(folder)
    model, _ = load(folder / "checkpoint", "layers")
    assert sequence_multiple(model) == 2
    # Two ranks cannot split one key head, so that they shard parameters.
    is_measured_as_alone(folder, "one key head", "layers")
    model, _ = load(folder / "one key head", "layers")
    assert sequence_multiple(model) == 1
    dist.barrier()
    dist.destroy_process_group()
