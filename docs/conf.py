"""Sphinx's settings: sphinx-build -W -b html docs build/docs"""

import shutil
from pathlib import Path

from hf_packfree import __version__

HERE = Path(__file__).parent
shutil.copytree(HERE.parent / "notebooks", HERE / "notebooks", dirs_exist_ok=True)  # Sphinx reads its own folder only

project = "hf_packfree"
version = release = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"hf_packfree {release}"
html_show_sourcelink = False
default_role = "code"  # docstrings write `names` as Markdown does
myst_heading_anchors = 3
nb_execution_mode = "off"  # python -m tests.notebooks keeps the outputs
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True
napoleon_use_rtype = False
