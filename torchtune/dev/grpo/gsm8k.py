"""Former names of GSM8K (grade school math), with tags around the thoughts and the answer."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from torchtune.data import DataError
from torchtune.datasets import PromptDataset, RowSource, SFTDataset, Source, instruct_dataset
from torchtune.dev.grpo.data import _TASK, ReasoningProblem
from torchtune.tokenizers import ModelTokenizer

PREAMBLE_PROMPT = _TASK + "User: {question} Assistant: "
TRAINABLE_PROMPT = "<think>{cot}</think> <answer>{answer}</answer>"


def normalize_gsm(problem: Mapping[str, str]) -> ReasoningProblem:
    """Split a row of GSM8K, with an answer that ends in ``#### number``, into question, thoughts and answer.

    Raises:
        DataError: the row is not from GSM8K.
    """
    cot, mark, answer = str(problem.get("answer", "")).rpartition("####")
    if not mark or "question" not in problem:
        raise DataError("a row of GSM8K has a 'question', and an 'answer' that ends with '#### number'")
    return {"question": problem["question"], "cot": cot.strip(), "answer": answer.strip().replace(",", "")}


def sft_gsm_transform(problem: Mapping[str, str]) -> dict[str, str]:
    """Convert a row of GSM8K to ``preamble`` and ``trainable``."""
    return _preamble_and_rest(normalize_gsm(problem))


def _preamble_and_rest(problem: ReasoningProblem) -> dict[str, str]:
    preamble = PREAMBLE_PROMPT.format(question=problem["question"])
    return {"preamble": preamble, "trainable": TRAINABLE_PROMPT.format(**problem)}


def gsm8k_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source = "openai/gsm8k",
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    name: str = "main",
    partition: str | None = None,
    **load_dataset_kwargs: Any,
) -> PromptDataset:
    """Build GSM8K prompts in the tokenizer's format, with the columns ``question``, ``cot`` and ``answer`` for rewards.

    Args:
        tokenizer: the model's tokenizer.
        source: see :func:`torchtune.datasets.prompt_dataset`.
        filter_fn: keep the rows for which it returns True.
        split: split of the dataset.
        name: configuration of the dataset.
        partition: part of the rows: ``k/n``, the k-th of n parts, counted from 0, or ``i-k/n``, the i-th to the k-th.
        **load_dataset_kwargs: arguments of ``datasets.load_dataset``.

    Raises:
        DataError: the data cannot be loaded, or ``partition`` is invalid.
    """
    rows = _rows(source, partition, filter_fn=filter_fn, split=split, name=name, **load_dataset_kwargs)
    prompts = [{**row, "prompt": PREAMBLE_PROMPT.format(question=row["question"])} for row in rows]
    return PromptDataset(source=prompts, tokenizer=tokenizer)


def gsm8k_sft(
    tokenizer: ModelTokenizer,
    *,
    source: Source = "openai/gsm8k",
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    name: str = "main",
    partition: str | None = None,
    **load_dataset_kwargs: Any,
) -> SFTDataset:
    """Build the same prompts with thoughts and answers in tags, for fine-tuning; arguments as :func:`gsm8k_dataset`."""
    rows = _rows(source, partition, filter_fn=filter_fn, split=split, name=name, **load_dataset_kwargs)
    columns = {"input": "preamble", "output": "trainable"}
    return instruct_dataset(tokenizer, source=[_preamble_and_rest(row) for row in rows], column_map=columns)


def _rows(source: Source, partition: str | None, **arguments: Any) -> list[ReasoningProblem]:
    if source != "openai/gsm8k":
        arguments.pop("name")  # a configuration of the hub's dataset
    rows = []
    for number, row in enumerate(RowSource(source, **arguments).rows()):
        try:
            rows.append(normalize_gsm(row))
        except DataError as error:
            raise DataError(f"gsm8k: row {number}: {error}.") from error
    if partition is None:
        return rows
    found = re.fullmatch(r"(\d+)(?:-(\d+))?/(\d+)", str(partition))
    first, last, parts = (int(group) for group in (found[1], found[2] or found[1], found[3])) if found else (1, 0, 1)
    if not first <= last < parts:
        raise DataError(f"gsm8k: partition is '{partition}': write k/n or i-k/n, with parts 0 to n - 1.")
    return rows[len(rows) * first // parts : len(rows) * (last + 1) // parts]
