"""A small model and a DeepSpeed engine for it, in this process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch.utils.hooks import RemovableHandle

import superoffload
from so_tui.plan.plan import DeepSpeedBinding, MemoryPolicy, RankBinding
from so_tui.spec import find_preset
from so_tui.spec.run_spec import DataSpec, OffloadSpec, RunSpec, TrainSpec
from so_tui_trainer.checkpoint_folder import Manifest
from so_tui_trainer.engine_settings import engine_settings
from superoffload import checkpoint
from tests.support.checkpoints import manifest_of
from tests.support.rank_processes import free_port

os.environ.setdefault("DS_ACCELERATOR", "cpu")
torch.set_num_threads(1)  # the tensors are tiny: more threads would only wait for each other

Mode = Literal["superoffload", "zerooffload", "gpu"]
Parameters = Literal["none", "cpu"]

OF_SPEC = {"clipping", "accumulation", "sub_group_size", "parameters", "learning_rate"}
"""Arguments of ``spec`` that ``offloading`` takes."""
WIDTH = 25
LAYERS = 6
ALL = 1 << 30
"""Bytes that let every sub-group of the small model speculate, or be copied."""
DEVICE = torch.device("cuda" if os.environ["DS_ACCELERATOR"] == "cuda" else "cpu")


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + added


class Model(torch.nn.Module):
    """A model whose embedding is tied to the head, with one frozen parameter."""

    def __init__(self, vocabulary: int = 50, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.frozen = torch.nn.Parameter(torch.ones(width), requires_grad=False)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * self.frozen)
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )


TRAINABLE = sum(parameter.numel() for parameter in Model().parameters() if parameter.requires_grad)
"""Elements of the small model whose states are stepped."""


class OddModel(Model):
    """A model with parameters of one and two elements, and one that is larger than a sub-group."""

    def __init__(self) -> None:
        super().__init__(vocabulary=211)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.turn = torch.nn.Parameter(torch.zeros(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        turn = torch.cos(self.turn).sum() / 2 + torch.sin(self.turn[0])
        return super().forward(tokens) * self.scale.squeeze(0) * turn


def spoil(made: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> RemovableHandle:
    """Change the gradient that the third block gets, until the returned hook is removed."""

    def follow(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(change)  # type: ignore[no-untyped-call]

    return made.module.blocks[2].register_forward_hook(follow)  # type: ignore[no-any-return]


def poison(made: Any) -> RemovableHandle:
    """Make every gradient below the third block NaN from now on, until the hook is removed."""
    return spoil(made, lambda gradient: gradient * float("nan"))


def skip_step(made: Any, data: list[torch.Tensor]) -> None:
    """Train a step with a gradient that is not finite, which is skipped."""
    before = made.skipped_steps
    hook = poison(made)
    train(made, data)
    hook.remove()
    assert made.skipped_steps == before + 1


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return matrices with weight decay and the rest without, as the trainer does."""
    groups: tuple[list[torch.nn.Parameter], ...] = ([], [])
    for parameter in model.parameters():
        groups[len(getattr(parameter, "ds_shape", parameter.shape)) < 2].append(parameter)
    return [
        {"params": group, "weight_decay": decay}
        for group, decay in zip(groups, (0.05, 0.0), strict=True)
    ]


def spec(
    mode: Mode,
    ratio: float = 1.0,
    *,
    clipping: float = 0.0,
    accumulation: int = 1,
    sub_group_size: int = 2000,
    implementation: Literal["so-tui", "deepspeed"] = "so-tui",
    parameters: Parameters = "none",
    **train: Any,
) -> RunSpec:
    # stands for the small model, which has no preset; only its largest layer is read
    return RunSpec(
        name="small",
        model=find_preset("tiny").spec.model,
        data=DataSpec(source="none"),
        train=TrainSpec(
            micro_batch=2,
            gradient_accumulation=accumulation,
            steps=20,
            gradient_clipping=clipping,
            **{"learning_rate": 1e-2, "beta2": 0.95, "max_skipped_steps": 0, **train},
        ),
        offload=OffloadSpec(
            mode=mode,
            ratio=ratio,
            sub_group_size=sub_group_size,
            engine=implementation,
            parameters=parameters,
        ),
    )


