"""Messages, prompt templates, masks and collation: text in, token rows out."""

from torchtune.data._batch import Batch
from torchtune.data._chat_to_messages import OpenAIToMessages, ShareGPTToMessages
from torchtune.data._collate import (
    collate_documents,
    collate_preference,
    left_pad_sequence,
    padded_collate,
    padded_collate_dpo,
    padded_collate_packed,
    padded_collate_sft,
)
from torchtune.data._collate_images import padded_collate_tiled_images_and_mask
from torchtune.data._common import CROSS_ENTROPY_IGNORE_IDX, DataError, Transform
from torchtune.data._documents import Documents
from torchtune.data._images import format_content_with_images, load_image
from torchtune.data._loader import BatchLoader
from torchtune.data._messages import (
    MaskingStrategy,
    Message,
    MessageLike,
    Role,
    as_messages,
    mask_messages,
    validate_messages,
)
from torchtune.data._prompt_templates import (
    ChatMLTemplate,
    GrammarErrorCorrectionTemplate,
    PromptTemplate,
    PromptTemplateInterface,
    QuestionAnswerTemplate,
    SummarizeTemplate,
)
from torchtune.data._sharing import share_prefixes
from torchtune.data._to_messages import AlpacaToMessages, ChosenRejectedToMessages, InputOutputToMessages
from torchtune.data._truncate import truncate

__all__ = [
    "CROSS_ENTROPY_IGNORE_IDX",
    "AlpacaToMessages",
    "Batch",
    "BatchLoader",
    "ChatMLTemplate",
    "ChosenRejectedToMessages",
    "DataError",
    "Documents",
    "GrammarErrorCorrectionTemplate",
    "InputOutputToMessages",
    "MaskingStrategy",
    "Message",
    "MessageLike",
    "OpenAIToMessages",
    "PromptTemplate",
    "PromptTemplateInterface",
    "QuestionAnswerTemplate",
    "Role",
    "ShareGPTToMessages",
    "SummarizeTemplate",
    "Transform",
    "as_messages",
    "collate_documents",
    "collate_preference",
    "format_content_with_images",
    "left_pad_sequence",
    "load_image",
    "mask_messages",
    "padded_collate",
    "padded_collate_dpo",
    "padded_collate_packed",
    "padded_collate_sft",
    "padded_collate_tiled_images_and_mask",
    "share_prefixes",
    "truncate",
    "validate_messages",
]
