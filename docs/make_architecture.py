"""Write ``docs/figures/architecture.svg``: the packages in layers, and who imports whom.

python docs/make_architecture.py

Each package stands one layer above the highest one that it imports. An arrow that others imply is
left out: where a imports b and b imports c, the arrow from a to c says nothing new.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs" / "figures" / "architecture.svg"
SOURCES = (ROOT / "so_tui", ROOT / "trainer" / "so_tui_trainer", ROOT / "trainer" / "superoffload")
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 132, 34, 14, 34, 20
STYLE = """
    text { font: 600 12.5px system-ui, "DejaVu Sans", sans-serif; fill: #1a1a1a; text-anchor: middle; }
    .page { fill: #ffffff; }
    .line { stroke: #777777; fill: none; stroke-width: 1.2; }
    .tip { fill: #777777; }
    .so_tui { fill: #d4e8f7; stroke: #56b4e9; }
    .so_tui_trainer { fill: #f3dfea; stroke: #cc79a7; }
    .superoffload { fill: #cdebe1; stroke: #009e73; }
    .box + text { fill: #111111; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #1b1c1e; }
      .line { stroke: #b5b5b5; }
      .tip { fill: #b5b5b5; }
    }
"""  # noqa: E501

Graph = Mapping[str, frozenset[str]]


def imports() -> Graph:
    """Return the packages that each package imports, by their names."""
    found: dict[str, set[str]] = {}
    for source in SOURCES:
        for path in sorted(source.rglob("*.py")):
            names = path.relative_to(source.parent).with_suffix("").parts
            package = _package(".".join(names))
            if package:
                found.setdefault(package, set()).update(
                    other
                    for name in _imported(ast.parse(path.read_text(encoding="utf-8")))
                    if (other := _package(name)) and other != package
                )
    return {package: frozenset(others & set(found)) for package, others in found.items()}


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a module imports, also where ``from package import module`` does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def _package(module: str) -> str | None:
    """Return the box that a module belongs to, or None for other people's packages."""
    top, _, rest = module.partition(".")
    if top == "so_tui":
        first = rest.partition(".")[0]
        at = ROOT / "so_tui" / first
        if first in ("", "__init__", "version") or not (
            at.is_dir() or at.with_suffix(".py").exists()
        ):
            return None
        return "so_tui.commands" if first in ("cli", "__main__") else f"so_tui.{first}"
    return top if top in ("so_tui_trainer", "superoffload") else None


def layers(graph: Graph) -> dict[str, int]:
    """Return the layer of each package, 0 for those that import none."""

    @cache
    def layer(package: str) -> int:
        return 1 + max(map(layer, graph[package]), default=-1)

    return {package: layer(package) for package in graph}


def direct(graph: Graph) -> Graph:
    """Return the arrows that no chain of others implies."""

    @cache
    def reached(package: str) -> frozenset[str]:
        return graph[package].union(*map(reached, graph[package]))

    return {
        package: others - frozenset().union(*map(reached, others))
        for package, others in graph.items()
    }


def picture() -> str:
    """Return the drawing as SVG."""
    graph = imports()
    layer = layers(graph)
    highest = max(layer.values())
    rows = [
        sorted(package for package in graph if layer[package] == at)
        for at in range(highest, -1, -1)
    ]
    width = 2 * MARGIN + max(map(len, rows)) * (BOX_WIDTH + GAP_X) - GAP_X
    height = 2 * MARGIN + len(rows) * (BOX_HEIGHT + GAP_Y) - GAP_Y
    places = {}
    for at, row in enumerate(rows):
        left = (width - len(row) * (BOX_WIDTH + GAP_X) + GAP_X) / 2
        for column, package in enumerate(row):
            x, y = left + column * (BOX_WIDTH + GAP_X), MARGIN + at * (BOX_HEIGHT + GAP_Y)
            places[package] = (x, y)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "  <title>The packages, and who imports whom</title>",
        f"  <style>{STYLE}  </style>",
        '  <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>',
        f'  <rect class="page" width="{width}" height="{height}" rx="8"/>',
    ]
    for package, others in sorted(direct(graph).items()):
        for other in sorted(others):
            (x, y), (to_x, to_y) = places[package], places[other]
            start, end = x + BOX_WIDTH / 2, to_x + BOX_WIDTH / 2
            y += BOX_HEIGHT
            bend = (to_y - y) / 2
            lines.append(
                f'  <path class="line" d="M{start:g} {y:g}C{start:g} {y + bend:g} {end:g} '
                f'{to_y - bend:g} {end:g} {to_y - 2:g}" marker-end="url(#arrow)"/>'
            )
    for package, (x, y) in sorted(places.items()):
        top, _, name = package.partition(".")
        lines.append(
            f'  <rect class="box {top}" x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" '
            f'height="{BOX_HEIGHT}" rx="4"/><text x="{x + BOX_WIDTH / 2:g}" '
            f'y="{y + BOX_HEIGHT / 2 + 4.5:g}">{name or top}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    FIGURE.write_text(picture(), encoding="utf-8")
