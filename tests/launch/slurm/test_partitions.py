"""Partitions as ``sinfo`` lists them."""

from __future__ import annotations

import pytest

from so_tui.launch.slurm.client import Partition, _parse_partitions
from so_tui.ui.configure.screen import _partition_note

RECORDED = "main*|up|1:00:00|1/1/0/2|gpu:2|(null)\nstrict|up|1:00:00|1/1/0/2|gpu:2|(null)\n"
"""By Slurm 22.05.8."""
RECORDED_24_11 = (
    "main*|up|1:00:00|0/2/0/2|(null)|thp_never,a\nclosed|down|infinite|0/2/0/2|(null)|thp_never,a\n"
)
"""By Slurm 24.11.5."""
SEVERAL = """\
gh-dev|up|2:00:00|0/8/0/8|(null)|gh
normal*|up|1-00:00:00|90/10/4/104|gpu:gh200:4(S:0-3)|thp_never,nvidia_vboost_enabled
normal*|up|1-00:00:00|0/2/0/2|gpu:gh200:2,tmpdisk:900|thp_never
closed|down|infinite|0/0/7/7|N/A|
"""


def test_what_slurm_22_05_printed() -> None:
    main, strict = _parse_partitions(RECORDED)
    assert main == Partition(
        name="main", default=True, time_limit="1:00:00", nodes=2, idle=1, gpus=2
    )
    assert (strict.name, strict.default) == ("strict", False)


def test_what_slurm_24_11_printed() -> None:
    main, closed = _parse_partitions(RECORDED_24_11)
    assert main == Partition(
        name="main",
        default=True,
        time_limit="1:00:00",
        nodes=2,
        idle=2,
        gpus=0,
        features=("thp_never", "a"),
    )
    assert (closed.open, closed.time_limit) == (False, "")


def test_groups_of_nodes_add_up() -> None:
    normal, development, closed = _parse_partitions(SEVERAL)
    assert (normal.name, normal.nodes, normal.idle, normal.gpus) == ("normal", 106, 12, 4)
    assert normal.features == ("thp_never", "nvidia_vboost_enabled")
    assert (development.time_limit, development.gpus) == ("2:00:00", 0)
    assert (closed.open, closed.time_limit, closed.features) == (False, "", ())


@pytest.mark.parametrize(
    "line",
    [
        "",
        "|",
        "PARTITION|AVAIL|TIMELIMIT|NODES(A/I/O/T)|GRES|AVAIL_FEATURES",
        "a|up|1:00|1/2/3|gpu:1|x",
        "\0|||||",
    ],
)
def test_a_line_of_another_form_is_left_out(line: str) -> None:
    assert [partition.name for partition in _parse_partitions(f"{line}\n{RECORDED}")] == [
        "main",
        "strict",
    ]


@pytest.mark.parametrize(
    ("chosen", "part"),
    [
        ("normal", "12 of 106 nodes free, 4 GPUs each, at most 1-00:00:00"),
        ("", "normal, gh-dev"),
        ("closed", "closed now"),
    ],
)
def test_the_form_says_what_the_chosen_partition_offers(chosen: str, part: str) -> None:
    assert part in _partition_note(_parse_partitions(SEVERAL), chosen, slurm=True)


def test_names_of_partitions_are_shown_harmless() -> None:
    hostile = _parse_partitions("a\x1b[2Jb|up|1:00:00|1/1/0/2|gpu:2|(null)\n")
    for chosen in ("", hostile[0].name):
        assert _partition_note(hostile, chosen, slurm=True).isprintable()
    assert _partition_note(hostile, "", slurm=False) == "no Slurm here"
