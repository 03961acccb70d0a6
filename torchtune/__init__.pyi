from . import checkpoints as checkpoints
from . import config as config
from . import data as data
from . import datasets as datasets
from . import estimate as estimate
from . import evaluation as evaluation
from . import generation as generation
from . import models as models
from . import modules as modules
from . import reports as reports
from . import rlhf as rlhf
from . import supervision as supervision
from . import tokenizers as tokenizers
from . import training as training
from . import utils as utils
from ._facade import classify as classify
from ._facade import embed as embed
from ._facade import generate as generate
from ._facade import load as load
from ._facade import save as save

__version__: str
