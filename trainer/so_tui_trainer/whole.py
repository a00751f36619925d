"""Whole models in one process, to let them write: from a checkpoint, an export or any other folder, in bf16 or, on the CPU, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from so_tui.spec import InputError, ModelSpec, Problem, RunSpec, first_line
from so_tui.spec.generation import Device
from so_tui_trainer.export import weights
from so_tui_trainer.model.buffers import trained_shapes, untrained
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.matching import DEFAULT_ATTENTION, meta_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROOM = 1.25
"""Free memory that a GPU must have, as a multiple of the weights: keys and values of what is written need some too."""


def of_checkpoint(checkpoint: Path, spec: RunSpec) -> PreTrainedModel:
    """Make the model of a checkpoint, with its fp32 master weights rounded to bf16 as in training.

    Raises:
        OSError: A file cannot be read.
        InputError: The checkpoint does not fit the model.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    factory: Any = AutoModelForCausalLM
    config = load_config(spec.model)
    with no_init_weights():
        causal: PreTrainedModel = factory.from_config(
            config,
            dtype=torch.bfloat16,
            attn_implementation=DEFAULT_ATTENTION,
            trust_remote_code=spec.model.trust_remote_code,
        )
    causal.tie_weights()  # left out with the initialisation; without it a tied head would be a parameter of its own
    meta = meta_model(config, trust_remote_code=spec.model.trust_remote_code)
    tensors = weights(checkpoint, trained_shapes(causal)) | untrained(meta, spec.model)
    causal.load_state_dict(tensors, strict=False, assign=True)
    causal.tie_weights()
    return causal


def of_folder(folder: Path, model: ModelSpec) -> PreTrainedModel:
    """Load a model's folder. Only safetensors are read: other weights are pickles, which can run code. So can kernels that it names.

    Args:
        folder: The folder.
        model: Whether the model's own code may run.

    Raises:
        InputError: There is no model in it that can be read (``model-unreadable``).
    """
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    try:
        causal: PreTrainedModel = factory.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            attn_implementation=DEFAULT_ATTENTION,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=model.trust_remote_code,
        )
    except (
        Exception
    ) as error:  # a damaged folder raises whatever it leads to, also errors of other packages
        message = (
            f"has no causal language model in safetensors that can be read ({first_line(error)})"
        )
        remedy = "Name a run, or a folder that `so-tui export` wrote."
        raise InputError(
            [
                Problem(
                    code="model-unreadable",
                    field="model",
                    value=str(folder),
                    message=message,
                    remedy=remedy,
                )
            ]
        ) from error
    return causal


def parameter_count(causal: PreTrainedModel) -> int:
    """Return the number of parameters, tied ones once."""
    return sum(parameter.numel() for parameter in causal.parameters())


def chosen_device(wanted: Device, parameters: int) -> torch.device:
    """Return where models of so many parameters together can write: the GPU with the most free memory if they fit there, else the CPU.

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
        message, remedy = (
            "no GPU here has enough free memory for the model",
            "Wait for the run that uses it, or take the CPU.",
        )
        raise InputError(
            [
                Problem(
                    code="gpu-without-room",
                    field="--device",
                    value=wanted,
                    message=message,
                    remedy=remedy,
                )
            ]
        )
    return torch.device("cpu")


def placed(causal: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return a model ready to write on a device. CPUs compute in fp32, because many are slow in bf16."""
    moving: Any = causal
    moved: PreTrainedModel = moving.to(device) if device.type == "cuda" else moving.float()
    moved.requires_grad_(False).train(False)
    return moved
