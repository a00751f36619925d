"""The settings of a run that the engine and ZeRO-3 get."""

from __future__ import annotations

import pytest
from deepspeed.utils import get_z3_leaf_modules
from msgspec.structs import replace
from transformers import AutoConfig, PreTrainedModel

from so_tui.model.profile import profile_of
from so_tui.model.sharding import run_ahead_parameters
from so_tui.plan.plan import OptionalMemory
from so_tui.spec import find_preset, with_values
from so_tui.spec.run_spec import RunSpec
from so_tui_trainer.engine_settings import engine_settings
from so_tui_trainer.model.build import _set_leaf_modules
from superoffload.errors import OffloadError
from superoffload.settings import Settings
from tests.support.engine import binding
from tests.support.launching import tiny
from tests.support.models import causal_model
from tests.support.problems import coded, refusal, rejected
from tests.support.small_training import EXPERTS, SHAPE

VALUES = {
    "offload.mode": "superoffload",
    "offload.engine": "deepspeed",
    "offload.ratio": "0.35",
    "train.gradient_accumulation": "6",
    "train.gradient_clipping": "0.5",
    "train.learning_rate": "3e-5",
    "train.beta1": "0.8",
    "train.beta2": "0.97",
    "train.epsilon": "1e-7",
    "train.weight_decay": "0.02",
    "train.max_skipped_steps": "7",
}


def spec(**changes: str) -> RunSpec:
    return with_values(
        find_preset("qwen3-4b-random").spec,
        VALUES | {name.replace("__", "."): value for name, value in changes.items()},
    )


def test_every_setting_comes_from_the_spec_or_the_binding() -> None:
    run = spec()
    found = engine_settings(run, binding())
    assert found == Settings(
        mode="superoffload",
        engine="deepspeed",
        ratio=0.35,
        learning_rate=3e-5,
        beta1=0.8,
        beta2=0.97,
        epsilon=1e-7,
        weight_decay=0.02,
        max_skipped_steps=7,
        states="fp32",
        seed=run.train.seed,
        adam_cpus=binding().adam_cpus,
        run_ahead_parameters=run_ahead_parameters(profile_of(run.model).largest_layer, run.ranks),
        available_bytes=found.available_bytes,
    )
    undivided = replace(binding(), adam_cpus=())
    assert engine_settings(run, undivided).adam_cpus == undivided.cpus, "all cores of the rank"


def test_only_our_engine_has_compact_moments() -> None:
    compact = {"offload__states": "int8-moments", "offload__engine": "so-tui"}
    assert engine_settings(spec(**compact), binding()).states == "int8-moments"
    assert engine_settings(spec(**compact, offload__mode="gpu"), binding()).states == "fp32"
    for theirs in ({"offload__mode": "zerooffload"}, {"offload__engine": "deepspeed"}):
        with rejected("states-format"):
            spec(**compact | theirs)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("second_gib", "copies_gib", "beside_states_gib", "expected"),
    [
        (20, 0, None, (20, 0)),
        (20, 0, -1, (0, 0)),
        (0, 20, 5, (0, 5)),
        (20, 10, 1000, (20, 10)),
        (20, 10, 25, (20, 5)),
        (20, 10, 15, (15, 0)),
    ],
)
def test_second_states_and_then_copies_fit_the_host(
    second_gib: int,
    copies_gib: int,
    beside_states_gib: int | None,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At ratio 1: 14 bytes each for the states."""
    run = spec(offload__engine="so-tui", offload__ratio="1", train__gradient_accumulation="1")
    available = None
    if beside_states_gib is not None:
        available = int((14 * run.model.parameter_count + beside_states_gib * GIB) / 0.94)
    monkeypatch.setattr("so_tui_trainer.engine_settings.available_bytes", lambda files: available)
    planned = OptionalMemory(second_states_bytes=second_gib * GIB, copies_bytes=copies_gib * GIB)
    found = engine_settings(run, binding(), planned)
    sizes = found.speculation_bytes / GIB, found.copies_bytes / GIB
    assert sizes == pytest.approx(expected, rel=0.02, abs=0.02)
    assert found.available_bytes() == available, "with the limits of control groups"


def test_a_mode_that_nobody_resolved_is_refused() -> None:
    with coded(OffloadError, "mode-not-resolved"):
        engine_settings(spec(offload__mode="auto"), binding())


def model() -> PreTrainedModel:
    return causal_model(AutoConfig.for_model("qwen3_moe", **SHAPE | EXPERTS))


@pytest.mark.parametrize("gpus", ["1", "2"])
def test_layers_and_what_is_named_are_gathered_whole(gpus: str) -> None:
    causal = model()
    _set_leaf_modules(causal, tiny(gpus=gpus, model__leaf_modules='["Qwen3MoeExperts"]'))
    assert {type(module).__name__ for module in get_z3_leaf_modules(causal)} == {
        "Qwen3MoeDecoderLayer",
        "Qwen3MoeExperts",
    }


def test_a_block_that_the_model_lacks_is_named_with_those_it_has() -> None:
    problem = refusal(
        lambda: _set_leaf_modules(model(), tiny(model__leaf_modules='["NoSuchBlock"]'))
    )
    assert (problem.code, problem.value) == ("leaf-module-unknown", "NoSuchBlock")
    assert "Qwen3MoeDecoderLayer" in problem.remedy
