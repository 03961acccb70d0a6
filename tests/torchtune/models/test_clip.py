"""CLIP's vision encoder against ``transformers``: images of one tile."""

import pytest
import torch
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from torchtune.models import ModelError
from torchtune.models.clip import clip_vision_encoder

# ours -> theirs
LAYER = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.out_proj",
    "mlp.w1": "mlp.fc1",
    "mlp.w2": "mlp.fc2",
    "sa_norm": "layer_norm1",
    "mlp_norm": "layer_norm2",
}
REST = {
    "conv": "embeddings.patch_embedding",
    "ln_pre": "pre_layrnorm",
    "ln_post": "post_layernorm",
}


def test_features_are_those_of_transformers():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPVisionConfig(**sizes, image_size=28, patch_size=14, hidden_act="gelu")
    hf_model = CLIPVisionModel(config).eval()
    for parameter in hf_model.parameters():
        nn.init.normal_(parameter, 0.1, 0.3)
    state = {name.removeprefix("vision_model."): value for name, value in hf_model.state_dict().items()}
    names = dict(REST)
    for i in range(2):
        for tune_name, hf_name in LAYER.items():
            names[f"layers.{i}.{tune_name}"] = f"encoder.layers.{i}.{hf_name}"
    weights = {}
    for tune_name, hf_name in names.items():
        for kind in ("weight", "bias"):
            if f"{hf_name}.{kind}" in state:
                weights[f"{tune_name}.{kind}"] = state[f"{hf_name}.{kind}"]
    weights["cls_token_embedding.weight"] = state["embeddings.class_embedding"]
    weights["token_pos_embedding.positional_embedding"] = state["embeddings.position_embedding.weight"]
    encoder = clip_vision_encoder(28, 14, 16, 2, 2, nn.GELU, max_num_tiles=1, out_indices=[1])
    encoder.load_state_dict(weights)

    images = torch.randn(3, 3, 28, 28)
    with torch.no_grad():
        wanted = hf_model(images, output_hidden_states=True)
        features, (hidden,) = encoder(images.view(3, 1, 1, 3, 28, 28))
    torch.testing.assert_close(hidden.flatten(0, 2), wanted.hidden_states[1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(features[:, 0, 0, 0], wanted.pooler_output, atol=1e-5, rtol=1e-4)


def test_heads_have_any_size_that_divides_the_width():
    """Towers with rotary positions need heads of a multiple of 4; CLIP has none."""
    encoder = clip_vision_encoder(4, 2, embed_dim=12, num_layers=1, num_heads=4, max_num_tiles=1)
    assert encoder(torch.ones(1, 1, 1, 3, 4, 4))[0].shape == (1, 1, 1, 5, 12)
    with pytest.raises(ModelError, match=r"embed_dim \(12\) must be a multiple of num_heads \(5\)"):
        clip_vision_encoder(4, 2, embed_dim=12, num_layers=1, num_heads=5, max_num_tiles=1)


def test_layers_have_any_activation():
    encoder = clip_vision_encoder(4, 2, embed_dim=8, num_layers=2, num_heads=2, activation=nn.ReLU)
    assert [type(layer.mlp.activation) for layer in encoder.layers] == [nn.ReLU, nn.ReLU]
