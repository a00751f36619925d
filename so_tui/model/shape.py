"""A transformer's shape in one vocabulary, whichever keys its ``config.json`` uses.

Known model types: llama, qwen3, qwen3_moe, phi3, gpt_oss, seed_oss. Others with the same keys are
read the same way, those with latent attention (deepseek) by the heads that it is unfolded to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from so_tui.spec.errors import InputError, Problem
from so_tui.spec.model_table import layer_kinds, layers_without_attention

# What transformers assumes where a config.json is silent; elsewhere it is hidden_size /
# num_attention_heads.
_DEFAULT_HEAD_DIM = {"qwen3": 128, "gpt_oss": 64, "seed_oss": 128}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WINDOW_IN_EVERY_LAYER = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
"""Model types of transformers that use ``sliding_window``, where it is set, in all layers."""


AttentionLayers = tuple[int, int, int | None]
"""How many layers have attention of which width (query heads x head dimension), and which window.
"""


class Architecture(Struct, frozen=True, kw_only=True):
    model_type: str
    layers: int
    hidden: int
    """Width of the residual stream."""
    vocabulary: int
    heads: int
    """Query heads; ``heads * head_dim`` need not be ``hidden``."""
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of a dense feed-forward block, or of one expert."""
    experts: int = 0
    """Experts of a layer; 0 in a dense model."""
    experts_per_token: int = 0
    window: int | None = None
    """Positions that a sliding-window layer sees; None where no layer has one."""
    windowed_layers: int = 0
    """Layers with a window, or with attention in chunks of that many positions."""
    windowed_head_dim: int = 0
    """Width of their heads where it is not ``head_dim``, which is then that of the other layers
    (Gemma 4).
    """
    other_layers: int = 0
    """Layers without attention over pairs of tokens: recurrences, or a feed-forward block alone."""

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Keys, or values; both have this width."""
        return self.kv_heads * self.head_dim

    @property
    def active_intermediate(self) -> int:
        """Feed-forward width that one token uses."""
        return self.intermediate * max(1, self.experts_per_token)

    @property
    def input_bytes(self) -> int:
        """Bytes per token of one block's input: 2 h."""
        return 2 * self.hidden

    @property
    def result_bytes(self) -> tuple[int, int]:
        """Bytes per token and layer of attention's result, and of its log-sum-exp: 2 q and 4
        heads.
        """
        return 2 * self.query_width, 4 * self.heads

    @property
    def attention_layers(self) -> tuple[AttentionLayers, ...]:
        """The layers with attention over pairs of tokens, without and with a window."""
        full = self.layers - self.windowed_layers - self.other_layers
        windowed_width = self.heads * (self.windowed_head_dim or self.head_dim)
        kinds = (
            (full, self.query_width, None),
            (self.windowed_layers, windowed_width, self.window),
        )
        return tuple(kind for kind in kinds if kind[0])


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Return the shape that ``[model.config]`` describes.

    Raises:
        InputError: Names every key that is missing (``missing-model-key``) or not a positive whole
            number (``invalid-model-key``).
    """
    problems: list[Problem] = []

    def number(*keys: str) -> int:
        key = next((key for key in keys if config.get(key) is not None), keys[0])
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
        code, message = "invalid-model-key", "must be a positive whole number"
        if value is None:
            code, message = "missing-model-key", "is missing, so the model's shape is not known"
        problems.append(
            Problem(
                code,
                f"model.config.{key}",
                "" if value is None else repr(value),
                message,
                "copy the keys of the model's config.json, or extend a preset",
            )
        )
        return 1

    model_type = str(config.get("model_type", ""))
    hidden = number("hidden_size")
    heads = number("num_attention_heads")
    layers = number("num_hidden_layers")
    experts = number(*_EXPERTS) if set(_EXPERTS) & config.keys() else 0
    window, windowed_layers = _windows(config, model_type, layers)
    head_dim, widest = (
        _head_dim(config, number) or _DEFAULT_HEAD_DIM.get(model_type, hidden // heads),
        _widest_head(config),
    )
    found = Architecture(
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        vocabulary=number("vocab_size"),
        heads=heads,
        kv_heads=number("num_key_value_heads") if config.get("num_key_value_heads") else heads,
        head_dim=max(head_dim, widest),
        intermediate=number("moe_intermediate_size", "intermediate_size")
        if experts
        else number("intermediate_size"),
        experts=experts,
        experts_per_token=number("num_experts_per_tok", "top_k_experts") if experts else 0,
        window=window,
        windowed_layers=windowed_layers,
        windowed_head_dim=head_dim if widest > head_dim else 0,
        other_layers=layers_without_attention(layer_kinds(config)),
    )
    if problems:
        raise InputError(problems)
    return found


def _head_dim(config: Mapping[str, Any], number: Callable[..., int]) -> int:
    """Return the width of a head, 0 where the config has none. In latent attention ``head_dim`` is
    only the rotated part.
    """
    if config.get("qk_nope_head_dim") and config.get("qk_rope_head_dim"):
        return number("qk_nope_head_dim") + number("qk_rope_head_dim")
    return number("head_dim") if config.get("head_dim") else 0


def _widest_head(config: Mapping[str, Any]) -> int:
    """Return the widest head of layers that have heads of their own size (``per_layer_config``); 0
    where none has.
    """
    layers = config.get("per_layer_config")
    own = (
        [layer.get("head_dim") for layer in layers.values() if isinstance(layer, dict)]
        if isinstance(layers, dict)
        else []
    )
    return max((size for size in own if isinstance(size, int)), default=0)


def _windows(config: Mapping[str, Any], model_type: str, layers: int) -> tuple[int | None, int]:
    """Return the sliding window, or the chunk, and the number of layers that have one."""
    kinds = layer_kinds(config)
    if windowed := kinds.count("chunked_attention"):
        window = config.get("attention_chunk_size")
        return (window, windowed) if isinstance(window, int) and window > 0 else (None, 0)
    window = config.get("sliding_window")
    if not isinstance(window, int) or (
        model_type.startswith("qwen") and not config.get("use_sliding_window")
    ):
        return None, 0
    if isinstance(config.get("layer_types"), list | tuple):
        windowed = kinds.count("sliding_attention")
    elif model_type == "gpt_oss":
        windowed = (layers + 1) // 2
    elif model_type in _WINDOW_IN_EVERY_LAYER:
        windowed = layers
    return (window, windowed) if windowed else (None, 0)
