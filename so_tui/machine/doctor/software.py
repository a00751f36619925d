"""Check the installed software and the environment variables that a training process would inherit.

Codes: missing-packages, untested-deepspeed, version-too-old, version-too-new, untested-set,
torch-cpu-only, torch-no-rocm, binding-forbidden, no-numactl, no-compiler, no-ninja,
adam-not-compiled, no-cuda-toolkit, cuda-toolkit-mismatch, slower-attention, omp-single-thread,
kmp-affinity, arch-list-suffix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec.structs import replace

from so_tui.folders import kernel_folder
from so_tui.machine.doctor.checks import CheckContext, Finding, Findings
from so_tui.machine.software import (
    INSTALL_TRAINING,
    PACKAGES,
    Bound,
    extensions_folder,
    installed_set,
    outside_bounds,
    version_sets,
)
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import version_numbers
from so_tui.spec.attention import KERNELS, Needs, Present, choose_backend, generation_of
from so_tui.trust.files import distrust_of_file, distrust_of_folder

_ORDINARY = Needs(head_size=128)
"""What most models ask of attention."""


def _check_packages(context: CheckContext) -> Findings:
    if not context.machine.live:
        return
    installed = context.machine.software
    missing = [
        name
        for name in ("torch", "deepspeed", "transformers", "datasets")
        if getattr(installed, name) is None
    ]
    if missing:
        yield Finding(
            "missing-packages",
            "blocks",
            f"{', '.join(missing)} not installed",
            evidence=f"no such package for Python {installed.python}",
            cost="Everything works except training.",
            remedy=f"{INSTALL_TRAINING}.",
        )


def _check_versions(context: CheckContext) -> Findings:
    """Check that each package is within the tested bounds, and that all of them were tested
    together.
    """
    installed = context.machine.software
    if not context.machine.live or not installed.torch:
        return
    outside = outside_bounds(installed)
    for bound in outside:
        yield _outside(bound, getattr(installed, bound.package))
    complete = all(getattr(installed, package) for package in PACKAGES)
    if complete and not outside and installed_set(installed) is None:
        yield Finding(
            "untested-set",
            "note",
            "These versions were not tested together",
            evidence=", ".join(f"{package} {getattr(installed, package)}" for package in PACKAGES),
            cost=(
                "None is known: each version lies between the oldest and the newest that were "
                "tested."
            ),
            remedy="No action needed. Should a run fail where it should not, take a tested set: "
            + "; or ".join(
                ", ".join(f"{package} {version}" for package, version in each.versions.items())
                for each in version_sets()
            )
            + ".",
        )


def _outside(bound: Bound, version: str) -> Finding:
    evidence = f"installed: {version}; supported: {bound.oldest} to {bound.newest}"
    if bound.package == "deepspeed":
        return Finding(
            "untested-deepspeed",
            "blocks",
            f"DeepSpeed {version} is not supported",
            evidence=f"{evidence}, whose internals the offload engine uses",
            cost=(
                "With another version, weights could be updated wrongly without an error, so the "
                "engine refuses it."
            ),
            remedy=f"`pip install deepspeed=={bound.newest}`",
        )
    too_old = version_numbers(version) < version_numbers(bound.oldest)
    return Finding(
        "version-too-old" if too_old else "version-too-new",
        "warning",
        (
            f"{bound.package} {version} is {'older' if too_old else 'newer'} than any that was "
            "tested"
        ),
        evidence=evidence,
        cost=f"Runs may fail. {bound.older}"
        if too_old
        else "Runs may fail: what so-tui uses of it may have changed.",
        remedy=f"Install {bound.package} {bound.oldest} to {bound.newest}.",
    )


def _check_torch_build(context: CheckContext) -> Findings:
    installed = context.machine.software
    if context.nvidia_gpus and installed.torch and installed.torch_cuda is None:
        yield Finding(
            "torch-cpu-only",
            "blocks",
            "torch is built for the CPU only",
            evidence=(
                f"torch {installed.torch} without CUDA, on a machine with "
                f"{len(context.nvidia_gpus)} NVIDIA GPU(s)"
            ),
            cost="Training would not use the GPUs.",
            remedy=(
                "Install a CUDA build: torch 2.11 or newer from PyPI, or with `--index-url "
                "https://download.pytorch.org/whl/cu130`."
            ),
        )
    if (
        any(gpu.shares_memory for gpu in context.machine.gpus)
        and installed.torch
        and installed.torch_rocm is None
    ):
        yield Finding(
            "torch-no-rocm",
            "blocks",
            "torch is built without ROCm",
            evidence=f"torch {installed.torch}, on a machine with {context.machine.gpus[0].name}",
            cost="Training could not use the GPUs, and runs are refused.",
            remedy="Install a ROCm build of torch from pytorch.org.",
        )


def _check_memory_binding(context: CheckContext) -> Findings:
    installed = context.machine.software
    if not context.machine.live or installed.numactl_works is not False:
        return
    if installed.numactl is None and installed.mempolicy_works is not False:
        yield Finding(
            "no-numactl",
            "note",
            "numactl is not installed",
            evidence="no numactl on PATH",
            cost=(
                "None: DeepSpeed's launcher runs without its core binding, and each rank binds "
                "itself."
            ),
            remedy="No action needed. The package is called numactl.",
        )
        return
    several = sum(node.memory_total_bytes > 0 for node in context.machine.numa_nodes) > 1
    trial = (
        "a trial `numactl -m NODE -C CPUS true` failed"
        if installed.numactl
        else "no numactl on PATH; get_mempolicy(2) is refused"
    )
    consequence = ", but its memory may come from any node." if several else "."
    yield Finding(
        "binding-forbidden",
        "warning" if several else "note",
        "Memory cannot be bound to a NUMA node here",
        evidence=f"{trial} (containers without CAP_SYS_NICE forbid it)",
        cost=(
            "DeepSpeed's launcher runs without its core binding. Each rank binds its cores "
            f"itself{consequence}"
        ),
        remedy="Start the container with `--cap-add SYS_NICE`.",
    )


def _check_build_tools(context: CheckContext) -> Findings:
    """Check what compiles CPU Adam: a compiler in every offload mode, and ninja for DeepSpeed's
    own.
    """
    installed = context.machine.software
    if (
        not context.machine.live
        or installed.deepspeed is None
        or (context.plan and context.plan.mode == "gpu")
    ):
        return
    if installed.compiler is None:
        yield _no_compiler(context)
    if installed.ninja is None:
        yield Finding(
            "no-ninja",
            "blocks" if context.uses_deepspeed_adam else "note",
            "ninja is missing",
            evidence="no package ninja, and `ninja --version` failed",
            cost=(
                "DeepSpeed's CPU Adam (zerooffload, or offload.engine = deepspeed) cannot be "
                "compiled. so-tui's own does not need ninja."
            ),
            remedy="`pip install ninja`; then compile it with `so-tui doctor --fix`.",
        )
    if context.uses_deepspeed_adam and context.files and not _is_compiled(context):
        yield Finding(
            "adam-not-compiled",
            "note",
            "DeepSpeed's CPU Adam is not compiled yet",
            evidence=f"no cpu_adam.so below {extensions_folder(context.environment)}",
            cost="The first run compiles it for one to three minutes while all ranks wait.",
            remedy="Compile it now with `so-tui doctor --fix`.",
        )


def _no_compiler(context: CheckContext) -> Finding:
    remedy = (
        "Install g++ (or load the site's compiler module). `so-tui doctor --fix` then compiles CPU "
        "Adam ahead, also for machines of the same kind that share the home folder."
    )
    if context.files is not None and has_adam_kernel(context.files, context.environment):
        return Finding(
            "no-compiler",
            "note",
            "No C++ compiler",
            evidence=(
                f"`c++ --version` (or $CXX) failed; {kernel_folder(context.environment)} contains "
                "a compiled CPU Adam"
            ),
            cost="None, if that was compiled for this kind of CPU.",
            remedy=remedy,
        )
    return Finding(
        "no-compiler",
        "blocks",
        "No C++ compiler",
        evidence="`c++ --version` (or $CXX) failed",
        cost="CPU Adam is compiled at first use, so the offload modes cannot start.",
        remedy=remedy,
    )


def has_adam_kernel(files: SystemFiles, environment: Mapping[str, str]) -> bool:
    """Return whether a compiled CPU Adam exists that would be loaded, which nobody else can write.
    In a copied machine owners are unknown.

    Whether it suits this CPU is checked when it is loaded.
    """
    folder = kernel_folder(environment)
    names = [
        name
        for name in files.names(str(folder))
        if name.startswith("adam-") and name.endswith(".so")
    ]
    if not files.live:
        return bool(names)
    return distrust_of_folder(folder) is None and any(
        distrust_of_file(folder / name) is None for name in names
    )


def _check_cuda_toolkit(context: CheckContext) -> Findings:
    """Check the CUDA toolkit, which DeepSpeed compares with torch's CUDA version before it compiles
    its CPU Adam.
    """
    installed = context.machine.software
    if (
        not context.machine.live
        or not context.nvidia_gpus
        or not context.uses_deepspeed_adam
        or installed.torch_cuda is None
    ):
        return
    if "DS_SKIP_CUDA_CHECK" in context.environment or (context.files and _is_compiled(context)):
        return
    torch_cuda = ".".join(installed.torch_cuda.split(".")[:2])
    if installed.cuda_toolkit is not None and (
        installed.cuda_toolkit == torch_cuda
        or (installed.cuda_toolkit.startswith("12.") and torch_cuda.startswith("12."))
    ):
        return
    nvcc = (
        f"nvcc {installed.cuda_toolkit}"
        if installed.cuda_toolkit
        else "no nvcc (CUDA_HOME, PATH, /usr/local/cuda)"
    )
    yield Finding(
        "cuda-toolkit-mismatch" if installed.cuda_toolkit else "no-cuda-toolkit",
        "warning",
        "The CUDA toolkit differs from torch's CUDA version"
        if installed.cuda_toolkit
        else "No CUDA toolkit",
        evidence=f"{nvcc}; torch {installed.torch} for CUDA {installed.torch_cuda}",
        cost=(
            "DeepSpeed may refuse to compile its CPU Adam (zerooffload, or offload.engine = "
            "deepspeed)."
        ),
        remedy=(
            "Use `offload.mode = superoffload` with so-tui's own engine, which needs no toolkit; "
            "or load the matching CUDA module, or set DS_SKIP_CUDA_CHECK=1."
        ),
    )


def _is_compiled(context: CheckContext) -> bool:
    """Return whether DeepSpeed's CPU Adam is compiled for this version of Python and torch."""
    assert context.files is not None
    return context.files.exists(f"{extensions_folder(context.environment)}/cpu_adam/cpu_adam.so")


