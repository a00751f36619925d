"""Limits on imports: the screen must start quickly, and the core must run without torch."""

import resource

import pytest

from tests.support.python_path import printed

HEAVY = ["torch", "deepspeed", "transformers", "datasets", "numpy", "pandas"]
SCREEN = ["textual", "rich"]
CORE = [
    "so_tui.spec",
    "so_tui.machine",
    "so_tui.plan",
    "so_tui.runs",
    "so_tui.launch",
    "so_tui.cli",
    "so_tui.commands.run",
]


def modules_loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(*(name.partition('.')[0] for name in sys.modules))"
    return set(printed("-c", code).split())


@pytest.mark.parametrize("module", CORE)
def test_the_core_loads_no_framework_and_no_screen(module: str) -> None:
    assert not modules_loaded_by(module) & {*HEAVY, *SCREEN}


def test_the_screen_loads_no_framework() -> None:
    assert not modules_loaded_by("so_tui.ui.app") & set(HEAVY)


def test_help_is_quick() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    runs = 5
    for _ in range(runs):
        printed("-m", "so_tui", "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    process_s = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / runs
    assert process_s < 0.2
