"""Settings of the shared run (``finished_run``), and of runs that must have its losses."""

HELD_OUT = {"data__held_out": "30"}
TWELVE_STEPS = HELD_OUT | {"train__steps": "12"}
PROMPTS = {
    "prompts__texts": '["Which process uses a port?", "Show the disks."]',
    "prompts__every_steps": "5",
    "prompts__max_tokens": "12",
}
"""What the shared run is asked, which must not change its losses."""
SUPEROFFLOAD = {"offload__mode": "superoffload"}
PARTS = ("data_s", "forward_s", "backward_s", "exposed_optimizer_s", "other_s")
"""Fields of a step record, which add up to its time."""
