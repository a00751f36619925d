"""Collect prose from the documentation that Debian's packages install, as rows to pretrain on.

python benchmarks/free_text.py ROWS.jsonl [--folder /usr/share/doc] [--megabytes 24]
"""

from __future__ import annotations

import argparse
import gzip
import html.parser
import json
import random
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

DOCUMENTATION = Path("/usr/share/doc")
_PLAIN = re.compile(
    r"(README|NEWS|FAQ|TODO|HACKING|INSTALL)[^/]*|.*\.(txt|md|pod|rst|dict|[1-8])", re.IGNORECASE
)
_HTML = re.compile(r".*\.html?", re.IGNORECASE)
_COMPRESSED = (".gz", ".dz")
_BLOCKS = frozenset(
    {"p", "li", "dd", "dt", "td", "div", "section", "h1", "h2", "h3", "h4", "pre", "blockquote"}
)
_COMMON_WORDS = re.compile(r"\b(the|a|of|to|is|in|and|that|for|with)\b")
_LARGEST_FILE_BYTES = 100_000_000


class _Blocks(html.parser.HTMLParser):
    """The text of a page, with an empty line after each block."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCKS:
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in _BLOCKS:
            self.parts.append("\n\n")


def paragraphs(folder: Path, unreadable: Callable[[Path, Exception], None]) -> Iterator[str]:
    """Yield paragraphs of English prose, each one once. ``unreadable`` is told of each file that is
    left out because it cannot be read.
    """
    seen: set[int] = set()
    for path in sorted(folder.rglob("*")):
        name = path.name.removesuffix(path.suffix) if path.suffix in _COMPRESSED else path.name
        page = _HTML.fullmatch(name)
        if (
            not (page or _PLAIN.fullmatch(name))
            or path.is_symlink()
            or not path.is_file()
            or path.stat().st_size > _LARGEST_FILE_BYTES
        ):
            continue
        try:
            content = (
                gzip.decompress(path.read_bytes())
                if path.suffix in _COMPRESSED
                else path.read_bytes()
            )
        except (OSError, EOFError, zlib.error) as error:
            unreadable(path, error)
            continue
        text = content.decode(errors="ignore")
        if page:
            blocks = _Blocks()
            blocks.feed(text)
            text = "".join(blocks.parts)
        for part in re.split(r"\n\s*\n", text):
            paragraph = " ".join(part.split())
            if _is_prose(paragraph) and hash(paragraph) not in seen:
                seen.add(hash(paragraph))
                yield paragraph


def _is_prose(text: str) -> bool:
    if not 150 <= len(text) <= 4000 or not text.isascii():
        return False
    letters = sum(character.isalpha() or character == " " for character in text)
    return letters > 0.88 * len(text) and len(_COMMON_WORDS.findall(text)) > 0.12 * len(
        text.split()
    )


def write_text(path: Path, folder: Path, most_bytes: float) -> int:
    """Write paragraphs as rows in a random but repeatable order, about ``most_bytes`` at most, and
    return their bytes.
    """
    broken = []

    def skip(file: Path, error: Exception) -> None:
        broken.append(file)
        print(f"{file} is left out: {error}", file=sys.stderr)

    found = list(paragraphs(folder, skip))
    if broken:
        print(f"{len(broken)} files could not be read", file=sys.stderr)
    random.Random(0).shuffle(found)
    total = 0
    with path.open("w") as file:
        for text in found:
            total += len(text)
            file.write(json.dumps({"text": text}) + "\n")
            if total > most_bytes:
                break
    return total


def main() -> None:
    """Write the rows and say how much text they are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path)
    parser.add_argument("--folder", type=Path, default=DOCUMENTATION)
    parser.add_argument("--megabytes", type=float, default=24)
    given = parser.parse_args()
    print(
        f"{write_text(given.rows, given.folder, 1e6 * given.megabytes) / 1e6:.1f} MB of text in "
        f"{given.rows}"
    )


if __name__ == "__main__":
    main()
