"""``python -m so_tui`` is ``so-tui``."""

import sys

from so_tui.cli import main

sys.exit(main())
