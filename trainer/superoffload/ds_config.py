"""The DeepSpeed config that an engine needs, and a record of every value in it that differs from
the user's.

Imports neither torch nor DeepSpeed, so a launcher can write the config before training starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from so_tui.model.sharding import OWN_LARGEST_BUCKET
from superoffload.errors import OffloadError

Config = Mapping[str, Any]
"""A DeepSpeed config, or a section of one."""
SECTION = "superoffload"
"""Top-level key under which the overrides are recorded. DeepSpeed ignores keys that it does not
define.
"""

_OWN_PINNING = "Only the staging buffers are pinned, and the engine pins them itself."
_OWN_WEIGHTS = (
    "The engine puts the weights into one memory, which its Adam worker shares, and pins that "
    "itself."
)
_OWN_ADAM = (
    "Our optimizer replaces DeepSpeed's CPU Adam and is not one of the classes that DeepSpeed has "
    "tested."
)
_WHOLE_OFFLOAD = (
    "DeepSpeed must leave all optimizer states to our optimizer, which applies the ratio itself."
)
_SELECTS_CLASS = (
    "DeepSpeed looks up its SuperOffload optimizer, which ours replaces, only with this setting."
)
_OWN_STATES = "Our optimizer allocates and schedules the offloaded states itself."
_SMALL_BUCKET = (
    "A gradient leaves for the host when its bucket is full, so small buckets start the Adam "
    "worker early."
)
_NO_PERSISTENCE = (
    "Persistent parameters would be all-gathered right after a step, before most new weights have "
    "arrived."
)
_UNTESTED = "DeepSpeed otherwise accepts only optimizer classes that it has tested."
_OWN_ACCUMULATION = (
    "Gradients are handed over in the weights' type, and the Adam worker accumulates them in fp32."
)

_STAGE = 3
_CLIPPING = "gradient_clipping"
_ZERO = "zero_optimization"
_OFFLOAD = "zero_optimization.offload_optimizer"
_PARAMETERS = "zero_optimization.offload_param"
_BUCKET = "zero_optimization.reduce_bucket_size"
_KEPT_OFFLOAD_KEYS = frozenset(
    {"device", "super_offload", "ratio", "pin_memory", "cpuadam_cores_perc"}
)


class Override(NamedTuple):
    """One value that DeepSpeed reads instead of the user's."""

    key: str
    """Dotted path in DeepSpeed's config, such as ``zero_optimization.offload_optimizer.ratio``."""
    given: Any
    """The user's value; None where the user's config has no such key."""
    used: Any
    """The value that DeepSpeed reads; None where the key is removed."""
    reason: str
    """One sentence."""


def engine_config(ds_config: Config) -> dict[str, Any]:
    """Return the config that DeepSpeed must read for our optimizer.

    The section ``"superoffload"`` of the result lists every value that differs from the user's
    config, so that the result is both what DeepSpeed reads and a full account of what the user
    asked for.

    Args:
        ds_config: A ZeRO-3 config with the user's own values. Of a config that already has the
            section, only the bucket may change: one that was ``auto`` and has been filled in since.

    Returns:
        A new config; ``ds_config`` is not modified.

    Raises:
        OffloadError: It or a section of it is no dictionary, or its bucket no number
            (``ds-config``); its stage is not 3 (``zero-stage``).
    """
    _check(ds_config)
    if SECTION not in ds_config:
        return _with(ds_config, _changes(ds_config))
    config, given = deepcopy(dict(ds_config)), _get(ds_config, _BUCKET)
    if isinstance(given, int | float) and given > OWN_LARGEST_BUCKET:
        _set(config, _BUCKET, OWN_LARGEST_BUCKET)
        config[SECTION].setdefault("overrides", []).append(
            Override(_BUCKET, given, OWN_LARGEST_BUCKET, _SMALL_BUCKET)._asdict()
        )
    return config


def check_clipping(ds_config: Config) -> None:
    """Raise OffloadError (``ds-config``) unless the clipping of a config without ``auto`` is one
    that our optimizer can apply.
    """
    clipping = ds_config.get(_CLIPPING, 0.0)
    if not isinstance(clipping, int | float) or not clipping >= 0:
        raise OffloadError(
            f"DeepSpeed's {_CLIPPING} is {clipping!r}. Use a number, at least 0; 0 clips nothing.",
            code="ds-config",
        )