def _check_attention(context: CheckContext) -> Findings:
    """Find a faster attention backend for this GPU than the installed ones; models and settings
    decide in the end (the plan says).
    """
    installed = context.machine.software
    if not context.machine.live or not context.nvidia_gpus or installed.torch is None:
        return
    here = Present(
        generation=generation_of(context.nvidia_gpus[0].name), packages=installed.attention_packages
    )
    best = choose_backend(
        _ORDINARY, replace(here, packages=frozenset(kernel.package for kernel in KERNELS))
    )
    used = choose_backend(_ORDINARY, here)
    if best.backend == used.backend or best.backend != "flash-attn-4":
        return
    yield Finding(
        "slower-attention",
        "note",
        f"Attention uses {used.backend}; {best.backend} is faster on this GPU",
        evidence=f"{context.nvidia_gpus[0].name}; {best.backend} is not installed",
        cost=(
            "On an H200, attention takes half the time with it where documents are long: with one "
            "of 65,536 tokens a step of 4 billion parameters took 12.9 s instead of 20.9. With "
            "documents of a few hundred tokens it gains little."
        ),
        remedy="Install so-tui with the extra `flash` too (CUDA 13, no compiler).",
    )


def _check_environment(context: CheckContext) -> Findings:
    if context.environment.get("OMP_NUM_THREADS") == "1":
        yield Finding(
            "omp-single-thread",
            "note",
            "OMP_NUM_THREADS is 1",
            evidence="environment variable OMP_NUM_THREADS=1",
            cost=(
                "None for runs started by so-tui, which set it themselves. Other trainers would "
                "run CPU Adam on one thread."
            ),
            remedy="No action needed.",
        )
    if "KMP_AFFINITY" in context.environment:
        yield Finding(
            "kmp-affinity",
            "note",
            "KMP_AFFINITY is set",
            evidence=f"environment variable KMP_AFFINITY={context.environment['KMP_AFFINITY']}",
            cost=(
                "DeepSpeed's launcher refuses to bind cores with it, so so-tui removes it from a "
                "run's environment."
            ),
            remedy="No action needed. For other trainers: `unset KMP_AFFINITY`.",
        )
    architectures = context.environment.get("TORCH_CUDA_ARCH_LIST", "")
    without_suffix = re.sub(r"(\d)[a-z]\b", r"\1", architectures)
    if without_suffix != architectures:
        yield Finding(
            "arch-list-suffix",
            "note",
            "TORCH_CUDA_ARCH_LIST has a suffix letter",
            evidence=f"environment variable TORCH_CUDA_ARCH_LIST={architectures}",
            cost=(
                "DeepSpeed's build of FusedAdam fails on it, so so-tui passes the list without "
                "letters to its runs."
            ),
            remedy=(
                "No action needed. For other trainers: `export "
                f"TORCH_CUDA_ARCH_LIST='{without_suffix}'`."
            ),
        )


CHECKS = (
    _check_packages,
    _check_versions,
    _check_torch_build,
    _check_memory_binding,
    _check_build_tools,
    _check_cuda_toolkit,
    _check_attention,
    _check_environment,
)
