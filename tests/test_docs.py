"""The documents agree with the code: links lead somewhere, named files exist, every command and
exit code is described.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks import published
from docs.make_architecture import FIGURE, picture
from docs.make_codes import PAGE
from docs.make_codes import page as codes
from docs.make_versions import PAGE as VERSIONS
from docs.make_versions import page as versions
from so_tui.commands import parser
from so_tui.runs.records import OutcomeCode
from tests.support.python_path import ROOT

pytestmark = pytest.mark.repository

PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
TO_HEADING = re.compile(r"\]\(([^)#]*)#([^)]*)\)")
CODE = re.compile(r"`([^`\n]+)`")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
DOCTOR = ROOT / "so_tui" / "machine" / "doctor"
OUR_FOLDERS = (
    "so_tui/",
    "trainer/",
    "tests/",
    "benchmarks/",
    "tools/",
    "presets/",
    "docs/",
    "locks/",
    "screenshots/",
    "containers/",
)


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_link_leads_somewhere_and_every_named_file_exists(page: Path) -> None:
    """A link whose address is broken over two lines leads nowhere. Whether another site answers is
    not tried.
    """
    text = page.read_text()
    targets = LINK.findall(text)
    assert [
        name for name in targets if "://" not in name and not (page.parent / name).exists()
    ] == []
    sites = [urlsplit(target) for target in targets if "://" in target]
    assert all(site.scheme == "https" and "." in site.netloc for site in sites)
    headings = [link for link in TO_HEADING.findall(text) if "://" not in link[0]]
    assert [
        (file, anchor)
        for file, anchor in headings
        if anchor not in anchors(page.parent / file if file else page)
    ] == []
    quoted = [name for name in CODE.findall(text) if name.startswith(OUR_FOLDERS)]
    files = [name for name in quoted if re.fullmatch(r"[\w./-]+", name)]
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_every_function_that_architecture_names_is_in_its_file() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([\w./-]+\.py):([\w.]+)`", text)
    assert len(named) > 30
    assert [place for place in named if not defines(*place)] == []


def defines(file: str, name: str) -> bool:
    """Return whether a file has a function or class, or a method if ``name`` has a dot."""
    if not (ROOT / file).is_file():
        return False
    nodes: Sequence[ast.stmt] = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [node for node in nodes if isinstance(node, DEFINITIONS) and node.name == part]
        if not found:
            return False
        nodes = found[0].body
    return True


@pytest.mark.parametrize(("page", "least"), [("docs/architecture.md", 22), ("CONTRIBUTING.md", 12)])
def test_what_to_change_is_in_files_that_exist(page: str, least: int) -> None:
    rows = (ROOT / page).read_text().partition("| ... | look in |\n|---|---|\n")[2]
    rows = rows.partition("\n\n")[0]
    assert len(rows.splitlines()) >= least
    named = [text for text in CODE.findall(rows) if "/" in text]
    assert [text for text in named if not (ROOT / text).exists()] == []


def test_the_codes_are_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == codes(ROOT), "run: python docs/make_codes.py"


def test_the_tested_versions_are_current() -> None:
    assert VERSIONS.read_text(encoding="utf-8") == versions(), "run: python docs/make_versions.py"


def test_the_picture_of_the_packages_is_current() -> None:
    assert FIGURE.read_text(encoding="utf-8") == picture(), "run: python docs/make_architecture.py"


def test_published_figures_are_current() -> None:
    assert published.PAGE.read_text(encoding="utf-8") == published.page(published.compared()), (
        "run: python -m benchmarks.published"
    )


def test_outcomes_and_checks_have_codes() -> None:
    written = set(re.findall(r"^\| `([a-z0-9-]+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    listed = {code for module in DOCTOR.glob("*.py") for code in listed_codes(module.read_text())}
    assert len(listed) > 50
    assert {
        code.value
        for code in OutcomeCode
        if code not in (OutcomeCode.FINISHED, OutcomeCode.STOPPED)
    } | listed <= written


def listed_codes(module: str) -> set[str]:
    """Return the codes that the docstring of a module of doctor's checks lists."""
    match = re.search(r"^Codes: (.*?)\.\s", module, re.MULTILINE | re.DOTALL)
    return set(re.split(r",\s+", match.group(1))) if match else set()


