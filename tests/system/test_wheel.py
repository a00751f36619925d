"""The wheel as a user installs it: in an empty environment, with the light lock, run from another
folder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest

from so_tui import __version__
from tests.support.python_path import PIP, ROOT

pytestmark = pytest.mark.system

Run = Callable[..., subprocess.CompletedProcess[str]]
FRAMEWORKS = ("torch", "deepspeed", "transformers", "datasets", "numpy")


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel, and nothing else, in an empty environment."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(folder / "bin" / "python"), *PIP]
    subprocess.run(
        [*install, "-c", str(ROOT / "locks" / "light.txt"), str(wheel)], check=True, cwd=folder
    )
    return folder


@pytest.fixture
def so_tui(environment: Path, tmp_path: Path) -> Run:
    """Run the installed command from a folder outside the checkout, in an environment that finds
    nothing of it.
    """
    variables: Mapping[str, str] = {
        "HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "COLUMNS": "140",
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(environment / "bin" / "so-tui"), *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return run


def test_wheel_holds_presets_and_trainer(wheel: Path) -> None:
    names = set(ZipFile(wheel).namelist())
    assert {"so_tui/py.typed", "superoffload/py.typed"} <= names
    assert {f"so_tui/presets/{path.name}" for path in (ROOT / "presets").glob("*.toml")} <= names
    assert {
        "so_tui_trainer/__main__.py",
        "superoffload/optimizer.py",
        "superoffload/adam.cpp",
        "so_tui/plan/constants.json",
    } <= names
    assert {
        f"so_tui-{__version__}.data/data/share/man/man1/so-tui.1",
        "so_tui/commands/commands.toml",
        "so_tui/commands/words.json",
        "so_tui/machine/doctor/findings.toml",
    } <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_the_light_install_needs_no_framework(environment: Path) -> None:
    freeze = [str(environment / "bin" / "python"), "-m", "pip", "list", "--format=json"]
    listed = json.loads(subprocess.run(freeze, check=True, capture_output=True, text=True).stdout)
    assert not {package["name"].lower() for package in listed} & set(FRAMEWORKS)


def test_the_manual_is_where_man_looks(environment: Path) -> None:
    assert (environment / "share" / "man" / "man1" / "so-tui.1").read_text() == (
        ROOT / "docs" / "so-tui.1"
    ).read_text()


def test_machine_is_inspected_elsewhere(so_tui: Run, tmp_path: Path) -> None:
    inspected = so_tui("inspect", "--json")
    assert inspected.returncode == 0, inspected.stderr
    assert json.loads(inspected.stdout)["numa_nodes"]
    (tmp_path / "node.json").write_text(inspected.stdout)

    planned = so_tui("plan", "--machine", "node.json", "tiny", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)

    listed = so_tui("presets", "--json")
    assert listed.returncode == 0, listed.stderr
    assert {path.stem for path in (ROOT / "presets").glob("*.toml")} <= {
        preset["name"] for preset in json.loads(listed.stdout)["presets"]
    }


def test_a_plan_compares_all_presets_from_another_folder(so_tui: Run) -> None:
    planned = so_tui("plan")
    assert planned.returncode == 0, planned.stderr
    assert "tiny" in planned.stdout


def test_training_without_its_stack_is_refused(so_tui: Run) -> None:
    refused = so_tui("run", "tiny", "--plain")
    assert refused.returncode == 3, refused.stderr
    assert "Traceback" not in refused.stderr


def in_environment(environment: Path, folder: Path, code: str) -> str:
    """Run Python code in the environment, from another folder, and return what it prints."""
    variables = {
        "HOME": str(folder),
        "PATH": "/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "TERM": "xterm-256color",
    }
    command = [str(environment / "bin" / "python"), "-P", "-c", code]
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(wheel: Path) -> dict[str, list[bytes]]:
    """Return the lines of each file, sorted: RECORD lists the files in the order in which they were
    found.
    """
    with ZipFile(wheel) as archive:
        return {name: sorted(archive.read(name).splitlines()) for name in archive.namelist()}


def test_the_wheel_says_which_commit_it_was_built_from(so_tui: Run) -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("there is no git, or no checkout")
    describe = ["describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    described = ["git", "-C", str(ROOT), *describe]
    commit = subprocess.run(described, capture_output=True, text=True, check=False)
    if commit.returncode != 0:
        pytest.skip(f"git does not read this checkout: {commit.stderr}")
    assert so_tui("--version").stdout.strip() == f"so-tui {__version__} ({commit.stdout.strip()})"


def test_wheel_and_sdist_are_reproducible(wheel: Path, tmp_path: Path) -> None:
    def build(target: str, sources: Path, folder: Path) -> Path:
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
        subprocess.run(command, cwd=sources, check=True, capture_output=True)
        (built,) = folder.iterdir()
        return built

    first, second = (build("sdist", ROOT, tmp_path / name) for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    assert build("wheel", ROOT, tmp_path / "wheel").read_bytes() == wheel.read_bytes()
    with tarfile.open(first) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (sources,) = (tmp_path / "unpacked").iterdir()
    assert contents(build("wheel", sources, tmp_path / "again")) == contents(wheel)


def test_all_three_packages_are_found_in_the_environment(environment: Path, tmp_path: Path) -> None:
    code = (
        "from importlib.util import find_spec as f; print(*(f(n).origin for n in ('so_tui', "
        "'so_tui_trainer', 'superoffload')))"
    )
    origins = in_environment(environment, tmp_path, code).split()
    assert len(origins) == 3
    assert all(Path(origin).is_relative_to(environment) for origin in origins)


SCREEN = """
import asyncio, time
from so_tui.ui.app import SoTuiApp

async def main():
    app = SoTuiApp()
    async with app.run_test(size=(120, 40)) as pilot:
        deadline = time.monotonic() + 100
        while "(embedded)" not in app.export_screenshot():
            assert time.monotonic() < deadline, "no preset on the screen"
            await pilot.pause(0.1)
    print("drawn")

asyncio.run(main())
"""


def test_the_screen_lists_the_presets_of_the_wheel(environment: Path, tmp_path: Path) -> None:
    assert in_environment(environment, tmp_path, SCREEN).strip() == "drawn"
