"""Write the container files from ``images.toml``: for podman and docker, for apptainer, and for the
container engine of CSCS.

python containers/make.py
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
HEADER = "# Written by `python containers/make.py` from containers/images.toml: do not edit."


def install_packages(common: dict[str, Any]) -> tuple[str, ...]:
    """Return the shell commands that install packages of the distribution."""
    return (
        "apt-get update",
        (
            "DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "
            f"{' '.join(common['packages'])}"
        ),
        "rm -rf /var/lib/apt/lists/*",
    )


def install_so_tui(common: dict[str, Any], image: dict[str, Any]) -> str:
    """Return the shell command that installs so-tui and its training packages, once its files are
    there.
    """
    # NVIDIA's container pins packages with PIP_CONSTRAINT; ours have versions of their own, in an
    # environment of their own.
    torch = "SYSTEM_TORCH=1 " if image["system_torch"] else ""
    return (
        f"env --unset=PIP_CONSTRAINT PIP_NO_CACHE_DIR=1 make -C {common['folder']} {torch}install"
    )


def containerfile(name: str, common: dict[str, Any], image: dict[str, Any]) -> str:
    """Return the file for ``podman build`` and ``docker build``."""
    folder = common["folder"]
    return f"""{HEADER}
# {image["title"]}.
# In the repository's root: podman build -f containers/{name}.Containerfile -t so-tui:{name} .
ARG BASE={image["base"]}
FROM ${{BASE}}

# hadolint ignore=DL3008
RUN {" && ".join(install_packages(common))}

COPY {" ".join(common["files"])} {folder}/
{"".join(f"COPY {source} {folder}/{source}{chr(10)}" for source in common["folders"])}
RUN {install_so_tui(common, image)}

ENV PATH={folder}/.venv/bin:$PATH
"""


def definition(name: str, common: dict[str, Any], image: dict[str, Any]) -> str:
    """Return the definition for ``apptainer build``."""
    folder = common["folder"]
    lines = "\n".join(
        f"    {command}" for command in (*install_packages(common), install_so_tui(common, image))
    )
    copied = "\n".join(
        f"    {source} {folder}/{source}" for source in (*common["files"], *common["folders"])
    )
    return f"""{HEADER}
# {image["title"]}.
# In the repository's root: apptainer build so-tui-{name}.sif containers/{name}.def
Bootstrap: docker
From: {{{{ BASE }}}}

%arguments
    BASE={image["base"]}

%files
{copied}

%post
{lines}

%environment
    export PATH={folder}/.venv/bin:$PATH

%runscript
    exec so-tui "$@"
"""


def environment(name: str, common: dict[str, Any], image: dict[str, Any]) -> str:
    """Return the environment definition file for CSCS."""
    return f"""{HEADER}
# {image["title"]}.
# On a compute node: podman build -f containers/{name}.Containerfile -t so-tui:{name} .
#                    enroot import -x mount -o $SCRATCH/so-tui-{name}.sqsh podman://so-tui:{name}
image = "${{SCRATCH}}/so-tui-{name}.sqsh"
mounts = ["${{SCRATCH}}:${{SCRATCH}}", "${{HOME}}:${{HOME}}"]
workdir = "${{SCRATCH}}"

[env]
HF_HOME = "${{SCRATCH}}/huggingface"
SO_TUI_RUNS_DIR = "${{SCRATCH}}/so-tui-runs"
"""


def files() -> Iterator[tuple[Path, str]]:
    """Yield each container file with its text."""
    common = tomllib.loads((FOLDER / "images.toml").read_text())
    for name, image in common["images"].items():
        yield FOLDER / f"{name}.Containerfile", containerfile(name, common, image)
        yield FOLDER / f"{name}.def", definition(name, common, image)
        yield FOLDER / f"{name}.edf.toml", environment(name, common, image)


def main() -> None:
    """Write all files."""
    for path, text in files():
        path.write_text(text)
        print(path.relative_to(FOLDER.parent))


if __name__ == "__main__":
    main()
