"""Logging, devices, errors and files; knows nothing about models."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "DeviceSupport": "_device",
        "UserError": "_errors",
        "atomic_directory": "_files",
        "atomic_write": "_files",
        "batch_to_device": "_device",
        "deprecate_parameter": "_logging",
        "deprecated": "_logging",
        "explain_os_error": "_files",
        "fsync_directory": "_files",
        "get_device": "_device",
        "get_device_support": "_device",
        "get_logger": "_logging",
        "get_torch_device_namespace": "_device",
        "get_world_size_and_rank": "_device",
        "log_once": "_logging",
        "log_rank_zero": "_logging",
        "require": "_optional",
        "torch_version_ge": "_version",
        "write_json": "_files",
    },
)
