"""Export a checkpoint as a Hugging Face folder: bf16 weights, configuration, tokenizer. One
process, without DeepSpeed or GPU.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

import so_tui
import superoffload
from so_tui.spec import InputError, ModelSpec, RunSpec, first_line, resolve_source
from so_tui.spec.errors import reject
from so_tui.spec.generation import Device
from so_tui.trust.files import Distrust, distrust_of_folder
from so_tui.trust.folders import SHARE_VARIABLE, WITH_GROUP, make_run_folder, open_named
from so_tui.units import disk_size
from so_tui_trainer.checkpoint_folder import optimizer_folder, read_manifest
from so_tui_trainer.data.chat import chat_of
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.foreign import is_own, private_copy
from so_tui_trainer.model.config import load_config, stored_config, unreadable
from so_tui_trainer.model.stored import shards
from so_tui_trainer.model.trained import PREFIX
from so_tui_trainer.model.weights import (
    DEFAULT_ATTENTION,
    constructed,
    meta_model,
    trained_shapes,
    untrained,
)
from so_tui_trainer.remote_code import explained

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )


MARKER_NAME = "so_tui_export.json"


class ExportMarker(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """File in every export, which says what it was made from and that it may be replaced. Other
    model folders do not have it.
    """

    run: str
    step: int
    version: str
    """Version of so-tui."""
    base: str = ""
    """Hub id or folder of the model whose weights the training began with; empty if they were
    random.
    """
    revision: str = ""
    """Of the base model on the hub."""


def _marker_of(run_name: str, step: int, model: ModelSpec) -> ExportMarker:
    """Return the marker of an export."""
    base, revision = (model.id, model.revision) if model.weights == "pretrained" else ("", "")
    return ExportMarker(
        run=run_name, step=step, version=so_tui.__version__, base=base, revision=revision
    )


@dataclass(slots=True)
class Stage:
    """How far an export is; written by the thread that exports, read by another."""

    doing: Literal["reading", "writing"] = "reading"
    total_bytes: int = 0
    """Of all tensors; 0 before the first is read."""
    done_tensors: int = 0
    total_tensors: int = 0
    read_bytes: int = 0
    folder: Path | None = None
    """Where files are being written."""

    def read(self, shapes: Mapping[str, torch.Size]) -> None:
        """Begin to read tensors of these shapes."""
        self.total_bytes = sum(shape.numel() for shape in shapes.values()) * torch.bfloat16.itemsize
        self.total_tensors = len(shapes)

    def write(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Begin to write files of these tensors into a folder."""
        self.total_bytes = sum(tensor.nbytes for tensor in state.values())
        self.done_tensors = self.total_tensors = 0
        self.folder, self.doing = folder, "writing"

    def done_bytes(self) -> int:
        """Return the bytes that are read or, later, written."""
        if self.folder is None:
            return self.read_bytes
        with suppress(FileNotFoundError):  # it is renamed at the end
            return min(
                self.total_bytes,
                sum(
                    path.stat().st_size
                    for path in self.folder.iterdir()
                    if path.suffix == ".safetensors"
                ),
            )
        return self.total_bytes


