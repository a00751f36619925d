"""Attention within packed documents: one interface (``varlen``), one registry of kernels
(``backends``), one choice (``choice``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from so_tui.machine.software import package_version
from so_tui.spec import ModelSpec
from so_tui.spec.attention import (
    FORMER_NAMES,
    KERNELS,
    MASKED_BACKENDS,
    OBSTACLES,
    UNKNOWN_GPU,
    AttentionBackend,
    Chosen,
    Needs,
    Obstacle,
    Present,
    choose_backend,
    obstacle_to,
)
from so_tui.spec.errors import reject
from so_tui.spec.model_table import mixing_kinds, recurrent_kinds
from so_tui_trainer.data.batches import Batch
from so_tui_trainer.model import Gradients, apply, checkpointing, kinds_of
from so_tui_trainer.older_versions import cache_argument

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


Arguments = dict[str, Any]
"""Keyword arguments of a kernel, or of a model's forward pass."""


# Sequence parallelism (Ulysses): ranks that hold parts of the same sequences trade tokens for
# heads around attention.
#
# Outside of attention a rank computes its part of the tokens. For attention it gets all tokens of
# its part of the heads, so that the kernels see whole documents, and returns the result. Gradients
# go the same ways back: each rank's gradient is of the loss of all ranks, with respect to what it
# computed, and their sum over the ranks is that of the whole sequence.


class _SequenceGroup(NamedTuple):
    """The ranks that share sequences, in the order of their parts."""

    size: int
    position: int
    """Which part is this rank's."""
    group: dist.ProcessGroup

    def all_tokens(self, tensor: Tensor) -> Tensor:
        """Trade a part of the tokens with all heads for all tokens with a part of the heads. Each
        rank gets at least one: where there are fewer heads of keys and values, several get the
        same.

        Args:
            tensor: [tokens, heads, size]

        Returns:
            [all tokens, max(1, heads / ranks), size]
        """
        copies = self.size // tensor.shape[1]
        whole = tensor.repeat_interleave(copies, dim=1) if copies > 1 else tensor
        return apply(_Trade, whole, self, True)

    def all_heads(self, tensor: Tensor) -> Tensor:
        """Trade attention's results back.

        Args:
            tensor: [all tokens, heads / ranks, size]

        Returns:
            [tokens, heads, size]
        """
        return apply(_Trade, tensor, self, False)


def sequence_group(ranks_per_sequence: int) -> _SequenceGroup | None:
    """Return this rank's group, of consecutive ranks; None where each rank has sequences of its
    own. All ranks must call it.
    """
    if ranks_per_sequence == 1:
        return None
    replica, position = divmod(dist.get_rank(), ranks_per_sequence)
    firsts = range(0, dist.get_world_size(), ranks_per_sequence)
    groups = [dist.new_group(list(range(first, first + ranks_per_sequence))) for first in firsts]
    return _SequenceGroup(ranks_per_sequence, position, groups[replica])


