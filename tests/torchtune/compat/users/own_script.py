"""A script that takes components apart: private modules of release 0.7."""

import torch
from torch import nn

from torchtune.data._common import PACK_TYPE
from torchtune.generation._generation import get_causal_mask_from_padding_mask, get_position_ids_from_padding_mask
from torchtune.models.convert_weights import _FROM_HF, get_mapped_key
from torchtune.models.llama3._component_builders import llama3, lora_llama3
from torchtune.models.llama3._model_utils import scale_hidden_dim_for_mlp
from torchtune.models.qwen2._component_builders import qwen2_mlp
from torchtune.modules.attention_utils import _MaskType, _sdpa_or_flex_attention
from torchtune.modules.peft._utils import get_lora_module_names

SIZES = {"vocab_size": 50, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 16, "max_seq_len": 32}


class Wrapped(nn.Module):
    """A model with another feed-forward layer in front of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.mlp = qwen2_mlp(dim=16, hidden_dim=scale_hidden_dim_for_mlp(16))

    def forward(self, tokens: torch.Tensor, mask: _MaskType | None = None) -> torch.Tensor:
        """Compute logits."""
        return self.model(tokens, mask=mask)


def take_steps(count: int) -> list[float]:
    """Train, and return the losses."""
    torch.manual_seed(0)
    assert get_mapped_key("model.layers.3.self_attn.o_proj.weight", _FROM_HF) == "layers.3.attn.output_proj.weight"
    adapted = lora_llama3(["q_proj"], lora_rank=2, lora_alpha=4, **SIZES)
    assert any("lora_a" in name for name, _ in adapted.named_parameters())
    assert get_lora_module_names(["q_proj"], False, False) == ["q_proj"]
    attend = _sdpa_or_flex_attention()
    q = torch.rand(1, 2, 5, 4)
    assert attend(q, q, q, None, 0.0, True).shape == q.shape
    model = Wrapped(llama3(**SIZES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    pack: PACK_TYPE = {"tokens": torch.arange(1, 9)[None], "seq_lens": [8]}
    is_token = torch.ones(1, 8, dtype=torch.bool)
    mask = get_causal_mask_from_padding_mask(is_token)
    assert get_position_ids_from_padding_mask(is_token).tolist() == [list(range(8))]
    losses = []
    for _ in range(count):
        logits = model(pack["tokens"], mask)
        loss = nn.functional.cross_entropy(logits[0, :-1], pack["tokens"][0, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
