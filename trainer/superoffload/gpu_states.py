"""The sub-groups whose states stay on the GPU: fp32 master weights, gradients and moments, stepped
by torch's AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from superoffload.shared_states import pin, unpin
from superoffload.transfers import Event, Transfers

# A copy of a sub-group's states, from which a checkpoint is written while training goes on.


Tensors = tuple[Tensor, Tensor, Tensor]
"""Master weights, first and second moment, in fp32."""


Copies = dict[int, Callable[[], Tensors]]
"""By sub-group: waits until a copy of its states is complete, and returns it, in any thread."""


# Sub-groups: parameters that are stepped together, the gradients that arrive for them, and their
# states.


@dataclass(frozen=True)
class SubGroup:
    """This rank's shards of the parameters that are stepped together, in one flat tensor."""

    weights: Tensor
    """What the model computes with: bf16 or fp32, padding included. On the GPU, or in host memory
    (``host_weights``).
    """
    parameter_group: int
    """Index of the optimizer's parameter group, whose learning rate and weight decay apply."""
    names: tuple[str, ...]
    offsets: tuple[int, ...]
    """First element of each parameter's shard."""
    on_gpu: bool
    """Whether the optimizer states are on the GPU."""
    places: tuple[int, ...]
    """Where each shard begins in the whole parameter."""
    first_use: int
    """When a forward pass first needs the weights: the position of the earliest parameter in the
    model's order.
    """

    def span(self, member: int) -> tuple[int, int]:
        """Return the first element of a parameter's shard and the one after its last, padding
        included.
        """
        bounds = (*self.offsets, self.weights.numel())
        return bounds[member], bounds[member + 1]


@dataclass(frozen=True)
class Gradient:
    """The reduced gradient of this rank's shard of one parameter."""

    sub_group: int
    member: int
    """Position of the parameter in the sub-group."""
    values: Tensor
    """Without padding, in memory that nothing else will be written to."""


@dataclass(frozen=True)
class SubGroupState:
    """The optimizer state of one sub-group of one rank: flat tensors of equal length, padding
    included.

    All but ``weights`` are fp32. ``set_moments`` takes what ``moments`` returned, or tensors of the
    same form.
    """

    device: str
    """``gpu`` or ``cpu``; where DeepSpeed offloads nothing, the type of the torch device."""
    weights: Tensor
    """What the model computes with (bf16, on the GPU or in host memory): a cast of
    ``master_weights``.
    """
    master_weights: Tensor
    moments: Callable[[], tuple[Tensor, Tensor]] | None
    """Returns the first and second moment: the state itself, or copies of compact moments. None
    where they are out of reach, in the process of DeepSpeed's own SuperOffload worker.
    """
    set_moments: Callable[[Tensor, Tensor], None]
    step: int
    set_step: Callable[[int], None]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return master weights, first and second moment; only the master weights if the moments
        are out of reach.
        """
        return self.master_weights, *(self.moments() if self.moments else ())


def initial_state(optimizer: Any, master_weights: Tensor) -> dict[str, Any]:
    """Return the state of one sub-group before its first step, in the form in which the optimizer
    itself creates it.
    """
    step: Any = 0
    if isinstance(optimizer, torch.optim.AdamW):
        on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
        step = torch.zeros(
            (), dtype=torch.float32, device=master_weights.device if on_device else "cpu"
        )
    return {
        "step": step,
        "exp_avg": torch.zeros_like(master_weights),
        "exp_avg_sq": torch.zeros_like(master_weights),
    }


class GpuStates:
    """States of the GPU sub-groups.

    ``adamw`` steps them. Its parameter groups hold the master weights during a step only, and are
    empty otherwise. The sub-groups in ``copied`` have room in host memory for a copy of their
    states, from which a checkpoint is written while training goes on.

    Raises:
        OffloadError: If host memory cannot be pinned (``pinning``).
    """

    def __init__(
        self, sub_groups: Sequence[SubGroup], adamw: torch.optim.AdamW, copied: Sequence[int]
    ) -> None:
        self._sub_groups = sub_groups
        self._pinned: list[int] = []
        self._copies: dict[int, Tensor] = {}
        """Host memory for the copy of a sub-group's master weights and moments."""
        self._adamw = adamw
        self.indices = [index for index, group in enumerate(sub_groups) if group.on_gpu]
        self._master_weights = {
            index: sub_groups[index].weights.detach().to(torch.float32, copy=True).requires_grad_()
            for index in self.indices
        }
        self.gradients = {
            index: torch.zeros_like(master_weights)
            for index, master_weights in self._master_weights.items()
        }
        try:
            for index in set(self.indices).intersection(copied):
                self._copies[index] = memory = torch.zeros(3, sub_groups[index].weights.numel())
                if sub_groups[index].weights.device.type == "cuda":
                    pin(memory.data_ptr(), memory.nbytes)
                    self._pinned.append(memory.data_ptr())
        except BaseException:
            self.close()
            raise

    def add(self, index: int, begin: int, values: Tensor, *, first_micro_batch: bool) -> None:
        """Add one parameter's gradient from element ``begin`` on. The step's first micro-batch
        overwrites the step before's.
        """
        target = self.gradients[index].narrow(0, begin, values.numel())
        if first_micro_batch:
            target.copy_(values)
        else:
            target.add_(values)

    def step(self, factor: float) -> None:
        """Step all GPU sub-groups with their gradients times ``factor``, and cast the new
        weights.
        """
        if not self.indices:
            return
        self._empty_parameter_groups()
        for index in self.indices:
            if factor != 1.0:
                self.gradients[index].mul_(factor)
            self._master_weights[index].grad = self.gradients[index]
            self._adamw.param_groups[self._sub_groups[index].parameter_group]["params"].append(
                self._master_weights[index]
            )
        self._adamw.step()
        self._empty_parameter_groups()
        for index in self.indices:
            self._sub_groups[index].weights.copy_(self._master_weights[index])

    def master_weights(self, index: int) -> Tensor:
        return self._master_weights[index].detach()

    def moments(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the first and second moment, creating them before the first step."""
        master_weights = self._master_weights[index]
        state = self._adamw.state[master_weights]
        if not state:
            state.update(initial_state(self._adamw, master_weights))
        return state["exp_avg"], state["exp_avg_sq"]

    def set_moments(self, index: int, first: Tensor, second: Tensor) -> None:
        for target, values in zip(self.moments(index), (first, second), strict=True):
            target.copy_(values)

    def copies(self, transfers: Transfers) -> Copies:
        """Queue copies of the states of all sub-groups that have room for it, before their next
        step.
        """
        found: Copies = {}
        for index, memory in self._copies.items():
            states = (self.master_weights(index), *self.moments(index))
            copied = transfers.states_to_host(list(zip(memory, states, strict=True)))
            found[index] = partial(_when_copied, copied, memory)
        return found

    def close(self) -> None:
        """Unpin the host memory. Safe to call twice."""
        if self._pinned:
            torch.cuda.synchronize(self._sub_groups[0].weights.device)
        while self._pinned:
            unpin(self._pinned.pop())

    def set_steps_taken(self, steps: int) -> None:
        for index in self.indices:
            self.moments(index)
            self._adamw.state[self._master_weights[index]]["step"].fill_(steps)

    def _empty_parameter_groups(self) -> None:
        for group in self._adamw.param_groups:
            group["params"] = []


def _when_copied(copied: Event, memory: Tensor) -> Tensors:
    copied.synchronize()
    master_weights, first, second = memory
    return master_weights, first, second
