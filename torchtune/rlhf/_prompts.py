"""Prompts: batches of them, prompts of plain datasets, the check of their lengths, and their sharing among answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchtune.data import (
    CROSS_ENTROPY_IGNORE_IDX,
    Batch,
    BatchLoader,
    DataError,
    Message,
    WrappedDataset,
    as_example_dataset,
    collate_documents,
    share_prefixes,
)
from torchtune.modules import TransformerDecoder
from torchtune.modules.transformer import text_decoder
from torchtune.rlhf._rollouts import RolloutError
from torchtune.rlhf.loss import AnswerLoss, RewardLoss
from torchtune.training import ParallelDims
from torchtune.utils import UserError, get_logger, log_once


@dataclass(frozen=True)
class Prompt:
    """Prompt to sample answers for.

    Attributes:
        tokens: token ids.
        row: columns of the dataset's row.
        number: index of the row.
        is_blank: whether the prompt is a filler, for a rank with fewer prompts than others; its answers are ignored.
        messages: the conversation, to which environments add tools and observations.
        images: the ``encoder_input`` of the prompt's images; empty without images.

    Example:
        >>> torchtune.rlhf.Prompt(tokens=[5, 6], row={"answer": "7"}, number=0).row["answer"]
        '7'
    """

    tokens: list[int]
    row: Mapping[str, Any]
    number: int
    is_blank: bool = False
    messages: Sequence[Message] = ()
    images: Mapping[str, Any] = field(default_factory=dict)


def images_of(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return the keyword argument ``images`` of samplers; empty if no prompt has an image.

    Example:
        >>> torchtune.rlhf.images_of([torchtune.rlhf.Prompt([5, 6], {}, number=0)])
        {}
    """
    images = [prompt.images for prompt in prompts]
    if not any(images):
        return {}  # samplers of text do not have the argument
    return {"images": images}


@dataclass(eq=False)
class PromptBatch(Batch):
    """Batch of prompts.

    Attributes:
        prompts: one prompt per document.

    Example:
        >>> prompt = torchtune.rlhf.Prompt(tokens=[5, 6], row={}, number=0)
        >>> torchtune.rlhf.PromptBatch(tokens=torch.tensor([5, 6]), prompts=[prompt]).prompts[0].number
        0
    """

    prompts: list[Prompt] = field(default_factory=list)


def collate_prompts(batch: Sequence[Mapping[str, Any]]) -> Batch:
    """Concatenate prompts, padding-free, into a :class:`PromptBatch`.

    Args:
        batch: examples of :func:`torchtune.datasets.prompt_dataset`.

    Raises:
        DataError: an example lacks a key of a prompt.
    """
    documents = []
    labels = []
    prompts = []
    for example in batch:
        missing = {"tokens", "labels", "row", "number"} - example.keys()
        if missing:
            raise DataError(
                f"dataset: an example has no '{min(missing)}', so it is not a prompt: use "
                "torchtune.datasets.prompt_dataset."
            )
        tokens = example["tokens"]
        # The labels of a prompt are its tokens, for the loader to count and to ignore in a filler. `collate_documents`
        # refuses labels that are not shifted, so they join the batch below.
        prompt_labels = torch.as_tensor(example["labels"])  # [s]
        documents.append({"tokens": tokens, "labels": [CROSS_ENTROPY_IGNORE_IDX] * len(tokens)})
        labels.append(prompt_labels)
        images = {}
        if "encoder_input" in example:
            images = {"encoder_input": example["encoder_input"]}
        prompts.append(
            Prompt(
                list(tokens),
                example["row"],
                example["number"],
                # The loader fills a rank with fewer rows than others by a row with all labels ignored.
                is_blank=bool((prompt_labels == CROSS_ENTROPY_IGNORE_IDX).all()),
                messages=example.get("messages", ()),
                images=images,
            )
        )
    collated = collate_documents(documents)
    return PromptBatch(
        collated.tokens,
        torch.cat(labels)[None],  # [1, s]
        collated.input_pos,
        collated.documents,
        prompts=prompts,
    )


