"""Building blocks of models: layers, losses, adapters and attention kernels."""

from torchtune._lazy import former_names
from torchtune.modules.attention import (
    LatentAttention,
    MultiHeadAttention,
    create_block_causal_mask,
    packed_block_causal_mask,
)
from torchtune.modules.embeddings import resize_token_embeddings
from torchtune.modules.feed_forward import FeedForward, swiglu
from torchtune.modules.kernels.attention import attention
from torchtune.modules.kv_cache import KVCache, delete_kv_caches, disable_kv_cache, local_kv_cache
from torchtune.modules.low_precision import FrozenNF4Linear as FrozenNF4Linear
from torchtune.modules.low_precision import (
    reparametrize_as_dtype_state_dict_post_hook as reparametrize_as_dtype_state_dict_post_hook,
)
from torchtune.modules.low_precision.layers import StoredLinear
from torchtune.modules.model_converters import (
    BidirectionalAttention,
    FlashAttentionKernel,
    Freeze,
    NEFTune,
    OptionalKernels,
    TiledMLP,
)
from torchtune.modules.output_projection import (
    Pooling,
    TiedLinear,
    classifier_model,
    last_hidden_states,
    pooled_embeddings,
)
from torchtune.modules.position_embeddings import RotaryPositionalEmbeddings, apply_rope
from torchtune.modules.rms_norm import Fp32LayerNorm, RMSNorm, TanhGate, rms_norm
from torchtune.modules.transformer import (
    TransformerCrossAttentionLayer,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
    text_decoder,
)
from torchtune.modules.vision_transformer import Tiles as Tiles
from torchtune.modules.vision_transformer import VisionTransformer

__all__ = [
    "BidirectionalAttention",
    "FeedForward",
    "FlashAttentionKernel",
    "Fp32LayerNorm",
    "Freeze",
    "KVCache",
    "LatentAttention",
    "MultiHeadAttention",
    "NEFTune",
    "OptionalKernels",
    "Pooling",
    "RMSNorm",
    "RotaryPositionalEmbeddings",
    "StoredLinear",
    "TanhGate",
    "TiedLinear",
    "TiledMLP",
    "TransformerCrossAttentionLayer",
    "TransformerDecoder",
    "TransformerSelfAttentionLayer",
    "VisionTransformer",
    "apply_rope",
    "attention",
    "classifier_model",
    "create_block_causal_mask",
    "delete_kv_caches",
    "disable_kv_cache",
    "last_hidden_states",
    "local_kv_cache",
    "packed_block_causal_mask",
    "pooled_embeddings",
    "resize_token_embeddings",
    "rms_norm",
    "swiglu",
    "text_decoder",
]

__getattr__ = former_names(__name__)