class _Trade(torch.autograd.Function):
    """A trade between the ranks, and the opposite one of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: _SequenceGroup, all_tokens: bool) -> Tensor:
        ctx.ranks, ctx.all_tokens = ranks, all_tokens
        return _traded(tensor, ranks, all_tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        return _traded(gradients[0], ctx.ranks, not ctx.all_tokens), None, None


def _traded(tensor: Tensor, ranks: _SequenceGroup, all_tokens: bool) -> Tensor:
    """Send each rank its part of the heads, for all tokens; else its part of the tokens, for all
    heads.
    """
    by_rank = (
        tensor.reshape(len(tensor), ranks.size, -1, tensor.shape[-1]).transpose(0, 1)
        if all_tokens
        else tensor.reshape(ranks.size, -1, *tensor.shape[1:])
    )
    sent = by_rank.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    return received.flatten(0, 1) if all_tokens else received.transpose(0, 1).flatten(1, 2)


# Attention over packed documents by any kernel, with the attention sinks of gpt-oss.
#
# A sink is one more logit per head, which takes part in the softmax and has no value. Kernels know
# no sinks, so their results are corrected exactly. With L, the log-sum-exp of a token's scores,
# the sink s makes it L' = logaddexp(L, s), and the output o' = o exp(L - L'). Backward computes P
# = exp(S - L) and delta = sum(do * o) from the L and o that it is given; with L' and o' these are
# the terms of the softmax with the sink. Only the gradient of the sink itself remains: -sum exp(s
# - L') delta over the tokens.


NAME = "so_tui_varlen"
"""Name of the implementation. It must not contain `flash`: transformers would take it for a package
to import.
"""


class Documents(NamedTuple):
    """Arguments of a kernel besides its tensors."""

    boundaries: Tensor
    """[documents + 1] int32; cumulative lengths"""
    longest: int
    """Tokens of the longest document."""
    scale: float
    """Factor of the scores before the softmax."""
    window: int | None = None
    """How many tokens a token attends to, itself included; None: all before it in its document."""
    softcap: float = 0.0
    """Scores are capped to softcap x tanh(score / softcap); 0: not at all."""


class Kernels(NamedTuple):
    """A backend's causal attention within documents over flattened tokens; plain kernels in tests.

    ``query`` and ``out`` are [tokens, heads, size], ``key`` and ``value`` [tokens, key heads,
    size], log-sum-exp [heads, tokens] fp32.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Documents], tuple[Tensor, Tensor]]
    """(query, key, value, documents) -> (out, log-sum-exp)"""
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Documents], tuple[Tensor, Tensor, Tensor]
    ]
    """(gradient of out, query, key, value, out, log-sum-exp, documents) -> gradients of query, key,
    value
    """


class _Attention(torch.autograd.Function):
    """Attention within documents.

    It takes the query [tokens, heads, size], key and value [tokens, key heads, size] and sinks
    [heads], or None for a model without. It returns [tokens, heads, size].
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        documents: Documents,
        kernels: Kernels,
    ) -> Tensor:
        def compute() -> tuple[Tensor, Tensor]:
            """Return the output and the log-sum-exp [heads, tokens], both with the sinks."""
            out, without = kernels.forward(query, key, value, documents)
            if sinks is None:
                return out, without
            normaliser = torch.logaddexp(without, sinks.to(without.dtype)[:, None])
            return out.mul_((without - normaliser).exp_().t()[..., None]), normaliser

        out, normaliser = checkpointing.save_or_reuse("attention", compute)
        ctx.save_for_backward(query, key, value, sinks, out, normaliser)
        ctx.documents, ctx.kernels = documents, kernels
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        query, key, value, sinks, out, normaliser = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_query, of_key, of_value = ctx.kernels.backward(
            gradient, query, key, value, out, normaliser, ctx.documents
        )
        of_sinks = None
        if sinks is not None:
            # Rounding of the bf16 products averages out over the tokens.
            delta = (gradient * out).sum(-1, dtype=normaliser.dtype).t()
            share = (sinks.to(normaliser.dtype)[:, None] - normaliser).exp_()
            of_sinks = -(share * delta).sum(1).to(sinks.dtype)
        return of_query, of_key, of_value, of_sinks, None, None


def register(kernels: Kernels, ranks: _SequenceGroup | None = None) -> str:
    """Register the kernels as an attention implementation of transformers.

    Args:
        kernels: The kernels.
        ranks: The ranks that share sequences, if any do.

    Returns:
        The name of the implementation.
    """
    from transformers import AttentionInterface

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        is_part: bool = False,
        unpadded: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """Adapt transformers' shapes. Kernels take values whose heads are as large as those of
        keys.

        Args:
            query: [rows, heads, width, head size]; ``key`` and ``value`` alike, with their own
                heads and the values' own size.
            is_part: Whether the ranks that share sequences hold the other parts of these rows.
            unpadded: [rows, width] bool; what is padding, whose attention is 0, if it is trained.

        Returns:
            [rows, width, heads, head size], and no attention weights.

        Raises:
            InputError: The layer has a mask, which the kernels would leave out.
        """
        if attention_mask is not None:
            raise reject(
                "model-packing-unsupported",
                "model.config",
                type(module).__name__,
                "has an attention mask of its own, which kernels for packed documents "
                "would leave out",
                "Choose a newer kind of model.",
            )
        rows, heads, width, size = query.shape
        of_value = value.shape[-1]
        padded = value if of_value == size else nn.functional.pad(value, (0, size - of_value))
        flat_query, flat_key, flat_value = (
            tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, padded)
        )
        documents = Documents(cu_seq_lens_q, max_length_q, scaling, sliding_window, softcap or 0.0)
        if ranks is None or not is_part:
            mixed = apply(_Attention, flat_query, flat_key, flat_value, s_aux, documents, kernels)
        else:
            sinks = None if s_aux is None else s_aux.chunk(ranks.size)[ranks.position]
            whole = map(ranks.all_tokens, (flat_query, flat_key, flat_value))
            mixed = ranks.all_heads(apply(_Attention, *whole, sinks, documents, kernels))
        result = mixed[..., :of_value].reshape(rows, width, heads, of_value).contiguous()
        return result if unpadded is None else result * unpadded[..., None, None], None

    AttentionInterface.register(NAME, attention)
    return NAME


# The kernels of each attention backend, behind one interface (``varlen.Kernels``).
#
# Forward returns the log-sum-exp and backward takes it, so that sinks, recomputation and
# activation checkpointing are written once for all kernels. That takes the functions that flash-
# attn wraps in ``autograd.Function``; packages are imported when a backend is chosen.
#
# Head sizes of keys and values are equal here: ``varlen`` pads values whose heads are smaller.


def _torch_flash() -> Kernels:
    """Return torch's flash kernels.

    The raw kernels are used instead of ``torch.nn.attention.varlen``: in every supported version
    they share key heads among query heads, and they return what sinks need.
    """
    aten: Any = torch.ops.aten

    def options(documents: Documents) -> Arguments:
        return {"scale": documents.scale, **_sides(documents)}

    def no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the state of the random number generator, which only dropout uses."""
        return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)

    return Kernels(
        lambda query, key, value, documents: aten._flash_attention_forward(
            *(query, key, value, *_lengths(documents), 0.0, documents.window is None, False),
            **options(documents),
        )[:2],
        lambda gradient, query, key, value, out, normaliser, documents: (
            aten._flash_attention_backward(
                *(gradient, query, key, value, out, normaliser, *_lengths(documents)),
                *(0.0, documents.window is None, *no_dropout(query.device)),
                **options(documents),
            )
        ),
    )


