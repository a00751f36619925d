"""Predicts how long an optimizer step takes, from the model's FLOPs, the bytes it moves, and the rates of the hardware.

step = accumulation x (forward + backward + data) + optimizer time that nothing hides + a little. Rates of the hardware are the machine's
own where ``so-tui calibrate`` measured them, else published for its kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from so_tui.plan.gpu_pass import PassModel
from so_tui.plan.optimizer_time import OptimizerModel
from so_tui.plan.types import StepTime


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """The step of a placed spec: passes on the GPU, and the optimizer beside and after them."""

    passes: PassModel
    adam_cores: int
    """Cores that run CPU Adam for one rank."""
    ranks_per_node: int
    """Ranks that share their node's memory."""

    @cached_property
    def optimizer(self) -> OptimizerModel:
        """What the optimizer adds to the passes."""
        passes = self.passes
        return OptimizerModel(
            placement=passes.placement,
            speed=passes.speed,
            one_pass=passes.one_pass,
            adam_cores=self.adam_cores,
            ranks_per_node=self.ranks_per_node,
            use=passes.use,
        )

    def step_time(self) -> StepTime:
        """Return the seconds of one optimizer step."""
        once, use, steps = (
            self.passes.one_pass,
            self.passes.use,
            self.passes.placement.spec.gradient_accumulation_steps,
        )
        return StepTime(
            forward_s=steps * once.forward_s,
            backward_s=steps * once.backward_s + self.optimizer.gradient_copies_s(),
            exposed_optimizer_s=self.optimizer.exposed_s(),
            data_s=steps * use.data_s + use.other_s,
        )
