from .float8_training import Float8Training as Float8Training
from .layers import FrozenFloat8Linear as FrozenFloat8Linear
from .layers import FrozenInt8Linear as FrozenInt8Linear
from .layers import FrozenNF4Linear as FrozenNF4Linear
from .quantize_base import QuantizeBase as QuantizeBase
from .quantize_base import reparametrize_as_dtype_state_dict_post_hook as reparametrize_as_dtype_state_dict_post_hook
