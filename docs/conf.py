"""Sphinx configuration; uses only Sphinx's own extensions and no network."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent / "_ext"), str(Path(__file__).parents[1])]

import torchtune  # noqa: E402

project = "torchtune"
version = release = torchtune.__version__
author = "the torchtune contributors"
copyright = "the torchtune contributors"
language = "en"

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "tables", "faces", "dark_code"]
exclude_patterns = ["_build"]
html_theme = "basic"
html_title = "torchtune"
html_static_path = ["_static"]
html_extra_path = ["llms.txt"]  # at the root of the site (llmstxt.org)
html_css_files = ["site.css"]
templates_path = ["_templates"]
pygments_style = "friendly"
html_show_sourcelink = False
html_copy_source = False
highlight_language = "text"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_use_type_comments = False  # there are none, and looking for them takes a twentieth of the time
napoleon_numpy_docstring = False
napoleon_use_ivar = True
