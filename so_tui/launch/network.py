"""Which network NCCL uses between nodes, from what it logs, beside the one that the site profile names.

Without the site's plugin NCCL falls back to TCP sockets. Training goes on, many times slower, and nothing else says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

EXPECTED_VARIABLE = "SO_TUI_NETWORK"
"""Tells the supervisors of a job which network NCCL should use between its nodes, by the name that NCCL gives it."""
_SOCKETS = "Socket"
_USES = re.compile(r"NCCL INFO Using network (\S.*)")


class NetworkWatch:
    """Looks in the log for a fall-back to sockets."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Look for it where ``environ`` says that another network is expected."""
        self._expected = environ.get(EXPECTED_VARIABLE, "")
        self.missing_name = ""
        """The expected network, once NCCL was seen to use sockets instead."""

    def missing(self, lines: Iterable[str]) -> bool:
        """Return whether NCCL uses sockets instead of the expected network, after these lines of the log too."""
        if self._expected not in ("", _SOCKETS) and any(
            used and used[1].strip() == _SOCKETS for used in map(_USES.search, lines)
        ):
            self.missing_name = self._expected
        return bool(self.missing_name)
