"""``tune eval``: evaluate one or two models on rows of a file, or on tasks of lm-eval, and print a table."""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import torchtune
from torchtune._cli._shorthands import dataset_node
from torchtune._cli.subcommand import (
    CHECKPOINT,
    Subcommand,
    add_placement,
    check_least,
    check_most,
    find_checkpoint,
    shared_by_processes,
)
from torchtune.utils import UserError, valid_json, write_json

_RERANK_FIRST = 100  # texts of a query that a reranker sorts by default


class Eval(Subcommand):
    """Subcommand that evaluates a model on rows of a file and on tasks of lm-eval."""

    name = "eval"
    help = "Score a model's answers to your rows, and compare it with another model"
    description = (
        "Answer every row of a file, compare the answers with the right ones, and write them to a\n"
        "JSONL file. After an interruption, the same command continues."
    )
    epilog = """
        scores:
          exact            the answer equals the right one; exact:PATTERN compares the last match of PATTERN
          number           the last number equals the right one
          json             fraction of the right JSON object's fields in the answer
          regex:PATTERN    the pattern matches
          math             the last expression equals the right one (extra math)
          package.function a function (rows, texts) -> list of numbers; None for rows without a score

        Without --data and --tasks, it measures the perplexity of the run's dataset_val. A
        classifier is measured on the labels of --data or dataset_val: --prompt names the column
        of its texts, --answer that of its labels.

        examples:
          $ tune eval /tmp/run
          $ tune eval /tmp/run/epoch_2 --data held_out.jsonl --score json --against /tmp/SmolLM2-135M-Instruct
          $ tune eval /tmp/SmolLM2-135M-Instruct --adapter /tmp/run/step_100 --data held_out.jsonl --score exact
          $ tune eval /tmp/run/epoch_2 --data held_out.jsonl --perplexity
          $ tune eval /tmp/run/epoch_2 --tasks hellaswag,arc_easy --limit 100
          $ tune eval /tmp/run/epoch_2 --data held_out.jsonl --score exact --nproc-per-node 8
          $ tune eval /tmp/classifier/epoch_2 --data held_out.jsonl
          $ tune eval /tmp/run/epoch_2 --retrieval corpus.json --against /tmp/SmolLM2-135M-Instruct
          $ tune eval /tmp/run/epoch_2 --retrieval corpus.json --reranker /tmp/reranker/epoch_2
    """

    def _add_arguments(self) -> None:
        add = self._parser.add_argument
        # Options of a single kind of evaluation are None by default, so that _check_metrics can refuse them elsewhere.
        add("model", help=CHECKPOINT)
        add("--data", type=Path, help="rows with the right answers: .jsonl, .json, .csv, .parquet …")
        add("--score", action="append", default=[], metavar="NAME", help="score of the answers, see below; repeatable")
        add("--perplexity", action="store_true", help="measure the perplexity of the right answers, or of texts")
        add("--against", help="checkpoint to compare with")
        add("--adapter", help="folder of a LoRA adapter of the model")
        add("--tasks", metavar="NAME,NAME", help="tasks of lm-eval (extra eval); tune_facts needs no download")
        add("--retrieval", type=Path, metavar="FILE", help="queries, corpus and relevant texts: ndcg, mrr and recall")
        add("--reranker", metavar="FOLDER", help="reranker that orders the first texts of --retrieval anew")
        add(
            "--rerank-first",
            type=int,
            metavar="K",
            help=f"number of texts of a query for --reranker (default: {_RERANK_FIRST})",
        )
        add(
            "--pooling",
            choices=("last", "mean"),
            help="pooling of --retrieval (default: the checkpoint's, or last)",
        )
        add("--dimensions", type=int, help="leading dimensions of the embeddings of --retrieval (default: all)")
        add("--include-path", type=Path, help="folder of your own tasks, in lm-eval's YAML")
        add("--chat-template", action="store_true", help="apply the checkpoint's chat template to tasks")
        add("--prompt", metavar="COLUMN", help="column of the prompt or conversation (default: by its name)")
        add("--answer", metavar="COLUMN", help="column of the right answer (default: by its name)")
        add("--system", help="system prompt of conversations without one")
        add("--limit", type=int, help="maximum number of rows (default: all)")
        add("--output", type=Path, default=Path("eval"), help="folder of answers and results (default: eval)")
        add("--max-new-tokens", type=int, default=256, help="maximum tokens per answer (default: 256)")
        add("--max-sequences", type=int, default=16, help="batch size (default: 16)")
        add("--temperature", type=float, default=0.0, help="randomness; 0 takes the most likely token (default: 0)")
        add("--top-k", type=int, help="sample from the k most likely tokens (default: all)")
        add("--top-p", type=float, help="sample from the most likely tokens up to this probability (default: all)")
        add("--min-p", type=float, help="sample from tokens at least this times as likely as the first (default: all)")
        add("--seed", type=int, default=0, help="seed of sampling (default: 0)")
        add_placement(self._parser)

    def _run(self, args: argparse.Namespace) -> None:
        check_least(args, limit=1, max_new_tokens=1, max_sequences=1, temperature=0, seed=0)
        check_least(args, dimensions=1, rerank_first=1)
        check_least(args, top_k=0, top_p=0, min_p=0)
        check_most(args, top_p=1, min_p=1)
        args.model = find_checkpoint(args.model)
        args.models = [(args.model, args.adapter)]
        if args.against:
            args.models.insert(0, (args.against, None))  # the first model is the reference
        if torchtune.models.is_classifier(args.model):
            if args.retrieval:
                raise UserError(
                    f"--retrieval: {args.model} is a classifier or reranker, which embeds no texts: name an embedding "
                    "model, and a reranker in --reranker."
                )
            eval_classifier(args)
            return
        self._check_metrics(args)
        if args.tasks:
            eval_tasks(args)
        if args.retrieval:
            eval_retrieval(args)
        if args.data or not (args.tasks or args.retrieval):  # by default, the perplexity of the run's dataset_val
            eval_rows(args)

    @staticmethod
    def _check_metrics(args: argparse.Namespace) -> None:
        """Refuse options of something that is not measured."""
        for name in ("pooling", "dimensions", "reranker", "rerank_first"):
            if args.retrieval is None and getattr(args, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} needs texts to embed: give them in --retrieval.")
        if args.rerank_first is not None and args.reranker is None:
            raise UserError("--rerank-first needs a reranker: give its folder in --reranker.")
        # Without tasks, --perplexity needs no rows: it is the default, and measures the run's dataset_val.
        if args.data is None and (args.score or (args.perplexity and args.tasks)):
            raise UserError("--score and --perplexity need rows: give them in --data.")
        row_options = ["prompt", "answer", "system"]
        if not args.tasks:  # which the limit is for as well
            row_options.append("limit")
        for name in row_options:
            if args.data is None and getattr(args, name) is not None:
                raise UserError(f"--{name} needs rows: give them in --data.")
        if args.data is not None and not args.score and not args.perplexity:
            raise UserError("there is nothing to measure: add --score exact (or another, see --help) or --perplexity.")
        if not args.tasks and (args.include_path or args.chat_template):
            raise UserError(
                "--include-path and --chat-template need --tasks: rows of --data always use the chat template."
            )


