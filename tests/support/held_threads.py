"""Threads that begin or end late, as on a busy machine, for ``set_default_executor``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any


class HeldThreads(ThreadPoolExecutor):
    """Holds what it is given until it is released; then the newest begins first."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self.held: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.held.append((future, partial(work, *args, **kwargs)))
        return future

    def release(self) -> None:
        """Run everything that is held, one after the other, in another thread, and wait for it."""
        thread = threading.Thread(target=self._run_all)
        thread.start()
        thread.join()

    def _run_all(self) -> None:
        while self.held:
            future, work = self.held.pop()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:  # noqa: BLE001 - whoever waits for the result gets it
                    future.set_exception(error)


class LateThreads(ThreadPoolExecutor):
    """Works at once, but nobody hears that it is done until the results are released."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[tuple[Future[Any], Future[Any]]] | None = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done = super().submit(work, *args, **kwargs)
        if self._late is None:
            return done
        future: Future[Any] = Future()
        self._late.append((done, future))
        return future

    def release(self) -> None:
        """Give results as soon as there are any, from now on."""
        late, self._late = self._late or [], None
        for done, future in late:
            done.add_done_callback(partial(_pass_on, future))


def _pass_on(future: Future[Any], done: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())
