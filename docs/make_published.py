"""Write ``docs/published.md``: every published figure about SuperOffload beside ours for the same settings.

python docs/make_published.py
"""

from __future__ import annotations

from pathlib import Path

from so_tui.plan.published import compared
from so_tui.plan.show import page as table

PAGE = Path(__file__).with_name("published.md")

_INTRODUCTION = """\
# Published figures beside ours

<!-- Written by `python docs/make_published.py`; a test keeps it current. -->

You see every published figure about SuperOffload that we know of, what so-tui plans for the same settings, and why the two differ where
they do by more than 15 %. `so-tui published` prints the same, with your machine's rates if it is one of these and was calibrated. The
figures are data: `so_tui/plan/published.toml`.

Ours are predictions. so-tui has not run on a Grace machine; what pageable copies cost there is assumed, and measured by
`so-tui calibrate`. TFLOPS are by the formula of DeepSpeed's example script (`seed_tflops_total` in [metrics](metrics.md)), and "plain
kernels" are those of the model as transformers has it. What is said of DeepSpeed's versions was read in their sources.

"""


def page() -> str:
    """Return the page."""
    return _INTRODUCTION + table(compared())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
