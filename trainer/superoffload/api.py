"""The functions of the package: make a DeepSpeed engine for an offload mode, and save, load,
measure and close it.

DeepSpeed itself has no way to do the latter. All functions must be called by every rank, from the
main thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor

from superoffload import checkpoint
from superoffload.checkpoint import Rounded, Save
from superoffload.deepspeed_adapter import engine as adapter
from superoffload.deepspeed_adapter.stage3 import own_super_offload
from superoffload.ds_config import accepting_config, check_clipping, engine_config
from superoffload.errors import NonFiniteGradientError, OffloadError
from superoffload.gpu_states import SubGroupState
from superoffload.settings import Settings
from superoffload.transfers import OffloadStats

# Parameter groups as scripts give them: what of them is trained, and which of their options our
# AdamW has.


Groups = list[dict[str, Any]]
"""Parameter groups without frozen parameters."""
ParameterGroups = Iterable[dict[str, Any]] | Iterable[torch.nn.Parameter]
"""As torch's optimizers take them: groups ``{"params": [...], "weight_decay": ...}``, or
parameters. Frozen ones are ignored.
"""


def _trainable(parameter_groups: ParameterGroups, model: torch.nn.Module) -> Groups:
    """Return the groups without frozen parameters, and without groups of nothing else.

    Raises:
        OffloadError: If nothing is left (``nothing-trainable``), or a parameter is none of the
            model's (``other-parameters``).
    """
    given: list[Any] = list(parameter_groups)
    given = (
        [{"params": given}] if given and all(isinstance(each, Tensor) for each in given) else given
    )
    groups = [
        {**group, "params": [parameter for parameter in group["params"] if parameter.requires_grad]}
        for group in given
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise OffloadError("The model has no trainable parameter.", code="nothing-trainable")
    here = {id(parameter) for parameter in model.parameters()}
    foreign = [
        parameter for group in groups for parameter in group["params"] if id(parameter) not in here
    ]
    if foreign:
        raise OffloadError(
            f"parameter_groups has parameters that are none of the model's: {len(foreign)}, the "
            f"first of shape {tuple(foreign[0].shape)}. Make the groups from model.parameters(), "
            "after the last change of the model.",
            code="other-parameters",
        )
    return groups


def _check_options(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise OffloadError (``optimizer-option``) for what torch's AdamW can do and the Adam worker
    cannot.
    """
    for index, name in product(range(len(groups)), ("amsgrad", "maximize")):
        if groups[index].get(name):
            raise OffloadError(
                f"Parameter group {index} has {name} = True, which our AdamW does not do. Leave it "
                "out.",
                code="optimizer-option",
            )


def initialize(
    model: torch.nn.Module,
    parameter_groups: ParameterGroups,
    settings: Settings,
    ds_config: Mapping[str, Any],
    **arguments: Any,
) -> tuple[Any, Any, Any, Any]:
    """Call ``deepspeed.initialize`` for an engine whose optimizer is AdamW and runs where
    ``settings.mode`` says.

    Sub-groups are stepped while backward runs, so set the learning rate of a step before its last
    backward begins. DeepSpeed's own schedulers do, since they set it right after the step before.

    Args:
        model: The model, sharded (``shard``) or whole.
        parameter_groups: The parameters to train.
        settings: How this rank's optimizer runs.
        ds_config: A DeepSpeed ZeRO-3 config. Where our optimizer runs, ``engine_config`` is applied
            unless it already was; otherwise ``accepting_config``.
        arguments: More of ``deepspeed.initialize``, such as ``training_data`` and ``lr_scheduler``.

    Returns:
        What ``deepspeed.initialize`` returns: engine, optimizer, data loader, scheduler. Call
        ``close`` with the engine at the end.

    Raises:
        OffloadError: For another DeepSpeed version (``deepspeed-version``), a mode that cannot run
            here, parameters that are none of the model's (``other-parameters``), options that our
            AdamW lacks (``optimizer-option``), and codes of ``engine_config``.
    """
    adapter.check_version()
    adapter.import_muon()
    groups = _trainable(parameter_groups, model)
    if settings.replaces_deepspeeds_optimizer:
        with replacing_optimizers(settings), adapter.keeping_buffers(model):
            return deepspeed.initialize(  # type: ignore[no-any-return]
                model=model, optimizer=_torch_adamw(groups, settings), config=ds_config, **arguments
            )
    optimizer = _deepspeed_optimizer(groups, settings)
    with adapter.keeping_buffers(model):
        made = deepspeed.initialize(
            model=model, optimizer=optimizer, config=accepting_config(ds_config), **arguments
        )
    adapter.finish(made[0], settings)
    return made  # type: ignore[no-any-return]


