"""Llama 3.

Llama 2 with a larger vocabulary and RoPE base, and grouped queries at every size (https://arxiv.org/abs/2407.21783).
Its format also reads any other ``config.json`` of Llama's architecture.
"""

from typing import TYPE_CHECKING

from torch import nn

from torchtune._lazy import former_package
from torchtune.models._builders import component_builders, model_builders
from torchtune.models._description import Description, ModelError
from torchtune.models._hf_config import LLAMA
from torchtune.models._parallel_plan import decoder_plan
from torchtune.models._spec import family
from torchtune.models._tokenizer_builder import tokenizer_builder
from torchtune.models._weight_names import GGUF, HF_INTERLEAVED, META
from torchtune.tokenizers import HeaderTurns

SPEC = family(
    "llama3",
    LLAMA,
    HF_INTERLEAVED,
    formats={"meta": META, "gguf": GGUF},
    model_types=("LLAMA3", "LLAMA2", "LLAMA3_2"),  # also reads any Llama by its config.json,
)

_COMMON = {
    "vocab_size": 128_256,
    "max_seq_len": 8192,
    "num_kv_heads": 8,
    "rope_base": 500_000.0,
}

SIZES = {
    "llama3_8b": Description(**_COMMON, num_layers=32, embed_dim=4096, intermediate_dim=14_336, num_heads=32),
    "llama3_70b": Description(**_COMMON, num_layers=80, embed_dim=8192, intermediate_dim=28_672, num_heads=64),
}
BUILDERS = model_builders(__name__, "Llama 3", SPEC, SIZES)
llama3_8b = BUILDERS["llama3_8b"]
lora_llama3_8b = BUILDERS["lora_llama3_8b"]
qlora_llama3_8b = BUILDERS["qlora_llama3_8b"]
llama3_70b = BUILDERS["llama3_70b"]
lora_llama3_70b = BUILDERS["lora_llama3_70b"]
qlora_llama3_70b = BUILDERS["qlora_llama3_70b"]

COMPONENTS = component_builders(
    __name__,
    "llama3",
    "Llama 3",
    SPEC,
    Description,
    ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "max_seq_len"),
    attn_dropout=0.0,
    rope_base=500_000,
    intermediate_dim=None,
    norm_eps=1e-5,
)
llama3 = COMPONENTS["llama3"]
lora_llama3 = COMPONENTS["lora_llama3"]


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


if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def base_llama_tp_plan(
    model: nn.Module, *, inference: bool = False, enable_fp8_training: bool = False
) -> dict[str, "ParallelStyle"]:
    """Make the tensor-parallel plan of a decoder without architecture-specific modules, such as Llama.

    Args:
        model: a :class:`torchtune.modules.TransformerDecoder`.
        inference: must be False: generation runs on one device.
        enable_fp8_training: must be False: float8 training is not supported.

    Raises:
        ModelError: ``inference`` or ``enable_fp8_training`` is True.
    """
    for name, value in (("inference", inference), ("enable_fp8_training", enable_fp8_training)):
        if value:
            raise ModelError(f"tensor_parallel_plan: {name}=True is not available: leave it out.")
    return decoder_plan(model)


__all__ = ["SPEC", *BUILDERS, *COMPONENTS, "Llama3Tokenizer", "base_llama_tp_plan", "llama3_tokenizer"]
__getattr__, __path__ = former_package(__name__)
