"""Sphinx configuration. The build needs the installed package and its configs, no network."""

import sys
from pathlib import Path

from anemoi_gt import __version__

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "anemoi_gt"
author = "the authors of anemoi_gt"
project_copyright = author
version = release = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_parser",
    "plain_docstrings",
    "config_reference",
    "edges_figure",
    "halo_figure",
    "results_figures",
]
exclude_patterns = ["_build"]
# `name` in a docstring links where the name is documented, and is code where it is not
default_role = "py:obj"

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3

pygments_dark_style = "github-dark"
highlight_language = "none"  # a literal block in a docstring is a formula

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say types with their shapes
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
numpydoc_show_class_members = False
viewcode_line_numbers = True
viewcode_follow_imported_members = True

html_theme = "furo"
html_title = f"anemoi_gt {release}"
html_static_path = ["_static"]
html_css_files = ["anemoi_gt.css"]
html_js_files = ["copy.js"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072B2", "color-brand-content": "#0072B2"},
    "dark_css_variables": {"color-brand-primary": "#56B4E9", "color-brand-content": "#56B4E9"},
}
