"""The sub-groups whose states stay on the GPU: fp32 masters, gradients and moments, stepped by torch's AdamW."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from superoffload.sub_groups import SubGroup


class GpuStates:
    """``adamw`` steps them; its parameter groups are borrowed for that and hold no parameters otherwise."""

    def __init__(self, sub_groups: Sequence[SubGroup], adamw: torch.optim.AdamW) -> None:
        self._sub_groups = sub_groups
        self._adamw = adamw
        self.indices = [index for index, group in enumerate(sub_groups) if group.on_gpu]
        self._masters = {index: sub_groups[index].weights.detach().to(torch.float32, copy=True).requires_grad_() for index in self.indices}
        self._gradients = {index: torch.zeros_like(master) for index, master in self._masters.items()}

    def add(self, index: int, begin: int, values: torch.Tensor, *, first: bool) -> None:
        """A parameter's gradient; ``first``: of the step's first micro-step, replacing that of the step before."""
        target = self._gradients[index].narrow(0, begin, values.numel())
        if first:
            target.copy_(values)
        else:
            target.add_(values)

    def gradients(self) -> Iterable[tuple[int, torch.Tensor]]:
        """What came in during this step, by sub-group."""
        return self._gradients.items()

    def step(self, factor: float) -> None:
        """With the gradients times ``factor``."""
        if not self.indices:
            return
        self._lend_nothing()
        for index in self.indices:
            if factor != 1.0:
                self._gradients[index].mul_(factor)
            self._masters[index].grad = self._gradients[index]
            self._adamw.param_groups[self._sub_groups[index].parameter_group]["params"].append(self._masters[index])
        self._adamw.step()
        self._lend_nothing()
        for index in self.indices:
            self._sub_groups[index].weights.copy_(self._masters[index])

    def master(self, index: int) -> torch.Tensor:
        return self._masters[index].detach()

    def moments(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        master = self._masters[index]
        state = self._adamw.state[master]
        if not state:
            on_device = self._adamw.defaults.get("fused")
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device if on_device else "cpu")
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        return state["exp_avg"], state["exp_avg_sq"]

    def set_steps_taken(self, steps: int) -> None:
        for index in self.indices:
            self.moments(index)
            self._adamw.state[self._masters[index]]["step"].fill_(steps)

    def _lend_nothing(self) -> None:
        for group in self._adamw.param_groups:
            group["params"] = []
