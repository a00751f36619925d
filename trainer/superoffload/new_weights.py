"""New weights on their way from the Adam worker to the layers that use them: which have arrived, and who has waited for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from superoffload.meter import LayerWait, Meter
from superoffload.transfers import Event, Mark, Stream, Transfer, Transfers


class NewWeights:
    """The new weights of one rank's CPU sub-groups.

    The worker client's thread calls ``arrive``, the training thread all else.

    Args:
        transfers: Makes streams wait.
        meter: Is told of waits.
        wait: Blocks until a function that it is given returns true, which only a result of the worker can bring about.
    """

    def __init__(
        self, transfers: Transfers, meter: Meter, wait: Callable[[Callable[[], bool]], None]
    ) -> None:
        self._transfers, self._meter, self._wait = transfers, meter, wait
        self._arrived: dict[int, Transfer | None] = {}
        """By sub-group: the copy of its new weights to the GPU; None where they stay in host memory."""
        self._unawaited: set[int] = set()
        """Sub-groups for whose new weights the computing stream has not waited yet."""
        self._unused: set[int] = set()
        """Sub-groups whose new weights no layer has used yet."""
        self._computing: Stream = None
        """The stream that computes forward, while a wait is measured."""
        self._blocked: Mark | None = None
        """When the host had last waited for the worker, in that stream's time."""

    def expect(self, index: int) -> None:
        """Note that a sub-group will have other weights than those that arrived last."""
        self._arrived.pop(index, None)
        self._unawaited.add(index)
        self._unused.add(index)

    def arrive(self, index: int, transfer: Transfer | None) -> None:
        """Note that the worker has made a sub-group's new weights, and their copy to the GPU unless they stay in host memory."""
        self._arrived[index] = transfer

    def copied(self, index: int) -> list[Event]:
        """Return the event after which a sub-group's new weights have been copied to the GPU; none where they are not copied."""
        transfer = self._arrived.get(index)
        return [transfer.done] if transfer else []

    def wait_for(self, sub_groups: Iterable[int] | None = None) -> None:
        """Make the current stream wait for the new weights of these sub-groups, or of all. Blocks until the worker has made them."""
        waiting = sorted(
            self._unawaited if sub_groups is None else self._unawaited.intersection(sub_groups)
        )
        late = [index for index in waiting if index not in self._arrived]
        for index in waiting:
            self._wait(lambda index=index: index in self._arrived)  # type: ignore[misc]
            if transfer := self._arrived[index]:
                self._transfers.wait_event(transfer.done)
        self._unawaited.difference_update(waiting)
        if late:
            self._blocked = self._transfers.mark(self._computing)

    @contextmanager
    def measuring_wait(self, sub_groups: Iterable[int]) -> Iterator[None]:
        """Measure how long the current stream has nothing to compute within the context, because of new weights.

        They are those of ``sub_groups``, which it uses next, and all that the host waits for: it queues nothing meanwhile.
        """
        used = self._unused.intersection(sub_groups)
        if not used and not self._unawaited:  # else marks would cost time in every layer
            yield
            return
        self._computing, self._blocked = self._transfers.stream(), None
        begin = self._transfers.mark()
        yield
        if used or self._blocked is not None:
            updated = [transfer.end for index in used if (transfer := self._arrived.get(index))]
            if self._blocked is not None:
                updated.append(self._blocked)
            self._meter.current.layer_waits.append(
                LayerWait(begin, self._transfers.mark(), tuple(updated))
            )
        self._unused -= used
        self._computing = None
