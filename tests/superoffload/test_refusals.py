"""What a script can get wrong in its call of ``initialize`` is refused by name and value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch

import superoffload
from superoffload.api import _trainable
from tests.support import engine as support
from tests.support.problems import coded


def code_of(call: Callable[[], Any], *said: str) -> str:
    """Return the code of the error that a call raises, whose message has these words."""
    with pytest.raises(superoffload.OffloadError) as caught:
        call()
    assert all(word in str(caught.value) for word in said), caught.value
    return caught.value.code


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("mode", ["offload", None]),
        ("engine", ["ours"]),
        ("ratio", [1.5, -0.1, float("nan"), "0.9", None]),
        ("speculation_bytes", [-1, "1GB", float("nan")]),
        ("copies_bytes", [-1, "1GB", None]),
        ("states", ["fp16", None]),
        ("seed", [1.5, "0"]),
        ("max_skipped_steps", [-1, 1.5]),
        ("learning_rate", [-1.0, float("nan"), float("inf"), "1e-3", None]),
        ("beta1", [1.0, -0.1, float("nan"), np.float32(1)]),
        ("beta2", [1.0, "0.9"]),
        ("epsilon", [-1e-8, float("inf")]),
        ("weight_decay", [-0.1, float("nan"), np.float16("inf")]),
        ("adam_cpus", [0, (-1,), ("a",), "01", (0.5,)]),
        ("run_ahead_parameters", [-1, "all"]),
        ("watchdog_timeout_s", [0, -1.0, float("nan"), np.float32(0)]),
    ],
)
def test_an_impossible_setting_is_refused_where_it_is_made(name: str, values: list[Any]) -> None:
    for value in values:
        make = partial(superoffload.Settings, **{"learning_rate": 1e-3, name: value})
        assert code_of(make, f" {name} = {value!r} ") == "settings"


def initialize(model: torch.nn.Module, groups: Any, **config: Any) -> Any:
    support.ensure_process_group()
    described = support.ds_config(support.spec("superoffload", clipping=1.0), torch.float32)
    return superoffload.initialize(
        model, groups, superoffload.Settings(learning_rate=1e-3), described | config
    )


@pytest.mark.parametrize(
    ("zero", "code", "said"),
    [
        ({"stage": 2}, "zero-stage", "zero_optimization.stage is 2"),
        (None, "zero-stage", "zero_optimization.stage is None"),
        (3, "ds-config", "zero_optimization is 3"),
        ({"offload_optimizer": ["cpu"]}, "ds-config", "offload_optimizer is ['cpu']"),
        ({"reduce_bucket_size": "big"}, "ds-config", "reduce_bucket_size is 'big'"),
        ({"offload_param": {"device": "nvme", "nvme_path": "/tmp"}}, "offload-param", "nvme"),
    ],
)
def test_an_impossible_config_is_refused(zero: Any, code: str, said: str) -> None:
    model = torch.nn.Linear(3, 2)
    zero = {"stage": 3, **zero} if isinstance(zero, dict) else zero
    make = partial(initialize, model, model.parameters(), zero_optimization=zero)
    assert code_of(make, said) == code


@pytest.mark.parametrize("clipping", [-1.0, float("nan"), "auto"])
def test_an_impossible_clipping_is_refused(clipping: Any) -> None:
    """A negative one would turn every gradient around."""
    model = torch.nn.Linear(3, 2)
    make = partial(initialize, model, model.parameters(), gradient_clipping=clipping)
    assert code_of(make, f"gradient_clipping is {clipping!r}") == "ds-config"


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_what_only_the_gpus_adamw_can_do_is_refused(option: str) -> None:
    """Sub-groups on the GPU would do it and those on the host would not."""
    model = torch.nn.Linear(3, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], option: True}]
    assert code_of(lambda: initialize(model, groups), "group 1", option) == "optimizer-option"
    config = support.ds_config(support.spec("superoffload"), torch.float32)
    options: dict[str, Any] = {option: True}
    theirs = torch.optim.AdamW(model.parameters(), **options)
    with superoffload.replacing_optimizers(superoffload.Settings(learning_rate=1e-3)):
        make = partial(deepspeed.initialize, model=model, optimizer=theirs, config=config)
        assert code_of(make) == "optimizer-option"


def test_parameters_of_another_model_are_refused() -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(5, 7)
    both = [*model.parameters(), *other.parameters()]
    assert code_of(lambda: initialize(model, both), "2", "(7, 5)") == "other-parameters"


def test_parameters_are_taken_in_every_form_that_torch_takes() -> None:
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    for given in (model.parameters(), list(model.parameters()), [{"params": model.parameters()}]):
        assert [group["params"] for group in _trainable(given, model)] == [[model.weight]]
    with coded(superoffload.OffloadError, "nothing-trainable"):
        _trainable([{"params": [model.bias]}], model)


@pytest.mark.parametrize("rate", [-1e-3, float("nan"), float("inf")])
def test_an_impossible_learning_rate_is_refused(rate: float) -> None:
    assert code_of(lambda: superoffload.set_learning_rate(None, rate), str(rate)) == "learning-rate"


def test_cores_out_of_reach_are_refused_by_number() -> None:
    making = support.offloading(adam_cpus=(0, 100_000))
    assert code_of(making.__enter__, "adam_cpus has 100000,") == "adam-cpus"
