"""The documents agree with the code: links lead somewhere, named files exist, every command and
exit code is described.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks import published
from docs import make_architecture, make_codes, make_versions
from so_tui.commands import parser
from tests.support.python_path import ROOT, printed

pytestmark = pytest.mark.repository

PAGES = [
    *(f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")),
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
TO_HEADING = re.compile(r"\]\(([^)#]*)#([^)]*)\)")
CODE = re.compile(r"`([^`\n]+)`")
OURS = "so_tui|trainer|tests|benchmarks|tools|presets|docs|locks|screenshots|containers"
OUR_FILE = re.compile(rf"(?:{OURS})/[\w./-]*")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere_and_every_named_file_exists(page: str) -> None:
    """A link whose address is broken over two lines leads nowhere. Whether another site answers is
    not tried.
    """
    text, path = text_of(page), ROOT / page
    targets = LINK.findall(text)
    local = [name for name in targets if "://" not in name]
    assert [name for name in local if not (path.parent / name).exists()] == []
    sites = [urlsplit(target) for target in targets if "://" in target]
    assert all(site.scheme == "https" and "." in site.netloc for site in sites)
    headings = [link for link in TO_HEADING.findall(text) if "://" not in link[0]]
    assert [
        (file, anchor)
        for file, anchor in headings
        if anchor not in anchors(path.parent / file if file else path)
    ] == []
    files = filter(OUR_FILE.fullmatch, CODE.findall(text))
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_every_function_that_architecture_names_is_in_its_file() -> None:
    named = re.findall(r"`([\w./-]+\.py):([\w.]+)`", text_of("docs/architecture.md"))
    assert len(named) > 30
    parts = [(file, part) for file, name in named for part in name.split(".")]
    defined = r"(?:def|class) {}\b"
    assert [
        each for each in parts if not re.search(defined.format(each[1]), text_of(each[0]))
    ] == []


@pytest.mark.parametrize(
    ("page", "content", "command"),
    [
        (make_codes.PAGE, lambda: make_codes.page(ROOT), "docs/make_codes.py"),
        (make_versions.PAGE, make_versions.page, "docs/make_versions.py"),
        (make_architecture.FIGURE, make_architecture.picture, "docs/make_architecture.py"),
        (published.PAGE, lambda: published.page(published.compared()), "-m benchmarks.published"),
    ],
    ids=["codes", "versions", "architecture", "published"],
)
def test_a_written_page_is_current(page: Path, content: Callable[[], str], command: str) -> None:
    assert page.read_text(encoding="utf-8") == content(), f"run: python {command}"


def planned(home: Path, *arguments: str, columns: int = 80) -> str:
    """Return what ``so-tui plan`` prints without measurements of this machine."""
    own = {f"XDG_{kind}_HOME": str(home) for kind in ("CONFIG", "STATE", "CACHE")}
    environment = os.environ | own | {"COLUMNS": str(columns)}
    return printed("-m", "so_tui", "plan", *arguments, env=environment)


def test_explained_tables_and_plans_are_printed(tmp_path: Path) -> None:
    rows = re.findall(
        r"^[a-z0-9.-]+ +[★✗ ].*/s.*$|^[a-z0-9.-]+ +✗.*$", text_of("docs/choose.md"), re.MULTILINE
    )
    assert len(rows) == 6
    ((plan, shown),) = re.findall(
        r"^Some lines of `so-tui plan (.*)`:\n\n```\n(.*?)```$",
        text_of("docs/planner.md"),
        re.MULTILINE | re.DOTALL,
    )
    lines = [line for line in shown.splitlines() if line != "..."]
    assert len(lines) == 10
    table = "--machine gh200-quad-120"
    for arguments, columns, explained in (
        (table, 80, rows[:4]),
        (f"{table} --nodes 3", 80, rows[4:]),
        (plan, 250, lines),
    ):
        shown = planned(tmp_path, *arguments.split(), columns=columns)
        lines_of_it = [line.split() for line in shown.splitlines()]
        assert [line for line in explained if line.split() not in lines_of_it] == []


def test_the_memory_in_the_figure_is_that_of_the_plan(tmp_path: Path) -> None:
    figure = text_of("docs/figures/memory.svg")
    told = planned(tmp_path, "qwen3-14b", "--machine", "gh200-480")
    parts = (
        "bf16 weights|states and gradients|stored activations|fp32 master|fp32 moments|staging|"
        "second states|copies for checkpoints"
    )
    numbers = re.findall(rf">(?:{parts})[^<]*? ([\d.]+)<", figure)
    totals = re.findall(r"memory: ([\d.]+) of (\d+)<", figure)
    assert (len(numbers), len(totals)) == (8, 2)
    shown = [
        *(rf"\s{re.escape(number)} GiB\s" for number in numbers),
        *(rf"{used}(\.0)? GiB of {total}(\.0)? GiB" for used, total in totals),
    ]
    assert [each for each in shown if not re.search(each, told)] == []


def test_every_command_and_option_is_in_the_reference() -> None:
    reference = text_of("docs/commands.md")
    (commands,) = (
        action
        for action in parser.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    public = {choice.dest for choice in commands._choices_actions} - {*parser.INTERNAL}
    assert {name for name in public if not re.search(rf"`{name}\b", reference)} == set()
    options = {name for each in commands.choices.values() for name in each._option_string_actions}
    written = set(re.findall(r"`[^`\n]*?(?<!\w)(--?[a-z][a-z-]*)", reference))
    assert written - options == set()
    exits = parser.EPILOG.partition("first steps")[0]
    in_help = {int(code) for code in re.findall(r"(?:^|[ ,])(\d+) [a-z]", exits)}
    in_table = {int(code) for code in re.findall(r"^\| (\d+) \|", reference, re.MULTILINE)}
    assert in_help
    assert in_help == in_table


def rows_of(page: str) -> list[str]:
    return [line for line in text_of(page).splitlines() if line.startswith("| ")]


@pytest.mark.parametrize(("page", "least"), [("SECURITY.md", 20), ("docs/monitors.md", 26)])
def test_guarantees_name_existing_tests(page: str, least: int) -> None:
    rows = [row for row in rows_of(page) if "tests/" in row]
    assert len(rows) > least
    for name in re.findall(r"`(tests/[\w/.]+(?:::\w+)?)`", "".join(rows)):
        path, _, function = name.partition("::")
        assert (f"def {function}(" if function else "def test_") in text_of(path), name


def test_each_feature_that_so_tui_has_is_shown_by_a_test() -> None:
    cells = [row.split("|") for row in rows_of("docs/monitors.md")]
    ours = [row for row in cells if row[2].strip() == "Y"]
    assert [row[1].strip() for row in ours if "`tests/" not in row[-2]] == []


def test_every_test_that_is_selected_for_aarch64_exists() -> None:
    """A name that matches nothing would end that run, or leave out nothing."""
    selection = tomllib.loads(text_of("tools/aarch64/selection.toml"))
    for test in (test for kind in selection.values() for part in kind for test in part["tests"]):
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), test
        assert not name or f"def {name.partition('[')[0]}(" in text_of(path), test
