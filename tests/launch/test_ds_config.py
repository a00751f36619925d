import json

import pytest
from msgspec.structs import replace

from so_tui.launch.ds_config import _published_config, ds_config
from so_tui.plan.planner import make_plan
from so_tui.spec import find_preset, with_values
from so_tui.spec.presets import as_published
from so_tui.spec.run_spec import Mode, OffloadSpec, TrainSpec
from superoffload.ds_config import engine_config, overrides
from tests.support.plans import plan_of, quad_gh200, spec_of

PINNED = {"device": "cpu", "pin_memory": True}


def test_superoffload_with_our_engine() -> None:
    offload = OffloadSpec(ratio=0.7, sub_group_size=1_000_000, cpu_adam_cores_fraction=0.8)
    accumulating = TrainSpec(micro_batch=2, gradient_accumulation=8)
    spec = spec_of(offload=offload, train=accumulating)
    config = _published_config(plan_of(spec, cpus=((0,),)))
    assert config == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1_000_000,
            "reduce_bucket_size": 1_000_000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {
                **PINNED,
                "ratio": 0.7,
                "super_offload": True,
                "cpuadam_cores_perc": 0.8,
            },
        },
        "wall_clock_breakdown": False,
        "zero_force_ds_cpu_optimizer": False,
    }
    json.dumps(config)
    assert "data_types" not in _published_config(plan_of(spec_of()))


def test_file_names_what_our_engine_overrides() -> None:
    config = ds_config(plan_of(spec_of(offload=OffloadSpec(ratio=0.7))))
    found = {override.key: (override.given, override.used) for override in overrides(config)}
    assert found["zero_optimization.offload_optimizer.ratio"] == (0.7, 1.0)
    assert config["zero_optimization"]["offload_optimizer"]["ratio"] == 1.0, "what DeepSpeed reads"
    assert engine_config(config) == config, "the trainer has nothing left to change"
    assert all(override.reason for override in overrides(config))
    assert overrides(ds_config(plan_of(spec_of(offload=OffloadSpec(engine="deepspeed"))))) == ()
    assert overrides(ds_config(plan_of(spec_of(), mode="gpu"))) == ()


def test_deepspeeds_own_engine_reads_the_users_values() -> None:
    spec = spec_of(offload=OffloadSpec(engine="deepspeed", cpu_adam_cores_fraction=0.8))
    zero = ds_config(plan_of(spec))["zero_optimization"]
    section = zero["offload_optimizer"]
    assert (section["ratio"], section["cpuadam_cores_perc"]) == (0.9, 0.8)
    assert zero["overlap_comm"] is False
    zero_offload = ds_config(plan_of(spec, mode="zerooffload"))["zero_optimization"]
    assert zero_offload["offload_optimizer"] == PINNED | {"ratio": 0.9}


def test_as_published_reads_the_examples_block() -> None:
    spec = as_published(replace(find_preset("llama-3.1-8b").spec, gpus=2))
    plan = make_plan(spec, quad_gh200())
    assert plan.spec.train.micro_batch == 2
    assert ds_config(plan) == {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": 400_000_000,
            "sub_group_size": 400_000_000,
            "offload_optimizer": {
                **PINNED,
                "ratio": 0.8,
                "super_offload": True,
                "cpuadam_cores_perc": 0.9,
            },
        },
        "wall_clock_breakdown": True,
    }


@pytest.mark.parametrize(("deepspeed", "clipping"), [("0.19.8", 1.0), ("0.19.7", 0.0), (None, 1.0)])
def test_default_clipping_is_deepspeeds(deepspeed: str | None, clipping: float) -> None:
    machine = quad_gh200()
    machine = replace(machine, software=replace(machine.software, deepspeed=deepspeed))
    spec = find_preset("qwen3-14b:as-published").spec
    assert make_plan(spec, machine).spec.train.gradient_clipping == clipping
    own = {"offload.config": "published-clipping", "train.gradient_clipping": "0.5"}
    assert ds_config(make_plan(with_values(spec, own), machine))["gradient_clipping"] == 0.5


@pytest.mark.parametrize("mode", ["superoffload", "zerooffload", "gpu"])
def test_gradient_clipping_is_always_written(mode: Mode) -> None:
    for clipping in (0.0, 0.25):
        config = ds_config(plan_of(spec_of(train=TrainSpec(gradient_clipping=clipping)), mode=mode))
        assert config["gradient_clipping"] == clipping
        assert ("offload_optimizer" in config["zero_optimization"]) == (mode != "gpu")


@pytest.mark.parametrize("preset", ["qwen3-14b", "qwen3-14b:as-published"])
def test_deepspeed_writes_as_much_to_the_log_as_was_asked_for(preset: str) -> None:
    spec = find_preset(preset).spec
    asked = with_values(spec, {"train.log_level": "debug"})
    usual, more = (ds_config(make_plan(one, quad_gh200())) for one in (spec, asked))
    assert more == usual | {"log_level": "debug"}


def test_several_gpus_gather_the_next_layer_while_one_computes() -> None:
    spec = find_preset("llama-3.1-8b").spec
    zero = ds_config(plan_of(spec))["zero_optimization"]
    layer, live = 218_112_000, 436_224_000
    assert zero["stage3_prefetch_bucket_size"] == layer
    assert zero["stage3_max_live_parameters"] == live
