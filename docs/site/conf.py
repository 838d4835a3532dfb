"""Settings of Sphinx for the site (`make docs`): the pages of docs/, and those that reference.py makes from code."""

import html
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

project = html_title = "Runahead"
extensions = ["myst_parser"]
html_theme = "furo"
html_static_path = ["_static"]
html_js_files = ["mermaid.min.js"]  # it draws the diagrams of a page when the page is loaded
html_show_sphinx = False
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]


class Mermaid(SphinxDirective):
    """A diagram as text, which mermaid draws in the browser."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        text = html.escape("\n".join(self.content))
        return [nodes.raw("", f'<pre class="mermaid">{text}</pre>', format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("mermaid", Mermaid)
    return {"parallel_read_safe": True}