@contextmanager
def replacing_optimizers(settings: Settings) -> Iterator[None]:
    """Make ``deepspeed.initialize`` give its engines our optimizer, for programs that call it, as
    transformers' ``Trainer`` does.

    Within the context, each call needs ``optimizer``, a ``torch.optim.AdamW``, and a ZeRO-3 config
    as a dictionary; ``engine_config`` is applied to it. Learning rate, betas, epsilon and weight
    decay are those of the AdamW, so that schedulers of it work; those in ``settings`` are not used.

    Args:
        settings: How this rank's optimizer runs. Its mode must be ``superoffload`` and its engine
            ``so-tui``.

    Raises:
        OffloadError: For another DeepSpeed version (``deepspeed-version``), other settings
            (``mode``); from ``deepspeed.initialize``, for another optimizer or config
            (``optimizer-class``, ``optimizer-option``, ``no-config``, and codes of
            ``engine_config``).
    """
    adapter.check_version()
    adapter.import_muon()
    if not settings.replaces_deepspeeds_optimizer:
        raise OffloadError(
            f'mode = "{settings.mode}", engine = "{settings.engine}": our optimizer needs '
            '"superoffload" and "so-tui".',
            code="mode",
        )
    original = deepspeed.initialize

    def initialize_with_ours(
        *arguments: Any, config: Any = None, config_params: Any = None, **keywords: Any
    ) -> Any:
        given = config if config is not None else config_params
        if not isinstance(given, Mapping):
            raise OffloadError(
                "deepspeed.initialize needs its config as a dictionary (`config`) for our "
                "optimizer.",
                code="no-config",
            )
        if not isinstance(optimizer := keywords.get("optimizer"), torch.optim.AdamW):
            raise OffloadError(
                f"deepspeed.initialize was given {type(optimizer).__name__} as `optimizer`. Our "
                "optimizer takes the place of a torch.optim.AdamW; leave the section `optimizer` "
                "out of DeepSpeed's config.",
                code="optimizer-class",
            )
        _check_options(optimizer.param_groups)
        config = engine_config(given)
        check_clipping(config)
        with own_super_offload(settings):  # which releases what was made if anything fails
            made = original(*arguments, config=config, **keywords)
            if adapter.super_offload(made[0]) is None:
                raise OffloadError(
                    "DeepSpeed did not use our optimizer but made a "
                    f"{type(made[0].optimizer).__name__}.",
                    code="optimizer-not-used",
                )
            adapter.finish(made[0], settings)
        return made

    deepspeed.initialize = initialize_with_ours
    try:
        yield
    finally:
        deepspeed.initialize = original


def worker_pid(engine: Any) -> int | None:
    """Return the process id of our Adam worker, if there is one."""
    optimizer = adapter.super_offload(engine)
    return optimizer.cpu.worker_pid if optimizer else None


def save_state(engine: Any, folder: Path) -> int:
    """Write this rank's master weights, moments and step counts into ``folder`` and return their
    size in bytes.

    No rank waits for another.

    Raises:
        OffloadError: If the state in memory is not sound, for example after a gradient that is not
            finite.
        OSError: If the disk does not take it.
    """
    return begin_save(engine, folder, copying=False).finish()


def begin_save(engine: Any, folder: Path, *, copying: bool = True) -> Save:
    """Begin to write this rank's state, so that training may go on at once: what is written is the
    state of the last step.

    States are copied as far as there is memory for it (``Settings.copies_bytes``, second sets of
    states); the rest is written before this function returns. DeepSpeed's own optimizers copy
    nothing.

    Args:
        engine: The engine.
        folder: As for ``save_state``.
        copying: Whether to copy anything. Without copies everything is written at once.

    Returns:
        What is still to be written. Call its ``finish`` before the next ``begin_save``, in any
        thread.

    Raises:
        OffloadError, OSError: As ``save_state``; also if a save before has not been finished
            (``copies-in-use``).
    """
    synchronize(engine)
    optimizer = adapter.super_offload(engine)
    states = adapter.sub_group_states(engine)
    save = Save(Path(folder), _manifest(engine, states))
    try:
        if copying and optimizer:
            save.attach, save.release = optimizer.transfers.attach, optimizer.release_copy
            save.copies.update(optimizer.copy_states())
        for index, state in enumerate(states):
            if index not in save.copies:
                save.write(index, state.tensors())
    except BaseException:
        save.close()
        raise
    return save


