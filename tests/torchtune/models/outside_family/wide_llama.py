"""A family from outside the library: Llama under another name, as another package would add it."""

from dataclasses import replace

from torchtune.models import Description, get_spec

_LLAMA = get_spec("llama3")


def read(config: dict, ignore_fields: tuple[str, ...] = ()) -> Description:
    """Its own spelling of the width."""
    config = {**config, "architectures": list(_LLAMA.architectures)}
    config["hidden_size"] = config.pop("width")
    return _LLAMA.from_hf_config(config, ignore_fields)


def write(description: Description) -> dict:
    """The inverse of :func:`read`."""
    config = {**_LLAMA.to_hf_config(description), "architectures": ["WideLlamaForCausalLM"]}
    config["width"] = config.pop("hidden_size")
    return config


SPEC = replace(
    _LLAMA,
    name="wide_llama",
    architectures=("WideLlamaForCausalLM",),
    from_hf_config=read,
    to_hf_config=write,
    model_types=("WIDE_LLAMA",),
)
NOT_A_SPEC = 1
