"""Files of runs, presets, caches and models are opened by ``so_tui.trust``, which bounds what is
read and judges what was opened. This test lists every other function that opens a file by name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEARCHED = ("so_tui", "trainer/so_tui_trainer")
BORDERS = "so_tui/trust/"
OPENERS = ("open", "read_text", "read_bytes", "write_text", "write_bytes", "FileIO", "memmap")
COPIES = ("copy", "copyfile", "copy2", "copytree", "copyfileobj", "move")
"""Functions of ``shutil``."""
JUDGED = ("open_descriptor", "open_folder")
"""Functions that judge what they open."""
OF_FOLDERS = ("folder.open", "opened.open", "self.folder.open", "archive.open")
"""A ``Folder`` or an archive opens what is in it; a path of a folder opens nothing."""
KERNELS = ("/proc", "/sys", "proc/", "sys/")
"""How paths begin that the kernel alone writes."""

DEVICE = "a device, /proc, or a file that only the program's own installation has"
EMPTY = "writes into a new folder that no other user can open"
OWN = "writes a file of a run that this process supervises or trains"
LIBRARY = "a library's own reader, which takes a path"
ASKED = "a file that the user named on the command line, and that must be new"
WIDGET = "opens a part of the screen"
ALLOWED = {
    "so_tui/cli.py:_discard": DEVICE,
    "so_tui/cli.py:main": DEVICE,
    "so_tui/folders.py:known_runs_dirs": "the user's own list of folders",
    "so_tui/launch/helper_limits.py:taken_bytes": DEVICE,
    "so_tui/launch/launch.py:Executor.start": OWN,
    "so_tui/launch/slurm/script.py:edited": EMPTY,
    "so_tui/launch/supervisor/host.py:Host.start": OWN,
    "so_tui/launch/supervisor/host_check.py:take": "a lock, judged by what was opened",
    "so_tui/launch/supervisor/prometheus.py:Textfile.publish": "a new file; no link is followed",
    "so_tui/machine/software.py:torch_build": DEVICE,
    "so_tui/runs/export.py:export_rows": ASKED,
    "so_tui/runs/listing.py:_record_folder": "appends to the user's own list of folders",
    "so_tui/runs/lock.py:RunLock.take": OWN,
    "so_tui/runs/lock.py:_excludes_others": OWN,
    "so_tui/runs/lock.py:run_lock": OWN,
    "so_tui/runs/reader.py:trim_log": OWN,
    "so_tui/runs/segments.py:SegmentWriter._open_next": OWN,
    "so_tui/runs/segments.py:cut_incomplete_line": OWN,
    "so_tui/runs/state.py:_overwrite": OWN,
    "so_tui/spec/check.py:write_atomic": "the border for writing: a new file that is renamed",
    "so_tui/ui/charts/series.py:write_picture": ASKED,
    "so_tui/ui/configure/screen.py:ConfigureScreen.action_find": WIDGET,
    "so_tui/ui/dashboard/screen.py:DashboardScreen.action_find": WIDGET,
    "so_tui/ui/page.py:FiltersTable.action_find": WIDGET,
    "trainer/so_tui_trainer/checkpoint.py:Saving.__init__": EMPTY,
    "trainer/so_tui_trainer/checkpoint_folder.py:complete": EMPTY,
    "trainer/so_tui_trainer/data/documents.py:Writer.append": EMPTY,
    "trainer/so_tui_trainer/data/documents.py:Writer.publish": EMPTY,
    "trainer/so_tui_trainer/data/documents.py:Writer.take": EMPTY,
    "trainer/so_tui_trainer/data/documents.py:_mapped": LIBRARY,
    "trainer/so_tui_trainer/data/tokens.py:_tokenised": EMPTY,
    "trainer/so_tui_trainer/export.py:replacing": EMPTY,
    "trainer/so_tui_trainer/foreign.py:private_copy": EMPTY,
    "trainer/so_tui_trainer/model/stored.py:_write_file": EMPTY,
    "trainer/so_tui_trainer/model/stored.py:_write_rest": EMPTY,
    "trainer/so_tui_trainer/model/weights.py:prepare_weights": "a lock in the user's own cache",
    "trainer/so_tui_trainer/recorder.py:_EventFile.__init__": OWN,
    "trainer/so_tui_trainer/remote_code.py:_refuse_code_elsewhere": "in the private copy",
    "trainer/so_tui_trainer/remote_code.py:copied_code": "in the private copy",
    "trainer/so_tui_trainer/tools/presets.py:_rewritten": "a tool that writes this repository",
    "trainer/so_tui_trainer/tools/presets.py:main": "a tool that writes this repository",
}
"""Why functions may open a file by its name."""


def test_files_are_opened_by_the_borders_alone() -> None:
    found = set(_places())
    assert found - ALLOWED.keys() == set(), "open these with so_tui.trust, or say why not"
    assert ALLOWED.keys() - found == set(), "these open nothing by name any more"


def test_what_opens_a_file_by_name_is_found() -> None:
    module = """
from pathlib import Path
HERE = Path(__file__).with_name("data.toml")
def package(): HERE.read_bytes(), Path(f"/proc/{1}/stat").read_text(), os.open(n, f, dir_fd=3)
def judged(): folder.open("name"), os.fdopen(open_descriptor(path), "rb"), text.copy()
def a(): open(path)
class B:
    def b(self): json.load(Path(path).open())
def c(): tomllib.loads(path.read_text())
def d(): os.open(path, os.O_RDONLY)
def e(): shutil.copy(one, other)
def f(): partial(path.open, "rb")
"""
    assert list(_opening(ast.parse(module))) == ["a", "B.b", "c", "d", "e", "f"]


def _places() -> Iterator[str]:
    for folder in SEARCHED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(BORDERS):
                for function in _opening(ast.parse(path.read_bytes())):
                    yield f"{name}:{function}"


def _opening(module: ast.Module) -> Iterator[str]:
    """Yield the functions of a module that open a file by its name."""
    package = {
        target.id
        for node in module.body
        if isinstance(node, ast.Assign) and "__file__" in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def within(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*names, child.name)
            elif isinstance(child, ast.Call) and _opens(child, package):
                yield ".".join(names) or "<module>"
            yield from within(child, inner)

    return within(module, ())


def _opens(call: ast.Call, package: set[str]) -> bool:
    """Return whether a call opens a file by a name that others may have given.

    Args:
        call: The call.
        package: Names of paths next to the module, which is installed.
    """
    function = call.func
    if ast.unparse(function) == "partial":
        function = call.args[0]
    if isinstance(function, ast.Attribute):
        of_shutil = isinstance(function.value, ast.Name) and function.value.id == "shutil"
        opens = function.attr in (COPIES if of_shutil else OPENERS)
    else:
        opens = isinstance(function, ast.Name) and function.id in OPENERS
    if not opens or any(keyword.arg == "dir_fd" for keyword in call.keywords):
        return False
    if ast.unparse(function) in OF_FOLDERS:
        return False
    for node in ast.walk(call):
        if isinstance(node, ast.Name) and node.id in (*package, *JUDGED, "__file__"):
            return False
        if isinstance(node, ast.Constant) and str(node.value).startswith(KERNELS):
            return False
    return True
