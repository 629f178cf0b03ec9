"""How the documentation is built: `make docs`."""

import ackcore

project = "ackcore"
author = "the ackcore developers"
release = version = ackcore.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
# For contributors, on the repository's own pages.
exclude_patterns = ["_build", "design.md"]
# `topic` in a docstring may be any of several attributes: it then has no link.
suppress_warnings = ["ref.python"]
myst_heading_anchors = 3
# Docstrings write `name` for what may have a page here and for what has none.
default_role = "py:obj"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give types, shapes and units
autodoc_class_signature = "separated"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"ackcore {release}"
html_static_path = ["_static"]  # `make docs` draws rates.svg there
html_css_files = ["ackcore.css"]
html_theme_options = {"sidebar_hide_name": False}
