"""``tune eval`` on tasks of lm-eval: evaluate one or two models."""

import argparse
from pathlib import Path

import torchtune
from torchtune import evaluation


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
