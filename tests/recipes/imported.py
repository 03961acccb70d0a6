"""Imports what recipes import, and what reads their files, for a process that forks both."""

import gc
import importlib
import os

# Read by what is imported below; the last one is what `tune run` sets.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}

from tests.recipes.forker import import_rooms

import_rooms()
for name in ("torchtune._facade", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"):
    importlib.import_module(name)
gc.freeze()  # children do not look for garbage here, which would copy all of it
gc.enable()  # in its children, too
