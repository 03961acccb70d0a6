from ._best_validation import BestValidation as BestValidation
from ._best_validation import is_own_metric
from ._describe_run import StepPlan as StepPlan
from ._describe_run import (
    align_rows,
    component_name,
    count_tokens,
    explain_no_validation,
    explain_shared_rows,
)
from ._flops import attention_pairs, peak_flops
from ._observe_together import observe_together as observe_together
from ._out_of_memory import OutOfMemoryError as OutOfMemoryError
from ._out_of_memory import explain_out_of_memory as explain_out_of_memory
from ._profiler import DEFAULT_PROFILE_DIR as DEFAULT_PROFILE_DIR
from ._profiler import DEFAULT_PROFILER_ACTIVITIES as DEFAULT_PROFILER_ACTIVITIES
from ._profiler import DEFAULT_SCHEDULE as DEFAULT_SCHEDULE
from ._profiler import DEFAULT_TRACE_OPTS as DEFAULT_TRACE_OPTS
from ._profiler import PROFILER_KEY as PROFILER_KEY
from ._profiler import DummyProfiler as DummyProfiler
from ._profiler import GuardedProfiler as GuardedProfiler
from ._profiler import profiler_from_config as profiler_from_config
from ._profiler import setup_torch_profiler as setup_torch_profiler
from ._progress import ProgressBar as ProgressBar
from ._run_control import RunControl as RunControl
from ._signals import StopSignal as StopSignal
from ._step_guard import SkippedStepsError as SkippedStepsError
from ._step_guard import StepGuard as StepGuard
from ._step_metrics import PROGRESS_METRICS
from ._step_metrics import StepMetrics as StepMetrics
from ._throughput import Throughput as Throughput
from ._watchdog import HANG_EXIT_CODE as HANG_EXIT_CODE
from ._watchdog import Watchdog as Watchdog
from ._watchdog import watch_run as watch_run
from ._watchdog import watched as watched
