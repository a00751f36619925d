"""A rank that shares sequences with others: a script, started once per rank. It compares loss
and gradients with one rank that has whole sequences, masks, and keeps all activations.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

import superoffload
from so_tui.launch.ds_config import ds_config
from so_tui.machine import inspect_machine
from so_tui.plan.planner import make_plan
from so_tui.spec.run_spec import ModelSpec
from so_tui_trainer.data.batches import Batch, Batches
from so_tui_trainer.data.documents import Documents
from so_tui_trainer.engine_settings import engine_settings
from so_tui_trainer.model import attention, checkpointing, fused
from so_tui_trainer.model import build as building
from so_tui_trainer.model.build import build
from so_tui_trainer.model.checkpointing import HostActivations, Room
from so_tui_trainer.model.config import disable_dropout
from so_tui_trainer.model.trained import TrainedModel, parameter_groups
from tests.support import small_training
from tests.support.attention import PLAIN
from tests.support.documents import documents, spec
from tests.support.engine import binding
from tests.support.models import LONGROPE, are_close, causal_model, gradients_of
from tests.support.rank_processes import leave

SHAPE = small_training.SHAPE | small_training.EXPERTS
SHAPE |= {"intermediate_size": 64, "num_hidden_layers": 2, "sliding_window": 16}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
"""Windows of 16 tokens, in documents that the end of a rank's part divides."""


@dataclass(frozen=True)
class Case:
    model_type: str
    policy: checkpointing.Policy
    shape: dict[str, Any] = field(default_factory=dict)
    """Changes of SHAPE."""
    settings: dict[str, str] = field(default_factory=dict)
    """Changes of the spec."""
    tile: int = 0
    """Tokens of a tile; 0: whole feed-forward blocks."""
    uneven: bool = False
    """Whether only the ends of documents carry loss, of which ranks have uneven shares."""


TWICE = {"train__gradient_accumulation": "2"}
IN_ROWS = {"data__packing": "false", "train__micro_batch": "4"}
CASES = (
    Case("qwen3", "none", {"num_key_value_heads": 1}),
    Case("phi3", "full", LONGROPE),
    Case("gpt_oss", "selective", ALTERNATING),
    Case("gpt_oss", "attention", ALTERNATING, TWICE, uneven=True),
    Case("gemma3_text", "attention", ALTERNATING, TWICE, tile=20, uneven=True),
    Case("qwen3", "attention", {}, IN_ROWS, tile=20, uneven=True),
)
"""gpt-oss has sinks. With full or attention, all that layers keep is in host memory."""


def uneven() -> Documents:
    """Return documents of which only the last two tokens are trained."""
    found = documents()
    trained = np.zeros_like(found.trained)
    for end in found.offsets[1:]:
        trained[end - 2 : end] = True
    return found._replace(trained=trained)


def batches_of(ranks: int, rank: int, case: Case) -> Batches:
    """Return the batches of a rank that shares each sequence with all others."""
    parts = {"gpus": str(ranks), "train__sequence_parallel": str(ranks)}
    shared = spec(**parts | {"train__gradient_accumulation": "1"} | case.settings)
    found = Batches(uneven() if case.uneven else documents(), shared, rank)
    found.end_to_end = ranks > 1
    return found


def results(model: TrainedModel, batches: Sequence[Batch], scale: float) -> dict[str, Tensor]:
    model.zero_grad()
    total = torch.zeros(())
    for batch in batches:
        loss = model(batch, scale)
        torch.autograd.backward(loss)
        total += loss.detach()
    return {"loss": total} | gradients_of(model)


def compare(case: Case) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = AutoConfig.for_model(case.model_type, **SHAPE | case.shape)
    disable_dropout(config)
    name = attention.register(PLAIN, attention.sequence_group(ranks))
    exact = case.model_type != "gpt_oss"
    # Eager attention rounds its softmax to float32.
    masked, dtype = ("sdpa", torch.float64) if exact else ("eager", torch.float32)
    causal, plain = (_model(config, dtype, each) for each in (name, masked))
    room = Room(2, 1 << 20)
    results_too = [room, room] if case.policy == "attention" else []
    on_host = case.policy in ("full", "attention")
    host = HostActivations(room, results_too, torch.device("cpu")) if on_host else None
    checkpointing.install(causal, case.policy, host)
    assert not case.tile or fused.install_tiles(causal, case.tile) == SHAPE["num_hidden_layers"]
    model, reference = TrainedModel(causal, name), TrainedModel(plain, masked)
    own, alone = batches_of(ranks, rank, case), batches_of(1, 0, case)
    relative, absolute = (1e-5, 1e-8) if exact else (1e-3, 1e-6)
    divided = 0
    for step in (1, 2):
        tokens = alone.counts(step).trained_tokens
        assert own.counts(step).trained_tokens == tokens
        parts = list(own.micro_batches(step))
        divided += sum(part.input_ids.shape[1] not in part.boundaries for part in parts)
        found = results(model, parts, 1 / tokens)
        for tensor in found.values():
            dist.all_reduce(tensor)
        expected = results(reference, list(alone.micro_batches(step)), 1 / tokens)
        are_close(found, expected, relative, absolute)
    assert divided, "a document that two ranks share"
    last = parts[-1]
    if rank == 0:
        last = replace(last, predictors=last.predictors[:0], targets=last.targets[:0])
    assert all(tensor.isfinite().all() for tensor in results(model, [last], 1.0).values())


