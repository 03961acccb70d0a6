"""Code Llama, on Llama 2.

Llama 2, trained further on sequences of 16,384 tokens, for which its RoPE base was raised to 1,000,000
(https://arxiv.org/abs/2308.12950).
"""

from dataclasses import replace

from torchtune.models._builders import model_builders
from torchtune.models.llama2 import SIZES as LLAMA2
from torchtune.models.llama2 import SPEC as LLAMA2_SPEC

SPEC = replace(LLAMA2_SPEC, name="code_llama2")

# Further tokens, for infilling, which 34B was not trained for, are in the vocabulary of the smaller models.
_7B = replace(LLAMA2["llama2_7b"], vocab_size=32_016, max_seq_len=16_384, rope_base=1_000_000.0)
SIZES = {
    "code_llama2_7b": _7B,
    "code_llama2_13b": replace(LLAMA2["llama2_13b"], vocab_size=32_016, max_seq_len=16_384, rope_base=1_000_000.0),
    "code_llama2_34b": replace(
        _7B,
        vocab_size=32_000,
        num_layers=48,
        embed_dim=8192,
        intermediate_dim=22_016,
        num_heads=64,
        num_kv_heads=8,
    ),
}
BUILDERS = model_builders(__name__, "Code Llama", SPEC, SIZES)
code_llama2_7b = BUILDERS["code_llama2_7b"]
lora_code_llama2_7b = BUILDERS["lora_code_llama2_7b"]
qlora_code_llama2_7b = BUILDERS["qlora_code_llama2_7b"]
code_llama2_13b = BUILDERS["code_llama2_13b"]
lora_code_llama2_13b = BUILDERS["lora_code_llama2_13b"]
qlora_code_llama2_13b = BUILDERS["qlora_code_llama2_13b"]
code_llama2_34b = BUILDERS["code_llama2_34b"]
lora_code_llama2_34b = BUILDERS["lora_code_llama2_34b"]
qlora_code_llama2_34b = BUILDERS["qlora_code_llama2_34b"]

__all__ = ["SPEC", *BUILDERS]
