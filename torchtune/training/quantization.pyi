from torchtune.compat import is_fp8_tensorwise_scaling as is_fp8_tensorwise_scaling
from torchtune.compat import swap_lora_linear_with_qat as swap_lora_linear_with_qat
from torchtune.compat._former_models import (
    _disable_linear_fake_quant,
    _enable_linear_fake_quant,
    _get_disable_fake_quant,
    _get_enable_fake_quant,
    disable_4w_fake_quant_module_swap,
    disable_8da4w_fake_quant_module_swap,
    enable_4w_fake_quant_module_swap,
    enable_8da4w_fake_quant_module_swap,
)
from torchtune.modules.low_precision.float8_training import convert_to_float8_training as convert_to_float8_training
from torchtune.modules.low_precision.quantizers import Float8Quantizer as Float8Quantizer
from torchtune.modules.low_precision.quantizers import GGUFQuantizer as GGUFQuantizer
from torchtune.modules.low_precision.quantizers import Int4WeightOnlyQATQuantizer as Int4WeightOnlyQATQuantizer
from torchtune.modules.low_precision.quantizers import (
    Int4WeightOnlyQATQuantizerModuleSwap as Int4WeightOnlyQATQuantizerModuleSwap,
)
from torchtune.modules.low_precision.quantizers import Int4WeightOnlyQuantizer as Int4WeightOnlyQuantizer
from torchtune.modules.low_precision.quantizers import (
    Int8DynActInt4WeightQATQuantizer as Int8DynActInt4WeightQATQuantizer,
)
from torchtune.modules.low_precision.quantizers import (
    Int8DynActInt4WeightQATQuantizerModuleSwap as Int8DynActInt4WeightQATQuantizerModuleSwap,
)
from torchtune.modules.low_precision.quantizers import Int8DynActInt4WeightQuantizer as Int8DynActInt4WeightQuantizer
from torchtune.modules.low_precision.quantizers import Int8WeightOnlyQATQuantizer as Int8WeightOnlyQATQuantizer
from torchtune.modules.low_precision.quantizers import Int8WeightOnlyQuantizer as Int8WeightOnlyQuantizer
from torchtune.modules.low_precision.quantizers import QATQuantizer as QATQuantizer
from torchtune.modules.low_precision.quantizers import Quantizer as Quantizer
from torchtune.modules.low_precision.quantizers import fake_quantization as fake_quantization
from torchtune.modules.low_precision.quantizers import get_quantizer_mode as get_quantizer_mode
