"""Sphinx's settings: sphinx-build -W -b html docs build/docs"""

import shutil
from contextlib import suppress
from inspect import isfunction
from pathlib import Path
from typing import Any, get_type_hints

from hf_packfree import __version__

HERE = Path(__file__).parent
# Sphinx reads its own folder only
shutil.copytree(HERE.parent / "notebooks", HERE / "notebooks", dirs_exist_ok=True)

project = "hf_packfree"
version = release = __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
html_theme = "furo"
html_title = f"hf_packfree {release}"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
# docstrings write `names` as Markdown does
default_role = "code"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
# python -m tests.notebooks keeps the outputs
nb_execution_mode = "off"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_typehints_description_target = "documented_params"
napoleon_use_ivar = True
# return types beside what is returned
napoleon_use_rtype = True
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = ">>> "
html_show_copyright = False


def setup(app: Any) -> None:
    """Show the options of a class by their types, as autodoc does those of a function alone."""

    def evaluate(app: Any, called: Any, bound: bool) -> None:
        # what is imported for type checkers alone stays as it is written
        with suppress(NameError):
            if isfunction(called):
                called.__annotations__ = get_type_hints(called)

    app.connect("autodoc-before-process-signature", evaluate)
