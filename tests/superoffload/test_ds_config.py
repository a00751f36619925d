"""The DeepSpeed config that our optimizer needs, and the record of what differs from the user's."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from typing import Any, Literal

import pytest

from so_tui.launch.ds_config import ds_config
from so_tui.spec.run_spec import Mode, OffloadSpec
from superoffload.ds_config import Override, accepting_config, engine_config, overrides
from tests.support.plans import plan_of, spec_of
from tests.support.python_path import checkout_path, printed

ZERO = "zero_optimization"
USER: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    ZERO: {
        "stage": 3,
        "sub_group_size": 400_000_000,
        "reduce_bucket_size": 400_000_000,
        "offload_optimizer": {
            "device": "cpu",
            "pin_memory": True,
            "ratio": 0.9,
            "super_offload": True,
            "cpuadam_cores_perc": 0.8,
            "fast_init": True,
        },
    },
    "zero_force_ds_cpu_optimizer": False,
    "data_types": {"grad_accum_dtype": "fp32"},
}


def recorded(config: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the given and the used value of each override."""
    assert all(entry.reason.endswith(".") for entry in overrides(config))
    return {entry.key: (entry.given, entry.used) for entry in overrides(config)}


def test_what_differs_from_the_users_config_is_recorded() -> None:
    user = deepcopy(USER)
    config = engine_config(user)
    assert user == USER
    expected = deepcopy(USER) | {"zero_allow_untested_optimizer": True}
    del expected["data_types"], expected[ZERO]["offload_optimizer"]["fast_init"]
    expected[ZERO]["offload_optimizer"] |= {"ratio": 1.0, "pin_memory": False}
    expected[ZERO] |= {"reduce_bucket_size": 100_000_000, "stage3_param_persistence_threshold": 0}
    assert config == expected | {"superoffload": config["superoffload"]}
    assert recorded(config) == {
        f"{ZERO}.offload_optimizer.ratio": (0.9, 1.0),
        f"{ZERO}.offload_optimizer.pin_memory": (True, False),
        f"{ZERO}.offload_optimizer.fast_init": (True, None),
        f"{ZERO}.reduce_bucket_size": (400_000_000, 100_000_000),
        f"{ZERO}.stage3_param_persistence_threshold": (None, 0),
        "zero_allow_untested_optimizer": (None, True),
        "data_types.grad_accum_dtype": ("fp32", None),
    }
    read = json.loads(json.dumps(config))
    assert read == config
    assert engine_config(read) == config
    assert list(config["superoffload"]["overrides"][0]) == list(Override._fields)


def test_a_config_without_offload_section_gets_one() -> None:
    given = {ZERO: {"stage": 3}}
    section = engine_config(given)[ZERO]
    offload = {"device": "cpu", "super_offload": True, "ratio": 1.0, "pin_memory": False}
    assert section["offload_optimizer"] == offload
    assert section["reduce_bucket_size"] == 100_000_000
    assert overrides(given) == ()


@pytest.mark.parametrize(("filled_in", "used"), [(1000.0, 1000.0), (16384**2, 100_000_000)])
def test_what_is_filled_in_for_an_auto_bucket_is_limited_too(filled_in: float, used: int) -> None:
    config = engine_config({ZERO: {"stage": 3, "reduce_bucket_size": "auto"}})
    assert config[ZERO]["reduce_bucket_size"] == "auto"
    config[ZERO]["reduce_bucket_size"] = filled_in
    limited = engine_config(config)
    assert limited[ZERO]["reduce_bucket_size"] == used
    found = recorded(limited).get(f"{ZERO}.reduce_bucket_size")
    assert found == ((filled_in, used) if filled_in != used else None)
    assert engine_config(limited) == limited


def test_a_config_is_made_to_accept_untested_optimizers() -> None:
    old = {ZERO: {"stage": 3}}
    config = accepting_config(old)
    assert old == {ZERO: {"stage": 3}}
    assert config["zero_allow_untested_optimizer"] is True
    assert recorded(config) == {"zero_allow_untested_optimizer": (None, True)}
    assert accepting_config(config) == config


@pytest.mark.parametrize(
    ("mode", "engine"),
    [
        ("gpu", "so-tui"),
        ("zerooffload", "so-tui"),
        ("superoffload", "deepspeed"),
        ("superoffload", "so-tui"),
    ],
)
def test_deepspeed_receives_exactly_what_the_file_says(
    mode: Mode, engine: Literal["so-tui", "deepspeed"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ds_config.json`` is the record of what DeepSpeed was given, in every mode."""
    import deepspeed
    import torch

    from superoffload import api
    from superoffload.settings import Settings

    plan = plan_of(spec_of(offload=OffloadSpec(mode=mode, engine=engine)), mode=mode)
    file = json.loads(json.dumps(ds_config(plan)))
    received: list[Any] = []

    def receive(*, config: Any, **_: Any) -> None:
        received.append(config)
        raise InterruptedError

    monkeypatch.setattr(deepspeed, "initialize", receive)
    # Some need CUDA or a compiler.
    monkeypatch.setattr(api, "_deepspeed_optimizer", lambda *_: None)
    settings = Settings(mode=mode, engine=engine, learning_rate=1e-3, adam_cpus=(0,))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(InterruptedError):
        api.initialize(model, model.parameters(), settings, file)
    assert received == [file]
    assert file["zero_allow_untested_optimizer"] is True


def test_importing_it_loads_neither_torch_nor_deepspeed() -> None:
    code = (
        "import sys, superoffload, superoffload.ds_config; print(sorted({'torch', 'deepspeed', "
        "'numpy'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": checkout_path()}
    assert printed("-c", code, env=environment).strip() == "[]"
