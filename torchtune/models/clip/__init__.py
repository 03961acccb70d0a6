"""CLIP: the images of vision models, and their encoder."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "CLIPImageTransform": "_transform",
        **dict.fromkeys(("clip_mlp", "clip_vision_encoder"), "_component_builders"),
        **dict.fromkeys(
            ("TiledTokenPositionalEmbedding", "TilePositionalEmbedding", "TokenPositionalEmbedding"),
            "_position_embeddings",
        ),
    },
)
