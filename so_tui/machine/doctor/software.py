"""Checks of what is installed and of the environment variables that a training process would inherit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from so_tui.machine.doctor.finding import Finding, Look
from so_tui.machine.tree import Tree
from so_tui.spec.folders import kernel_folder

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
    several = sum(node.memory_total_bytes > 0 for node in look.machine.numa_nodes) > 1
    forbidden = installed.numactl is not None or installed.mempolicy_works is False
    asked = "a trial `numactl -m NODE -C CPUS true` failed" if installed.numactl else "no numactl on PATH; get_mempolicy(2) is refused"
    yield Finding(
        severity="warning" if several and forbidden else "note",
        title="Memory cannot be bound to a node here" if forbidden else "numactl is not installed",
        evidence=f"{asked} (containers without CAP_SYS_NICE forbid it)" if forbidden else "no numactl on PATH",
        cost="DeepSpeed's launcher is started without its core binding. Each rank binds itself"
        + (", but memory may come from any node." if forbidden else "."),
        remedy="Start the container with `--cap-add SYS_NICE`." if forbidden else "Nothing must be done; the package is called numactl.",
    )


def build_tools(look: Look) -> Iterator[Finding]:
    """A compiler for CPU Adam in every offload mode; ninja and, with GPUs, the CUDA toolkit for DeepSpeed's alone."""
    installed = look.machine.software
    if not look.machine.live or installed.deepspeed is None or (look.plan and look.plan.mode == "gpu"):
        return
    if installed.compiler is None:
        kept = look.tree is not None and keeps_kernel(look.tree, look.environment)
        yield Finding(
            severity="note" if kept else "blocks",
            title="No C++ compiler",
            evidence="`c++ --version` (or $CXX) was tried"
            + (f"; {kernel_folder(look.environment)} keeps what was compiled before" if kept else ""),
            cost="None, if that was compiled for this kind of CPU."
            if kept
            else "CPU Adam is compiled at first use and cannot be: the offload modes do not start.",
            remedy="Install g++ (or load the site's compiler module); `so-tui doctor --fix` then compiles it ahead, also for machines "
            "like it with the same home folder.",
        )
    if installed.ninja is None:
        yield Finding(
            severity="blocks" if look.deepspeeds_adam else "note",
            title="ninja is missing",
            evidence="no package ninja, and `ninja --version` was tried",
            cost="DeepSpeed's CPU Adam (zerooffload, or offload.engine = deepspeed) cannot be compiled; so-tui's own needs no ninja.",
            remedy="`pip install ninja`; `so-tui doctor --fix` then compiles it ahead.",
        )
    if look.deepspeeds_adam and look.tree and not _compiled(look):
        yield Finding(
            severity="note",
            title="DeepSpeed's CPU Adam is not compiled yet",
            evidence=f"no cpu_adam.so below {_extensions(look)}",
            cost="The first run does it while all its ranks wait, for one to three minutes.",
            remedy="`so-tui doctor --fix` does it now.",
        )


def keeps_kernel(tree: Tree, environment: Mapping[str, str]) -> bool:
    """Whether a compiled CPU Adam is there; for which CPU is seen when it is loaded."""
    return any(name.startswith("adam-") and name.endswith(".so") for name in tree.names(str(kernel_folder(environment))))


def toolkit(look: Look) -> Iterator[Finding]:
    """DeepSpeed compares the CUDA toolkit with the one torch was built for before it compiles anything."""
    installed = look.machine.software
    if not look.machine.live or not look.nvidia or not look.deepspeeds_adam or installed.torch_cuda is None:
        return
    if "DS_SKIP_CUDA_CHECK" in look.environment or (look.tree and _compiled(look)):
        return
    torch_cuda = ".".join(installed.torch_cuda.split(".")[:2])
    if installed.cuda_toolkit is None or not _toolkits_agree(installed.cuda_toolkit, torch_cuda):
        has = f"nvcc {installed.cuda_toolkit}" if installed.cuda_toolkit else "no nvcc (CUDA_HOME, PATH, /usr/local/cuda)"
        yield Finding(
            severity="warning",
            title="The CUDA toolkit is not the one torch was built for" if installed.cuda_toolkit else "No CUDA toolkit",
            evidence=f"{has}; torch {installed.torch} for CUDA {installed.torch_cuda}",
            cost="DeepSpeed may refuse to compile its CPU Adam (zerooffload, or offload.engine = deepspeed).",
            remedy="Use `offload.mode = superoffload` with so-tui's own engine, which needs no toolkit; or load the matching CUDA module, "
            "or set DS_SKIP_CUDA_CHECK=1.",
        )


def _toolkits_agree(toolkit_version: str, torch_cuda: str) -> bool:
    """Within CUDA 12 DeepSpeed 0.19.8 takes any minor version; else the versions must be the same."""
    return toolkit_version == torch_cuda or (toolkit_version.startswith("12.") and torch_cuda.startswith("12."))


def _extensions(look: Look) -> str:
    home = look.environment.get("HOME", "~")
    return look.environment.get("TORCH_EXTENSIONS_DIR") or f"{look.environment.get('XDG_CACHE_HOME') or home + '/.cache'}/torch_extensions"


def _compiled(look: Look) -> bool:
    """Whether torch's extension folder holds DeepSpeed's CPU Adam, in whichever subfolder this Python and CUDA have there."""
    assert look.tree is not None
    folder = _extensions(look)
    places = (folder, *(f"{folder}/{name}" for name in look.tree.names(folder)))
    return any(look.tree.exists(f"{place}/cpu_adam/cpu_adam.so") for place in places)


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


CHECKS = (packages, torch_build, numactl, build_tools, toolkit, environment)
