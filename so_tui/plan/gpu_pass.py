"""Predicts how long the GPU takes for one micro-batch, forward and backward.

Both are matrix products at the rate that the GPU reaches in models, attention at its backend's rate within documents of their length, plus
what moves through the GPU's memory beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from msgspec import Struct

from so_tui.model.activations import norm_bytes, offloaded_bytes, policy_of
from so_tui.model.flops import attention_pairs
from so_tui.model.padding import bucket_tokens
from so_tui.plan.constants import Speed, StepConstants, constants
from so_tui.plan.placement import Placement
from so_tui.plan.sequence_parallel import exchanged_bytes
from so_tui.plan.workload import Workload
from so_tui.spec.attention import MASKED_BACKENDS, AttentionBackend

BACKWARD_ATTENTION = 2.5
"""FLOPs of attention's backward pass over those of its forward pass: five products instead of two."""


class _Layers(NamedTuple):
    """Seconds of all layers' forward pass, of their backward pass, and of what that recomputes."""

    forward: float
    backward: float
    repeated: float


class Pass(Struct, frozen=True, kw_only=True):
    """Seconds of one micro-batch on the GPU, without waiting for anything."""

    forward_s: float
    backward_s: float
    backward_python_s: float
    """Of backward, the time Python needs to launch it. It is hidden while the GPU computes for longer."""
    exposed_copies_s: float = 0.0
    """Of both, the time by which copies of what layers keep in host memory make them longer."""


