from ._grouped_optimizer import GroupedOptimizer
from ._low_precision_optimizer import HALF, LowPrecisionOptimizer, OptimizerStateError, check_state_format
from ._prepare_optimizer import prepare_optimizer, require_trained
