from __future__ import annotations

import pytest

from so_tui.machine.host import contiguous_runs, cpu_ranges, cpus_or_empty, parse_cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8", (0, 1, 2, 3, 8)),
        ("\n", ()),
        ("", ()),
        ("7", (7,)),
        ("0-1,112-113", (0, 1, 112, 113)),
        ("4,2-3", (2, 3, 4)),
    ],
)
def test_kernel_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus
    assert parse_cpus(cpu_ranges(cpus)) == cpus


def test_ranges() -> None:
    assert cpu_ranges((0, 1, 2)) == "0-2"
    assert cpu_ranges([3, 1, 2, 9]) == "1-3,9"
    assert contiguous_runs([5, 1, 2]) == ((1, 2), (5,))


@pytest.mark.parametrize("text", ["a", "1-x"])
def test_other_text_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpus(text)


@pytest.mark.parametrize("text", ["65536", "0-70000", "3,70000-70001"])
def test_a_number_beyond_any_cpu_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match="beyond any CPU"):
        parse_cpus(text)
    assert cpus_or_empty(text) == ()