def eval_rows(args: argparse.Namespace) -> None:
    """Evaluate the models on rows, as the arguments of ``tune eval`` define.

    Raises:
        UserError: see :mod:`torchtune.evaluation`; raised before a model is loaded if possible.
    """
    if args.data is None:
        data = Path("dataset_val")  # no file: it names the file of results
        settings = _run_settings(args.model)
        if not settings.get("dataset_val"):
            raise UserError(
                f"there is nothing to measure: {args.model} is not of a run with dataset_val: give rows in --data, or "
                "--tasks."
            )
        perplexity_node = settings["dataset_val"]
        max_seq_len = settings["tokenizer"].get("max_seq_len")
    else:
        data = args.data.expanduser()
        perplexity_node = None  # without a node, no perplexity is measured
        if args.perplexity:
            perplexity_node = _perplexity_node(data, args)
        max_seq_len = None
    rows = []
    scores = torchtune.evaluation.make_scores(args.score)
    if scores:  # read before a model is loaded, which may take minutes
        columns = {"prompt": args.prompt, "answer": args.answer, "system": args.system}
        rows = torchtune.evaluation.read_eval_rows(data, **columns, limit=args.limit)
        torchtune.evaluation.check_scores(scores, rows, data)
    path = args.output / f"{data.stem}.results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    evaluations = []
    for folder, adapter in args.models:  # one after the other, because their memory may not suffice for two
        evaluations.append(_evaluate(folder, adapter, args, data, rows, scores, perplexity_node, max_seq_len))
    lines = [*_format_table(evaluations), *_format_remarks(evaluations, args)]
    print("\n".join(lines))
    results = {"data": str(data), "rows": len(rows), "models": [_result_entry(result) for result in evaluations]}
    _write_results(path, results)


