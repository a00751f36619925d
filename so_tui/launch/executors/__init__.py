"""Where a run's supervisor is started: on this machine, or (later) through a scheduler."""
