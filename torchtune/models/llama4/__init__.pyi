from ._earlier import BUILDERS
from ._earlier import Llama4Transform as Llama4Transform
from ._earlier import Llama4VisionEncoder as Llama4VisionEncoder
from ._earlier import Llama4VisionProjectionHead as Llama4VisionProjectionHead
from ._earlier import decoder_only_tp_plan as decoder_only_tp_plan
from ._earlier import llama4_decoder as llama4_decoder
from ._earlier import llama4_maverick_17b_128e as llama4_maverick_17b_128e
from ._earlier import llama4_scout_17b_16e as llama4_scout_17b_16e
from ._earlier import llama4_transform as llama4_transform
from ._earlier import llama4_vision_encoder as llama4_vision_encoder
from ._earlier import llama4_vision_projection_head as llama4_vision_projection_head
from ._earlier import lora_llama4_maverick_17b_128e as lora_llama4_maverick_17b_128e
from ._earlier import lora_llama4_scout_17b_16e as lora_llama4_scout_17b_16e
from ._earlier import qlora_llama4_maverick_17b_128e as qlora_llama4_maverick_17b_128e
from ._earlier import qlora_llama4_scout_17b_16e as qlora_llama4_scout_17b_16e
from ._model import FORMAT, SIZES, Llama4ImageProcessor
from ._model import SPEC as SPEC
from ._model import Llama4Tokenizer as Llama4Tokenizer
