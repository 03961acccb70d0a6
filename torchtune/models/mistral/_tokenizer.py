"""Mistral's tokenizer."""

from torchtune.data import PromptTemplateInterface
from torchtune.data._prompt_templates import TemplateType, get_prompt_template
from torchtune.models.mistral._prompt_template import MistralChatTemplate
from torchtune.modules.transforms.tokenizers._sentencepiece_chat import SentencePieceChatTokenizer

_DEFAULT_TEMPLATE = MistralChatTemplate()


class MistralTokenizer(SentencePieceChatTokenizer):
    """SentencePiece tokenizer with Mistral's layout of conversations.

    Args:
        path: ``tokenizer.model``.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: layout of conversations; ``None`` joins the texts as they are.
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken.
    """

    def __init__(
        self,
        path: str,
        max_seq_len: int | None = None,
        prompt_template: PromptTemplateInterface | None = _DEFAULT_TEMPLATE,
        truncation_type: str = "right",
    ) -> None:
        super().__init__(path, max_seq_len, prompt_template, truncation_type)


def mistral_tokenizer(
    path: str,
    max_seq_len: int | None = None,
    prompt_template: TemplateType | None = "torchtune.models.mistral.MistralChatTemplate",
    truncation_type: str = "right",
) -> MistralTokenizer:
    """Mistral's tokenizer.

    Args:
        path: ``tokenizer.model``.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: dotted path of a template, or a mapping role -> [text before, text after].
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken.
    """
    return MistralTokenizer(path, max_seq_len, get_prompt_template(prompt_template), truncation_type)
