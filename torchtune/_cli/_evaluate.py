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
        data, (node, length) = Path("dataset_val"), _validation_data(args.model)
    else:
        data, length = args.data.expanduser(), None
        node = _perplexity_node(data, args) if args.perplexity else None
    rows, scores = [], evaluation.make_scores(args.score)
    if scores:
        columns = {"prompt": args.prompt, "answer": args.answer, "system": args.system}
        rows = evaluation.read_eval_rows(data, **columns, limit=args.limit)
        evaluation.check_scores(scores, rows, data)
    path = args.output / f"{data.stem}.results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = [_evaluate(*each, args, data, rows, scores, node, length) for each in args.models]
    print("\n".join([*_format_table(found), *_format_remarks(found, args)]))
    results = {"data": str(data), "rows": len(rows), "models": [_result_entry(each, args) for each in found]}
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
    row = first[1]
    kind, reader = format_of(row) if isinstance(row, dict) else ("no mappings", "")
    if kind == "prompts with answers" and isinstance(row.get("question"), str):
        reader = "instruct_dataset column_map.input=question column_map.output=answer"
    elif not reader or reader.startswith(("prompt_", "preference_", "kto_")):
        raise UserError(
            f"{data}: its rows are {kind}, but perplexity needs texts or conversations: use --score, or another file."
        )
    return dataset_node(data, (kind, reader), [f"split=train[:{args.limit}]"] if args.limit else [])


def _evaluate(
    folder: str,
    adapter: str | None,
    args: argparse.Namespace,
    data: Path,
    rows: Any,
    scores: Any,
    node: Any,
    length: int | None,
) -> dict[str, Any]:
    images = node is not None or any(row.has_images for row in rows)
    model, tokenizer = torchtune.load(folder, adapter=adapter, dtype=args.dtype, device=args.device, images=images)
    check_generates(model)
    dtype = training.precision.DTYPE_NAMES[text_decoder(model).tok_embeddings.weight.dtype]
    found: dict[str, Any] = {"model": folder, "adapter": adapter, "dtype": dtype, "perplexity": None, "answers": None}
    if node is not None:
        tokenizer.max_seq_len = length or tokenizer.max_seq_len
        found["perplexity"] = evaluation.perplexity(model, instantiate_dataset(node, tokenizer))
    if scores:
        found["answers"] = evaluation.evaluate_answers(
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
    return found


def _result_entry(found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return a model's entry of the results file."""
    answers, measured = found["answers"], found["perplexity"]
    result: dict[str, Any] = {name: found[name] for name in ("model", "adapter", "dtype")}
    if answers is not None:
        scores = {}
        for name in answers.scores:
            mean, error = answers.mean(name)
            scores[name] = {"mean": mean, "standard_error": error, "unscored": answers.unscored(name)}
        result |= {"answers": str(answers.path), "scores": scores, "ends": answers.ends}
    if measured is not None:
        result["perplexity"] = {"loss": measured.loss, "perplexity": measured.value, "tokens": measured.tokens}
    return result


def _format_table(found: list[dict[str, Any]]) -> list[str]:
    last = found[-1]
    names = list(last["answers"].scores) if last["answers"] else []
    lines = [["", *names, *(["perplexity"] if last["perplexity"] else [])]]
    for each in found:
        cells = [each["model"] + (f" + {each['adapter']}" if each["adapter"] else "")]
        for name in names:
            mean, error = each["answers"].mean(name)
            cells.append(f"{mean:.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}"))
        lines.append([*cells, *([f"{each['perplexity'].value:.4g}"] if each["perplexity"] else [])])
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in lines]


def _format_remarks(found: list[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    lines = []
    first, last = found[0]["answers"], found[-1]["answers"]
    for name in last.scores if first is not last else ():
        if interval := compare_rows(*(dict(enumerate(each.scores[name])) for each in (first, last))):
            meaning = interval.meaning(less_is_better=False)
            lines.append(f"{name:<11} {interval}, {interval.pairs:,} rows: {meaning}")
    for each in found:
        if (answers := each["answers"]) is None:
            continue
        lines.append(f"answers     {answers.path}")
        limits = {"max_new_tokens": f"--max-new-tokens {args.max_new_tokens}", "context": "the model's context"}
        for end, limit in limits.items():
            if cut := answers.ends.get(end, 0):
                lines.append(f"            {cut:,} were truncated at {limit}, and scored so")
        for name in answers.scores:
            if count := answers.unscored(name):
                lines.append(f"            {count:,} could not be scored by {name} and are not in its mean")
    return lines


def eval_tasks(args: argparse.Namespace) -> None:
    """Evaluate the models and print a table for each; results and answers so far are in a folder per model.

    Raises:
        UserError: see :func:`torchtune.evaluation.find_tasks` and :func:`torchtune.evaluation.evaluate_tasks`.
    """
    tasks = evaluation.find_tasks([name.strip() for name in args.tasks.split(",") if name.strip()], args.include_path)
    for place, (folder, adapter) in enumerate(args.models, start=1):
        output = args.output / f"{place}_{Path(adapter or folder).resolve().name}"
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
        print(f"{folder}{f' + {adapter}' if adapter else ''}\n{results.table}\nresults     {output / 'results.json'}")
        del model