def _load(
    args: argparse.Namespace, folder: str, adapter: str | None, shards: str, *, images: bool = False
) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        args: parsed arguments.
        folder: folder of the model.
        adapter: folder of an adapter, or None.
        shards: how several processes share the model, ``"layers"`` or ``"parameters"``, see :func:`torchtune.load`.
        images: whether the model reads images.
    """
    return torchtune.load(
        folder,
        adapter=adapter,
        dtype=args.dtype,
        device=args.device,
        images=images,
        shards=shared_by_processes(shards),
    )


def _write_results(path: Path, results: Any) -> None:
    """Write the results of an evaluation, and print where they are; rank 0 writes those of several processes."""
    if torchtune.utils.get_world_size_and_rank()[1] == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, valid_json(results))  # unknown numbers are null
    print(f"results     {path}")


def _run_settings(model: str) -> dict[str, Any]:
    """Return the settings of a checkpoint's run; empty for a model that no run has saved."""
    if (Path(model).expanduser() / torchtune.reports.SETTINGS).is_file():
        return torchtune.reports.RunFolder(model).settings
    return {}


def _perplexity_node(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the dataset node for the perplexity of the rows of a file."""
    if args.prompt or args.answer or args.system:
        raise UserError("--prompt, --answer and --system need --score: --perplexity reads rows as training does.")
    first = None
    if data.is_file() and data.stat().st_size:
        first = next(torchtune.datasets.read_rows(data), None)
    if first is None:
        raise UserError(f"{data}: there is no such file, or it has no rows: correct the path.")
    _, row = first
    if isinstance(row, dict):
        row_format = torchtune.datasets.format_of(row)
    else:
        row_format = torchtune.datasets.RowFormat("no mappings")
    if row_format.kind == torchtune.datasets.PROMPTS_WITH_ANSWERS and isinstance(row.get("question"), str):
        # Instructions with these columns; as prompts, the rows would have no labels.
        settings = torchtune.datasets.column_map(input="question", output="answer")
        row_format = torchtune.datasets.RowFormat(torchtune.datasets.INSTRUCTIONS, "instruct_dataset", settings)
    elif row_format.builder in ("", "prompt_dataset", "preference_dataset", "kto_dataset"):
        raise UserError(
            f"{data}: its rows are {row_format.kind}, but perplexity needs texts or conversations: use --score, or "
            "another file."
        )
    overrides = []
    if args.limit:
        overrides.append(f"split=train[:{args.limit}]")
    return dataset_node(data, row_format, overrides)


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
    images = node is not None or any(row.has_images for row in rows)  # the rows of a node are not read yet
    model, tokenizer = _load(args, folder, adapter, shards="layers", images=images)
    torchtune.generation.check_generates(model)
    weight = torchtune.modules.text_decoder(model).tok_embeddings.weight
    dtype = torchtune.training.precision.DTYPE_NAMES[weight.dtype]
    perplexity = None
    if node is not None:
        tokenizer.max_seq_len = max_seq_len or tokenizer.max_seq_len
        dataset = torchtune.datasets.instantiate_dataset(node, tokenizer)
        perplexity = torchtune.evaluation.perplexity(model, dataset)
    answers = None
    if scores:
        answers = torchtune.evaluation.evaluate_answers(
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


def _label(folder: str, adapter: str | None) -> str:
    """Return the name of a model in tables."""
    if adapter:
        return f"{folder} + {adapter}"
    return folder


def _format_table(evaluations: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table: a row for each model, a column for each score and for the perplexity."""
    # All models are measured in the same way, so that any of them has the names of the columns.
    last = evaluations[-1]
    names = []
    if last["answers"]:
        names = list(last["answers"].scores)
    header = ["", *names]
    if last["perplexity"]:
        header.append("perplexity")
    table = [header]
    for result in evaluations:
        cells = [_label(result["model"], result["adapter"])]
        for name in names:
            mean, error = result["answers"].mean(name)
            cell = f"{mean:.3f}"
            if not math.isnan(error):  # of two rows or more
                cell += f" ± {error:.3f}"
            cells.append(cell)
        if result["perplexity"]:
            cells.append(f"{result['perplexity'].value:.4g}")
        table.append(cells)
    return _align(table)


def _align(table: list[list[str]]) -> list[str]:
    """Return the rows of a table as lines, with cells padded to the width of their column."""
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
    # Two models, both with answers: one model is the first and the last, and without --score both have none.
    if first is not last:
        for name in last.scores:
            reference_scores = dict(enumerate(first.scores[name]))  # by row
            model_scores = dict(enumerate(last.scores[name]))
            interval = torchtune.reports.compare_rows(reference_scores, model_scores)
            if interval is not None:  # some rows have a score of both models
                meaning = interval.meaning(less_is_better=False)
                lines.append(f"{name:<11} {interval}, {interval.pairs:,} rows: {meaning}")
    for result in evaluations:
        answers = result["answers"]
        if answers is None:  # without --score
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


def eval_classifier(args: argparse.Namespace) -> None:
    """Measure classifiers on rows with labels, and print a table.

    Raises:
        UserError: an option is for answers in text, there are no rows, or a row has a class that the model lacks.
    """
    text_options = {"--score": args.score, "--perplexity": args.perplexity, "--tasks": args.tasks}
    for option, value in text_options.items():
        if value:
            raise UserError(f"{option}: {args.model} is a classifier, which gives no text: leave it out.")
    node, max_seq_len, name = _labeled_data(args)
    reports = []
    for folder, adapter in args.models:
        # Passages are read whole, without caches: processes share the parameters rather than the layers.
        model, tokenizer = _load(args, folder, adapter, shards="parameters")
        tokenizer.max_seq_len = max_seq_len or tokenizer.max_seq_len
        dataset = torchtune.datasets.instantiate_dataset(node, tokenizer, model.max_seq_len)
        reports.append(torchtune.evaluation.evaluate_classifier(model, dataset, batch_size=args.max_sequences))
    table = [["", "rows", "loss", *reports[-1].scores]]
    entries = []
    for (folder, adapter), report in zip(args.models, reports, strict=True):
        # The reference may have other classes, and so no score of a class.
        scores = [f"{report.scores.get(score, math.nan):.3f}" for score in reports[-1].scores]
        table.append([_label(folder, adapter), f"{report.rows:,}", f"{report.loss:.4f}", *scores])
        entries.append({"model": folder, "adapter": adapter, "loss": report.loss, "scores": report.scores})
    print("\n".join(_align(table)))
    path = args.output / f"{name}.results.json"
    _write_results(path, {"data": name, "rows": reports[-1].rows, "models": entries})


def _labeled_data(args: argparse.Namespace) -> tuple[Any, int | None, str]:
    """Return the dataset node with labels, the maximum sequence length, and a name for the file of results."""
    settings = _run_settings(args.model)
    max_seq_len = None
    if settings:
        max_seq_len = settings["tokenizer"].get("max_seq_len")
    if args.data is None:
        if not settings.get("dataset_val"):
            raise UserError(
                f"there is nothing to measure: {args.model} is not of a run with dataset_val: give rows with labels in "
                "--data."
            )
        return settings["dataset_val"], max_seq_len, "dataset_val"
    data = args.data.expanduser()
    if not data.is_file():
        raise UserError(f"{data}: there is no such file: correct the path.")
    node: dict[str, Any] = {}
    if settings:  # the rows are read as those of the training
        trained_on = torchtune.datasets.dataset_nodes(settings["dataset"])[0]
        names = ("column", "label_column", "add_eos", "max_seq_len")
        node = {name: trained_on[name] for name in names if name in trained_on}
    node |= {"_component_": "torchtune.datasets.classification_dataset", "source": str(data)}
    if args.prompt:
        node["column"] = args.prompt
    if args.answer:
        node["label_column"] = args.answer
    if args.limit:
        node["split"] = f"train[:{args.limit}]"
    return node, max_seq_len, data.stem


def eval_tasks(args: argparse.Namespace) -> None:
    """Evaluate the models and print a table for each; results and answers so far are in a folder per model.

    Raises:
        UserError: see :func:`torchtune.evaluation.find_tasks` and :func:`torchtune.evaluation.evaluate_tasks`.
    """
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    tasks = torchtune.evaluation.find_tasks(names, args.include_path)
    for number, (folder, adapter) in enumerate(args.models, start=1):
        # With a number, because two checkpoints may have the same name, such as epoch_0.
        output = args.output / f"{number}_{Path(adapter or folder).resolve().name}"
        # Tensor parallel: every process has a part of each layer.
        model, tokenizer = _load(args, folder, adapter, shards="layers")
        results = torchtune.evaluation.evaluate_tasks(
            model,
            tokenizer,
            tasks,
            batch_size=args.max_sequences,
            limit=args.limit,
            chat_template=args.chat_template,
            seed=args.seed,
            folder=output,
        )
        print(_label(folder, adapter))
        print(f"{results.table}\nresults     {output / 'results.json'}")
        del model  # before the next one is loaded


def eval_retrieval(args: argparse.Namespace) -> None:
    """Rank a corpus for queries with the embeddings of each model, and print a table of the scores.

    Raises:
        UserError: see :func:`torchtune.evaluation.read_retrieval` and :meth:`torchtune.evaluation.Reranker.of`.
    """
    data = torchtune.evaluation.read_retrieval(args.retrieval)
    reranker = None
    if args.reranker is not None:
        folder = find_checkpoint(args.reranker)
        reranker_model, reranker_tokenizer = _load(args, folder, adapter=None, shards="parameters")
        reranker = torchtune.evaluation.Reranker.of(folder, reranker_model, reranker_tokenizer)
    first = args.rerank_first or _RERANK_FIRST
    entries = []
    for folder, adapter in args.models:
        settings = torchtune.evaluation.EmbeddingSettings.of(adapter or folder)
        if args.pooling:
            settings = dataclasses.replace(settings, pooling=args.pooling)
        # Passages are read whole, without caches: processes share the parameters rather than the layers.
        model, tokenizer = _load(args, folder, adapter, shards="parameters")
        label = _label(folder, adapter)
        entry = {"model": label, **dataclasses.asdict(settings)}
        options = {"settings": settings, "dimensions": args.dimensions, "batch_size": args.max_sequences}
        if reranker is None:
            scores = torchtune.evaluation.evaluate_retrieval(model, tokenizer, data, **options)
            entries.append({**entry, "scores": scores})
        else:
            # Scores of both orders of the same texts, before and after the reranker: an entry for each.
            scores, reranked = torchtune.evaluation.evaluate_reranking(
                model, tokenizer, reranker, data, first=first, **options
            )
            entries.append({**entry, "scores": scores})
            reranked_entry = {**entry, "model": f"{label}, the first {first} reranked", "reranker": args.reranker}
            entries.append({**reranked_entry, "scores": reranked})
        del model  # before the next one is loaded
    header = ["", *entries[0]["scores"]]
    table = [header]
    for entry in entries:
        cells = [f"{score:.3f}" for score in entry["scores"].values()]
        table.append([entry["model"], *cells])
    print("\n".join(_align(table)))
    print(f"{len(data.queries):,} queries, {len(data.corpus):,} texts")
    path = args.output / f"{args.retrieval.stem}.retrieval.json"
    sizes = {"queries": len(data.queries), "corpus": len(data.corpus)}
    _write_results(path, {"data": str(args.retrieval), **sizes, "models": entries})