def _check(ds_config: Config) -> None:
    for key in ("config", _ZERO, _OFFLOAD, _PARAMETERS):
        section = ds_config if key == "config" else _get(ds_config, key)
        if section is not None and not isinstance(section, Mapping):
            raise OffloadError(
                f"DeepSpeed's {key} is {section!r}. Use a dictionary.", code="ds-config"
            )
    bucket = _get(ds_config, _BUCKET)
    if not isinstance(bucket, int | float | None) and bucket != "auto":
        raise OffloadError(f"DeepSpeed's {_BUCKET} is {bucket!r}. Use a number.", code="ds-config")
    stage = _get(ds_config, f"{_ZERO}.stage")
    if stage != _STAGE:
        raise OffloadError(
            f"DeepSpeed's {_ZERO}.stage is {stage}. Our optimizer works with ZeRO-3: use {_STAGE}.",
            code="zero-stage",
        )


def accepting_config(ds_config: Config) -> dict[str, Any]:
    """Return the config with which DeepSpeed accepts an optimizer class that it has not tested,
    such as a fused AdamW.

    Args:
        ds_config: A ZeRO-3 config. If it has no ``zero_allow_untested_optimizer``, the key is added
            and recorded as an override; otherwise it is returned unchanged.

    Returns:
        A new config; ``ds_config`` is not modified.
    """
    if "zero_allow_untested_optimizer" in ds_config:
        return deepcopy(dict(ds_config))
    return _with(ds_config, [Override("zero_allow_untested_optimizer", None, True, _UNTESTED)])


def overrides(ds_config: Config) -> tuple[Override, ...]:
    """Return the overrides that ``engine_config`` recorded in a config; none for a config without
    the section.
    """
    return tuple(Override(**entry) for entry in ds_config.get(SECTION, {}).get("overrides", ()))


def _with(ds_config: Config, prescribed: Iterable[Override]) -> dict[str, Any]:
    """Return a copy with the prescribed values, in which those that differ from the user's are
    recorded.
    """
    config = deepcopy(dict(ds_config))
    changes = [change for change in prescribed if change.given != change.used]
    for change in changes:
        _set(config, change.key, change.used)
    config[SECTION] = {"overrides": [change._asdict() for change in changes]}
    return config


def _changes(config: Config) -> Iterator[Override]:
    """Yield every value that our optimizer prescribes, whether or not the user's is the same."""

    def prescribe(key: str, used: Any, reason: str) -> Override:
        return Override(key, _get(config, key), used, reason)

    yield prescribe(f"{_OFFLOAD}.device", "cpu", _SELECTS_CLASS)
    yield prescribe(f"{_OFFLOAD}.super_offload", True, _SELECTS_CLASS)
    yield prescribe(f"{_OFFLOAD}.ratio", 1.0, _WHOLE_OFFLOAD)
    yield prescribe(f"{_OFFLOAD}.pin_memory", False, _OWN_PINNING)
    for name in _get(config, _OFFLOAD) or {}:
        if name not in _KEPT_OFFLOAD_KEYS:
            yield prescribe(f"{_OFFLOAD}.{name}", None, _OWN_STATES)
    if _get(config, f"{_PARAMETERS}.device") == "cpu":
        yield prescribe(f"{_PARAMETERS}.pin_memory", False, _OWN_WEIGHTS)
    bucket = _get(config, _BUCKET)
    if bucket != "auto":  # left to whoever fills in such values before DeepSpeed reads the config
        used_bucket = OWN_LARGEST_BUCKET if bucket is None else min(int(bucket), OWN_LARGEST_BUCKET)
        yield prescribe(_BUCKET, used_bucket, _SMALL_BUCKET)
    yield prescribe("zero_optimization.stage3_param_persistence_threshold", 0, _NO_PERSISTENCE)
    yield prescribe("zero_allow_untested_optimizer", True, _OWN_ADAM)
    yield prescribe("zero_force_ds_cpu_optimizer", False, _OWN_ADAM)
    for name in config.get("data_types", {}):
        yield prescribe(f"data_types.{name}", None, _OWN_ACCUMULATION)


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a nested value; None removes the key, and with it a section that becomes empty."""
    *sections, name = key.split(".")
    parents = [config]
    for section in sections:
        if (
            parents[-1].get(section) is None
        ):  # JSON's null, which DeepSpeed takes for an absent section
            parents[-1][section] = {}
        parents.append(parents[-1][section])
    if value is not None:
        parents[-1][name] = value
        return
    parents[-1].pop(name, None)
    if sections and not parents[-1]:
        del parents[-2][sections[-1]]
