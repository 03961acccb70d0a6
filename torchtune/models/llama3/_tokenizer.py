"""Tokenizer of Llama 3, 3.1, 3.2 and 3.3."""

from torchtune.models._tokenizer_builders import tokenizer_builder
from torchtune.tokenizers import HeaderTurns

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
    """tiktoken tokenizer with Llama 3's chat format.

    Args:
        path: path of Meta's ``tokenizer.model``.
        special_tokens: text -> id; by default Llama 3's.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        prompt_template: adds texts to the messages before they are formatted.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken, or a required special token is missing.
    """

    default_tokens = LLAMA3_SPECIAL_TOKENS


llama3_tokenizer = tokenizer_builder(Llama3Tokenizer, "llama3_tokenizer", "Llama 3")
