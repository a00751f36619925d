"""The sub-groups whose states are on the CPU: their shared memory, what their Adam worker was told, and what has come back.

One exchange array per sub-group carries the gradient down and the new weights back. Who may write it when:

    gradient arrives    after the weights of the step before have left it, or the worker has added up the last micro-step's gradient
    worker              once the gradient is there
    weights leave       once the worker is done
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from superoffload import kernel, worker
from superoffload.arena import Arena
from superoffload.meter import Meter
from superoffload.norm import non_finite
from superoffload.sub_groups import SubGroup
from superoffload.transfers import Copy, Done, Event, Transfers
from superoffload.worker_client import WorkerClient


class CpuStates:
    """With no sub-group on the CPU there is neither memory nor worker, and nothing to wait for.

    Raises OffloadError when there is no compiler for the kernel, or not enough memory; nothing is left behind then.
    """

    def __init__(
        self,
        sub_groups: Sequence[SubGroup],
        transfers: Transfers,
        meter: Meter,
        *,
        accumulate: bool,
        cpus: Sequence[int],
        watchdog_timeout_s: float,
    ) -> None:
        self._sub_groups = sub_groups
        self._transfers = transfers
        self._meter = meter
        self.indices = [index for index, group in enumerate(sub_groups) if not group.on_gpu]
        self.in_order_of_use = sorted(self.indices, key=lambda index: sub_groups[index].first_use)
        """Norms, say, are few, last in the list, and wanted by the very first layer."""
        self.slot = {index: slot for slot, index in enumerate(self.indices)}
        """Sub-group -> its place in the arena."""
        self.squares: dict[int, float] = {}
        """Of the gradients that the worker has added up or stepped with, as far as it has said so."""
        self._beginning: set[int] = set()
        self._accumulating: set[int] = set()
        """Sub-groups whose exchange the worker is still reading."""
        self._pending: set[int] = set()
        """Sub-groups whose new weights the computing stream has not waited for yet."""
        self._landed: dict[int, Event] = {}
        """When the copy of a sub-group's new weights is done."""
        self._arena: Arena | None = None
        self._link: WorkerClient | None = None
        if self.indices:
            try:
                self._start(accumulate, cpus, watchdog_timeout_s)
            except BaseException:
                self.close()
                raise

    @property
    def worker_pid(self) -> int | None:
        return self._link.process.pid if self._link else None

    def check(self) -> None:
        """Raises what has gone wrong with the worker."""
        if self._link:
            self._link.check()

    def place(self, index: int, member: int, values: torch.Tensor) -> list[Copy]:
        """The copies that bring a gradient into the exchange, to be made when ``readers`` are done with it."""
        if index in self._accumulating:  # it was told to a whole forward ago
            self._wait(lambda: index not in self._accumulating)
        exchange = self._exchange(index)
        begin, end = self._sub_groups[index].span(member)
        after = begin + values.numel()
        copies = [(exchange[begin:after], values.to(exchange.dtype))]
        if after < end:  # the last rank's padding still holds weights
            copies.append((exchange[after:end], values.new_zeros(end - after, dtype=exchange.dtype)))
        return copies

    def readers(self, index: int) -> list[Event]:
        """When the weights of the step before have left the exchange."""
        return [self._landed[index]] if index in self._landed else []

    def accumulate(self, index: int, step: int, *, first: bool, after: Event) -> None:
        """Has the worker add the gradient in the exchange to the accumulated one, or begin a new sum with it."""
        self._accumulating.add(index)
        self._send(worker.Command(worker.Operation.ACCUMULATE, self.slot[index], step, first=int(first)), after)

    def step(self, index: int, command: worker.Command, after: Event) -> None:
        """Has the worker do what ``command`` says, a step of this sub-group."""
        self._landed.pop(index, None)
        self.squares.pop(index, None)
        self._pending.add(index)
        self._send(command, after)

    def wait_for_accumulation(self) -> None:
        if self.indices:
            self._wait(lambda: not self._accumulating)

    def wait_for_steps(self) -> None:
        """Until the worker is done with all sub-groups."""
        if self.indices:
            self._wait(lambda: len(self.squares) == len(self._landed) == len(self.indices))

    def wait_for_weights(self, sub_groups: Iterable[int] | None = None) -> None:
        """Lets the current stream wait for the new weights of these sub-groups, or all; blocks until the worker is done with them."""
        waiting = sorted(self._pending if sub_groups is None else self._pending.intersection(sub_groups))
        if not waiting:
            return
        begin = self._transfers.mark()
        for index in waiting:
            self._wait(lambda index=index: index in self._landed)  # type: ignore[misc]
            self._transfers.join(self._landed[index])
        self._pending.difference_update(waiting)
        self._meter.current.landing.append((begin, self._transfers.mark()))

    def master(self, index: int) -> torch.Tensor:
        assert self._arena is not None
        return self._arena.master(self.slot[index])

    def moments(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._arena is not None
        return self._arena.first_moment(self.slot[index]), self._arena.second_moment(self.slot[index])

    def close(self) -> None:
        """Ends the worker and gives the memory back. Safe to call twice."""
        if self._link:
            self._link.close()
        if self._arena:
            device = self._sub_groups[0].weights.device
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # no copy may be under way when its pages are unlocked
            self._arena.close()

    def _start(self, accumulate: bool, cpus: Sequence[int], watchdog_timeout_s: float) -> None:
        library = kernel.library()
        weights = [self._sub_groups[index].weights for index in self.indices]
        page_lock = weights[0].device.type == "cuda"
        self._arena = Arena([flat.numel() for flat in weights], weights[0].dtype, accumulate=accumulate, page_lock=page_lock)
        self._link = WorkerClient(self._arena, cpus, library, self._transfers.attach, self._on_result, watchdog_timeout_s)
        self._begin_all()  # the worker's many threads are the first to touch the pages
        self._arena.lock_pages()
        for index in self.indices:
            self._exchange(index).copy_(self._sub_groups[index].weights)
        self._begin_all()

    def _begin_all(self) -> None:
        self._beginning = set(self.indices)
        for index in self.indices:
            self._send(worker.Command(worker.Operation.BEGIN, self.slot[index]), Done())
        self._wait(lambda: not self._beginning)

    def _on_result(self, result: worker.Result) -> None:
        """In the link's thread."""
        index = self.indices[result.sub_group]
        if result.operation == worker.Operation.BEGIN:
            self._beginning.discard(index)
            return
        self._meter.current.adam_busy_s += result.seconds
        self.squares[index] = result.sum_of_squares
        if result.operation == worker.Operation.ACCUMULATE:
            self._accumulating.discard(index)
            return
        if not math.isfinite(result.sum_of_squares):
            raise non_finite(self._sub_groups, index, result.step, poisoned=True)
        transfer = self._transfers.weights_to_gpu(self._sub_groups[index].weights, self._exchange(index))
        self._meter.current.to_gpu.append(transfer)
        self._landed[index] = transfer.done

    def _exchange(self, index: int) -> torch.Tensor:
        assert self._arena is not None
        return self._arena.exchange(self.slot[index])

    def _send(self, command: worker.Command, after: Event) -> None:
        assert self._link is not None
        self._link.submit(command, after)

    def _wait(self, ready: Callable[[], bool]) -> None:
        assert self._link is not None
        begin = time.perf_counter()
        self._link.wait(ready)
        self._meter.current.host_wait_s += time.perf_counter() - begin
