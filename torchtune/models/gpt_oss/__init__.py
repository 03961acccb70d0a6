"""gpt-oss."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "GptOssTokenizer": "_tokenizer",
        "gpt_oss_tokenizer": "_tokenizer",
    },
)
