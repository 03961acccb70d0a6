"""What each model is: sizes, weight names, configuration files, and the one builder that makes them all."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Description": "_description",
        "Llama3RopeScaling": "_description",
        "ModelError": "_description",
        "ModelSpec": "_spec",
        "WeightMap": "_weight_map",
        "WeightMapError": "_weight_map",
        "build": "_build",
        "from_hf_config": "_from_hf_config",
        "get_spec": "_spec",
        "list_specs": "_spec",
        "register": "_spec",
        "spec_for_architecture": "_spec",
    },
    (
        "convert_weights",
        "gemma",
        "gemma2",
        "gemma3",
        "glm4",
        "granite",
        "llama2",
        "llama3",
        "llama3_1",
        "llama3_2",
        "llama3_3",
        "mistral",
        "olmo2",
        "phi3",
        "phi4",
        "qwen2",
        "qwen2_5",
        "qwen3",
        "smol",
        "smol3",
    ),
)
