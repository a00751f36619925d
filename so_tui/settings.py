"""The user's own settings: what ``settings.toml`` holds, reading it, and changing it."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from so_tui.trust.decoding import prepare

# What ``settings.toml`` can say. The descriptions here are those of the schema, of ``so-tui
# settings`` and of the screen.


AlertName = Literal["ended", "failed", "not-finite", "stall", "loss", "disk"]
ALERTS: tuple[AlertName, ...] = get_args(AlertName)
Key = Annotated[str, Meta(min_length=1, max_length=80)]
Rows = Annotated[int, Meta(ge=4, le=500)]
Columns = Annotated[int, Meta(ge=30, le=500)]


class ScreenSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the screen looks."""

    theme: Annotated[
        str,
        Meta(
            max_length=80,
            description=(
                "colours: so-tui-dark, -light, -contrast, -colour-blind, or a theme of Textual"
            ),
        ),
    ] = "so-tui-dark"
    glyphs: Annotated[
        Literal["auto", "braille", "block", "ascii"],
        Meta(description="characters of charts; auto takes what locale and terminal can show"),
    ] = "auto"
    units: Annotated[Literal["binary", "decimal"], Meta(description="memory in GiB or in GB")] = (
        "binary"
    )
    layout: Annotated[
        Literal["auto", "compact"],
        Meta(description="auto goes by the terminal's size; compact is that of a small one"),
    ] = "auto"


class KeySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the screen."""

    style: Annotated[
        Literal["standard", "vim"], Meta(description="vim adds j k g G ^d ^u ^f ^b for moving")
    ] = "standard"
    bindings: Annotated[
        dict[Annotated[str, Meta(max_length=80)], Key],
        Meta(
            max_length=200,
            description='other keys for commands: stop = "ctrl+x"; several are separated by commas',
        ),
    ] = {}


class PanelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of panels that were changed on the screen; those that were not follow from the
    terminal.
    """

    charts: Annotated[Rows | None, Meta(description="rows of the dashboard's charts")] = None
    nodes: Annotated[
        Annotated[int, Meta(ge=0, le=100)] | None,
        Meta(description="rows of each NUMA node's history"),
    ] = None
    side: Annotated[
        Columns | None, Meta(description="columns of the panels at the right of the dashboard")
    ] = None
    form: Annotated[Columns | None, Meta(description="columns of Configure's form")] = None
    run: Annotated[
        Rows | None, Meta(description="rows of the chosen run below the list of runs")
    ] = None
    run_beside: Annotated[
        Columns | None, Meta(description="columns of the chosen run beside the list of runs")
    ] = None


class RunListSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The list of runs."""

    sort: Annotated[
        Literal[
            "started",
            "name",
            "model",
            "state",
            "host",
            "step",
            "loss",
            "evaluation",
            "tokens/s",
            "mfu",
            "memory",
        ],
        Meta(description="what the screen sorts runs by"),
    ] = "started"
    reverse: Annotated[
        bool, Meta(description="whether the screen shows the last of them first")
    ] = False
    group: Annotated[
        Literal["none", "model", "state", "tag", "host"],
        Meta(description="what the screen groups runs by"),
    ] = "none"


class AlertSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is announced, and how."""

    on: Annotated[tuple[AlertName, ...], Meta(max_length=20, description="what is announced")] = (
        ALERTS
    )
    bell: Annotated[bool, Meta(description="ring the terminal's bell")] = True
    notify: Annotated[
        Literal["auto", "osc9", "osc777", "off"],
        Meta(description="desktop notification by the terminal; auto takes what it understands"),
    ] = "auto"
    title: Annotated[
        bool, Meta(description="name live runs and the last alert in the terminal's title")
    ] = True
    stall_s: Annotated[
        float, Meta(ge=10, le=604_800, description="seconds without a step that count as a stall")
    ] = 900.0
    loss_above: Annotated[float | None, Meta(description="announce a loss above this")] = None
    disk_free_gb: Annotated[
        float,
        Meta(
            ge=0,
            le=1e9,
            description=(
                "announce less free disk space than this, in GB, for the run or its checkpoints"
            ),
        ),
    ] = 10.0
    command: Annotated[
        tuple[Annotated[str, Meta(max_length=4096, pattern=r"^[^\0]*\Z")], ...],
        Meta(
            max_length=64,
            description="command that the supervisor runs for each alert, as a list of arguments",
        ),
    ] = ()
    command_timeout_s: Annotated[
        float, Meta(ge=1, le=300, description="seconds after which that command is ended")
    ] = 20.0


class PrometheusSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of live runs for Prometheus, on the host that trains."""

    folder: Annotated[
        str,
        Meta(
            pattern=r"^(/[^\0]*)?\Z",
            max_length=4000,
            description=(
                "folder that node_exporter's textfile collector reads; supervisors keep a file of "
                "each live run there"
            ),
        ),
    ] = ""


class HelperSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What processes may take that read models and data."""

    memory_gb: Annotated[
        Annotated[float, Meta(ge=1, le=1e6)] | None,
        Meta(
            description=(
                "memory of a process that reads models and data, in GB; by default 3.2, more for "
                "weights and for further processes, and at most 90 % of what is free"
            ),
        ),
    ] = None
    row_s: Annotated[
        float,
        Meta(ge=1, le=1e6, description="CPU seconds for a row, a batch of small ones, or a file"),
    ] = 20.0


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of ``settings.toml`` in the user's XDG config folder."""

    screen: ScreenSettings = ScreenSettings()
    panels: PanelSettings = PanelSettings()
    keys: KeySettings = KeySettings()
    runs: RunListSettings = RunListSettings()
    alerts: AlertSettings = AlertSettings()
    prometheus: PrometheusSettings = PrometheusSettings()
    helpers: HelperSettings = HelperSettings()


prepare(Settings)
