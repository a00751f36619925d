"""The one gate to Python code that comes with a model or a tokenizer, and to kernels on the hub.

Whoever can write a model's folder, a shared cache of the hub or a branch there could exchange code
between the user's yes and its use. So the small files of a source are copied into a folder of this
user, the copy is hashed and compared with what the user allowed, and transformers gets the copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from so_tui.machine.software import code_folders
from so_tui.spec import InputError, ModelSpec, resolve_source
from so_tui.spec.consents import Code, is_allowed
from so_tui.spec.errors import reject
from so_tui.trust.files import Distrust, NotOwnError
from so_tui.trust.folders import private_folder
from so_tui.units import disk_size, thousands
from so_tui_trainer.foreign import copy_files, is_own
from so_tui_trainer.hub import model_problem

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MODULES = "HF_MODULES_CACHE"
_PYTHON = "*.py"
_COPIED = (
    _PYTHON,
    *("*.json", "*.jinja", "*.txt", "*.yaml", "*.yml", "*.merges"),
    *("*.model", "*.tiktoken", "*.vocab", "*.bpe", "*.spm"),
)
"""Files that configurations and tokenizers read. Weights are read where they are, as numbers."""
_LEFT_OUT = ("original", "metal", "onnx", "__pycache__")
_MOST_FILES = 1000
_LARGEST_BYTES = 256 << 20
_allowed = set[str]()
"""Copies whose code the user allowed, and whose hash this process has checked."""
_OWN_ATTENTION = (None, "eager", "sdpa")
"""Attention that transformers itself computes. Every other name may lead to a kernel on the hub,
also that of a package which is not installed.
"""


def loadable(
    model: ModelSpec, field: Literal["model.id", "model.tokenizer"] = "model.id"
) -> dict[str, Any]:
    """Return the arguments with which ``from_pretrained`` loads a model's configuration, or its
    tokenizer.

    Args:
        model: The model; with ``trust_remote_code``, code runs that the user allowed.
        field: What names the source.

    Raises:
        InputError: Its code is not allowed (``code-not-trusted``), is elsewhere
            (``code-elsewhere``), or its files are too many or too large (``code-too-large``).
        OSError: It cannot be downloaded or copied.
    """
    own = field == "model.id"
    source = resolve_source(model.id if own else model.tokenizer)
    revision = model.revision if own else "main"
    given = {"pretrained_model_name_or_path": source, "revision": revision}
    if not model.trust_remote_code:
        return given | {"trust_remote_code": False}
    code = copied(source, revision, field)
    if not code.files:
        return given | {"trust_remote_code": False}
    if not is_allowed(code):
        raise code.refusal(field)
    from transformers.utils.hub import HF_MODULES_CACHE

    if _modules() != Path(HF_MODULES_CACHE):  # from where transformers imports
        raise NotOwnError(Path(HF_MODULES_CACHE), Distrust.OTHERS_CAN_WRITE)
    _allowed.add(code.folder)
    return {"pretrained_model_name_or_path": code.folder, "trust_remote_code": True}


def code_of(config: PretrainedConfig) -> dict[str, bool]:
    """Return the argument with which ``from_config`` builds a model: whether its configuration
    comes from a copy whose code was allowed, so that its classes do, too.
    """
    elsewhere = any("--" in text for text in _texts(getattr(config, "auto_map", None)))
    return {"trust_remote_code": config.name_or_path in _allowed and not elsewhere}


def copied(source: str, revision: str, field: str) -> Code:
    """Copy the small files of a source into a folder of this user, named by their content, and
    describe the Python code among them. Raises as ``loadable``.
    """
    here = Path(source)
    is_folder = here.is_dir()
    folder = here.absolute() if is_folder else _downloaded(source, revision)
    root = private_folder(_modules() / "so-tui")
    partial = Path(tempfile.mkdtemp(dir=root))
    python, everything, files = hashlib.sha256(), hashlib.sha256(), list[str]()
    try:
        names = [*_small_files(folder, source, field)]
        if is_own(folder.resolve()):
            for name in names:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / name, partial / name)
        else:
            copy_files(folder.resolve(), names, partial, field)
        for name in names:
            content = (partial / name).read_bytes()
            file = hashlib.sha256(os.fsencode(name)).digest() + hashlib.sha256(content).digest()
            everything.update(file)
            if fnmatch(name, _PYTHON):
                python.update(file)
                files.append(name)
        _refuse_code_elsewhere(partial, files, source, field)
        final = root / everything.hexdigest()
        try:
            partial.rename(final)
        except OSError:  # it is there already
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Code(
        source=str(folder) if is_folder else source,
        revision="" if is_folder else revision,
        hash=python.hexdigest(),
        files=tuple(files),
        folder=str(final),
    )


def _modules() -> Path:
    """Return the folder for the code of models that nobody else can write or exchange."""
    return Path(code_folders(os.environ).get(_MODULES) or os.environ[_MODULES])


def _downloaded(source: str, revision: str) -> Path:
    """Return the folder of the hub's cache with the small files of a repository."""
    from huggingface_hub import snapshot_download

    ignored = [f"{name}/*" for name in _LEFT_OUT]
    return Path(
        snapshot_download(
            source, revision=revision, allow_patterns=[*_COPIED], ignore_patterns=ignored
        )
    )


