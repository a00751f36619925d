"""Python's garbage collection during training."""

from __future__ import annotations

import gc
import weakref

from so_tui_trainer import session


class Knot:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_what_was_loaded_is_never_looked_at_again_and_garbage_is_not_kept() -> None:
    loaded, garbage = Knot(), Knot()
    gone = weakref.ref(garbage)
    del garbage
    try:
        session.freeze_garbage()
        assert gone() is None
        assert not any(each is loaded for each in gc.get_objects())
        later = Knot()
        assert any(each is later for each in gc.get_objects())
    finally:
        gc.unfreeze()
