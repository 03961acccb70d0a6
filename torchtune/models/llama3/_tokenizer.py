"""Llama 3's tokenizer, of all its versions."""

from collections.abc import Mapping

from torchtune.data import PromptTemplateInterface
from torchtune.data._prompt_templates import TemplateType, get_prompt_template
from torchtune.modules.transforms.tokenizers import parse_hf_tokenizer_json
from torchtune.modules.transforms.tokenizers._header_turns import HeaderTurns

SPECIAL_TOKENS = {
    "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001,
    "<|reserved_special_token_0|>": 128002,
    "<|reserved_special_token_1|>": 128003,
    "<|finetune_right_pad_id|>": 128004,
    "<|step_id|>": 128005,
    "<|start_header_id|>": 128006,
    "<|end_header_id|>": 128007,
    "<|eom_id|>": 128008,
    "<|eot_id|>": 128009,
    "<|python_tag|>": 128010,
    "<|reserved_special_token_245|>": 128011,
    "<|video|>": 128012,
    "<|image|>": 128256,
}
NUM_RESERVED_SPECIAL_TOKENS = 257
RESERVED_TOKENS = {
    f"<|reserved_special_token_{2 + i}|>": 128013 + i for i in range(NUM_RESERVED_SPECIAL_TOKENS - len(SPECIAL_TOKENS))
}
LLAMA3_SPECIAL_TOKENS = {**SPECIAL_TOKENS, **RESERVED_TOKENS}


class Llama3Tokenizer(HeaderTurns):
    """tiktoken tokenizer with Llama 3's layout of conversations.

    Args:
        path: Meta's ``tokenizer.model``.
        special_tokens: text -> id; by default Llama 3's.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: texts added to the turns before the layout.
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken, or a special token that the layout needs is missing.
    """

    def __init__(
        self,
        path: str,
        special_tokens: Mapping[str, int] | None = None,
        max_seq_len: int | None = None,
        prompt_template: PromptTemplateInterface | None = None,
        truncation_type: str = "right",
    ) -> None:
        special_tokens = LLAMA3_SPECIAL_TOKENS if special_tokens is None else special_tokens
        super().__init__(path, special_tokens, max_seq_len, prompt_template, truncation_type)


def llama3_tokenizer(
    path: str,
    special_tokens_path: str | None = None,
    max_seq_len: int | None = None,
    prompt_template: TemplateType | None = None,
    truncation_type: str = "right",
) -> Llama3Tokenizer:
    """Llama 3's tokenizer.

    Args:
        path: Meta's ``tokenizer.model``.
        special_tokens_path: a ``tokenizer.json`` with special tokens that replace Llama 3's.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: dotted path of a template, or a mapping role -> [text before, text after].
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.

    Raises:
        DataError: a file is missing or broken.
    """
    return Llama3Tokenizer(
        path=path,
        special_tokens=parse_hf_tokenizer_json(special_tokens_path) if special_tokens_path is not None else None,
        max_seq_len=max_seq_len,
        prompt_template=get_prompt_template(prompt_template),
        truncation_type=truncation_type,
    )
