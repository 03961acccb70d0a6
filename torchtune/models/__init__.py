"""Model families: sizes, weight names, Hugging Face configs, and the builder of all models."""

from torchtune._lazy import attach, packages_in

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Description": "_description",
        "DynamicRopeScaling": "_rope_scaling",
        "ExpertAdapter": "_weight_ops",
        "FusedAdapter": "_weight_ops",
        "Group": "_weight_map",
        "Identity": "_weight_ops",
        "ImageTextDescription": "_vision_description",
        "LinearRopeScaling": "_rope_scaling",
        "Llama3RopeScaling": "_rope_scaling",
        "LongRopeScaling": "_rope_scaling",
        "ModelError": "_description",
        "ModelSpec": "_spec",
        "Slices": "_weight_ops",
        "VisionDescription": "_vision_description",
        "WeightMap": "_weight_map",
        "WeightMapError": "_weight_map",
        "YarnRopeScaling": "_rope_scaling",
        "build": "_build",
        "from_hf_config": "_from_hf_config",
        "get_spec": "_spec",
        "list_specs": "_spec",
        "register": "_spec",
        "spec_for_architecture": "_spec",
        "module_prefixes": "_parts",
        "rename_prefix": "_parts",
        "stored_dtype": "_from_hf_config",
        "text_config": "_parts",
        "text_prefixes": "_parts",
        "with_text_config": "_parts",
    },
    ("convert_weights", *packages_in(__path__)),
)