class NumberedPrompts(WrappedDataset):
    """Prompts of a dataset without rows, such as :func:`torchtune.datasets.text_completion_dataset`.

    Args:
        dataset: dataset of examples with ``tokens``.
        stop_tokens: ids of tokens that end an answer; a prompt must not end with one of them.

    Example:
        >>> data = torchtune.datasets.text_completion_dataset(tokenizer, source=[{"text": "the cat"}], add_eos=False)
        >>> torchtune.rlhf.NumberedPrompts(data, tokenizer.stop_tokens)[0]["number"]
        0
    """

    def __init__(self, dataset: Any, stop_tokens: Sequence[int]) -> None:
        super().__init__(dataset)
        self._stop_tokens = set(stop_tokens)
        _ = self[0]  # raises early if add_eos is set

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an example in the format of :class:`torchtune.datasets.PromptDataset`."""
        tokens = [int(token) for token in self.dataset[index]["tokens"]]
        if tokens[-1] in self._stop_tokens:
            raise RolloutError(
                f"dataset: the prompt of row {index} ends with a token that ends answers: set dataset.add_eos=False."
            )
        return {"tokens": tokens, "labels": tokens, "row": {}, "number": index}


def numbered_prompts(dataset: Any, tokenizer: Any) -> Any:
    """Return a dataset of prompts unchanged; wrap other datasets in :class:`NumberedPrompts`."""
    if "number" in dataset[0]:
        return dataset
    return NumberedPrompts(dataset, tokenizer.stop_tokens)


def check_prompts(dataset: Any, sampler: Any, model: nn.Module, closing: int = 0) -> None:
    """Check that the longest prompt and answer fit the model's context. Raises :class:`RolloutError`.

    Args:
        dataset: dataset of prompts; not checked if their lengths are unknown.
        sampler: sampler with ``max_new_tokens``.
        model: the trained model. Its input is all tokens except the last.
        closing: number of tokens appended to the answer, as a reward model needs them (:class:`RewardModel`).
    """
    dataset = as_example_dataset(dataset)
    if dataset.num_images and not getattr(sampler, "takes_images", False):  # a user's sampler may lack it
        raise RolloutError(
            f"dataset: its prompts have images, but a {type(sampler).__name__} takes text only: set sampler to "
            "torchtune.rlhf.LocalSampler."
        )
    lengths = dataset.known_lengths
    if lengths is None:
        return
    row = int(lengths.argmax())
    new_tokens = getattr(sampler, "max_new_tokens", 1)  # a sampler without a limit samples at least one
    # The last token of an answer is only a label, so the model's input is one token shorter.
    input_length = lengths[row] + new_tokens - 1 + closing
    if input_length > model.max_seq_len:
        raise RolloutError(
            f"dataset: the prompt of row {row} has {lengths[row]} tokens, and with {new_tokens} new ones "
            f"(max_new_tokens) that is more than the model's {model.max_seq_len}: leave it out with filter_fn, "
            "or ask for fewer."
        )


class SharingError(UserError):
    """Raised if ``share_prefix`` is True but not possible."""

    raised_on_all = True


def can_share_prefixes(model: nn.Module, share_prefix: bool | None = None) -> bool:
    """Return whether documents share prefixes in a run: ``share_prefix``, or if None, whether the model supports it.

    Raises:
        SharingError: ``share_prefix`` is True, but the model does not support it.

    Example:
        >>> torchtune.rlhf.can_share_prefixes(model)
        True
    """
    if share_prefix is False:
        return False
    decoder = text_decoder(model)
    if not isinstance(decoder, TransformerDecoder):
        reason = f"{type(decoder).__name__} is not a TransformerDecoder"
    elif hasattr(model, "prefix_obstacle"):  # a model around the decoder may have obstacles of its own
        reason = model.prefix_obstacle()
    else:
        reason = decoder.prefix_obstacle()
    if reason and share_prefix:
        raise SharingError(f"share_prefix: no prompt can be computed once, because {reason}: set it to null.")
    if reason:
        log_once(get_logger(), f"A prompt is computed anew for each of its answers, because {reason}.")
    return reason is None


def share_pairs(
    loader: BatchLoader | None, model: nn.Module, loss: Any, dims: ParallelDims, *, share_prefix: bool | None = None
) -> BatchLoader | None:
    """Return a loader in which both answers of a pair share their common prefix, which is computed once.

    Labeled tokens are also shared if the loss uses only one number per answer, as all losses of this library do.

    Args:
        loader: loader of pairs; None stays None.
        model: the trained model.
        loss: loss of the run.
        dims: parallel dims, which may split a batch.
        share_prefix: True requires sharing, False disables it, and None shares if model and data allow it.

    Raises:
        SharingError: ``share_prefix`` is True, but the model does not support it.
        DataError: ``share_prefix`` is True, and a batch has no pairs; raised when the batch is collated.

    Example:
        >>> # In the setup of a recipe:
        >>> self.loader = rlhf.share_pairs(self.loader, model, self.loss_fn, self.dims)  # doctest: +SKIP
    """
    if loader is None or not can_share_prefixes(model, share_prefix):
        return loader
    # Scores of a whole answer do not change if the first tokens of both answers are computed once.
    scores_whole_answers = getattr(type(loss), "score", None) in (AnswerLoss.score, RewardLoss.score)
    collate = ParallelDims.unsharded_collate(loader.collate_fn)

    def collate_shared(examples: Sequence[Any]) -> Batch:
        batch = Batch.from_dict(collate(examples))
        if "pair" in batch.per_document and batch.documents is not None and not batch.inputs:
            return share_prefixes(batch, batch.per_document["pair"].tolist(), labelled=scores_whole_answers)
        if share_prefix:
            raise DataError("share_prefix: the batches have no pairs of documents: set it to null.")
        return batch

    return loader.derive(collate_fn=dims.collate(collate_shared))
