from ._device import DeviceSupport as DeviceSupport
from ._device import allocates_on_host as allocates_on_host
from ._device import batch_to_device as batch_to_device
from ._device import computes_on_cpu as computes_on_cpu
from ._device import fill_from_cpu, find_device, parse_device, to_device
from ._device import get_device as get_device
from ._device import get_device_support as get_device_support
from ._device import get_torch_device_namespace as get_torch_device_namespace
from ._device import get_world_size_and_rank as get_world_size_and_rank
from ._device import is_on_host as is_on_host
from ._device import is_simulated as is_simulated
from ._device import launches_kernels as launches_kernels
from ._device import simulated as simulated
from ._errors import EXIT_REQUEUE, HANG_EXIT_CODE, first_line, kept_random_state
from ._errors import LostRankError as LostRankError
from ._errors import ObserverGuard as ObserverGuard
from ._errors import UserError as UserError
from ._files import AppendedFile as AppendedFile
from ._files import ForeignPathError as ForeignPathError
from ._files import WriteError, cache_root, check_writable_folder, clear_leftovers, convert_os_errors
from ._files import append_line as append_line
from ._files import atomic_directory as atomic_directory
from ._files import atomic_write as atomic_write
from ._files import explain_file_limits as explain_file_limits
from ._files import explain_os_error as explain_os_error
from ._files import fsync_directory as fsync_directory
from ._files import refuse_path_of_other_user as refuse_path_of_other_user
from ._folder_lock import FolderLock as FolderLock
from ._heartbeat import LOOP_PHASES as LOOP_PHASES
from ._heartbeat import Activity as Activity
from ._heartbeat import doing as doing
from ._heartbeat import place as place
from ._heartbeat import sign_of_life as sign_of_life
from ._heartbeat import watch_activity as watch_activity
from ._heartbeat import watched_activity as watched_activity
from ._json import RepeatedKeyError, check_surrogates, decode_json, object_of_pairs
from ._json import read_json as read_json
from ._json import valid_json as valid_json
from ._json import write_json as write_json
from ._logging import AGENT_VARIABLE as AGENT_VARIABLE
from ._logging import GRACE_VARIABLE as GRACE_VARIABLE
from ._logging import LOST_RANK as LOST_RANK
from ._logging import MACHINES_VARIABLE as MACHINES_VARIABLE
from ._logging import above_bars as above_bars
from ._logging import close_run_logger as close_run_logger
from ._logging import deprecate_parameter as deprecate_parameter
from ._logging import deprecated as deprecated
from ._logging import dump_stacks as dump_stacks
from ._logging import dump_stacks_after as dump_stacks_after
from ._logging import get_logger as get_logger
from ._logging import get_rank as get_rank
from ._logging import get_run_logger as get_run_logger
from ._logging import is_first_to_print as is_first_to_print
from ._logging import log_once as log_once
from ._logging import log_rank_zero as log_rank_zero
from ._logging import logged_once as logged_once
from ._logging import note_in_run_log as note_in_run_log
from ._logging import run_log_path as run_log_path
from ._logging import was_error_printed as was_error_printed
from ._packages import hide_import_warnings
from ._packages import require as require
from ._packages import torch_version_ge as torch_version_ge
from ._remote_folder import RemoteError, RemoteFolder, is_url, local_path
from ._torch_private import (
    FakeTensor,
    FakeTensorMode,
    FrozenIntegers,
    TorchDispatchMode,
    allow_compiled_versions,
    compiled_with_backward,
    compiler_errors,
    compiler_options,
    fake_store,
    find_compiler,
    forbid_mixed_reductions,
    forget_meshes,
    fsdp_groups,
    group_named,
    shape_propagation,
    tree_leaves,
    unset_fake_temporarily,
)
from ._torch_private import bound_onednn_caches as bound_onednn_caches
from ._torch_private import flatten_mesh as flatten_mesh
from ._torch_private import has_bfloat16_vectors_only as has_bfloat16_vectors_only
from ._torch_private import has_cpp_compiler as has_cpp_compiler
from ._torch_private import hooks_of_all_modules as hooks_of_all_modules
from ._torch_private import in_backward_pass as in_backward_pass
from ._torch_private import in_dispatch_mode as in_dispatch_mode
from ._torch_private import in_function_transform as in_function_transform
from ._torch_private import memory_snapshot as memory_snapshot
from ._torch_private import one_compiler_thread as one_compiler_thread
from ._torch_private import onednn_computes as onednn_computes
from ._torch_private import onednn_layout as onednn_layout
from ._torch_private import onednn_linear as onednn_linear
from ._torch_private import onednn_linear_op as onednn_linear_op
from ._torch_private import record_memory_history as record_memory_history
from ._torch_private import reduce_scatter_op as reduce_scatter_op
from ._torch_private import saved_tensor_hooks as saved_tensor_hooks
from ._torch_private import set_collective_timeout as set_collective_timeout
from ._torch_private import verbose_profiling as verbose_profiling
