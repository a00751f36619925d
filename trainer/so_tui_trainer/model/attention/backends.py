"""The kernels of each attention backend, behind one interface (``varlen.Kernels``).

Forward returns the log-sum-exp and backward takes it, so that sinks, recomputation and activation checkpointing are written once for all
kernels. That takes the functions that flash-attn wraps in ``autograd.Function``; packages are imported when a backend is chosen.

Head sizes of keys and values are equal here: ``varlen`` pads values whose heads are smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from so_tui.spec.attention import AttentionBackend
from so_tui_trainer.model.attention.varlen import Documents, Kernels


def kernels_of(backend: AttentionBackend) -> Kernels:
    """Return a backend's kernels. Raises KeyError for ``sdpa`` and ``eager``, which have none, and ImportError without the package."""
    return _LOADERS[backend]()


def _torch_flash() -> Kernels:
    """Return torch's flash kernels.

    The raw kernels are used instead of ``torch.nn.attention.varlen``: in every supported version they share key heads among query heads,
    and they return what sinks need.
    """
    aten: Any = torch.ops.aten

    def forward(
        query: Tensor, key: Tensor, value: Tensor, documents: Documents
    ) -> tuple[Tensor, Tensor]:
        out, normaliser, *_ = aten._flash_attention_forward(
            *(query, key, value, *_lengths(documents), 0.0, documents.window is None, False),
            scale=documents.scale,
            **_sides(documents),
        )
        return out, normaliser

    def backward(
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        normaliser: Tensor,
        documents: Documents,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The state of the random number generator, which only dropout uses.
        state = (
            torch.zeros(2, dtype=torch.uint64, device=query.device),
            torch.empty(0, device=query.device),
        )
        found: tuple[Tensor, Tensor, Tensor] = aten._flash_attention_backward(
            *(
                gradient,
                query,
                key,
                value,
                out,
                normaliser,
                *_lengths(documents),
                0.0,
                documents.window is None,
                *state,
            ),
            scale=documents.scale,
            **_sides(documents),
        )
        return found

    return Kernels(forward, backward)


def _flash_attn_2() -> Kernels:
    """Return the kernels of flash-attn 2.7 and newer, which return the log-sum-exp as [heads, tokens]."""
    from flash_attn.flash_attn_interface import (
        _flash_attn_varlen_backward,
        _flash_attn_varlen_forward,
    )

    def options(documents: Documents) -> dict[str, Any]:
        return {
            "dropout_p": 0.0,
            "softmax_scale": documents.scale,
            "causal": True,
            "softcap": documents.softcap,
            "alibi_slopes": None,
            **_sides(documents),
        }

    def forward(
        query: Tensor, key: Tensor, value: Tensor, documents: Documents
    ) -> tuple[Tensor, Tensor]:
        out, normaliser, *_ = _flash_attn_varlen_forward(
            query, key, value, *_lengths(documents), **options(documents)
        )
        return out, normaliser

    def backward(
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        normaliser: Tensor,
        documents: Documents,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = _empty_like(query, key, value)
        deterministic = torch.are_deterministic_algorithms_enabled()
        _flash_attn_varlen_backward(
            *(gradient, query, key, value, out, normaliser, *found, *_lengths(documents)),
            **options(documents),
            deterministic=deterministic,
        )
        return found

    return Kernels(forward, backward)


def _flash_attn_3() -> Kernels:
    from flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    def options(documents: Documents) -> dict[str, Any]:
        return {
            **_named_lengths(documents),
            "softmax_scale": documents.scale,
            "softcap": documents.softcap,
            **_sides(documents),
        }

    def forward(
        query: Tensor, key: Tensor, value: Tensor, documents: Documents
    ) -> tuple[Tensor, Tensor]:
        out, normaliser, *_ = _flash_attn_forward(
            query, key, value, causal=True, **options(documents)
        )
        return out, normaliser

    def backward(
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        normaliser: Tensor,
        documents: Documents,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = _empty_like(query, key, value)
        of_query, of_key, of_value = found
        _flash_attn_backward(
            *(gradient, query, key, value, out, normaliser),
            dq=of_query,
            dk=of_key,
            dv=of_value,
            is_causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **options(documents),
        )
        return found

    return Kernels(forward, backward)


def _flash_attn_4() -> Kernels:
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    def options(documents: Documents) -> dict[str, Any]:
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

    def forward(
        query: Tensor, key: Tensor, value: Tensor, documents: Documents
    ) -> tuple[Tensor, Tensor]:
        out, normaliser, *_ = _flash_attn_fwd(
            query, key, value, return_lse=True, **options(documents)
        )
        return out, normaliser

    def backward(
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        normaliser: Tensor,
        documents: Documents,
    ) -> tuple[Tensor, Tensor, Tensor]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        of_query, of_key, of_value, *_ = _flash_attn_bwd(
            query,
            key,
            value,
            out,
            gradient,
            normaliser,
            deterministic=deterministic,
            **options(documents),
        )
        return of_query, of_key, of_value

    return Kernels(forward, backward)


def _lengths(documents: Documents) -> tuple[Tensor, Tensor, int, int]:
    """Return boundaries and longest document, of queries and of keys."""
    return documents.boundaries, documents.boundaries, documents.longest, documents.longest


def _named_lengths(documents: Documents) -> dict[str, Any]:
    """Return the same for kernels that take them by name."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, _lengths(documents), strict=True))


def _sides(documents: Documents) -> dict[str, int]:
    """Return how far a token sees to its left and right, in the kernels' terms: -1 is no limit."""
    return {
        "window_size_left": -1 if documents.window is None else documents.window - 1,
        "window_size_right": 0,
    }


def _empty_like(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_LOADERS: dict[AttentionBackend, Callable[[], Kernels]] = {
    "flash-attn-4": _flash_attn_4,
    "flash-attn-3": _flash_attn_3,
    "flash-attn-2": _flash_attn_2,
    "torch-flash": _torch_flash,
}
