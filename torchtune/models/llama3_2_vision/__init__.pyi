from ._earlier import llama3_2_vision_decoder as llama3_2_vision_decoder
from ._earlier import lora_llama3_2_vision_decoder as lora_llama3_2_vision_decoder
from ._earlier import lora_llama3_2_vision_encoder as lora_llama3_2_vision_encoder
from ._model import SIZES, llama3_2_vision_projection_head
from ._model import SPEC as SPEC
from ._model import Llama3VisionEncoder as Llama3VisionEncoder
from ._model import Llama3VisionProjectionHead as Llama3VisionProjectionHead
from ._model import llama3_2_vision_11b as llama3_2_vision_11b
from ._model import llama3_2_vision_90b as llama3_2_vision_90b
from ._model import llama3_2_vision_encoder as llama3_2_vision_encoder
from ._model import lora_llama3_2_vision_11b as lora_llama3_2_vision_11b
from ._model import lora_llama3_2_vision_90b as lora_llama3_2_vision_90b
from ._model import qlora_llama3_2_vision_11b as qlora_llama3_2_vision_11b
from ._model import qlora_llama3_2_vision_90b as qlora_llama3_2_vision_90b
from ._transform import Llama3VisionTransform as Llama3VisionTransform
from ._transform import llama3_2_vision_transform as llama3_2_vision_transform
