"""Questions of the evaluation harness with images."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchtune.data import DataError, Message, format_content_with_images
from torchtune.evaluation._errors import EvaluationError
from torchtune.generation import prompt_row
from torchtune.modules.transformer import text_decoder

# How tasks of the harness write the place of an image.
_TAG = "<image>"


def without_images(model: nn.Module, tokenizer: Any) -> str | None:
    """Why questions with images cannot be asked, as the end of a sentence; None: they can."""
    if text_decoder(model) is model:
        return f"but a {type(model).__name__} reads text only: name tasks of text, or a vision model."
    if not getattr(tokenizer, "takes_images", False):
        return (
            f"but the tokenizer, a {type(tokenizer).__name__}, reads text only: take that of the vision model, as "
            "the config llama3_2_vision/11B_evaluation does."
        )
    return None


def image_question(tokenizer: Any, text: str, given: Mapping[str, Any], room: int) -> dict[str, Any]:
    """What the tokenizer gives for a question, as the user's turn of a conversation.

    Args:
        tokenizer: of a vision model.
        text: the question, with ``<image>`` for each image.
        given: what the harness gives beside it: ``visual``, the images (Pillow, paths or addresses), or one of them.
        room: most tokens.

    Raises:
        EvaluationError: images and tags differ in number, or the question is too long.
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