def load_state(engine: Any, folder: Path) -> Rounded:
    """Load this rank's shards of a saved state and cast the weights from it, so that training
    continues as if it had never stopped.

    Any number of ranks may have saved the state, in any offload mode and with any ratio: parameters
    are matched by name. Compact moments are saved as fp32, and are not rounded again where they are
    loaded in the same format, with two exceptions.

    A state that lacks moments, which DeepSpeed's own SuperOffload saves, is loaded as DeepSpeed
    does: all moments and the count of steps begin anew. So they do where that engine loads a state,
    in a new process only: its worker keeps the moments that it has.

    Returns:
        The exceptions, on this rank: 8-bit blocks that shards of other ranks had cut, parameters
        whose moments were on a GPU, and those whose moments begin anew.

    Raises:
        StateMismatchError: If it belongs to another model. Nothing was changed.
        OffloadError: If a file is missing or cut short, or compact moments cannot hold the saved
            ones (``impossible-moments``).
    """
    synchronize(engine)
    states = adapter.sub_group_states(engine)
    rounded = checkpoint.read(Path(folder), _manifest(engine, states), states)
    adapter.publish_states(engine)
    settings: Settings = engine.superoffload_settings
    if settings.states == "fp32" or not settings.replaces_deepspeeds_optimizer:
        return rounded._replace(blocks=0, numel=0)
    return rounded if settings.states == "int8-moments" else rounded._replace(blocks=0)


def skipped_step(engine: Any) -> NonFiniteGradientError | None:
    """Return why the last step was skipped; None if it was taken. The states are then those of the
    step before it.
    """
    optimizer = adapter.super_offload(engine)
    return optimizer.skipped if optimizer else None


def stats(engine: Any) -> OffloadStats:
    """Return what the last step cost, from the end of the step before it. May wait for the GPU."""
    optimizer = adapter.super_offload(engine)
    return optimizer.stats() if optimizer else OffloadStats()


def leave_out_waits(engine: Any) -> None:
    """Leave waits since the last step (to save or to evaluate) out of the next step's ``stats``."""
    if optimizer := adapter.super_offload(engine):
        optimizer.meter.leave_out_waits()


def synchronize(engine: Any) -> None:
    """Wait until the weights are those of the last step. Raises OffloadError if the state in memory
    is not sound.
    """
    if optimizer := adapter.super_offload(engine):
        optimizer.synchronize()


def _hyperparameters(settings: Settings) -> dict[str, Any]:
    return {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.epsilon,
        "weight_decay": settings.weight_decay,
    }


def _deepspeed_optimizer(groups: Groups, settings: Settings) -> torch.optim.Optimizer:
    if settings.mode == "gpu":
        return _torch_adamw(groups, settings)
    if settings.mode == "superoffload" and not torch.cuda.is_available():
        raise OffloadError(
            'DeepSpeed\'s own SuperOffload runs on CUDA only. Use offload.engine = "so-tui" or '
            'offload.mode = "zerooffload".',
            code="needs-cuda",
        )
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    adapter.load_cpu_adam()
    return DeepSpeedCPUAdam(  # type: ignore[no-any-return]
        groups, **_hyperparameters(settings), adamw_mode=True
    )


def _torch_adamw(groups: Groups, settings: Settings) -> torch.optim.Optimizer:
    fast: dict[str, Any] = {"fused": True} if torch.cuda.is_available() else {"foreach": True}
    return torch.optim.AdamW(groups, **_hyperparameters(settings), **fast)


def _manifest(engine: Any, states: Sequence[SubGroupState]) -> checkpoint.Manifest:
    settings: Settings = engine.superoffload_settings
    return checkpoint.Manifest(
        deepspeed=deepspeed.__version__,
        mode=settings.mode,
        engine=settings.engine if settings.mode == "superoffload" else "deepspeed",
        ratio=settings.ratio if settings.mode != "gpu" else 0.0,
        rank=torch.distributed.get_rank(),
        ranks=torch.distributed.get_world_size(),
        sub_groups=tuple(
            checkpoint.SubGroupRecord.of(state, members)
            for state, members in zip(states, adapter.sub_group_parameters(engine), strict=True)
        ),
    )
