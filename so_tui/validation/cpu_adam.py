"""DeepSpeed's CPU Adam, which the parts with its optimizers need: compiled once, beside parts whose speed does not count."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from types import TracebackType

from so_tui.launch.helpers import Cancel, stream_tool
from so_tui.spec.errors import SoTuiError


class CpuAdam:
    """Compiles in a helper process, which takes one to three minutes unless it is cached. A context: what still compiles is ended."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "compile")
        self._cancel = Cancel()
        self._compiled: Future[object] | None = None

    def __enter__(self) -> CpuAdam:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cancel()
        self._thread.shutdown()

    def begin(self) -> None:
        """Compile from now on, if that has not begun."""
        self._begun()

    def wait(self, limit_s: float) -> None:
        """Wait until it is compiled. What DeepSpeed says against its own kernel is said by the run that needs it.

        Raises:
            SoTuiError: It takes longer, or the helper failed.
        """
        try:
            self._begun().result(limit_s)
        except FutureTimeout as error:
            raise SoTuiError(
                f"DeepSpeed's CPU Adam is not compiled after {limit_s:,.0f} s"
            ) from error

    def _begun(self) -> Future[object]:
        if self._compiled is None:
            self._compiled = self._thread.submit(
                lambda: list(stream_tool("build_ops", {}, self._cancel))
            )
        return self._compiled
