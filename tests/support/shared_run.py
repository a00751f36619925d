"""Settings of the run that tests share (``finished_run``), and of runs that must have its losses."""

HELD_OUT = {"data__held_out": "30"}
TWELVE_STEPS = HELD_OUT | {"train__steps": "12"}
SUPEROFFLOAD = {"offload__mode": "superoffload"}
