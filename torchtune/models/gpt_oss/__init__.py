"""gpt-oss."""

from torchtune._lazy import attach
from torchtune.models.gpt_oss._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        **dict.fromkeys(BUILDERS, "_model_builders"),
        "GptOssTokenizer": "_tokenizer",
        "gpt_oss_tokenizer": "_tokenizer",
    },
)
__all__ += ["SPEC"]
