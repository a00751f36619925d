"""The DeepSpeed configuration of a plan, as plain JSON values. There is no optimizer section: the
trainer builds the optimizer itself.
"""

from __future__ import annotations

from so_tui.model.profile import profile_of
from so_tui.model.sharding import live_parameters
from so_tui.plan.plan import Plan
from so_tui.spec import TrainSpec
from so_tui.trust.decoding import Tree
from superoffload.ds_config import engine_config

REUSED_LAYERS = 4
"""A layer is recomputed and then goes backward, 2 layers' parameters; where modules within it are
gathered whole they count twice.
"""


def ds_config(plan: Plan) -> Tree:
    """Return the content of ``ds_config.json``, exactly as DeepSpeed reads it.

    For our engine, values that it replaces are listed beside the user's in the section
    ``superoffload`` (see ``superoffload.ds_config``).
    """
    level = plan.spec.train.log_level
    changes = {} if level == TrainSpec().log_level else {"log_level": level}
    if plan.spec.offload.config != "so-tui":
        return _example_config(plan) | changes
    config = _published_config(plan) | changes
    return engine_config(config) if plan.spec.offload.own_engine else config


def _example_config(plan: Plan) -> Tree:
    """Return the block of DeepSpeed's SuperOffload examples, key by key, with the run's own sizes:
    that of the mode, ``superoffload`` or ``zerooffload``.

    ``gradient_clipping`` is absent as there, so that DeepSpeed's default applies, unless
    ``offload.config`` asks for it. What the examples do not have is left out as well: with several
    micro-batches, gradients are summed in bf16.
    """
    spec, offload = plan.spec, _offload_section(plan)
    if plan.mode == "zerooffload":
        del offload["ratio"]  # whose default is 1
    config: Tree = {
        "train_batch_size": plan.gpus * spec.train.micro_batch * spec.gradient_accumulation_steps,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "reduce_bucket_size": spec.offload.sub_group_size,
            "sub_group_size": spec.offload.sub_group_size,
            "offload_optimizer": offload,
        },
        "wall_clock_breakdown": True,
    }
    if spec.gradient_accumulation_steps > 1:
        config["gradient_accumulation_steps"] = spec.gradient_accumulation_steps
    if spec.offload.config == "published-clipping":
        config["gradient_clipping"] = spec.train.gradient_clipping
    return config


def _published_config(plan: Plan) -> Tree:
    """Return the user's own values under DeepSpeed's published keys.

    ``gradient_clipping`` is always present here: DeepSpeed assumes 1.0 for a missing key (since
    0.19.8), which silently costs SuperOffload its overlap. Buckets are as large as sub-groups, as
    in the published SuperOffload configurations, so that one reduction completes one sub-group.
    """
    spec = plan.spec
    config: Tree = {
        "train_micro_batch_size_per_gpu": spec.train.micro_batch,
        "gradient_accumulation_steps": spec.gradient_accumulation_steps,
        "gradient_clipping": spec.train.gradient_clipping,
        "bf16": {"enabled": True},
        "zero_optimization": _zero_section(plan),
        "wall_clock_breakdown": False,
    }
    if spec.gradient_accumulation_steps > 1:
        # bf16 has 8 bits of mantissa, so sums over many micro-batches would lose small gradients.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if plan.mode != "gpu":
        # DeepSpeed otherwise accepts no optimizer other than its own DeepSpeedCPUAdam.
        config["zero_force_ds_cpu_optimizer"] = False
    if not plan.spec.offload.own_engine:  # Our engine sets it itself and records it as an override.
        config["zero_allow_untested_optimizer"] = True
    return config


def _zero_section(plan: Plan) -> Tree:
    sub_group_size = plan.spec.offload.sub_group_size
    # As in DeepSpeed's published SuperOffload configurations. All other modes reduce gradients
    # while backward runs.
    section: Tree = {
        "stage": 3,
        "sub_group_size": sub_group_size,
        "reduce_bucket_size": sub_group_size,
        "overlap_comm": not plan.spec.offload.deepspeed_superoffload,
        "contiguous_gradients": True,
    }
    on_host = plan.spec.offload.keeps_weights_on_host
    if plan.gpus > 1 or on_host:
        layer = profile_of(plan.spec.model).largest_layer
        section["stage3_max_live_parameters"] = live_parameters(layer, plan.gpus)
        if layer:
            # Layers are all-gathered whole, the next one while the current one computes, so there
            # must be room for both.
            section["stage3_prefetch_bucket_size"] = layer
    if on_host:
        section["offload_param"] = {"device": "cpu", "pin_memory": True}
        # Weights that are needed again so soon stay on the GPU: those of a layer between its
        # recomputation and its backward. DeepSpeed's default is larger than many models.
        section["stage3_max_reuse_distance"] = REUSED_LAYERS * layer
    if plan.mode != "gpu":
        section["offload_optimizer"] = _offload_section(plan)
    return section


def _offload_section(plan: Plan) -> Tree:
    section: Tree = {"device": "cpu", "pin_memory": True, "ratio": plan.ratio}
    if plan.mode == "superoffload":
        section["super_offload"] = True
        section["cpuadam_cores_perc"] = plan.spec.offload.cpu_adam_cores_fraction
    return section
