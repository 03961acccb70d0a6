"""Classes of texts, with a loaded classifier."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchtune import training
from torchtune._facade._load_model import unwrap
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, DataError, Message, MessageLike, collate_documents
from torchtune.datasets import MULTI_LABEL, REGRESSION, ClassificationTransform
from torchtune.modules import text_decoder
from torchtune.utils import UserError

# A text or a conversation.
Classified = str | Sequence[MessageLike]
# The probability of each class, the likeliest first; or a number.
Classes = dict[str, float] | float
_BATCH_SIZE = 16


@torch.no_grad()
def classify(
    model: nn.Module, tokenizer: Any, texts: Classified | Sequence[Classified], *, add_eos: bool = False
) -> Classes | list[Classes]:
    """Return the classes of one text, or of several.

    Texts are tokenized as by :func:`torchtune.datasets.classification_dataset`. The model runs in evaluation mode and
    returns to its previous mode afterward.

    Args:
        model: classifier from :func:`load`.
        tokenizer: the model's tokenizer; it cuts longer texts if it has ``max_seq_len``.
        texts: a text, a conversation as a list of messages, or a list of these.
        add_eos: end a text with the EOS token, as ``add_eos`` of the dataset that trained.

    Returns:
        The probability of each class by name, the likeliest first. If several classes may be right, the probabilities
        are independent, and a class counts from 0.5 on. For a regression or a reward model, a number. A list of texts
        returns a list.

    Raises:
        UserError: the model is not a classifier, or a text has no token or more tokens than the model reads.

    Example:
        >>> model = torchtune.modules.classifier_model(2, "torchtune.models.from_hf_config", checkpoint_dir=checkpoint)
        >>> classes = torchtune.classify(model, tokenizer, "the cat")
        >>> sorted(classes), round(sum(classes.values()), 3)
        (['LABEL_0', 'LABEL_1'], 1.0)
    """
    decoder = text_decoder(unwrap(model))
    description = getattr(decoder, "description", None)
    if description is None or not description.is_classifier:
        raise UserError(
            "model: it predicts tokens and has no classes: give a classifier, or ask it with torchtune.generate."
        )
    training.fit_vocabulary(decoder, tokenizer)
    is_single = isinstance(texts, str) or (bool(texts) and isinstance(texts[0], Mapping | Message))
    inputs: list[Any] = list(texts)
    if is_single:
        inputs = [texts]
    transform = ClassificationTransform(tokenizer, "text", "label", add_eos, None)
    rows = []
    for number, text in enumerate(inputs):
        rows.append(_row(transform, text, f"text {number}", decoder.max_seq_len))
    outputs: list[Classes] = []
    was_training = decoder.training
    decoder.eval()
    try:
        for start in range(0, len(rows), _BATCH_SIZE):
            batch = collate_documents(rows[start : start + _BATCH_SIZE])  # the n texts of a batch, one after another
            index = batch.find_labels()  # [n], the last token of each text
            batch = batch.to(decoder.tok_embeddings.weight.device)
            hidden = decoder(**batch.model_inputs(), output="hidden")  # [1, s, d]
            logits = decoder.output(hidden[0].index_select(0, index.to(hidden.device)))  # [n, c]
            outputs += [_classes(row, description) for row in logits.float().cpu()]
    finally:
        decoder.train(was_training)
    if is_single:
        return outputs[0]
    return outputs


def _row(transform: ClassificationTransform, text: Any, name: str, longest: int) -> dict[str, list[int]]:
    """Return the tokens of a text, with a mark at the last of them."""
    try:
        if not isinstance(text, str):  # the messages of a conversation
            text = list(text)
        tokens = transform.tokens(text)
    except (DataError, TypeError) as error:
        raise UserError(f"{name}: it is not a text or a list of messages: {error}") from error
    if not 0 < len(tokens) <= longest:
        raise UserError(
            f"{name}: it has {len(tokens):,} tokens, and the model reads 1 to {longest:,}: shorten it, or set "
            "tokenizer.max_seq_len to cut it."
        )
    labels = [CROSS_ENTROPY_IGNORE_IDX] * len(tokens)
    labels[-1] = 0
    return {"tokens": tokens, "labels": labels}


def _classes(logits: torch.Tensor, description: Any) -> Classes:
    """Return the classes for logits ``[c]``."""
    is_number = description.problem_type == REGRESSION or (
        description.num_classes == 1 and description.problem_type is None
    )
    if is_number:
        return logits[0].item()
    if description.problem_type == MULTI_LABEL:  # each class by itself
        probabilities = logits.sigmoid()
    else:
        probabilities = logits.softmax(-1)
    names = description.class_names or [f"LABEL_{index}" for index in range(description.num_classes)]
    classes = dict(zip(names, probabilities.tolist(), strict=True))
    return dict(sorted(classes.items(), key=lambda item: -item[1]))
