"""Memory and time of a run: pure functions from a RunSpec and a Machine to a Plan."""