def export(
    checkpoint: Path,
    folder: Path,
    run_name: str,
    spec: RunSpec,
    stage: Stage | None = None,
    *,
    shared: bool = False,
) -> int:
    """Write the model of a checkpoint into ``folder``, for ``from_pretrained``.

    The folder appears when it is complete, and replaces only an older export. Nobody else can open
    it, unless it is shared.

    Args:
        checkpoint: The checkpoint's folder.
        folder: Where to write.
        run_name: The run's name, for the marker.
        spec: The run's own spec. It alone says which model this is: a checkpoint is data.
        stage: Is told how far it is.
        shared: Whether the group may read it, without ``SO_TUI_SHARE``, too.

    Returns:
        Bytes of the export.

    Raises:
        OSError: A file cannot be read or written.
        InputError: The checkpoint is of another model (``model-differs``, ``checkpoint-differs``),
            the folder holds something else or is another user's, the disk is full, or tokenizer or
            configuration cannot be loaded or are no files of their folder.
    """
    folder, stage = folder.resolve(), stage or Stage()
    refuse_foreign(folder)
    manifest = read_manifest(checkpoint)
    for field in ("id", "revision"):
        if (found := getattr(manifest.spec.model, field)) != (wanted := getattr(spec.model, field)):
            raise reject(
                "model-differs",
                f"model.{field}",
                wanted,
                f"is not the model of the checkpoint, which is {found}",
                "Restore the run's spec.json.",
            )
    given = _without_links(spec.model)
    config, tokenizer = load_config(given), load_tokenizer(given)
    generation = _generation_config(given, config, tokenizer)
    model: Any = meta_model(config)
    shapes = trained_shapes(model)
    stage.read(shapes)
    refuse_without_room(folder, stage.total_bytes)
    state = weights(checkpoint, shapes, stage) | untrained(model, spec.model)
    # Tied tensors share storage, which save_pretrained recognises; the loader ties them again.
    model.config.use_cache = True
    model.generation_config = generation
    mark = _marker_of(run_name, manifest.step, spec.model)
    with replacing(folder, mark, shared=shared) as partial:
        stage.write(partial, state)
        model.save_pretrained(partial, state_dict=state)
        tokenizer.save_pretrained(partial)
    stage.folder, stage.read_bytes = None, stage.total_bytes
    return sum(path.stat().st_size for path in folder.iterdir())


def weights(
    checkpoint: Path, shapes: Mapping[str, torch.Size], stage: Stage | None = None
) -> dict[str, Tensor]:
    """Cast a checkpoint's fp32 master weights to bf16.

    Args:
        checkpoint: The checkpoint's folder.
        shapes: Shapes of the model's parameters by name.
        stage: Is told how far it is.

    Returns:
        The weights by their name in the model.

    Raises:
        InputError: The checkpoint does not fit the model (``checkpoint-differs``).
    """
    found, stage = {}, stage or Stage()
    for full_name, master in superoffload.saved_master_weights(optimizer_folder(checkpoint)):
        name = full_name.removeprefix(PREFIX)
        if name not in shapes or shapes[name].numel() != len(master):
            raise _does_not_fit(
                checkpoint, f"has {len(master)} elements for {name}, which are not the model's"
            )
        found[name] = master.to(torch.bfloat16).view(shapes[name])
        stage.done_tensors += 1
        stage.read_bytes += found[name].nbytes
    if missing := shapes.keys() - found.keys():
        raise _does_not_fit(checkpoint, f"lacks {', '.join(sorted(missing)[:5])}")
    return found


def _does_not_fit(checkpoint: Path, message: str) -> InputError:
    return reject(
        "checkpoint-differs",
        "run",
        str(checkpoint),
        message,
        "Export another checkpoint, or restore the run's spec.json and the model's configuration.",
    )


def _without_links(model: ModelSpec) -> ModelSpec:
    """Return the model with private copies in place of folders, of its own or of its tokenizer,
    that others can write. They have no weights.

    A model whose own code runs is copied where that code is checked.

    Raises:
        InputError: As ``private_copy``, or the hub refuses the files (``model-config-unreadable``).
    """
    from huggingface_hub import constants

    sources = {"tokenizer": (model.tokenizer, "main")}
    if model.weights == "pretrained":
        sources["id"] = model.id, model.revision
    for field, (name, revision) in sources.items():
        if not name or model.trust_remote_code:
            continue
        folder = Path(resolve_source(name)).expanduser()
        if is_own(folder.resolve() if folder.is_dir() else Path(constants.HF_HUB_CACHE)):
            continue
        with explained(model, partial(unreadable, f"model.{field}", name)):
            copy, _ = private_copy(str(folder), revision, f"model.{field}")
        model = replace(model, **{field: str(copy)})
    return model