def _flash_attn_2() -> Kernels:
    """Return the kernels of flash-attn 2.7 and newer, which return the log-sum-exp as [heads,
    tokens].
    """
    from flash_attn.flash_attn_interface import (
        _flash_attn_varlen_backward,
        _flash_attn_varlen_forward,
    )

    def options(documents: Documents) -> Arguments:
        return {
            "dropout_p": 0.0,
            "softmax_scale": documents.scale,
            "causal": True,
            "softcap": documents.softcap,
            "alibi_slopes": None,
            **_sides(documents),
        }

    def backward(*tensors: Tensor, documents: Documents) -> None:
        _flash_attn_varlen_backward(
            *(*tensors, *_lengths(documents)),
            **options(documents),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    return Kernels(
        lambda query, key, value, documents: _flash_attn_varlen_forward(
            query, key, value, *_lengths(documents), **options(documents)
        )[:2],
        partial(_backward_into, backward),
    )


def _flash_attn_3() -> Kernels:
    from flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    def options(documents: Documents) -> Arguments:
        return {
            **_named_lengths(documents),
            "softmax_scale": documents.scale,
            "softcap": documents.softcap,
            **_sides(documents),
        }

    def backward(*tensors: Tensor, documents: Documents) -> None:
        *given, of_query, of_key, of_value = tensors
        _flash_attn_backward(
            *given,
            dq=of_query,
            dk=of_key,
            dv=of_value,
            is_causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **options(documents),
        )

    return Kernels(
        lambda query, key, value, documents: _flash_attn_forward(
            query, key, value, causal=True, **options(documents)
        )[:2],
        partial(_backward_into, backward),
    )


def _flash_attn_4() -> Kernels:
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    def options(documents: Documents) -> Arguments:
        window = documents.window
        sides = {
            "window_size_left": None if window is None else window - 1,
            "window_size_right": None if window is None else 0,
        }
        return {
            **_named_lengths(documents),
            **sides,
            "softmax_scale": documents.scale,
            "causal": window is None,
            "softcap": documents.softcap,
        }

    return Kernels(
        lambda query, key, value, documents: _flash_attn_fwd(
            query, key, value, return_lse=True, **options(documents)
        )[:2],
        lambda gradient, query, key, value, out, normaliser, documents: _flash_attn_bwd(
            *(query, key, value, out, gradient, normaliser),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **options(documents),
        )[:3],
    )


def _lengths(documents: Documents) -> tuple[Tensor, Tensor, int, int]:
    """Return boundaries and longest document, of queries and of keys."""
    return documents.boundaries, documents.boundaries, documents.longest, documents.longest


def _named_lengths(documents: Documents) -> Arguments:
    """Return the same for kernels that take them by name."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, _lengths(documents), strict=True))


def _sides(documents: Documents) -> dict[str, int]:
    """Return how far a token sees to its left and right, in the kernels' terms: -1 is no limit."""
    return {
        "window_size_left": -1 if documents.window is None else documents.window - 1,
        "window_size_right": 0,
    }


def _backward_into(
    run: Callable[..., None], gradient: Tensor, *saved: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, which ``run`` writes into tensors of theirs."""
    *tensors, documents = saved
    of_query, of_key, of_value = map(torch.empty_like, tensors[:3])
    run(gradient, *tensors, of_query, of_key, of_value, documents=documents)
    return of_query, of_key, of_value


LOADERS: dict[AttentionBackend, Callable[[], Kernels]] = {
    "flash-attn-4": _flash_attn_4,
    "flash-attn-3": _flash_attn_3,
    "flash-attn-2": _flash_attn_2,
    "torch-flash": _torch_flash,
}
"""What makes each backend's kernels, or raises ImportError without its package. ``sdpa`` and
``eager`` have none.
"""


# Choose a model's attention backend, and give it the boundaries of packed documents.
#
# Packed documents must not attend to each other. Kernels take the start of each document
# (``cu_seq_lens``); SDPA and eager attention get a block-diagonal mask, which transformers builds
# from position ids that restart.


_CODES: dict[Obstacle, str] = {
    "no-gpu": "attention-needs-gpu",
    "other-gpu": "attention-other-gpu",
    "not-installed": "attention-package-missing",
    "head-size": "attention-head-size",
    "softcap": "attention-without-softcap",
    "sinks": "attention-without-sinks",
    "rows": "attention-without-rows",
}
"""Codes of the refusal of a backend."""
_MASKS_WITHOUT_POSITIONS = {"granitemoehybrid"}
"""Models with recurrent layers whose own mask ignores that position ids restart. Their recurrent
layers need none.
"""


def present(device: torch.device) -> Present:
    """Return what this host has for attention on a device."""
    if device.type != "cuda":
        return Present(generation=None)
    packages = frozenset(
        kernel.package for kernel in KERNELS if kernel.package and package_version(kernel.package)
    )
    # With ROCm a "capability" is AMD's own number: 9.4 of an MI300A is not Hopper.
    generation = UNKNOWN_GPU if torch.version.hip else torch.cuda.get_device_capability(device)[0]
    return Present(generation=generation, packages=packages)


def needs_of(causal: PreTrainedModel) -> Needs:
    """Return what a model, which may be on meta tensors, asks of attention.

    Args:
        causal: The model. Its heads may have sinks (gpt-oss), and transformers supports SDPA for it
            if it computes plain softmax attention.
    """
    config: Any = causal.config
    latent = sum(
        getattr(config, key, None) or 0 for key in ("qk_nope_head_dim", "qk_rope_head_dim")
    )
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else (config,)
    widest = max(
        getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        for layer in layers
    )
    return Needs(
        head_size=latent or widest,
        sinks=any(name.endswith(".sinks") for name, _ in causal.named_parameters()),
        softcap=bool(getattr(config, "attn_logit_softcapping", None)),
        rows=needs_rows(config),
        plain=bool(causal._supports_sdpa),
    )


def _decide(model: ModelSpec, needs: Needs, available: Present) -> Chosen:
    """Return the backend of a model: the one that was asked for, else the fastest that can be used.

    Raises:
        InputError: The backend that was asked for cannot be used.
    """
    if model.attention == "auto":
        return choose_backend(needs, available)
    named: Any = model.attention  # one of the backends, or of their former names
    backend: AttentionBackend = FORMER_NAMES.get(named) or named
    if (obstacle := obstacle_to(backend, needs, available)) is None:
        return Chosen(backend)
    raise reject(
        _CODES[obstacle],
        "model.attention",
        model.attention,
        OBSTACLES[obstacle],
        "Set it to auto, which takes the fastest one that can be used.",
    )


def choose(
    model: ModelSpec, needs: Needs, device: torch.device, ranks_per_sequence: int = 1
) -> str:
    """Choose the attention implementation, by transformers' name, and register it. All ranks must
    call it.

    Raises:
        InputError: The backend that was asked for cannot be used, or the one that can does not take
            parts of sequences.
    """
    backend = _decide(model, needs, present(device)).backend
    if backend not in MASKED_BACKENDS:
        return register(LOADERS[backend](), sequence_group(ranks_per_sequence))
    if ranks_per_sequence == 1:
        return backend
    raise reject(
        "sequence-parallel-attention",
        "train.sequence_parallel",
        str(ranks_per_sequence),
        f"needs attention that takes document boundaries, and here it runs on {backend}",
        "Set it to 1.",
    )


def needs_rows(config: PretrainedConfig) -> bool:
    """Return whether each document needs a row of its own, since layers of the model would mix the
    documents of one row.
    """
    return bool(mixing_kinds(kinds_of(config)))


def takes_boundaries(implementation: str) -> bool:
    """Return whether an implementation, by transformers' name, takes document boundaries instead of
    a mask.
    """
    return implementation == NAME


def arguments(
    batch: Batch, implementation: str, config: PretrainedConfig, dtype: torch.dtype
) -> Arguments:
    """Return the arguments of the model's forward pass that say where its tokens are, and keep the
    documents of a batch apart.

    Args:
        batch: The micro-batch.
        implementation: The attention implementation.
        config: The model's configuration.
        dtype: Type of the model's embeddings.

    Returns:
        Keyword arguments: position ids, which restart at every document, and boundaries or masks.
        Nothing for a model that needs a row for each document: its own positions and masks are
        right for that document, and the padding after it is seen by no token.

        Padding that is trained has the attention that transformers gives it: none with kernels that
        take boundaries, as with flash attention there, and that of the row's own tokens with masks.
    """
    if batch.padded and not takes_boundaries(implementation):
        return {"position_ids": batch.position_ids, "attention_mask": batch.real.long()}
    if needs_rows(config):
        return {}
    positions: Arguments = {"position_ids": batch.position_ids}
    if takes_boundaries(implementation):
        boundaries, longest = batch.boundaries, batch.longest
        kernel: Arguments = {
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
        }
        part: Arguments = {"is_part": True} if batch.is_part else {}
        padding: Arguments = {"unpadded": batch.real} if batch.padded else {}
        return positions | kernel | part | padding
    kinds = set(kinds_of(config))
    apart = config.model_type in _MASKS_WITHOUT_POSITIONS
    if (len(kinds) < 2 or recurrent_kinds(kinds)) and not apart:
        return positions | {"attention_mask": None}
    # Models that mix kinds of layers take a mask for each kind. The mask that gpt-oss would make
    # itself ignores the position ids.
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    # Stands in for the embeddings.
    shape = torch.empty((*batch.input_ids.shape, 1), dtype=dtype, device=batch.input_ids.device)
    known: Arguments = {
        "config": config,
        "inputs_embeds": shape,
        "attention_mask": None,
        cache_argument(create_causal_mask): None,
        "position_ids": batch.position_ids,
    }
    if apart:
        return positions | {"attention_mask": create_causal_mask(**known)}
    makers = {
        "full_attention": create_causal_mask,
        "sliding_attention": create_sliding_window_causal_mask,
    }
    return positions | {"attention_mask": {kind: makers[kind](**known) for kind in kinds}}
