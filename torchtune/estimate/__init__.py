"""Memory, time and communication of a run before it starts: a simulated cluster, and checks of settings and data."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "RunError": "_check_run",
        "check_run": "_check_run",
        "check_settings": "_check_settings",
        "plan_data": "_plan_data",
        "plan_run": "_plan",
    },
    between_rooms={
        "SimulationError": "_simulated_inputs",
        "build_on_meta": "_plan",
        "check_simulated": "_simulate",
        "describe": "_fit",
        "estimate_run": "_extrapolate",
        "find_fastest": "_fit",
        "find_problems": "_check_run",
        "is_mixture": "_plan",
        "measure": "_plan_data",
        "measure_data": "_plan_data",
        "memory": "_report",
        "count_parameters": "_plan",
        "nodes_of": "_plan",
        "parse_cluster": "_devices",
        "parse_memory": "_devices",
        "steps_of_epoch": "_plan_data",
        "summary": "_report",
        "weights_memory": "_plan",
    },
)
