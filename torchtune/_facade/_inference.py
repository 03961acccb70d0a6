"""Answers of a loaded model, and classes of texts by a loaded classifier."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchtune import training
from torchtune._facade._load_and_save import ORIGINS, unwrap
from torchtune.data import (
    CROSS_ENTROPY_IGNORE_IDX,
    DataError,
    Message,
    MessageLike,
    as_messages,
    collate_documents,
)
from torchtune.datasets import MULTI_LABEL, REGRESSION, ClassificationTransform
from torchtune.generation import (
    GenerationError,
    LogitsProcessor,
    answer_limit,
    check_generates,
    generate_tokens,
    images_of_row,
    prompt_row,
    prompt_turns,
)
from torchtune.modules import TransformerDecoder, text_decoder
from torchtune.tokenizers import check_tokenizer
from torchtune.utils import UserError, get_logger

# A text is a user turn, messages are a conversation, token ids are continued unchanged.
Prompt = str | Sequence[MessageLike] | Sequence[int]
_DEFAULT_LENGTH = 512
_MAX_SEQUENCES = 16  # answers that are generated at a time
_SAMPLED_IDS = 64  # tokens that are compared between two tokenizers
# A text or a conversation.
Classified = str | Sequence[MessageLike]
# The probability of each class, the likeliest first; or a number.
Classes = dict[str, float] | float
_BATCH_SIZE = 16  # texts that are classified at a time


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.6,
    top_k: int | None = None,
    seed: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
) -> str | list[str]:
    """Generate answers to one prompt, or to several with continuous batching.

    The model runs in evaluation mode, adapters included, and returns to its previous mode afterward. An answer ends
    at a stop token of the tokenizer, after ``max_new_tokens``, or when the context is full. A warning reports answers
    that were truncated by the context or by the default length.

    Args:
        model: from :func:`load`, or from a builder with loaded weights.
        tokenizer: the model's tokenizer.
        prompt: a text, used as a user turn; a conversation, as a list of messages that does not end with the assistant,
            with images if the model reads them; or token ids, which are continued unchanged
            (``tokenizer.encode(text, add_eos=False)``). A list of these returns a list of answers.
        max_new_tokens: maximum length of an answer in tokens; 512 by default.
        temperature: divides the logits; 0 is greedy.
        top_k: sample from the k most likely tokens.
        seed: seed of sampling; random by default.
        top_p: sample from the most likely tokens whose probabilities sum to p.
        min_p: sample from the tokens that are at least p times as likely as the most likely one.
        logits_processors: functions ``(tokens [b, s], logits [b, v]) -> logits [b, v]`` that change the logits of the
            next token, before temperature, top_k, top_p and min_p; see
            :func:`stream_tokens <torchtune.generation.stream_tokens>`.

    Returns:
        The text of each answer, without special tokens.

    Raises:
        GenerationError: the prompt fills the context, a number is out of range, the tokenizer has another vocabulary,
            the checkpoint has no chat template for a conversation, or the logits are not finite.

    Example:
        >>> model, tokenizer = torchtune.load(checkpoint, dtype="fp32", device="cpu")
        >>> answers = torchtune.generate(model, tokenizer, ["Where is the cat?", "Why?"], max_new_tokens=4)
        >>> len(answers)
        2
    """
    model = unwrap(model)
    decoder = _check_model(model, tokenizer)
    prompts, is_single = _to_prompts(prompt)
    max_new = max_new_tokens
    if max_new is None:
        max_new = _DEFAULT_LENGTH
    device = decoder.tok_embeddings.weight.device
    rng = torch.Generator(device)
    if seed is None:
        rng.seed()
    else:
        rng.manual_seed(seed)

    rows = []
    limits = []
    for number, text_or_ids in enumerate(prompts):
        row = _tokenize_prompt(tokenizer, text_or_ids, number)
        rows.append(row)
        # max_new, or fewer tokens if the context ends before; raises if the prompt fills it.
        limits.append(answer_limit(decoder, row["tokens"], max_new, f"prompt {number}"))
    images = [images_of_row(row, device) for row in rows]  # an empty dict for a text
    reader = decoder
    if any(images):  # texts alone skip the vision tower
        reader = model
    generated = generate_tokens(
        reader,
        [torch.tensor(row["tokens"], device=device) for row in rows],
        max_new_tokens=limits,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        logits_processors=logits_processors,
        stop_tokens=tokenizer.stop_tokens,
        rng=rng,
        max_sequences=_MAX_SEQUENCES,
        images=images,
    )

    answers = []
    num_cut = 0
    for tokens, limit in zip(generated.tokens, limits, strict=True):
        ids = tokens.tolist()
        if ids[-1] in tokenizer.stop_tokens:
            ids.pop()
        elif max_new_tokens is None or limit < max_new:
            num_cut += 1  # by the default or by the context, not by the length that the caller asked for
        answers.append(tokenizer.decode(ids))
    if num_cut:
        get_logger().warning(
            f"{num_cut} of {len(answers)} answers are cut, by the context of {decoder.max_seq_len} tokens or after "
            f"{max_new} tokens: max_new_tokens sets how long an answer may be."
        )
    if is_single:
        return answers[0]
    return answers


def _to_prompts(prompt: Any) -> tuple[list[Any], bool]:
    """Return the prompts as a list, with token ids of tensors and arrays as lists, and whether it was a single one.

    Raises:
        GenerationError: the prompt has an unsupported type.
    """
    prompt = _check_prompt(prompt, "prompt")
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int | Mapping | Message):
        return [prompt], True
    prompts = []
    for number, item in enumerate(prompt):
        prompts.append(_check_prompt(item, f"prompt {number}"))
    return prompts, False


def _check_prompt(prompt: Any, name: str) -> Any:
    """Return a prompt, or a list of prompts, with the token ids of a tensor or an array as a list.

    Raises:
        GenerationError: it has an unsupported type.
    """
    if hasattr(prompt, "tolist"):  # a tensor or an array
        prompt = prompt.tolist()
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise GenerationError(
            f"{name}: a {type(prompt).__name__} cannot be continued: give a text, a list of messages, or token ids."
        )
    return prompt


def _check_model(model: nn.Module, tokenizer: Any) -> TransformerDecoder:
    """Return the text decoder; raise for a model or tokenizer that would generate garbage without an error."""
    decoder = text_decoder(model)
    if not isinstance(decoder, TransformerDecoder):
        raise GenerationError(f"model: a {type(model).__name__} does not generate: give a decoder of torchtune.models.")
    check_generates(decoder)
    for name, parameter in decoder.named_parameters():
        if parameter.is_meta:
            raise GenerationError(f"model: '{name}' has no values: load the weights first.")
    check_tokenizer(tokenizer)
    training.fit_vocabulary(model, tokenizer)
    if model in ORIGINS:
        _check_same_tokens(ORIGINS[model].tokenizer, tokenizer)
    return decoder


def _check_same_tokens(loaded: Any, tokenizer: Any) -> None:
    """Raise if most of a sample of ids are other texts than in the tokenizer that was loaded with the model."""
    if loaded is tokenizer:
        return
    count = min(loaded.vocab_size, tokenizer.vocab_size)
    # The first ids are often bytes and special tokens, which tokenizers have in common.
    ids = range(count // 10, count, max(count // _SAMPLED_IDS, 1))
    num_differing = sum(loaded.decode([token_id]) != tokenizer.decode([token_id]) for token_id in ids)
    if num_differing > len(ids) // 2:
        raise GenerationError(
            "tokenizer: its tokens are not those that the model was loaded with: give the one that torchtune.load "
            "returned with it."
        )


def _tokenize_prompt(tokenizer: Any, prompt: Prompt, number: int) -> dict[str, Any]:
    """Return the token ids of a prompt, including the header of the assistant's turn, and its images."""
    name = f"prompt {number}"
    is_ids = bool(prompt) and not isinstance(prompt, str) and isinstance(prompt[0], int)
    if is_ids:
        return {"tokens": list(prompt)}
    # Tokenizers of model families lack the attribute, because their chat format is in their code.
    if not getattr(tokenizer, "chat_templates", True):
        raise GenerationError(
            f"{name}: the checkpoint has no chat template, so that it answers no questions: load one that is "
            "instruction-tuned, or continue a text with tokenizer.encode(text, add_eos=False) as the prompt."
        )
    if isinstance(prompt, str):
        turns = [{"role": "user", "content": prompt}]
    else:
        turns = list(prompt)
    messages = prompt_turns(as_messages(turns), None, name)
    has_images = any(message.contains_media for message in messages)
    if has_images and not getattr(tokenizer, "takes_images", False):
        raise GenerationError(
            f"{name}: it has an image, but model and tokenizer read text only: torchtune.load(folder, images=True) "
            "loads the vision tower of a checkpoint that has one."
        )
    return prompt_row(tokenizer, messages, name)


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
    training.fit_vocabulary(decoder, tokenizer)  # raises if the tokenizer has more tokens than the model
    # A list of messages is one conversation.
    is_single = isinstance(texts, str) or (bool(texts) and isinstance(texts[0], Mapping | Message))
    inputs: list[Any] = list(texts)
    if is_single:
        inputs = [texts]
    # The columns are only named in errors; the limit, None, is that of the tokenizer.
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
            # The head computes the logits of the last tokens alone.
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
