from ._builders import llava_instruct_dataset as llava_instruct_dataset
from ._builders import multimodal_chat_dataset as multimodal_chat_dataset
from ._builders import the_cauldron_dataset as the_cauldron_dataset
from ._builders import the_cauldron_transform as the_cauldron_transform
from ._builders import vqa_dataset as vqa_dataset
