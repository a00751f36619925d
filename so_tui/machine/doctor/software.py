"""Checks of what is installed and of the environment variables that a training process would inherit."""

from __future__ import annotations

import re
from collections.abc import Iterator

from so_tui.machine.doctor.finding import Finding, Look

DEEPSPEED = "0.19.8"
"""The one version whose internals the offload engine was written for."""
_TRAIN = "Install the training extra: `pip install 'so-tui[train]'`."


def packages(look: Look) -> Iterator[Finding]:
    if not look.machine.live:
        return
    installed = look.machine.software
    missing = [name for name in ("torch", "deepspeed", "transformers", "datasets") if getattr(installed, name) is None]
    if missing:
        yield Finding(
            severity="blocks",
            title=f"{', '.join(missing)} not installed",
            evidence=f"no such package for Python {installed.python}",
            cost="Everything works but training.",
            remedy=_TRAIN,
        )
    if installed.deepspeed not in (None, DEEPSPEED):
        yield Finding(
            severity="blocks",
            title=f"DeepSpeed {installed.deepspeed} is not the tested one",
            evidence=f"installed: {installed.deepspeed}; the offload engine is written for the internals of {DEEPSPEED}",
            cost="Another version may step wrong weights without a word, so the engine refuses it.",
            remedy=f"`pip install deepspeed=={DEEPSPEED}`",
        )


def torch_build(look: Look) -> Iterator[Finding]:
    installed = look.machine.software
    if look.nvidia and installed.torch and installed.torch_cuda is None:
        yield Finding(
            severity="blocks",
            title="torch is built for the CPU only",
            evidence=f"torch {installed.torch} without CUDA, on a machine with {len(look.nvidia)} NVIDIA GPU(s)",
            cost="The GPUs would not be used at all.",
            remedy="Install a CUDA build: torch 2.11 or newer from PyPI, or with `--index-url https://download.pytorch.org/whl/cu130`.",
        )


def numactl(look: Look) -> Iterator[Finding]:
    installed = look.machine.software
    if not look.machine.live or installed.numactl_works is not False:
        return
    several = len([node for node in look.machine.numa_nodes if node.memory_total_bytes > 0]) > 1
    absent = installed.numactl is None
    yield Finding(
        severity="warning" if several and not absent else "note",
        title="numactl is not installed" if absent else "numactl is forbidden here",
        evidence="no numactl on PATH" if absent else "a trial `numactl -m NODE -C CPUS true` failed (containers may forbid set_mempolicy)",
        cost="DeepSpeed's launcher is started without its core binding. Each rank binds itself"
        + ("." if absent else ", but memory may come from any node."),
        remedy="Nothing must be done; the package is called numactl." if absent else "Start the container with `--cap-add SYS_NICE`.",
    )


def build_tools(look: Look) -> Iterator[Finding]:
    installed = look.machine.software
    if not look.machine.live or installed.deepspeed is None or (look.plan and look.plan.mode == "gpu"):
        return
    missing = [name for name, version in (("a C++ compiler", installed.compiler), ("ninja", installed.ninja)) if version is None]
    if missing:
        yield Finding(
            severity="blocks",
            title=f"{' and '.join(missing)} missing",
            evidence="`c++ --version` (or $CXX) and `ninja --version` were tried",
            cost="DeepSpeed compiles its CPU Adam at first use and cannot: the offload modes do not start.",
            remedy="Install g++ (or load the site's compiler module) and `pip install ninja`; `so-tui doctor --fix` then builds it ahead.",
        )


def environment(look: Look) -> Iterator[Finding]:
    if look.environment.get("OMP_NUM_THREADS") == "1":
        yield Finding(
            severity="note",
            title="OMP_NUM_THREADS is 1",
            evidence="environment variable OMP_NUM_THREADS=1",
            cost="None for runs started by so-tui, which set it themselves; a trainer started by hand would step Adam with one thread.",
            remedy="Nothing must be done.",
        )
    if "KMP_AFFINITY" in look.environment:
        yield Finding(
            severity="note",
            title="KMP_AFFINITY is set",
            evidence=f"environment variable KMP_AFFINITY={look.environment['KMP_AFFINITY']}",
            cost="DeepSpeed's launcher refuses to bind cores with it; so-tui takes it out of a run's environment.",
            remedy="Nothing must be done; `unset KMP_AFFINITY` for trainers started by hand.",
        )
    architectures = look.environment.get("TORCH_CUDA_ARCH_LIST", "")
    plain = re.sub(r"(\d)[a-z]\b", r"\1", architectures)
    if plain != architectures:
        yield Finding(
            severity="note",
            title="TORCH_CUDA_ARCH_LIST has a suffix letter",
            evidence=f"environment variable TORCH_CUDA_ARCH_LIST={architectures}",
            cost="DeepSpeed's build of FusedAdam fails on it; so-tui hands its runs the list without letters.",
            remedy=f"Nothing must be done; for trainers started by hand: `export TORCH_CUDA_ARCH_LIST='{plain}'`.",
        )


CHECKS = (packages, torch_build, numactl, build_tools, environment)
