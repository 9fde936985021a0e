"""How the documentation site is built: `make docs`. The reasons are in docs/adr/0018-the-site-is-built-by-sphinx.md.

The source folder is the root of the checkout, so that pages link to deploy/README.md, CHANGELOG.md and source files by
the same relative paths as where the repository itself is read.
"""

import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent

project = "horizon"
author = "The horizon authors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "bench/RESULTS.md", "deploy/**.md", "docs/**.md"]
exclude_patterns = [".*", "build", "dist", "demo-output"]

extensions = ["myst_parser", "sphinx_copybutton"]
# Anchors as GitHub makes them, so that one link works in both places.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = f"horizon {release}"
html_copy_source = False
html_show_copyright = False
html_theme_options: dict[str, Any] = {"top_of_page_buttons": []}
# The site's address shows the start page; it is in docs/, because sources keep their paths.
html_extra_path = ["site"]


def _resolve_folders(app: Sphinx, page: nodes.document) -> None:
    """Turn a link to a folder into one to its README where that is a page of the site, else into its text."""
    for node in list(page.findall(pending_xref)):
        target = unquote(node["reftarget"]).rstrip("/")
        folder = ROOT / Path(app.env.docname).parent / target
        if node.get("reftype") != "myst" or not target or not folder.is_dir():
            continue
        readme = (folder / "README").resolve().relative_to(ROOT).as_posix()
        if readme in app.env.found_docs:
            node.attributes |= {"refdomain": "doc", "reftarget": readme, "reftargetid": None}
        else:
            node.replace_self(node[0].deepcopy())


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("doctree-read", _resolve_folders)
