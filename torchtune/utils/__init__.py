"""Logging, devices, errors and files; knows nothing about models."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AppendedFile": "_appended",
        "DeviceSupport": "_device",
        "FolderLock": "_folder_lock",
        "UserError": "_errors",
        "atomic_directory": "_files",
        "atomic_write": "_files",
        "batch_to_device": "_device",
        "close_run_logger": "_log_files",
        "deprecate_parameter": "_logging",
        "deprecated": "_logging",
        "dump_stacks": "_log_files",
        "dump_stacks_after": "_log_files",
        "explain_os_error": "_files",
        "fsync_directory": "_files",
        "get_device": "_device",
        "get_device_support": "_device",
        "get_logger": "_logging",
        "get_run_logger": "_log_files",
        "get_torch_device_namespace": "_device",
        "get_world_size_and_rank": "_device",
        "log_once": "_logging",
        "log_rank_zero": "_logging",
        "note_in_run_log": "_log_files",
        "require": "_optional",
        "run_log_path": "_log_files",
        "torch_version_ge": "_version",
        "valid_json": "_files",
        "write_json": "_files",
    },
)