def binding(rank: int = 0) -> RankBinding:
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    return RankBinding(
        rank=rank,
        gpu=None,
        numa_node=None,
        cpus=cpus,
        main_cpus=cpus[:1],
        adam_cpus=cpus[1:] or cpus,
        memory_policy=MemoryPolicy(mode="default"),
        deepspeed=DeepSpeedBinding(cpus=cpus, numactl=(), omp_num_threads=1, matches=True),
    )


def ds_config(
    run: RunSpec, dtype: torch.dtype = torch.bfloat16, bucket: int = 3000
) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": run.offload.sub_group_size,
        "reduce_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        "stage3_param_persistence_threshold": 100,
    }
    if run.offload.mode != "gpu":
        ratio = run.offload.ratio
        zero["offload_optimizer"] = {"device": "cpu", "ratio": ratio, "pin_memory": False}
    if run.offload.parameters == "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    if run.offload.mode == "superoffload" and run.offload.engine == "deepspeed":
        zero["offload_optimizer"] |= {"super_offload": True, "cpuadam_cores_perc": 0.5}
    return {
        "train_micro_batch_size_per_gpu": run.train.micro_batch,
        "gradient_accumulation_steps": run.train.gradient_accumulation,
        "gradient_clipping": run.train.gradient_clipping,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    }


def ensure_process_group() -> None:
    """Join a process group of one rank, over gloo or NCCL, unless this process is in one."""
    if torch.distributed.is_initialized():
        return
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    superoffload.join_process_group(
        dist_backend="nccl" if DEVICE.type == "cuda" else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
    )


@contextmanager
def engine(
    run: RunSpec,
    dtype: torch.dtype = torch.bfloat16,
    model: torch.nn.Module | None = None,
    *,
    bucket: int = 3000,
    **settings: Any,
) -> Iterator[Any]:
    """Make an engine on ``DEVICE``, of a small model if None, which is closed in any case."""
    ensure_process_group()
    if model is None:
        torch.manual_seed(run.train.seed)
        model = Model()
    model = model.to(DEVICE)
    for parameter in model.parameters():  # buffers keep their type
        parameter.data = parameter.data.to(dtype)
    rank_settings = replace(engine_settings(run, binding()), **settings)
    made, *_ = superoffload.initialize(
        model, parameter_groups(model), rank_settings, ds_config(run, dtype, bucket)
    )
    try:
        yield made
    finally:
        superoffload.close(made)


@contextmanager
def offloading(
    ratio: float = 1.0, model: torch.nn.Module | None = None, **given: Any
) -> Iterator[Any]:
    """Make an engine with our optimizer from arguments of ``spec``, of ``engine``, and settings."""
    described = {name: given.pop(name) for name in OF_SPEC & given.keys()}
    with engine(spec("superoffload", ratio, **described), model=model, **given) as made:
        yield made


def batches(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 50, (2, 16), generator=generator) for _ in range(count)]


def train(made: Any, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for tokens in data:
        loss = made(tokens.to(DEVICE))
        made.backward(loss)
        made.step()
        losses.append(loss.item())
    return losses


def suspend_worker(made: Any, seconds: float) -> threading.Timer:
    """Suspend the Adam worker from now until ``seconds`` after the returned timer's start."""
    pid = superoffload.worker_pid(made)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return threading.Timer(seconds, os.kill, (pid, signal.SIGCONT))


def by_name(folder: Path) -> dict[str, tuple[int, list[bytes]]]:
    """Return the step and the bytes of each parameter's saved state, joined from all ranks."""
    groups = checkpoint.manifests(folder)[0].sub_groups
    steps = {name: group.step for group in groups for name in group.names}
    return {
        name: (steps[name], [kind.numpy().tobytes() for kind in kinds])
        for name, kinds in checkpoint.saved_states(folder)
    }


def manifest(step: int, run: RunSpec, ranks: int = 1) -> Manifest:
    return manifest_of(run, step, "", ranks, consumed=2 * step * ranks)


def states(made: Any, folder: Path | None = None, rank: int = 0) -> bytes:
    """Return what ``save_state`` writes: equal bytes are equal states."""
    with TemporaryDirectory() as temporary:
        superoffload.save_state(made, folder := folder or Path(temporary))
        return saved_bytes(folder, rank)


def saved_bytes(folder: Path, rank: int = 0) -> bytes:
    return (folder / f"rank_{rank:05d}.states").read_bytes()
