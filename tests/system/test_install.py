"""The wheel as a user installs it: alone in an empty environment, as pipx and uv do, and with the
``train`` extra beside a torch that the machine already has.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from so_tui import __version__
from tests.support.python_path import PIP, ROOT

pytestmark = pytest.mark.system

PROXIES = ("HTTP_", "HTTPS_", "NO_PROXY")
INDEX_SETTINGS = ("PIP_", "UV_", "SSL_", "REQUESTS_", *PROXIES, *map(str.lower, PROXIES))
"""What says where packages come from. Nothing else of the environment reaches the installers."""
STEPS = 4


def call(home: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command from a folder outside the checkout, as a user whose home is empty but for what
    was installed there.
    """
    folder, cache = home / "elsewhere", Path.home() / ".cache"
    folder.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name.startswith(INDEX_SETTINGS)}
    own = {
        "PIP_CACHE_DIR": str(cache / "pip"),
        "XDG_CACHE_HOME": str(cache),
        **kept,
        "HOME": str(home),
        "PATH": "/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "COLUMNS": "140",
        "PIPX_DEFAULT_BACKEND": "pip",
    }
    return subprocess.run(
        command, cwd=folder, env=own, capture_output=True, text=True, check=False, timeout=600
    )


def printed(home: Path, *command: str | Path) -> str:
    done = call(home, *command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return done.stdout


def built(target: str, sources: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=sources, check=True, capture_output=True)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", ROOT, tmp_path_factory.mktemp("built") / "dist")


def install(folder: Path, *packages: object) -> subprocess.CompletedProcess[str]:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    command = [str(folder / "bin" / "python"), *PIP, *map(str, packages)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and nothing else; its ``bin``."""
    folder = tmp_path_factory.mktemp("environment")
    done = install(folder, "-c", ROOT / "locks" / "light.txt", wheel)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    done = install(folder, "pipx", "uv")
    if done.returncode != 0:
        pytest.skip(f"pipx and uv could not be installed: {done.stderr.strip().splitlines()[-1]}")
    return folder / "bin"


def test_wheel_holds_presets_and_trainer(wheel: Path, environment: Path) -> None:
    names = set(ZipFile(wheel).namelist())
    sources = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.tcss", "*.toml", "*.json", "py.typed")
        for path in (ROOT / "so_tui").rglob(pattern)
    }
    assert sources <= names
    assert {f"so_tui/presets/{path.name}" for path in (ROOT / "presets").glob("*.toml")} <= names
    trainer = {"so_tui_trainer/__main__.py", "superoffload/py.typed", "superoffload/adam.cpp"}
    assert trainer <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]
    manual = environment.parent / "share" / "man" / "man1" / "so-tui.1"
    assert manual.read_text() == (ROOT / "docs" / "so-tui.1").read_text()


def test_the_light_install_needs_no_framework(environment: Path, tmp_path: Path) -> None:
    (packages,) = environment.parent.glob("lib/*/site-packages")
    frameworks = ("torch", "deepspeed", "transformers", "datasets", "numpy")
    assert not [name for name in frameworks if (packages / name).exists()]
    refused = call(tmp_path, environment / "so-tui", "run", "tiny", "--plain")
    assert refused.returncode == 3, refused.stderr
    assert "Traceback" not in refused.stderr


def test_machine_is_inspected_elsewhere(environment: Path, tmp_path: Path) -> None:
    so_tui = environment / "so-tui"
    inspected = printed(tmp_path, so_tui, "inspect", "--json")
    assert json.loads(inspected)["numa_nodes"]
    (tmp_path / "node.json").write_text(inspected)
    planned = printed(tmp_path, so_tui, "plan", "--machine", tmp_path / "node.json", "--json")
    assert json.loads(planned)
    listed = json.loads(printed(tmp_path, so_tui, "presets", "--json"))["presets"]
    ours = {path.stem for path in (ROOT / "presets").glob("*.toml")}
    assert ours <= {preset["name"] for preset in listed}


def test_the_wheel_says_which_commit_it_was_built_from(environment: Path, tmp_path: Path) -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("there is no git, or no checkout")
    describe = ["describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    described = ["git", "-C", str(ROOT), *describe]
    commit = subprocess.run(described, capture_output=True, text=True, check=False)
    if commit.returncode != 0:
        pytest.skip(f"git does not read this checkout: {commit.stderr}")
    version = printed(tmp_path, environment / "so-tui", "--version").strip()
    assert version == f"so-tui {__version__} ({commit.stdout.strip()})"


def contents(wheel: Path) -> dict[str, list[bytes]]:
    """Return the lines of each file, sorted: RECORD lists the files in the order in which they were
    found.
    """
    with ZipFile(wheel) as archive:
        return {name: sorted(archive.read(name).splitlines()) for name in archive.namelist()}


def test_wheel_and_sdist_are_reproducible(wheel: Path, tmp_path: Path) -> None:
    first, second = (built("sdist", ROOT, tmp_path / name) for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    assert built("wheel", ROOT, tmp_path / "wheel").read_bytes() == wheel.read_bytes()
    with tarfile.open(first) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (sources,) = (tmp_path / "unpacked").iterdir()
    assert contents(built("wheel", sources, tmp_path / "again")) == contents(wheel)


@pytest.mark.parametrize(
    "command", [("pipx", "install"), ("uv", "tool", "install")], ids=lambda words: words[0]
)
def test_light_install_plans(
    command: tuple[str, ...], tools: Path, wheel: Path, tmp_path: Path
) -> None:
    name, *words = command
    printed(tmp_path, tools / name, *words, "--python", sys.executable, wheel)
    so_tui = tmp_path / ".local" / "bin" / "so-tui"
    assert printed(tmp_path, so_tui, "--version").startswith(f"so-tui {__version__} (")
    assert json.loads(printed(tmp_path, so_tui, "plan", "tiny", "--json"))


def needed(name: str, found: dict[str, Distribution]) -> None:
    """Add an installed package, and all that it needs, to ``found``."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name not in found:
        found[name] = distribution(name)
        for requirement in map(Requirement, found[name].requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed(requirement.name, found)


@pytest.fixture
def _torch_of_the_site(tmp_path: Path) -> None:
    """Give the user of ``tmp_path`` a torch outside any environment: the one that the tests run
    with, and only what it needs.
    """
    pytest.importorskip("torch")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / ".local" / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    found: dict[str, Distribution] = {}
    needed("torch", found)
    tops = {
        Path(str(each.locate_file(file.parts[0])))
        for each in found.values()
        for file in each.files or []
        if file.parts[0] not in ("..", "__pycache__")
    }
    for top in tops:
        (packages / top.name).symlink_to(top)


@pytest.mark.usefixtures("_torch_of_the_site")
def test_train_extra_trains_beside_the_torch_of_a_site(
    tools: Path, wheel: Path, tmp_path: Path
) -> None:
    constraints = " ".join(f"-c {ROOT / 'locks' / name}" for name in ("light.txt", "newest.txt"))
    options = ["--python", sys.executable, "--system-site-packages", f"--pip-args={constraints}"]
    printed(tmp_path, tools / "pipx", "install", *options, f"{wheel}[train]")
    (made,) = tmp_path.glob(".local/**/venvs/so-tui")
    ours = {path.name for path in made.glob("lib/*/site-packages/*")}
    assert {"deepspeed", "transformers", "so_tui", "so_tui_trainer", "superoffload"} <= ours
    assert "torch" not in ours

    so_tui, runs = tmp_path / ".local" / "bin" / "so-tui", ["--runs-dir", str(tmp_path / "runs")]
    steps = ["--plain", "--set", f"train.steps={STEPS}"]
    assert f"finished at step {STEPS}" in printed(tmp_path, so_tui, "run", "tiny", *runs, *steps)
    listed = json.loads(printed(tmp_path, so_tui, "runs", *runs, "--json"))
    assert [(run["state"], run["step"]) for run in listed["runs"]] == [("finished", STEPS)]
