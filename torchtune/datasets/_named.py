"""Named datasets: general builders with other defaults."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torchtune.datasets._instruct import alpaca_dataset, instruct_dataset
from torchtune.datasets._preference import preference_dataset


def _named(name: str, builder: Callable[..., Any], doc: str, **defaults: Any) -> Callable[..., Any]:
    """Return a builder with other defaults, which also apply to arguments that are None."""

    @wraps(builder)
    def build(tokenizer: Any, **settings: Any) -> Any:
        given = {key: value for key, value in settings.items() if value is not None or key not in defaults}
        return builder(tokenizer, **{**defaults, **given})

    signature = inspect.signature(builder)
    parameters = [
        parameter.replace(default=defaults.get(key, parameter.default))
        for key, parameter in signature.parameters.items()
    ]
    build.__signature__ = signature.replace(parameters=parameters)
    build.__name__ = build.__qualname__ = name
    build.__module__, build.__doc__ = __name__, doc
    return build


alpaca_cleaned_dataset = _named(
    "alpaca_cleaned_dataset",
    alpaca_dataset,
    """Rows of :func:`alpaca_dataset` with fewer mistakes. For the arguments see there.

    Raises:
        DataError: see :class:`SFTDataset`; ``packed`` without the tokenizer's ``max_seq_len``.

    Example:
        >>> rows = [{"instruction": "Count.", "input": "", "output": "one two"}]
        >>> len(torchtune.datasets.alpaca_cleaned_dataset(tokenizer, source=rows))
        1
    """,
    source="yahma/alpaca-cleaned",
)

grammar_dataset = _named(
    "grammar_dataset",
    instruct_dataset,
    """Sentences with and without mistakes, columns ``input`` and ``output``.

    Goes with ``torchtune.data.GrammarErrorCorrectionTemplate``. For the arguments see :func:`instruct_dataset`.

    Raises:
        DataError: see :class:`SFTDataset`; ``packed`` without the tokenizer's ``max_seq_len``.

    Example:
        >>> rows = [{"input": "the cats sees", "output": "the cat sees"}]
        >>> len(torchtune.datasets.grammar_dataset(tokenizer, source=rows))
        1
    """,
    source="liweili/c4_200m",
)

samsum_dataset = _named(
    "samsum_dataset",
    instruct_dataset,
    """Dialogues and their summaries, columns ``dialogue`` and ``summary``.

    Goes with ``torchtune.data.SummarizeTemplate``. For the arguments see :func:`instruct_dataset`.

    Raises:
        DataError: see :class:`SFTDataset`; ``packed`` without the tokenizer's ``max_seq_len``.

    Example:
        >>> rows = [{"dialogue": "A: Why? B: So.", "summary": "A asks why."}]
        >>> len(torchtune.datasets.samsum_dataset(tokenizer, source=rows))
        1
    """,
    source="Samsung/samsum",
    column_map={"input": "dialogue", "output": "summary"},
)

hh_rlhf_helpful_dataset = _named(
    "hh_rlhf_helpful_dataset",
    preference_dataset,
    """Helpfulness comparisons, columns ``chosen`` and ``rejected``. For the arguments see :func:`preference_dataset`.

    Raises:
        DataError: see :class:`PreferenceDataset`.

    Example:
        >>> question = {"role": "user", "content": "Who?"}
        >>> row = {side: [question, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
        >>> len(torchtune.datasets.hh_rlhf_helpful_dataset(tokenizer, source=[row]))
        1
    """,
    source="RLHFlow/HH-RLHF-Helpful-standard",
)
