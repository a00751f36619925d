"""The wheel as pipx and uv install it: the light install, and with the ``train`` extra beside a
torch that the machine already has.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from so_tui import __version__
from tests.support.python_path import PIP, ROOT

pytestmark = pytest.mark.system

PROXIES = ("HTTP_", "HTTPS_", "NO_PROXY")
INDEX_SETTINGS = ("PIP_", "UV_", "SSL_", "REQUESTS_", *PROXIES, *map(str.lower, PROXIES))
"""What says where packages come from. Nothing else of the environment reaches the installers."""
STEPS = 4


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a user whose home is empty but for what was installed there."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(INDEX_SETTINGS)}
    caches = {
        "PIP_CACHE_DIR": str(Path.home() / ".cache" / "pip"),
        "XDG_CACHE_HOME": str(Path.home() / ".cache"),
    }
    own = {
        "HOME": str(home),
        "PATH": "/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "COLUMNS": "140",
        "PIPX_DEFAULT_BACKEND": "pip",
    }
    return caches | kept | own


def call(home: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command from a folder outside the checkout."""
    folder = home / "elsewhere"
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(home),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with ``pipx`` and ``uv``."""
    folder = tmp_path_factory.mktemp("tools")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(folder / "bin" / "python"), *PIP, "pipx", "uv"]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"pipx and uv could not be installed: {done.stderr.strip().splitlines()[-1]}")
    return folder / "bin"


@pytest.mark.parametrize("tool", ["pipx", "uv"])
def test_light_install_plans(tool: str, tools: Path, wheel: Path, tmp_path: Path) -> None:
    words = {"pipx": ["install"], "uv": ["tool", "install"]}[tool]
    installed = call(tmp_path, tools / tool, *words, "--python", sys.executable, wheel)
    assert installed.returncode == 0, installed.stderr

    so_tui = tmp_path / ".local" / "bin" / "so-tui"
    assert call(tmp_path, so_tui, "--version").stdout.startswith(f"so-tui {__version__} (")
    inspected = call(tmp_path, so_tui, "inspect", "--json")
    assert json.loads(inspected.stdout)["numa_nodes"], inspected.stderr
    planned = call(tmp_path, so_tui, "plan", "tiny", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)


def needed(name: str, found: dict[str, Distribution]) -> None:
    """Add an installed package, and all that it needs, to ``found``."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name not in found:
        found[name] = distribution(name)
        for requirement in map(Requirement, found[name].requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed(requirement.name, found)


@pytest.fixture
def torch_of_the_site(tmp_path: Path) -> Path:
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
        if file.parts[0] != ".."
    }
    for top in tops:
        if top.name != "__pycache__":
            (packages / top.name).symlink_to(top)
    return packages


def test_train_extra_trains_beside_the_torch_of_a_site(
    tools: Path, wheel: Path, torch_of_the_site: Path, tmp_path: Path
) -> None:
    constraints = " ".join(f"-c {ROOT / 'locks' / name}" for name in ("light.txt", "newest.txt"))
    options = ["--python", sys.executable, "--system-site-packages", f"--pip-args={constraints}"]
    installed = call(tmp_path, tools / "pipx", "install", *options, f"{wheel}[train]")
    assert installed.returncode == 0, installed.stderr
    (environment_of_so_tui,) = tmp_path.glob(".local/**/venvs/so-tui")
    ours = {path.name for path in environment_of_so_tui.glob("lib/*/site-packages/*")}
    assert {"deepspeed", "transformers", "so_tui", "so_tui_trainer", "superoffload"} <= ours
    assert "torch" not in ours

    so_tui = tmp_path / ".local" / "bin" / "so-tui"
    options = ["--plain", "--runs-dir", str(tmp_path / "runs"), "--set", f"train.steps={STEPS}"]
    trained = call(tmp_path, so_tui, "run", "tiny", *options)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert f"finished at step {STEPS}" in trained.stdout
    listed = json.loads(
        call(tmp_path, so_tui, "runs", "--runs-dir", tmp_path / "runs", "--json").stdout
    )
    assert [(run["state"], run["step"]) for run in listed["runs"]] == [("finished", STEPS)]
