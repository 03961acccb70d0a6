"""``tune eval``: evaluate one or two models on rows of a file, or on tasks of lm-eval, and print a table."""

import argparse
import math
from pathlib import Path
from typing import Any

import torchtune
from torchtune import evaluation, training
from torchtune._cli.data import dataset_node
from torchtune.datasets import format_of, instantiate_dataset, read_rows
from torchtune.generation import check_generates
from torchtune.modules import text_decoder
from torchtune.reports import SETTINGS, RunFolder, compare_rows
from torchtune.utils import UserError, valid_json, write_json


def eval_rows(args: argparse.Namespace) -> None:
    """Evaluate the models on rows, as the arguments of ``tune eval`` define.

    Raises:
        UserError: see :mod:`torchtune.evaluation`; raised before a model is loaded if possible.
    """
    if args.data is None:
        data = Path("dataset_val")
        node, max_seq_len = _validation_data(args.model)
    else:
        data = args.data.expanduser()
        node = _perplexity_node(data, args) if args.perplexity else None
        max_seq_len = None
    rows = []
    scores = evaluation.make_scores(args.score)
    if scores:
        columns = {"prompt": args.prompt, "answer": args.answer, "system": args.system}
        rows = evaluation.read_eval_rows(data, **columns, limit=args.limit)
        evaluation.check_scores(scores, rows, data)
    path = args.output / f"{data.stem}.results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    evaluations = [
        _evaluate(folder, adapter, args, data, rows, scores, node, max_seq_len) for folder, adapter in args.models
    ]
    print("\n".join([*_format_table(evaluations), *_format_remarks(evaluations, args)]))
    results = {"data": str(data), "rows": len(rows), "models": [_result_entry(result) for result in evaluations]}
    write_json(path, valid_json(results))  # unknown numbers are null
    print(f"results     {path}")


def _validation_data(model: str) -> tuple[Any, int | None]:
    """Return the ``dataset_val`` of a checkpoint's run, and the maximum sequence length."""
    settings = RunFolder(model).settings if (Path(model).expanduser() / SETTINGS).is_file() else {}
    if not settings.get("dataset_val"):
        raise UserError(
            f"there is nothing to measure: {model} is not of a run with dataset_val: give rows in --data, or --tasks."
        )
    return settings["dataset_val"], settings["tokenizer"].get("max_seq_len")