def _small_files(folder: Path, source: str, field: str) -> Iterator[str]:
    """Yield the names of the files to copy, in order."""
    seen = 0
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name not in _LEFT_OUT and not name.startswith(".")
        )
        for name in sorted(names):
            if any(fnmatch(name, pattern) for pattern in _COPIED):
                seen += 1
                found = (Path(at) / name).stat()
                if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST_BYTES:
                    size = disk_size(_LARGEST_BYTES)
                    raise _too_large(source, field, f"{name}, no regular file of at most {size}")
                yield os.path.relpath(Path(at) / name, folder)
            if seen > _MOST_FILES:
                raise _too_large(source, field, f"more than {thousands(_MOST_FILES)} files")


def _too_large(source: str, field: str, what: str) -> InputError:
    return reject(
        "code-too-large",
        field,
        source,
        f"has {what}, so its code cannot be copied and checked",
        "Name a folder with this model alone.",
    )


def _refuse_code_elsewhere(folder: Path, files: list[str], source: str, field: str) -> None:
    """Refuse configurations that name code in another repository or folder, which no hash here
    would cover.
    """
    for path in folder.rglob("*.json"):
        try:
            references = [*_references(json.loads(path.read_bytes()))]
        except (ValueError, RecursionError):  # transformers says what is wrong with it
            continue
        for reference in references:
            if f"{reference.rpartition('.')[0]}.py" not in files:
                raise reject(
                    "code-elsewhere",
                    field,
                    source,
                    f"names code elsewhere ({path.name}: {reference})",
                    "Download that code into the model's folder, and name it there as "
                    "`file.Class` in auto_map.",
                )


def _references(value: Any) -> Iterator[str]:
    """Yield what the tables ``auto_map`` in a configuration name."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "auto_map":
                yield from _texts(item)
            else:
                yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def refuse_without_consent(model: ModelSpec, error: BaseException) -> None:
    """Refuse a model that needs code of its own, if ``trust_remote_code`` is false.

    Args:
        model: The model.
        error: With which transformers refused it. Its errors share types, so their texts are
            matched.

    Raises:
        InputError: That is the reason (``model-needs-remote-code``).
    """
    if "trust_remote_code" in str(error) and not model.trust_remote_code:
        raise model_problem(
            "model-needs-remote-code",
            model,
            "comes with its own Python code, which does not run by default",
            "Read that code first. If you trust it, set model.trust_remote_code to true in a "
            "preset of your own or with --set, or add --trust-remote-code where a model is added.",
        ) from error


def without_hub_kernels(config: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration that names no attention other than transformers' own, in none of its
    parts, and whose MXFP4 weights are converted: a kernel on the hub is a program, too.
    """
    quantisation = getattr(config, "quantization_config", None)
    if isinstance(quantisation, dict) and quantisation.get("quant_method") == "mxfp4":
        quantisation["dequantize"] = True  # or transformers would load a kernel
    for part in (config, *vars(config).values()):
        if part is not config and hasattr(part, "_attn_implementation"):
            without_hub_kernels(part)
    if getattr(config, "_attn_implementation", None) not in _OWN_ATTENTION:
        config._attn_implementation = None
    return config
