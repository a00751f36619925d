"""Makes a Python environment for aarch64 on another machine: Debian's Python, the locked wheels,
and qemu-user to run them.

Everything is in one folder and nothing needs root. Its ``bin/python`` is a shell script that starts
the emulator, so that it also works as ``sys.executable`` where the kernel does not know foreign
programs (binfmt_misc).
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUITE, VERSION = "bookworm", "3.11"
"""Of Debian, and its Python: the oldest that so-tui supports."""
PACKAGES = ("python3.11-minimal", "libpython3.11-stdlib", "libgomp1", "libstdc++6")
MIRROR = "http://deb.debian.org/debian"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
EMULATOR = "qemu-aarch64"
TOOLS = {
    EMULATOR: "`apt-get install qemu-user`",
    "apt-get": "use a Debian or Ubuntu machine",
    "dpkg-deb": "use a Debian or Ubuntu machine",
}
PAGE_BYTES = 65_536
"""The page size of most kernels for Grace."""
LOCK = ROOT / "locks" / "light.txt"
ENVIRONMENT = ROOT / ".venv-aarch64"
_PLATFORMS = (
    "manylinux2014",
    "manylinux_2_17",
    "manylinux_2_24",
    "manylinux_2_26",
    "manylinux_2_28",
    "manylinux_2_34",
)


class MissingError(Exception):
    """This machine lacks something that the environment is made with; the message says what, and
    the remedy.
    """


def wheel_options(version: str = VERSION) -> list[str]:
    """Return the options with which pip takes wheels for aarch64."""
    platforms = [
        option for platform in _PLATFORMS for option in ("--platform", f"{platform}_aarch64")
    ]
    return ["--no-deps", "--only-binary=:all:", "--python-version", version, *platforms]


def emulated_python(folder: Path) -> Path:
    """Return the environment's Python, making the environment unless it is up to date.

    Args:
        folder: Where it is, or will be. Its content is replaced.

    Raises:
        MissingError: A tool is missing, or Debian's packages cannot be reached.
        subprocess.CalledProcessError: Another step failed.
    """
    check_tools()
    folder = folder.absolute()
    python, stamp, key = folder / "bin" / "python", folder / "key", _key(folder)
    if stamp.is_file() and stamp.read_text() == key:
        return python
    print(f"making an aarch64 environment in {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    root = folder / "root"
    _unpack_debian(folder / "apt", root)
    _install_wheels(folder)
    _write_scripts(folder, root)
    stamp.write_text(key)
    return python


def check_tools(keyring: Path = KEYRING) -> None:
    """Raise MissingError unless everything that is needed is installed."""
    for tool, remedy in TOOLS.items():
        if shutil.which(tool) is None:
            raise MissingError(f"{tool} is not installed: {remedy}")
    if not keyring.is_file():
        raise MissingError(f"{keyring} does not exist: `apt-get install debian-archive-keyring`")


def _key(folder: Path) -> str:
    """Return a digest of what the environment is made from. It contains paths, so one that was
    moved is made again.
    """
    emulator = subprocess.run(
        [EMULATOR, "--version"], capture_output=True, text=True, check=True
    ).stdout
    parts = (LOCK.read_text(), Path(__file__).read_text(), emulator, str(folder), str(ROOT))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _unpack_debian(apt: Path, root: Path) -> None:
    """Unpack Debian's Python and the libraries that it needs, with an apt that shares nothing with
    this machine's.
    """
    for folder in ("lists/partial", "archives/partial", "etc"):
        (apt / folder).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"deb [signed-by={KEYRING}] {MIRROR} {SUITE} main\n")
    settings = {
        "Dir::Etc": f"{apt}/etc/",
        "Dir::Etc::sourcelist": f"{apt}/sources.list",
        "Dir::State::status": f"{apt}/status",
        "Dir::State::lists": f"{apt}/lists/",
        "Dir::Cache": f"{apt}/",
        "Dir::Cache::archives": f"{apt}/archives/",
        "APT::Architecture": "arm64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",  # the folder is this user's own
        "Acquire::Languages": "none",
        "Debug::NoLocking": "true",
    }
    (apt / "apt.conf").write_text(
        "".join(f'{name} "{value}";\n' for name, value in settings.items())
        + '#clear APT::Architectures;\nAPT::Architectures {"arm64";};\n'
    )
    for arguments in (
        ["update", "--error-on=any"],
        ["install", "--download-only", "--yes", *PACKAGES],
    ):
        command = ["apt-get", "-qq", *arguments]
        done = subprocess.run(
            command,
            env=os.environ | {"APT_CONFIG": f"{apt}/apt.conf"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise MissingError(
                f"Debian's packages cannot be had from {MIRROR}: {done.stderr.strip()[-1000:]}"
            )
    for package in sorted((apt / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(root)], check=True)
    shutil.rmtree(apt)


def _install_wheels(folder: Path) -> None:
    """Install the locked wheels, and this checkout as an editable install would be."""
    target = folder / "lib" / f"python{VERSION}" / "site-packages"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, *wheel_options(), "--target", str(target), "-r", str(LOCK)], check=True)
    (target / "so_tui.pth").write_text(f"{ROOT}\n{ROOT / 'trainer'}\n")


def _write_scripts(folder: Path, root: Path) -> None:
    """Write ``bin/python``, which with ``pyvenv.cfg`` makes a virtual environment, and
    ``bin/so-tui``.
    """
    python = root / "usr" / "bin" / f"python{VERSION}"
    (folder / "pyvenv.cfg").write_text(
        f"home = {python.parent}\ninclude-system-site-packages = false\n"
    )
    emulator = [EMULATOR, "-L", str(root)]
    options = page_size_options(emulator, python)
    name = str(folder / "bin" / "python")
    _write_script(Path(name), [*emulator, *options, "-0", name, str(python)])
    _write_script(folder / "bin" / "so-tui", [name, "-m", "so_tui"])


def page_size_options(emulator: Sequence[str], python: Path) -> list[str]:
    """Return the options for pages of 64 KiB; none where the emulator cannot change their size
    (qemu 9 and later).
    """
    options = ["-p", str(PAGE_BYTES)]
    command = [*emulator, *options, str(python), "-c", "import mmap; print(mmap.PAGESIZE)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return options if done.stdout.strip() == str(PAGE_BYTES) else []


def _write_script(path: Path, command: Sequence[str]) -> None:
    words = shlex.join(command)
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    path.chmod(0o755)