def _generation_config(
    model: ModelSpec, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    """Return the model's generation settings, with the token that ends an answer of the data as a
    further stop token.

    Contradictory settings, which transformers refuses to write, are left out, and those that it
    cannot use.
    """
    from transformers import GenerationConfig

    found = GenerationConfig.from_model_config(config)
    with suppress(InputError):
        if model.weights == "pretrained":
            found = _generation_settings(resolve_source(model.id), model.revision) or found
    try:
        found.validate(strict=True)
    except ValueError:
        tokens = {
            key: getattr(found, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        found = GenerationConfig.from_dict(tokens)
    chat = chat_of(tokenizer)
    known = found.eos_token_id if isinstance(found.eos_token_id, list) else [found.eos_token_id]
    ends = dict.fromkeys([*known, tokenizer.convert_tokens_to_ids(chat.stop or chat.end)])
    ids = [number for number in ends if number is not None]
    found.eos_token_id = ids if len(ids) > 1 else ids[0]
    return found


def _generation_settings(source: str, revision: str) -> GenerationConfig | None:
    """Return the generation settings that come with a model; None if it has none.

    Raises:
        InputError: They cannot be used (``generation-config-unreadable``).
    """
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(source, revision=revision)
    except OSError:
        return None
    except Exception as error:  # whatever its values lead transformers to
        raise reject(
            "generation-config-unreadable",
            "model",
            source,
            f"has a generation_config.json that cannot be used ({first_line(error)})",
            "Correct or remove that file; a copy of the model's folder may be without it.",
        ) from error


def target_of(text: str | Path) -> Path:
    """Return the folder to write that a user has named. Raises as ``refuse_foreign``."""
    named = Path(text).expanduser()
    refuse_foreign(named)  # which another user's link could lead to any folder of this one
    refuse_foreign(folder := named.resolve())
    return folder


def refuse_foreign(folder: Path) -> None:
    """Refuse to overwrite a folder that is neither an export nor empty, or that is another user's.

    Raises:
        InputError: Something else is there (``export-would-overwrite``), or it is another user's
            (``not-your-folder``).
    """
    if not os.path.lexists(folder):
        return
    is_theirs = folder.is_symlink() and folder.lstat().st_uid not in (os.geteuid(), 0)
    if is_theirs or distrust_of_folder(folder) is Distrust.OTHER_OWNER:
        raise reject(
            "not-your-folder",
            "--to",
            str(folder),
            "is another user's folder or link",
            "Name another folder with --to.",
        )
    if folder.is_dir() and ((folder / MARKER_NAME).is_file() or not any(folder.iterdir())):
        return
    raise reject(
        "export-would-overwrite",
        "--to",
        str(folder),
        f"has files that are not an export of so-tui (no {MARKER_NAME})"
        if folder.is_dir()
        else "is not a folder",
        "Name a new or an empty folder with --to.",
    )


def refuse_without_room(folder: Path, needed_bytes: int) -> None:
    """Refuse a folder whose disk has too little space. An older export is removed only when the new
    one is complete.

    Raises:
        InputError: Less than ``needed_bytes`` is free.
    """
    free_bytes = shutil.disk_usage(
        next(parent for parent in folder.resolve().parents if parent.is_dir())
    ).free
    if free_bytes < needed_bytes:
        raise reject(
            "disk-full",
            "--to",
            str(folder),
            f"an export needs {disk_size(needed_bytes)}, but only {disk_size(free_bytes)} are free",
            "Free some space, or name a folder on a larger disk with --to.",
        )


@contextmanager
def replacing(folder: Path, mark: ExportMarker, *, shared: bool = False) -> Iterator[Path]:
    """Yield a marked folder to write into, by a path that only this process has. It
    replaces ``folder`` at the end, and is removed after an error. Nobody else can open it; the
    group can if it is shared, or with ``SO_TUI_SHARE``.
    """
    shared |= os.environ.get(SHARE_VARIABLE) == WITH_GROUP
    partial, old = (folder.with_name(folder.name + suffix) for suffix in (".partial", ".old"))
    for path in (folder, partial, old):
        refuse_foreign(path)
    for left in (partial, old):  # Left behind by an export that was killed.
        shutil.rmtree(left, ignore_errors=True)
    make_run_folder(partial, shared=shared)
    try:
        with open_named(partial) as opened:
            (opened.at / MARKER_NAME).write_bytes(msgspec.json.encode(mark))
            yield opened.at
            for path in opened.at.rglob("*"):
                path.chmod((0o750 if path.is_dir() else 0o640) & (0o777 if shared else 0o700))
            if not os.path.samestat(partial.lstat(), opened.at.stat()):
                raise OSError(errno.ESTALE, "was exchanged while it was written", str(partial))
        # Writing takes minutes; somebody may have put something there meanwhile.
        refuse_foreign(folder)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


# Whole models in one process, to let them write: from a checkpoint, an export or any other folder,
# in bf16 or, on the CPU, in fp32.


_ROOM = 1.25
"""Free memory that a GPU must have, as a multiple of the weights: keys and values of what is
written need some too.
"""


def of_checkpoint(checkpoint: Path, spec: RunSpec) -> PreTrainedModel:
    """Make the model of a checkpoint, with its fp32 master weights rounded to bf16 as in training.

    Raises:
        OSError: A file cannot be read.
        InputError: The checkpoint does not fit the model.
    """
    from transformers.initialization import no_init_weights

    config = load_config(spec.model)
    with no_init_weights():
        causal = constructed(config)
    # left out with the initialisation; without it a tied head would be a parameter of its own
    causal.tie_weights()
    meta = meta_model(config)
    tensors = weights(checkpoint, trained_shapes(causal)) | untrained(meta, spec.model)
    causal.load_state_dict(tensors, strict=False, assign=True)
    causal.tie_weights()
    return causal


def of_folder(folder: Path, model: ModelSpec) -> PreTrainedModel:
    """Load a model's folder. Only safetensors are read: other weights are pickles, which can run
    code. So can kernels that it names.

    Args:
        folder: The folder with the weights.
        model: The model whose code runs if it is allowed; without, all is read from the folder.

    Raises:
        InputError: There is no model in it that can be read (``model-unreadable``), or its index
            names weights elsewhere (``weights-elsewhere``).
    """
    shards(folder)  # transformers would follow any name
    given = model if model.trust_remote_code else replace(model, id=str(folder))
    with explained(
        given,
        lambda error: reject(
            "model-unreadable",
            "model",
            str(folder),
            f"has no causal language model in safetensors that can be read ({first_line(error)})",
            "Name a run, or a folder that `so-tui export` wrote.",
        ),
    ):
        # Loaded by its class, a model runs nothing that the folder holds by now.
        meta: Any = meta_model(stored_config(given))
        causal: PreTrainedModel = type(meta).from_pretrained(
            folder,
            config=meta.config,
            generation_config=_generation_settings(str(folder), model.revision),
            dtype=torch.bfloat16,
            attn_implementation=DEFAULT_ATTENTION,
            use_safetensors=True,
            local_files_only=True,
        )
    return causal


def chosen_device(wanted: Device, parameters: int) -> torch.device:
    """Return where models of so many parameters together can write: the GPU with the most free
    memory if they fit there, else the CPU.

    Raises:
        InputError: A GPU is asked for, and none has the memory (``gpu-without-room``).
    """
    needed = int(_ROOM * parameters * torch.bfloat16.itemsize)
    free = (
        [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
        if wanted != "cpu"
        else []
    )
    if free and max(free) >= needed:
        return torch.device("cuda", free.index(max(free)))
    if wanted == "gpu":
        raise reject(
            "gpu-without-room",
            "--device",
            wanted,
            "no GPU here has enough free memory for the model",
            "Wait for the run that uses it, or take the CPU.",
        )
    return torch.device("cpu")


def placed(causal: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return a model ready to write on a device. CPUs compute in fp32, because many are slow in
    bf16.
    """
    moving: Any = causal
    moved: PreTrainedModel = moving.to(device) if device.type == "cuda" else moving.float()
    moved.requires_grad_(False).train(False)
    return moved
