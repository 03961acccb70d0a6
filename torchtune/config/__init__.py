"""YAML configs: parse with source positions, check against dataclasses and signatures, instantiate components."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "CheckpointerComponent": "_schema",
        "Component": "_schema",
        "ConfigError": "_errors",
        "Configurable": "_instantiate",
        "DatasetComponent": "_schema",
        "InstantiationError": "_errors",
        "LossComponent": "_schema",
        "OptimizerComponent": "_schema",
        "PositiveInt": "_schema",
        "Range": "_schema",
        "RuntimeArgs": "_schema",
        "SchedulerComponent": "_schema",
        "describe_settings": "_schema",
        "instantiate": "_instantiate",
        "load_and_check": "_parse",
        "log_config": "_save",
        "parse": "_parse",
        "save_config": "_save",
        "settings_of": "_schema",
        "to_dict": "_save",
        "validate": "_parse",
    },
    between_rooms={
        "Document": "_document",
        "apply_overrides": "_document",
        "did_you_mean": "_errors",
        "redact_secrets": "_secrets",
        "locate": "_components",
        "read_document": "_document",
        "to_yaml": "_save",
        "locate_from_recipe": "_components",
    },
)
