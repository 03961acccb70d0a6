"""Questions of lm-eval with images."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchtune.data import DataError, Message, format_content_with_images
from torchtune.evaluation._evaluation_error import EvaluationError
from torchtune.generation import prompt_row
from torchtune.modules.transformer import text_decoder

# lm-eval's placeholder of an image.
_TAG = "<image>"


def explain_no_images(model: nn.Module, tokenizer: Any) -> str | None:
    """Return why the model cannot answer questions with images, as the end of a sentence, or ``None`` if it can."""
    if text_decoder(model) is model:
        return f"but a {type(model).__name__} reads text only: name tasks of text, or a vision model."
    if not getattr(tokenizer, "takes_images", False):
        return (
            f"but the tokenizer, a {type(tokenizer).__name__}, reads text only: take that of the vision model, as "
            "the config llama3_2_vision/11B_evaluation does."
        )
    return None


def image_question(tokenizer: Any, text: str, given: Mapping[str, Any], room: int) -> dict[str, Any]:
    """Tokenize a question with images, as a user turn.

    Args:
        tokenizer: tokenizer of a vision model.
        text: the question, with ``<image>`` for each image.
        given: lm-eval's media arguments: ``visual``, one image or a list (Pillow, paths or URLs).
        room: maximum number of tokens.

    Raises:
        EvaluationError: the numbers of images and placeholders differ, or the question is too long.
        DataError: an image cannot be read.
    """
    images = given.get("visual")
    if images is None:
        images = []
    images = list(images) if isinstance(images, Sequence) and not isinstance(images, str | bytes) else [images]
    try:
        content = format_content_with_images(text, image_tag=_TAG, images=images)
    except DataError as error:
        raise EvaluationError(
            f"tasks: {error}: doc_to_text has {_TAG} once for each image of doc_to_image, and examples "
            "(num_fewshot) have no images here."
        ) from error
    row = prompt_row(tokenizer, [Message(role="user", content=content)], "tasks")
    if len(row["tokens"]) > room:
        raise EvaluationError(
            f"tasks: a question with images has {len(row['tokens'])} tokens, of which none can be cut, and there is "
            f"room for {room}: raise max_seq_length, or lower the task's max_gen_toks."
        )
    return row