def _model(config: PretrainedConfig, dtype: torch.dtype, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    causal = causal_model(deepcopy(config), dtype=dtype, attention=implementation)
    causal.train()
    return causal


kept_bytes: list[int] = []
"""Of each ``HostActivations`` that a run makes."""
ON_HOST = ("offloaded-inputs", "offloaded-results")


class Measured(HostActivations):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        rooms = (self._inputs, *self.results)
        kept_bytes.append(sum(room._slots.nbytes for room in rooms if room is not None))


def plain_attention(
    model: ModelSpec, needs: Any, device: torch.device, ranks_per_sequence: int
) -> str:
    """Stand in for ``attention.choose``: no kernels that take boundaries run on a CPU."""
    return attention.register(PLAIN, attention.sequence_group(ranks_per_sequence))


def steps(**changes: str) -> list[tuple[float, float]]:
    """Train two steps of four sequences; return mean losses of all ranks, and norms."""
    size = dist.get_world_size()
    # With more, Adam amplifies how parts round, which depends on the CPU.
    settings = {"train__gradient_clipping": "1", "train__learning_rate": "1e-3"} | changes
    asked = spec(gpus=str(size), offload__mode="superoffload", **settings)
    plan = make_plan(asked, inspect_machine())
    run = plan.spec
    torch.manual_seed(run.train.seed)
    kept_bytes.clear()
    model = build(run, torch.device("cpu"), ds_config(plan))
    assert sum(kept_bytes) == sum(term.bytes for term in plan.breakdown if term.kind in ON_HOST)
    made, *_ = superoffload.initialize(
        model, parameter_groups(model, run), engine_settings(run, binding()), ds_config(plan)
    )
    batches = Batches(documents(), run, dist.get_rank())
    batches.end_to_end = True
    found = []
    for step in range(1, 3):
        counts, loss = batches.counts(step), torch.zeros(())
        for batch in batches.micro_batches(step):
            part = made(batch, size / counts.trained_tokens, 0.0)
            made.backward(part, scale_wrt_gas=False)
            made.step()
            loss += part.detach() / size
        dist.all_reduce(loss)
        norm = superoffload.gradient_norm(made)
        assert norm is not None
        found.append((loss.item(), norm))
    superoffload.close(made)
    return found


def train() -> None:
    """Under ZeRO-3 with our engine in bf16: the same sequences, each rank its own, or shared.

    Host memory must not change a bit; tiles and parts round differently.
    """
    attention.choose = plain_attention  # type: ignore[assignment]
    building.HostActivations = Measured  # type: ignore[assignment, attr-defined]
    full = {"train__gradient_accumulation": "1", "model__activation_checkpointing": "full"}
    full |= {"model__activation_offload": "off"}
    kept = full | {"model__activation_checkpointing": "attention"}
    fetched = {"offload__parameters": "cpu"}
    apart = steps(**full)
    assert apart == steps(**full | {"model__activation_offload": "on"})
    assert apart == steps(**kept | {"model__activation_offload": "attention"})
    assert apart == steps(**kept | {"model__activation_offload": "on"} | fetched)
    building.MLP_TILE_TOKENS = 50  # type: ignore[attr-defined]
    tiled = steps(**full, model__tiled_mlp="on")
    plain = kept | {"model__activation_offload": "auto", "model__kernels": "plain"}
    plain_norms, norms_too = steps(**plain), steps(**plain | fetched, model__tiled_mlp="on")
    parts = {"train__gradient_accumulation": "2", "train__sequence_parallel": "2"}
    shared = steps(**full | parts | {"model__activation_offload": "auto"})
    on_host = kept | parts | fetched | {"model__activation_offload": "on"}
    assert shared == steps(**on_host)
    everything = steps(**on_host, model__tiled_mlp="on")
    for found in (shared, tiled, everything):
        assert found == [pytest.approx(expected, rel=0.003) for expected in apart]
    for (loss, norm), (expected, expected_norm) in zip(norms_too, plain_norms, strict=True):
        assert loss == pytest.approx(expected, rel=1e-4)
        # Adam amplifies how bf16 rounds small gradients.
        assert norm == pytest.approx(expected_norm, rel=0.01)


if __name__ == "__main__":
    superoffload.join_process_group(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    torch.set_num_threads(1)
    for case in CASES:
        compare(case)
    train()
    sys.stdout.flush()
    leave()
