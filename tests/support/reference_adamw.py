"""Plain float32 AdamW, fed with the gradients of an engine, to compare it with."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from superoffload.deepspeed_adapter.engine import sub_group_states, super_offload
from superoffload.gpu_states import Gradient
from superoffload.optimizer import SuperOffload

OPTIONS = ("lr", "betas", "eps", "weight_decay")


class Reference:
    """float32 AdamW over flat sub-groups, on their device: recording never waits for a GPU."""

    def __init__(self, made: Any, clipping: float) -> None:
        self.core = core_of(made)
        self.clipping = clipping
        self.master_weights = [
            self.core.state(index).master_weights.to(group.weights.device, copy=True)
            for index, group in enumerate(self.core.sub_groups)
        ]
        groups = made.optimizer.optimizer.param_groups
        options = [groups[sub_group.parameter_group] for sub_group in self.core.sub_groups]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [weights], **{key: group[key] for key in OPTIONS}}
                for weights, group in zip(self.master_weights, options, strict=True)
            ],
            foreach=False,
        )
        self.reset()
        watch_gradients(self.core, self._record)

    def reset(self) -> None:
        self.gradients = [torch.zeros_like(weights) for weights in self.master_weights]

    def take(self) -> list[torch.Tensor]:
        """Return the gradients since the last step, to be stepped with later."""
        taken = self.gradients
        self.reset()
        return taken

    def step(self, learning_rate: float, taken: list[torch.Tensor] | None = None) -> float:
        """Step with the gradients since the last step or ``taken``; return the norm of all."""
        if taken is not None:
            self.gradients = taken
        sums = [gradient.double().square().sum() for gradient in self.gradients]
        squares = torch.stack(sums).sum()
        torch.distributed.all_reduce(squares)
        norm = math.sqrt(float(squares))
        scale = min(1.0, self.clipping / (norm + 1e-6)) if self.clipping else 1.0
        for group, weights, gradient in zip(
            self.optimizer.param_groups, self.master_weights, self.gradients, strict=True
        ):
            group["lr"] = learning_rate
            weights.grad = gradient * scale
        self.optimizer.step()
        self.reset()
        return norm

    def assert_same_states(self, made: Any) -> None:
        """Assert that master weights and moments agree with this optimizer's to 1e-6."""
        for state, expected in zip(sub_group_states(made), self.master_weights, strict=True):
            assert distance(state.master_weights, expected.detach()) < 1e-6
            assert state.moments is not None
            first, second = state.moments()
            assert distance(first, self.optimizer.state[expected]["exp_avg"]) < 1e-6
            assert distance(second, self.optimizer.state[expected]["exp_avg_sq"]) < 1e-6

    def _record(self, gradient: Gradient) -> None:
        begin = self.core.sub_groups[gradient.sub_group].offsets[gradient.member]
        values = gradient.values.flatten().float()
        self.gradients[gradient.sub_group][begin : begin + values.numel()] += values


def watch_gradients(core: SuperOffload, see: Callable[[Gradient], None]) -> None:
    """Call ``see`` with every gradient that the optimizer gets, before it has it."""
    receive = core.receive

    def watching(gradients: Sequence[Gradient], *, boundary: bool) -> None:
        for gradient in gradients:
            see(gradient)
        receive(gradients, boundary=boundary)

    core.receive = watching  # type: ignore[method-assign]


def record_gradients(made: Any) -> list[tuple[str, str]]:
    """Return a growing list of name and digest of every gradient that the optimizer gets."""
    core, found = core_of(made), list[tuple[str, str]]()

    def record(gradient: Gradient) -> None:
        values = gradient.values.detach().cpu().contiguous().view(torch.uint8).numpy()
        name = core.sub_groups[gradient.sub_group].names[gradient.member]
        found.append((name, hashlib.sha256(values.tobytes()).hexdigest()))

    watch_gradients(core, record)
    return found


def core_of(made: Any) -> SuperOffload:
    """Return the optimizer of an engine that runs ours."""
    core = super_offload(made)
    assert core is not None
    return core


def distance(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to ``expected``."""
    assert found is not None
    wide = expected.to(found.device).double()
    return float((found.double() - wide).norm() / wide.norm().clamp_min(1e-30))
