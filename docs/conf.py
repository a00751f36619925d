"""Settings of the documentation site, which `make docs` builds. The sources are the repository's
Markdown files, where they are.
"""

from __future__ import annotations

project = "so-tui"
html_title = "so-tui"
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "benchmarks/*.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
extensions = ["myst_parser"]
myst_heading_anchors = 3
highlight_language = "none"  # of blocks that name none: commands and their output

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_site"]  # a page that leads from the root to docs/index.html
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
