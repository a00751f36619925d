"""From a spec to running processes, and their supervision."""


# Time limits for ending a run, in a module without imports so that the command line's parser stays
# fast.

DEFAULT_GRACE_S = 600.0
"""How long a stop may take: the step in progress, then a checkpoint of up to hundreds of GB."""
EXIT_GRACE_S = 60.0
"""From the trainer's end record until its processes must be gone: the kernel needs time to free
hundreds of GB of pinned memory.
"""
KILL_AFTER_S = 5.0
"""From SIGTERM to SIGKILL. DeepSpeed's launcher by itself would wait up to 30 s for each rank."""
