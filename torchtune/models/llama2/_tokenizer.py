"""Llama 2's tokenizer."""

from torchtune.data import DataError, Message, PromptTemplateInterface
from torchtune.data._prompt_templates import TemplateType, get_prompt_template
from torchtune.models.llama2._prompt_template import Llama2ChatTemplate
from torchtune.modules.transforms.tokenizers import (
    ModelTokenizer,
    SentencePieceBaseTokenizer,
    tokenize_messages_no_special_tokens,
)
from torchtune.modules.transforms.tokenizers._protocols import MessageTransform, end_tokens

_DEFAULT_TEMPLATE = Llama2ChatTemplate()


class Llama2Tokenizer(MessageTransform, ModelTokenizer):
    """SentencePiece tokenizer with Llama 2's layout of conversations.

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
        self._spm_model = SentencePieceBaseTokenizer(path)
        self.special_tokens: dict[str, int] = {}
        self.max_seq_len = max_seq_len
        self.prompt_template = prompt_template
        self.truncation_type = truncation_type
        self.stop_tokens = [self.eos_id]

    @property
    def eos_id(self) -> int:
        """Token of the end."""
        return self._spm_model.eos_id

    @property
    def bos_id(self) -> int:
        """Token of the beginning."""
        return self._spm_model.bos_id

    @property
    def pad_id(self) -> int:
        """Token of padding; the model has none of its own, 0 is the unknown token."""
        return 0

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._spm_model.vocab_size

    def encode(
        self, text: str, add_bos: bool = True, add_eos: bool = True, trim_leading_whitespace: bool = False
    ) -> list[int]:
        """Token ids of ``text``; see :meth:`SentencePieceBaseTokenizer.encode`."""
        return self._spm_model.encode(
            text, add_bos=add_bos, add_eos=add_eos, trim_leading_whitespace=trim_leading_whitespace
        )

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids."""
        return self._spm_model.decode(token_ids)

    def tokenize_messages(
        self,
        messages: list[Message],
        *,
        add_start_tokens: bool = True,
        add_end_tokens: bool = True,
        add_eos: bool | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Tokenize a conversation.

        Args:
            messages: the conversation.
            add_start_tokens: put the token of the beginning before every exchange.
            add_end_tokens: put the token of the end after every turn of the assistant.
            add_eos: old spelling of ``add_end_tokens``.

        Returns:
            token ids, and for each whether it is masked (not trained on).

        Raises:
            DataError: a message holds an image.
        """
        if any(message.extra.get("tool_calls") for message in messages):
            raise DataError("Llama 2's layout has no place for tool_calls.")
        if self.prompt_template is not None:
            messages = self.prompt_template(messages)
        return tokenize_messages_no_special_tokens(
            self,
            messages,
            bos_id=self.bos_id if add_start_tokens else None,
            eos_id=self.eos_id if end_tokens(add_end_tokens, add_eos) else None,
            truncation_type=self.truncation_type,
        )


def llama2_tokenizer(
    path: str,
    max_seq_len: int | None = None,
    prompt_template: TemplateType | None = "torchtune.models.llama2.Llama2ChatTemplate",
    truncation_type: str = "right",
) -> Llama2Tokenizer:
    """Llama 2's tokenizer.

    Args:
        path: ``tokenizer.model``.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: dotted path of a template, or a mapping role -> [text before, text after].
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken.
    """
    template = get_prompt_template(prompt_template)
    return Llama2Tokenizer(path, max_seq_len=max_seq_len, prompt_template=template, truncation_type=truncation_type)
