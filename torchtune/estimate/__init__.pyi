from ._check_run import RunError as RunError
from ._check_run import check_run as check_run
from ._check_run import check_settings as check_settings
from ._check_run import find_problems as find_problems
from ._extrapolate import estimate_run as estimate_run
from ._fit import describe, find_fastest
from ._plan import build_on_meta as build_on_meta
from ._plan import context_length as context_length
from ._plan import count_parameters as count_parameters
from ._plan import measure, measure_data
from ._plan import plan_data as plan_data
from ._plan import plan_run as plan_run
from ._plan import weights_memory as weights_memory
from ._report import memory, summary
from ._roofline import parse_cluster as parse_cluster
from ._roofline import parse_memory as parse_memory
from ._simulate import SimulationError as SimulationError
from ._simulate import simulated_kind
