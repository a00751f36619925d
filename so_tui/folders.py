"""Folders of a user's presets, runs, state and cache, following the XDG rules.

Imports nothing heavy: a shell waits for completions, which need these folders.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

Environment = Mapping[str, str]
"""Variables of a process, by name."""


def state_home() -> Path:
    """Return so-tui's folder in the XDG state folder."""
    return _home("XDG_STATE_HOME", ".local/state", os.environ)


def cache_home(environment: Environment = os.environ) -> Path:
    """Return so-tui's folder in the XDG cache folder of a process with this environment. Its
    content may be deleted at any time.
    """
    return _home("XDG_CACHE_HOME", ".cache", environment)


def builtin_folder() -> Path:
    """Return the folder of the built-in presets: ``so_tui/presets`` in a wheel, ``presets`` beside
    the package in a checkout.
    """
    package = Path(__file__).resolve().parent
    installed = package / "presets"
    return installed if installed.is_dir() else package.parent / "presets"


def user_folder() -> Path:
    """Return the folder of the user's presets."""
    return _home("XDG_CONFIG_HOME", ".config", os.environ) / "presets"


def settings_file() -> Path:
    """Return the file of the user's settings."""
    return _home("XDG_CONFIG_HOME", ".config", os.environ) / "settings.toml"


def consents_file() -> Path:
    """Return the file that records whose Python code the user lets run."""
    return _home("XDG_CONFIG_HOME", ".config", os.environ) / "trusted-code.json"


def default_runs_dir() -> Path:
    """Return ``$SO_TUI_RUNS_DIR``, or ``runs`` in the XDG state folder."""
    override = os.environ.get("SO_TUI_RUNS_DIR", "")
    return Path(override).expanduser().absolute() if override else state_home() / "runs"


def validation_dir() -> Path:
    """Return the folder of the report of ``so-tui validate``."""
    return state_home() / "validation"


def probes_dir() -> Path:
    """Return the folder for the runs of ``plan --probe``, which no list shows; a failed one can be
    found by its path.
    """
    return state_home() / "probes"


def run_folders_record() -> Path:
    """Return the file that records other folders of runs than the default, one path per line."""
    return state_home() / "run-folders"


def known_runs_dirs() -> tuple[Path, ...]:
    """Return the default folder of runs and the recorded ones, each once."""
    try:
        recorded = run_folders_record().read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # nothing recorded, or not readable: the default folder remains
        recorded = []
    others = (Path(line) for line in recorded if line.startswith("/"))
    return tuple(
        dict.fromkeys(
            (default_runs_dir(), *(folder for folder in others if folder != probes_dir()))
        )
    )


def kernel_folder(environment: Environment) -> Path:
    """Return the folder of the compiled CPU Adam kernels for a process with this environment."""
    return cache_home(environment) / "kernels"


def compiled_folder(environment: Environment) -> Path:
    """Return the folder of what torch, Triton and others compile, for a process with this
    environment.
    """
    return cache_home(environment) / "compiled"


def host_folder() -> Path:
    """Return the folder for what belongs to this host alone. It is the same in every shell, which
    XDG_RUNTIME_DIR is not.
    """
    return Path(f"/tmp/so-tui-{os.getuid()}")


UNCACHED_COMPILERS = {
    "TORCH_NO_COMPILER_WRAPPER": "1",
    "CCACHE_DISABLE": "1",
    "CCACHE_CONFIGPATH": "/dev/null",
    "SCCACHE_RECACHE": "1",
}
"""Variables with which no compiler takes what it returns from a cache or its configuration, where
others may have put it: torch, and Debian's PATH, put ccache before the compiler. What is compiled
is kept in the folders above.
"""


def _home(variable: str, default: str, environment: Environment) -> Path:
    """Return a folder from an XDG variable; the XDG rules say to ignore relative paths."""
    base = Path(environment.get(variable, ""))
    return (
        base if base.is_absolute() else Path(environment.get("HOME") or Path.home()) / default
    ) / "so-tui"
