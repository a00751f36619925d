"""The settings of a run that the engine and ZeRO-3 get."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.utils import get_z3_leaf_modules
from msgspec.structs import replace
from transformers import AutoConfig, PreTrainedModel

from so_tui.machine.host import available_bytes
from so_tui.machine.system_files import SystemFiles
from so_tui.model.profile import profile_of
from so_tui.model.sharding import run_ahead_parameters
from so_tui.plan.plan import OptionalMemory
from so_tui.spec import InputError, find_preset, with_values
from so_tui.spec.run_spec import RunSpec
from so_tui_trainer.engine_settings import engine_settings
from so_tui_trainer.model.build import _set_leaf_modules
from superoffload.errors import OffloadError
from superoffload.settings import Settings
from tests.support.engine import binding
from tests.support.launching import tiny
from tests.support.models import causal_model
from tests.support.problems import coded, refusal
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


def test_only_our_engine_has_compact_moments() -> None:
    ours = spec(offload__engine="so-tui", offload__states="int8-moments")
    assert engine_settings(ours, binding()).states == "int8-moments"
    without_offload = spec(
        offload__engine="so-tui", offload__states="int8-moments", offload__mode="gpu"
    )
    assert engine_settings(without_offload, binding()).states == "fp32"
    for theirs in (
        {"offload__mode": "zerooffload", "offload__engine": "so-tui"},
        {"offload__engine": "deepspeed"},
    ):
        with pytest.raises(InputError) as caught:
            spec(offload__states="int8-moments", **theirs)
        assert [problem.code for problem in caught.value.problems] == ["states-format"]


@pytest.mark.parametrize("what", ["second_states_bytes", "copies_bytes"])
def test_second_states_and_copies_fit_the_host(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """At ratio 1: 4 billion parameters, 14 bytes each for the states."""
    run = spec(offload__engine="so-tui", offload__ratio="1", train__gradient_accumulation="1")
    states = 14 * run.model.parameter_count

    def found(planned: int, available: int | None) -> int:
        monkeypatch.setattr(
            "so_tui_trainer.engine_settings.available_bytes", lambda files: available
        )
        settings = engine_settings(run, binding(), OptionalMemory(**{what: planned}))
        both = settings.speculation_bytes, settings.copies_bytes
        assert min(both) == 0
        return max(both)

    assert found(20 << 30, None) == found(20 << 30, 10**13) == 20 << 30
    assert found(20 << 30, 70 * 10**9) == pytest.approx(0.94 * 70e9 - states, rel=1e-2)
    assert found(20 << 30, 50 * 10**9) == 0
    assert found(0, None) == 0


def test_copies_take_what_second_states_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    run = spec(offload__engine="so-tui", offload__ratio="1", train__gradient_accumulation="1")
    states = 14 * run.model.parameter_count

    def found(available: int) -> int:
        monkeypatch.setattr(
            "so_tui_trainer.engine_settings.available_bytes", lambda files: available
        )
        return engine_settings(
            run, binding(), OptionalMemory(second_states_bytes=20 << 30, copies_bytes=10 << 30)
        ).copies_bytes

    assert found(10**13) == 10 << 30
    assert found(int((states + 25 * 2**30) / 0.94)) == pytest.approx(5 * 2**30, rel=0.02)
    assert found(int((states + 15 * 2**30) / 0.94)) == 0


def test_a_rank_without_adam_cores_runs_adam_on_all_its_cores() -> None:
    undivided = replace(binding(), adam_cpus=())
    assert engine_settings(spec(), undivided).adam_cpus == undivided.cpus


def test_limits_of_the_control_group_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own reading of the available memory is about the whole host."""
    limited = SystemFiles(tmp_path)
    files = {
        "proc/meminfo": "MemAvailable:   400000000 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": "10000000000\n",
        "sys/fs/cgroup/job/memory.current": "7000000000\n",
        "sys/fs/cgroup/job/memory.stat": "inactive_file 0\nactive_file 0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("so_tui_trainer.engine_settings.SystemFiles", lambda: limited)
    assert (
        engine_settings(spec(), binding()).available_bytes()
        == available_bytes(limited)
        == 3_000_000_000
    )


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
    assert (problem.code, problem.field, problem.value) == (
        "leaf-module-unknown",
        "model.leaf_modules",
        "NoSuchBlock",
    )
    assert "Qwen3MoeDecoderLayer" in problem.remedy