def _perplexity_node(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the dataset node for the perplexity of the rows of a file."""
    if args.prompt or args.answer or args.system:
        raise UserError("--prompt, --answer and --system need --score: --perplexity reads rows as training does.")
    first = next(read_rows(data), None) if data.is_file() and data.stat().st_size else None
    if first is None:
        raise UserError(f"{data}: there is no such file, or it has no rows: correct the path.")
    _, row = first
    if isinstance(row, dict):
        kind, reader = format_of(row)
    else:
        kind, reader = "no mappings", ""
    if kind == "prompts with answers" and isinstance(row.get("question"), str):
        reader = "instruct_dataset column_map.input=question column_map.output=answer"
    elif not reader or reader.startswith(("prompt_", "preference_", "kto_")):
        raise UserError(
            f"{data}: its rows are {kind}, but perplexity needs texts or conversations: use --score, or another file."
        )
    overrides = [f"split=train[:{args.limit}]"] if args.limit else []
    return dataset_node(data, (kind, reader), overrides)


def _evaluate(
    folder: str,
    adapter: str | None,
    args: argparse.Namespace,
    data: Path,
    rows: Any,
    scores: Any,
    node: Any,
    max_seq_len: int | None,
) -> dict[str, Any]:
    """Evaluate one model.

    Args:
        folder: the checkpoint.
        adapter: folder of an adapter for it, or ``None``.
        args: arguments of ``tune eval``.
        data: file of the rows, for messages and the names of the answers.
        rows: rows to answer.
        scores: scores of the answers; without any, no row is answered.
        node: dataset node whose perplexity is measured, or ``None``.
        max_seq_len: maximum tokens of a row of the dataset; by default the tokenizer's.

    Returns:
        ``model``, ``adapter`` and ``dtype``; ``perplexity`` and ``answers``, None if they were not measured.
    """
    images = node is not None or any(row.has_images for row in rows)
    model, tokenizer = torchtune.load(folder, adapter=adapter, dtype=args.dtype, device=args.device, images=images)
    check_generates(model)
    dtype = training.precision.DTYPE_NAMES[text_decoder(model).tok_embeddings.weight.dtype]
    perplexity = None
    if node is not None:
        tokenizer.max_seq_len = max_seq_len or tokenizer.max_seq_len
        perplexity = evaluation.perplexity(model, instantiate_dataset(node, tokenizer))
    answers = None
    if scores:
        answers = evaluation.evaluate_answers(
            model,
            tokenizer,
            rows,
            scores,
            source=data,
            folder=args.output,
            label=Path(adapter or folder).resolve().name,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            seed=args.seed,
            max_sequences=args.max_sequences,
        )
    return {"model": folder, "adapter": adapter, "dtype": dtype, "perplexity": perplexity, "answers": answers}


def _result_entry(result: dict[str, Any]) -> dict[str, Any]:
    """Return a model's entry of the results file."""
    entry: dict[str, Any] = {name: result[name] for name in ("model", "adapter", "dtype")}
    answers = result["answers"]
    if answers is not None:
        scores = {}
        for name in answers.scores:
            mean, error = answers.mean(name)
            scores[name] = {"mean": mean, "standard_error": error, "unscored": answers.unscored(name)}
        entry |= {"answers": str(answers.path), "scores": scores, "ends": answers.ends}
    perplexity = result["perplexity"]
    if perplexity is not None:
        entry["perplexity"] = {
            "loss": perplexity.loss,
            "perplexity": perplexity.value,
            "tokens": perplexity.tokens,
        }
    return entry


def _format_table(evaluations: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table: a row for each model, a column for each score and for the perplexity."""
    # All models are measured in the same way, so that any of them has the names of the columns.
    last = evaluations[-1]
    names = list(last["answers"].scores) if last["answers"] else []
    header = ["", *names]
    if last["perplexity"]:
        header.append("perplexity")
    table = [header]
    for result in evaluations:
        label = result["model"]
        if result["adapter"]:
            label += f" + {result['adapter']}"
        cells = [label]
        for name in names:
            mean, error = result["answers"].mean(name)
            cells.append(f"{mean:.3f}" if math.isnan(error) else f"{mean:.3f} ± {error:.3f}")
        if result["perplexity"]:
            cells.append(f"{result['perplexity'].value:.4g}")
        table.append(cells)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for cells in table:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return lines


def _format_remarks(evaluations: list[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """Return the lines under the table: the comparison of two models, and what is to be known of the answers."""
    lines = []
    first = evaluations[0]["answers"]
    last = evaluations[-1]["answers"]
    if first is not last:
        for name in last.scores:
            interval = compare_rows(dict(enumerate(first.scores[name])), dict(enumerate(last.scores[name])))
            if interval:
                meaning = interval.meaning(less_is_better=False)
                lines.append(f"{name:<11} {interval}, {interval.pairs:,} rows: {meaning}")
    for result in evaluations:
        answers = result["answers"]
        if answers is None:
            continue
        lines.append(f"answers     {answers.path}")
        limits = {"max_new_tokens": f"--max-new-tokens {args.max_new_tokens}", "context": "the model's context"}
        for end, limit in limits.items():
            num_truncated = answers.ends.get(end, 0)
            if num_truncated:
                lines.append(f"            {num_truncated:,} were truncated at {limit}, and scored so")
        for name in answers.scores:
            num_unscored = answers.unscored(name)
            if num_unscored:
                lines.append(f"            {num_unscored:,} could not be scored by {name} and are not in its mean")
    return lines


def eval_tasks(args: argparse.Namespace) -> None:
    """Evaluate the models and print a table for each; results and answers so far are in a folder per model.

    Raises:
        UserError: see :func:`torchtune.evaluation.find_tasks` and :func:`torchtune.evaluation.evaluate_tasks`.
    """
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    tasks = evaluation.find_tasks(names, args.include_path)
    for number, (folder, adapter) in enumerate(args.models, start=1):
        output = args.output / f"{number}_{Path(adapter or folder).resolve().name}"
        model, tokenizer = torchtune.load(folder, adapter=adapter, dtype=args.dtype, device=args.device)
        results = evaluation.evaluate_tasks(
            model,
            tokenizer,
            tasks,
            batch_size=args.max_sequences,
            limit=args.limit,
            chat_template=args.chat_template,
            seed=args.seed,
            folder=output,
        )
        print(f"{folder} + {adapter}" if adapter else folder)
        print(f"{results.table}\nresults     {output / 'results.json'}")
        del model  # before the next one is loaded