def planned(home: Path, *arguments: str, columns: int = 80) -> str:
    """Return what ``so-tui plan`` prints without measurements of this machine."""
    environment = (
        os.environ
        | {f"XDG_{kind}_HOME": str(home) for kind in ("CONFIG", "STATE", "CACHE")}
        | {"COLUMNS": str(columns)}
    )
    done = subprocess.run(
        [sys.executable, "-m", "so_tui", "plan", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_explained_table_is_printed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "choose.md").read_text()
    rows = re.findall(r"^[a-z0-9.-]+ +[★✗ ].*/s.*$|^[a-z0-9.-]+ +✗.*$", page, re.MULTILINE)
    assert len(rows) == 6
    for options, explained in (((), rows[:4]), (("--nodes", "3"), rows[4:])):
        printed = [
            line.split()
            for line in planned(tmp_path, "--machine", "gh200-quad-120", *options).splitlines()
        ]
        assert [row for row in explained if row.split() not in printed] == []


def test_explained_plan_is_printed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "planner.md").read_text()
    ((arguments, shown),) = re.findall(
        r"^Some lines of `so-tui plan (.*)`:\n\n```\n(.*?)```$", page, re.MULTILINE | re.DOTALL
    )
    printed = [
        line.split() for line in planned(tmp_path, *arguments.split(), columns=250).splitlines()
    ]
    explained = [line for line in shown.splitlines() if line != "..."]
    assert len(explained) == 7
    assert [line for line in explained if line.split() not in printed] == []


def test_the_memory_in_the_figure_is_that_of_the_plan(tmp_path: Path) -> None:
    figure = (ROOT / "docs" / "figures" / "memory.svg").read_text()
    printed = planned(tmp_path, "qwen3-14b", "--machine", "gh200-480")
    shown = re.findall(
        r">(?:bf16 weights|states and gradients|stored activations|fp32 master|fp32 "
        r"moments|staging|second states)[^<]*? ([\d.]+)<",
        figure,
    )
    assert len(shown) == 7
    assert [
        number for number in shown if not re.search(rf"\s{re.escape(number)} GiB\s", printed)
    ] == []
    totals = re.findall(r"memory: ([\d.]+) of (\d+)<", figure)
    assert len(totals) == 2
    assert [
        total
        for total in totals
        if not re.search(rf"{total[0]}(\.0)? GiB of {total[1]}(\.0)? GiB", printed)
    ] == []


def test_every_command_is_in_the_reference() -> None:
    (commands,) = (
        action
        for action in parser.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    public = {choice.dest for choice in commands._choices_actions} - {*parser.INTERNAL}
    reference = (ROOT / "docs" / "commands.md").read_text()
    assert {name for name in public if not re.search(rf"`{name}\b", reference)} == set()


def test_every_option_in_the_reference_exists() -> None:
    (commands,) = (
        action
        for action in parser.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    options = {
        option for command in commands.choices.values() for option in command._option_string_actions
    }
    written = set(
        re.findall(
            r"`[^`\n]*?(?<!\w)(--?[a-z][a-z-]*)", (ROOT / "docs" / "commands.md").read_text()
        )
    )
    assert written - options == set()


def test_every_exit_code_is_in_the_reference() -> None:
    reference = (ROOT / "docs" / "commands.md").read_text()
    in_help = {
        int(code)
        for code in re.findall(r"(?:^|[ ,])(\d+) [a-z]", parser.EPILOG.partition("first steps")[0])
    }
    in_table = {int(code) for code in re.findall(r"^\| (\d+) \|", reference, re.MULTILINE)}
    assert in_help
    assert in_help == in_table


@pytest.mark.parametrize(("page", "least"), [("SECURITY.md", 20), ("docs/monitors.md", 26)])
def test_guarantees_name_existing_tests(page: str, least: int) -> None:
    rows = [
        line
        for line in (ROOT / page).read_text().splitlines()
        if line.startswith("|") and "tests/" in line
    ]
    assert len(rows) > least
    for row in rows:
        for name in re.findall(r"`(tests/[\w/.]+(?:::\w+)?)`", row):
            path, _, function = name.partition("::")
            text = (ROOT / path).read_text()
            assert f"def {function}(" in text if function else "def test_" in text, name


def test_each_feature_that_so_tui_has_is_shown_by_a_test() -> None:
    rows = [
        line.split("|")
        for line in (ROOT / "docs/monitors.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    assert [
        row[1].strip() for row in rows if row[2].strip() == "Y" and "`tests/" not in row[-2]
    ] == []


def test_every_test_that_is_selected_for_aarch64_exists() -> None:
    """A name that matches nothing would end that run, or leave out nothing."""
    selection = tomllib.loads((ROOT / "tools" / "aarch64" / "selection.toml").read_text())
    for test in (test for kind in selection.values() for part in kind for test in part["tests"]):
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), test
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), test
