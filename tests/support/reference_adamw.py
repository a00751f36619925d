"""Plain float32 AdamW, fed the gradients that an engine receives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from superoffload.deepspeed_adapter.engine import super_offload
from superoffload.optimizer import SuperOffload
from superoffload.sub_groups import Gradient


class Reference:
    """float32 AdamW over the same flat sub-groups, fed the gradients that the engine receives.

    It works where the weights are, so that recording a gradient never makes the host wait for the GPU.
    """

    def __init__(self, made: Any, clipping: float) -> None:
        core = super_offload(made)
        assert core is not None
        self.core: SuperOffload = core
        self.clipping = clipping
        self.masters = [
            core.master(index).to(group.weights.device, copy=True).requires_grad_() for index, group in enumerate(core.sub_groups)
        ]
        groups = made.optimizer.optimizer.param_groups
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": [master],
                    **{key: groups[sub_group.parameter_group][key] for key in ("lr", "betas", "eps", "weight_decay")},
                }
                for master, sub_group in zip(self.masters, core.sub_groups, strict=True)
            ],
            foreach=False,
        )
        self.reset()
        receive = core.receive

        def recording(gradients: Sequence[Gradient], *, boundary: bool) -> None:
            for gradient in gradients:
                begin = core.sub_groups[gradient.sub_group].offsets[gradient.member]
                values = gradient.values.flatten()
                self.gradients[gradient.sub_group][begin : begin + values.numel()] += values.float()
            receive(gradients, boundary=boundary)

        core.receive = recording  # type: ignore[method-assign]

    def reset(self) -> None:
        self.gradients = [torch.zeros_like(master) for master in self.masters]

    def take(self) -> list[torch.Tensor]:
        """What came in since the last step, to be stepped with later."""
        taken = self.gradients
        self.reset()
        return taken

    def step(self, learning_rate: float, taken: list[torch.Tensor] | None = None) -> float:
        """With what came in since the last step, or with what was taken. The norm of all gradients, before clipping."""
        if taken is not None:
            self.gradients = taken
        squares = sum(gradient.double().square().sum() for gradient in self.gradients)
        torch.distributed.all_reduce(squares)
        norm = math.sqrt(float(squares))
        scale = min(1.0, self.clipping / (norm + 1e-6)) if self.clipping else 1.0
        for group, master, gradient in zip(self.optimizer.param_groups, self.masters, self.gradients, strict=True):
            group["lr"] = learning_rate
            master.grad = gradient * scale
        self.optimizer.step()
        self.reset()
        return norm


def distance(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    assert found is not None
    expected = expected.to(found.device)
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
