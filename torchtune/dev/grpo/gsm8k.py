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
    return _fill_templates(normalize_gsm(problem))


def _fill_templates(problem: ReasoningProblem) -> dict[str, str]:
    """Return the prompt, and the text to train on: thoughts and answer in tags."""
    preamble = PREAMBLE_PROMPT.format(question=problem["question"])
    trainable = TRAINABLE_PROMPT.format(**problem)
    return {"preamble": preamble, "trainable": trainable}


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
    problems = _problems(source, partition, filter_fn=filter_fn, split=split, name=name, **load_dataset_kwargs)
    prompts = []
    for problem in problems:
        prompts.append({**problem, "prompt": PREAMBLE_PROMPT.format(question=problem["question"])})
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
    problems = _problems(source, partition, filter_fn=filter_fn, split=split, name=name, **load_dataset_kwargs)
    rows = [_fill_templates(problem) for problem in problems]
    columns = {"input": "preamble", "output": "trainable"}
    return instruct_dataset(tokenizer, source=rows, column_map=columns)


def _problems(source: Source, partition: str | None, **arguments: Any) -> list[ReasoningProblem]:
    """Read the rows of a source, and return those of a partition; see :func:`gsm8k_dataset`."""
    if source != "openai/gsm8k":
        arguments.pop("name")  # a configuration of the hub's dataset
    problems = []
    for number, row in enumerate(RowSource(source, **arguments).rows()):
        try:
            problems.append(normalize_gsm(row))
        except DataError as error:
            raise DataError(f"gsm8k: row {number}: {error}.") from error
    if partition is None:
        return problems
    first, last, parts = _parse_partition(partition)
    start = len(problems) * first // parts
    end = len(problems) * (last + 1) // parts
    return problems[start:end]


def _parse_partition(partition: str) -> tuple[int, int, int]:
    """Return (first part, last part, number of parts) of a text such as ``0/4`` or ``1-3/4``."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?/(\d+)", str(partition))
    if match is not None:
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        parts = int(match[3])
        if first <= last < parts:
            return first, last, parts
    raise DataError(f"gsm8k: partition is '{partition}': write k/n or i-k/n, with parts 0 to n - 1.")
