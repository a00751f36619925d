"""Check the installed software.

Codes: missing-packages, untested-deepspeed, version-too-old, version-too-new, untested-set,
torch-cpu-only, torch-no-rocm, binding-forbidden, no-numactl, no-compiler, no-ninja,
adam-not-compiled, code-folders-exchangeable, no-cuda-toolkit, cuda-toolkit-mismatch,
slower-attention.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from so_tui.doctor.checks import CheckContext, Findings, finding
from so_tui.folders import Environment, compiled_folder, kernel_folder
from so_tui.machine.software import (
    PACKAGES,
    extensions_folder,
    known_versions,
)
from so_tui.machine.system_files import SystemFiles
from so_tui.machine.types import version_numbers
from so_tui.spec.attention import KERNELS, Needs, Present, choose_backend, generation_of
from so_tui.trust.files import distrust_of_file
from so_tui.trust.folders import exchangeable_in

_ORDINARY = Needs(head_size=128)
"""What most models ask of attention."""


def _check_packages(context: CheckContext) -> Findings:
    """Check that each package is there and within the tested bounds, and that all of them were
    tested together.
    """
    installed = context.machine.software
    if not context.machine.live:
        return
    versions = {package: getattr(installed, package) for package in PACKAGES}
    if missing := [package for package, version in versions.items() if version is None]:
        yield finding(
            "missing-packages",
            f"no such package for Python {installed.python}",
            packages=", ".join(missing),
        )
    outside = known_versions().exceeded_by(installed) if installed.torch else ()
    for bound in outside:
        version = getattr(installed, bound.package)
        evidence = f"installed: {version}; supported: {bound.oldest} to {bound.newest}"
        too_old = version_numbers(version) < version_numbers(bound.oldest)
        name = "version-too-old" if too_old else "version-too-new"
        if bound.package == "deepspeed":
            name = "untested-deepspeed"
            evidence += ", whose internals the offload engine uses"
        yield finding(name, evidence, version=version, **msgspec.structs.asdict(bound))
    if not missing and not outside and known_versions().set_of(installed) is None:
        sets = "; or ".join(_listed(each.versions) for each in known_versions().sets)
        yield finding("untested-set", _listed(versions), sets=sets)


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def _check_torch_build(context: CheckContext) -> Findings:
    installed, gpus = context.machine.software, context.machine.gpus
    if installed.torch and context.nvidia_gpus and installed.torch_cuda is None:
        yield finding(
            "torch-cpu-only",
            f"torch {installed.torch} without CUDA, on a machine with {len(context.nvidia_gpus)} "
            "NVIDIA GPU(s)",
        )
    if installed.torch and any(gpu.shares_memory for gpu in gpus) and not installed.torch_rocm:
        yield finding("torch-no-rocm", f"torch {installed.torch}, on a machine with {gpus[0].name}")


def _check_memory_binding(context: CheckContext) -> Findings:
    installed = context.machine.software
    if not context.machine.live or installed.numactl_works is not False:
        return
    if installed.numactl is None and installed.mempolicy_works is not False:
        yield finding("no-numactl", "no numactl on PATH")
        return
    trial = (
        "a trial `numactl -m NODE -C CPUS true` failed"
        if installed.numactl
        else "no numactl on PATH; get_mempolicy(2) is refused"
    )
    yield finding(
        "binding-forbidden" if context.several_nodes else "binding-forbidden-on-one-node",
        f"{trial} (containers without CAP_SYS_NICE forbid it)",
    )


def _check_build_tools(context: CheckContext) -> Findings:
    """Check what compiles CPU Adam: a compiler in every offload mode, and ninja and the CUDA
    toolkit for DeepSpeed's own, which compares the toolkit with torch's CUDA version.
    """
    installed, environment = context.machine.software, context.environment
    compiles = not (context.plan and context.plan.mode == "gpu")
    if not context.machine.live or installed.deepspeed is None or not compiles:
        return
    failed = "`c++ --version` (or $CXX) failed"
    if installed.compiler is None and has_adam_kernel(context.files, environment):
        compiled = f"{kernel_folder(environment)} contains a compiled CPU Adam"
        yield finding("no-compiler-but-kernel", f"{failed}; {compiled}")
    elif installed.compiler is None:
        yield finding("no-compiler", failed)
    if installed.ninja is None:
        yield finding(
            "no-ninja",
            "no package ninja, and `ninja --version` failed",
            lesser=not context.uses_deepspeed_adam,
        )
    if not context.uses_deepspeed_adam:
        return
    folder = extensions_folder(environment)
    if context.files.exists(f"{folder}/cpu_adam/cpu_adam.so"):
        return
    if context.is_this_host:
        yield finding("adam-not-compiled", f"no cpu_adam.so below {folder}")
    needed, toolkit = installed.torch_cuda, installed.cuda_toolkit
    if not context.nvidia_gpus or needed is None or "DS_SKIP_CUDA_CHECK" in environment:
        return
    wanted = version_numbers(needed)[:2]
    # DeepSpeed accepts any toolkit of CUDA 12 for another.
    if version_numbers(toolkit) != wanted and not (
        version_numbers(toolkit)[:1] == wanted[:1] == (12,)
    ):
        nvcc = f"nvcc {toolkit}" if toolkit else "no nvcc (CUDA_HOME, PATH, /usr/local/cuda)"
        yield finding(
            "cuda-toolkit-mismatch" if toolkit else "no-cuda-toolkit",
            f"{nvcc}; torch {installed.torch} for CUDA {needed}",
        )


def _check_code_folders(context: CheckContext) -> Findings:
    """Name the folder in which others could exchange what was compiled."""
    if not context.is_this_host or not context.machine.live:
        return
    folder = compiled_folder(context.environment)
    if above := exchangeable_in(folder):
        yield finding(
            "code-folders-exchangeable",
            f"others can rename folders in {above}, which is above {folder}",
            above=above,
        )


def has_adam_kernel(files: SystemFiles, environment: Environment) -> bool:
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
    # Judged as if it were in there, because others may write in the folder itself, too.
    return exchangeable_in(folder / "kernel") is None and any(
        distrust_of_file(folder / name) is None for name in names
    )


def _check_attention(context: CheckContext) -> Findings:
    """Find a faster attention backend for this GPU than the installed ones; models and settings
    decide in the end (the plan says).
    """
    installed = context.machine.software
    if not context.machine.live or not context.nvidia_gpus or installed.torch is None:
        return
    gpu = context.nvidia_gpus[0].name
    here = Present(generation=generation_of(gpu), packages=installed.attention_packages)
    everything = replace(here, packages=frozenset(kernel.package for kernel in KERNELS))
    best = choose_backend(_ORDINARY, everything).backend
    used = choose_backend(_ORDINARY, here).backend
    if best != used and best == "flash-attn-4":
        yield finding("slower-attention", f"{gpu}; {best} is not installed", used=used, best=best)


CHECKS = (
    _check_packages,
    _check_torch_build,
    _check_memory_binding,
    _check_build_tools,
    _check_code_folders,
    _check_attention,
)
