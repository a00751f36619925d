"""The one gate to Python code that comes with a model or a tokenizer, and to kernels on the hub.

Whoever can write a model's folder, a shared cache of the hub or a branch there could exchange code
between the user's yes and its use. So the small files of a source are copied into a folder of this
user, the copy is hashed and compared with what the user allowed, and transformers gets the copy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from so_tui.spec import InputError, ModelSpec, resolve_source
from so_tui.spec.consents import Code, is_allowed
from so_tui.spec.errors import reject
from so_tui.trust.files import Distrust, NotOwnError
from so_tui_trainer.foreign import check_cached, digest_of, modules_folder, private_copy
from so_tui_trainer.hub import model_problem

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_allowed = set[str]()
"""Copies whose code the user allowed, and whose hash this process has checked."""
_OWN_ATTENTION = (None, "eager", "sdpa")
"""Attention that transformers itself computes. Every other name may lead to a kernel on the hub,
even the name of a known package, if that package is not installed.
"""


def load_arguments(
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
    if not Path(source).is_dir():
        check_cached("model", source, field)
    code = copied_code(source, revision, field) if model.trust_remote_code else None
    if code is None or not code.files:
        return {
            "pretrained_model_name_or_path": source,
            "revision": revision,
            "trust_remote_code": False,
        }
    if not is_allowed(code):
        raise code.refusal(field)
    from transformers.utils.hub import HF_MODULES_CACHE

    if modules_folder() != Path(HF_MODULES_CACHE):  # from where transformers imports
        raise NotOwnError(Path(HF_MODULES_CACHE), Distrust.OTHERS_CAN_WRITE)
    _allowed.add(code.folder)
    return {"pretrained_model_name_or_path": code.folder, "trust_remote_code": True}


def build_arguments(config: PretrainedConfig) -> dict[str, bool]:
    """Return the argument with which ``from_config`` builds a model. It allows the model's code if
    the configuration was loaded from an allowed copy and names no classes elsewhere.
    """
    named = _references(getattr(config, "auto_map", None), inside=True)
    elsewhere = any("--" in reference for reference in named)
    return {"trust_remote_code": config.name_or_path in _allowed and not elsewhere}


def copied_code(source: str, revision: str, field: str) -> Code:
    """Copy the small files of a source into a folder of this user, and describe the Python code
    among them. Raises as ``load_arguments``.
    """
    folder, names = private_copy(source, revision, field)
    files = [name for name in names if name.endswith(".py")]
    python = hashlib.sha256()
    for name in files:
        python.update(digest_of(name, (folder / name).read_bytes()))
    _refuse_code_elsewhere(folder, files, source, field)
    is_folder = Path(source).is_dir()
    return Code(
        source=str(Path(source).absolute()) if is_folder else source,
        revision="" if is_folder else revision,
        hash=python.hexdigest(),
        files=tuple(files),
        folder=str(folder),
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


def _references(value: Any, *, inside: bool = False) -> Iterator[str]:
    """Yield the names of classes in the tables ``auto_map`` of a configuration: all texts of a
    value that is ``inside`` one.
    """
    if isinstance(value, str) and inside:
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _references(item, inside=inside or key == "auto_map")
    elif isinstance(value, list):
        for item in value:
            yield from _references(item, inside=inside)


@contextmanager
def explained(model: ModelSpec, problem: Callable[[Exception], InputError]) -> Iterator[None]:
    """Turn whatever reading a model raises into a problem: a damaged file leads transformers to any
    error.

    Args:
        model: The model.
        problem: Returns the problem of an error.

    Raises:
        InputError: That problem; or the model needs code of its own, and ``trust_remote_code`` is
            false (``model-needs-remote-code``).
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # Errors of transformers share types, so their texts are matched.
        if "trust_remote_code" in str(error) and not model.trust_remote_code:
            raise model_problem(
                "model-needs-remote-code",
                model,
                "comes with its own Python code, which does not run by default",
                "Read that code first. If you trust it, set model.trust_remote_code to true in a "
                "preset of your own or with --set, or add --trust-remote-code where a model is "
                "added.",
            ) from error
        raise problem(error) from error


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