@dataclass(frozen=True, kw_only=True)
class PassModel:
    """The passes of a placed spec on a GPU of known speed."""

    placement: Placement
    speed: Speed
    workload: Workload = field(default_factory=Workload)
    attention: AttentionBackend = "torch-flash"
    between_hosts_bytes_per_s: float | None = None
    """How fast a collective enters and leaves each of several hosts; None on one."""
    fetches: bool = True
    """Whether weights in host memory are fetched; if not, passes are as if the GPU had them."""
    use: StepConstants = field(default_factory=lambda: constants().step)

    @cached_property
    def all_gather_s(self) -> float:
        """Seconds of one all-gather of all weights; backward all-gathers them again, and reduces as much."""
        rates = [self.between_hosts_bytes_per_s] if self.between_hosts_bytes_per_s else []
        if self.between_hosts_bytes_per_s is None or self.placement.local_ranks > 1:
            rates.append(self.speed.peer_bytes_per_s)
        return self.gathered_bytes / min(rates)

    @property
    def gathered_bytes(self) -> float:
        """Bytes that each rank, and each host, receives in one all-gather of all weights."""
        layout = self.placement.layout
        return 2 * layout.parameters * (layout.ranks - 1) / layout.ranks

    @cached_property
    def one_pass(self) -> Pass:
        """Forward with the loss, which forms its gradients there, and backward with what it recomputes.

        All-gathers take part of the GPU from the computation they overlap with. Where layers are small the GPU waits for Python, and has
        time for both.
        """
        use, layers, gather_s = (
            self.use,
            self.placement.profile.architecture.layers,
            self.all_gather_s,
        )
        layers_s = self._layers_s()
        overhead_s = layers * self.speed.layer_launch_overhead_of(self.placement.layout.ranks)
        gathering = use.all_gather_launches_per_layer if self.placement.layout.ranks > 1 else 0.0
        # Selective recomputation runs all of a layer's Python again, and skips its products.
        again = (
            0.0
            if policy_of(self.placement.spec.model) == "none"
            else use.forward_launches_per_layer
        )
        forward_python_s = (use.forward_launches_per_layer + gathering) * overhead_s
        fetched_s = self.fetched_weights_s
        forward = max(
            layers_s.forward + use.all_gather_share * gather_s,
            gather_s + fetched_s,
            forward_python_s,
        )
        python = (use.backward_launches_per_layer + again + gathering) * overhead_s
        backward = max(
            layers_s.backward + layers_s.repeated + 2 * use.all_gather_share * gather_s,
            2 * gather_s + fetched_s,
            python,
        )
        # What layers keep on the host is copied beside all that, in backward behind weights from there.
        waits = max(0.0, self.kept_copies_s(self.speed.d2h_bytes_per_s) - forward)
        waits_back = max(0.0, self.kept_copies_s(self.speed.h2d_bytes_per_s) + fetched_s - backward)
        return Pass(
            forward_s=forward + waits + self._loss_s(),
            backward_s=backward + waits_back,
            backward_python_s=python,
            exposed_copies_s=waits + waits_back,
        )

    def _layers_s(self) -> _Layers:
        """Return the seconds of all layers' forward, their backward, and what it recomputes."""
        placement, use = self.placement, self.use
        profile, shape, tokens = (
            placement.profile,
            placement.profile.architecture,
            self._computed_tokens,
        )
        rate = self.speed.matrix_flops * (
            use.expert_efficiency if shape.experts else use.matrix_efficiency
        )
        products = (
            2.0 * tokens * (profile.flops.active_parameters - profile.flops.head_parameters) / rate
        )
        elementwise = tokens * shape.layers * profile.elementwise_bytes / self._moved_bytes_per_s
        attention_forward, attention_backward = self._attention_s()
        unfused_experts = shape.experts and not profile.fused
        expert_products = (
            6.0 * tokens * shape.hidden * shape.active_intermediate * shape.layers / rate
            if unfused_experts
            else 0.0
        )
        again = 2.0 * tokens * profile.flops.repeated(tiled=placement.tiled) / rate
        repeated = {
            "full": again + elementwise + attention_forward,
            "attention": again + elementwise,
            "selective": elementwise + expert_products,
            "none": 0.0,
        }
        in_tiles = self._norms_again_s() if placement.tiled else 0.0
        exchange = self._exchange_s()
        policy = policy_of(placement.spec.model)
        return _Layers(
            forward=products + elementwise + attention_forward + exchange,
            backward=2 * (products + elementwise) + attention_backward + exchange + in_tiles,
            repeated=repeated[policy] + (exchange if policy != "none" else 0.0),
        )

    def _norms_again_s(self) -> float:
        """Return the seconds of norms that tiles of feed-forward blocks compute again."""
        profile, shape = self.placement.profile, self.placement.profile.architecture
        norms = 0 if profile.fused else norm_bytes(shape, fused=False)
        return self._computed_tokens * shape.layers * norms / self._moved_bytes_per_s

    def _exchange_s(self) -> float:
        """Return the seconds of trading tokens for heads and back in one pass over all layers, where ranks share sequences.

        Attention waits for it, so nothing hides it.
        """
        shape, ranks = (
            self.placement.profile.architecture,
            self.placement.spec.train.sequence_parallel,
        )
        if ranks == 1:
            return 0.0
        return (
            self._computed_tokens
            * shape.layers
            * exchanged_bytes(shape, ranks)
            / self.speed.peer_bytes_per_s
        )

    def kept_copies_s(self, bytes_per_s: float) -> float:
        """Return the seconds of copying in one direction what layers keep in host memory between the passes of one micro-batch."""
        placement = self.placement
        return (
            self._computed_tokens
            * offloaded_bytes(placement.profile.architecture, placement.spec.model)
            / bytes_per_s
        )

    @property
    def fetched_weights_s(self) -> float:
        """Seconds of copying this rank's weights in host memory to the GPU, once for each of the two passes. Computation hides them."""
        return 2 * self.placement.host_weights / self.speed.h2d_bytes_per_s if self.fetches else 0.0

    @cached_property
    def _computed_tokens(self) -> float:
        """Positions of a micro-batch that are computed: backends that take boundaries see little padding, others rows of one width."""
        positions = self.placement.tokens
        if self.attention in MASKED_BACKENDS:
            return positions * self._row_share
        return min(positions, positions * self.workload.useful_share + bucket_tokens(positions) / 2)

    @property
    def _row_share(self) -> float:
        """Width of a micro-batch's rows, of the sequence length, where attention takes a mask."""
        return self.workload.row_share(self.placement.spec.train.micro_batch)

    def _attention_s(self) -> tuple[float, float]:
        """Return the seconds of attention in all layers' forward and backward.

        Backends that take boundaries attend within documents, masked ones to all pairs of a row. A sliding window makes a document
        as slow as one of twice its length.
        """
        flops, length = self.placement.profile.flops, self.placement.spec.data.sequence_length
        if self.attention in MASKED_BACKENDS:
            row = self._row_share * length
            rate = self.speed.attention_at(self.attention, row)
            width = sum(layers * width for layers, width, _ in flops.attention_layers)
            forward = 4.0 * width * self._computed_tokens * row
            return forward / rate.forward, BACKWARD_ATTENTION * forward / rate.backward
        document = self.workload.attended_tokens or float(length)
        tokens = self.placement.tokens * self.workload.useful_share
        forward_s = backward_s = 0.0
        for layers, width, window in flops.attention_layers:
            rate = self.speed.attention_at(
                self.attention, document if window is None else min(document, 2.0 * window)
            )
            forward = (
                4.0
                * width
                * layers
                * attention_pairs(round(document), window)
                * tokens
                / round(document)
            )
            forward_s += forward / rate.forward
            backward_s += BACKWARD_ATTENTION * forward / rate.backward
        return forward_s, backward_s

    def _loss_s(self) -> float:
        profile, use = self.placement.profile, self.use
        shape, trained = profile.architecture, self.placement.tokens * self.workload.trained_share
        again = 2.0 * profile.recomputed_logits(int(trained)) * shape.hidden
        # The head's products are dense in any model.
        products = (6.0 * trained * profile.flops.head_parameters + again) / (
            self.speed.matrix_flops * use.matrix_efficiency
        )
        return (
            products
            + trained * shape.vocabulary * use.loss_bytes_per_logit / self._moved_bytes_per_s
        )

    @property
    def _moved_bytes_per_s(self) -> float:
        """Rate of elementwise work through GPU memory."""
        speed, use = self.speed, self.use
        return min(
            speed.matrix_flops * use.elementwise_bytes_per_flop,
            speed.hbm_bytes_per_s * use.elementwise_efficiency,
        )
