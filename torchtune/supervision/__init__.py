"""Supervision of a run: watchdog, step synchronization, skipped steps, progress, report, throughput, profiler."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "BestValidation": "_best_validation",
        "DEFAULT_PROFILER_ACTIVITIES": "_profiler",
        "DEFAULT_PROFILE_DIR": "_profiler",
        "DEFAULT_SCHEDULE": "_profiler",
        "DEFAULT_TRACE_OPTS": "_profiler",
        "DummyProfiler": "_profiler",
        "HANG_EXIT_CODE": "_watchdog",
        "OutOfMemoryError": "_out_of_memory",
        "PROFILER_KEY": "_profiler",
        "ProgressBar": "_progress",
        "RunControl": "_run_control",
        "RunReport": "_run_report",
        "SkippedStepsError": "_step_guard",
        "StepGuard": "_step_guard",
        "StepMetrics": "_step_metrics",
        "StopSignal": "_signals",
        "Throughput": "_throughput",
        "Watchdog": "_watchdog",
        "explain_out_of_memory": "_out_of_memory",
        "profiler_from_config": "_profiler",
        "setup_torch_profiler": "_profiler",
        "watch_run": "_watchdog",
        "watched": "_watchdog",
    },
    between_rooms={
        "attention_pairs": "_flops",
        "checksum_bits": "_run_report",
        "count_steps": "_run_report",
        "count_tokens": "_run_report",
        "describe_global_batch": "_run_report",
        "explain_no_validation": "_run_report",
        "peak_flops": "_flops",
    },
)
