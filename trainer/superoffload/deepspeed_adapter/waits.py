"""Makes ZeRO-3 wait for new weights where it is about to use them, by replacing functions of its objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module

from superoffload.deepspeed_adapter import streaming
from superoffload.optimizer import SuperOffload


class Waits:
    """The functions that were replaced for one optimizer.

    Args:
        core: The rank's optimizer.
        sub_group: By DeepSpeed's id of a trainable parameter, its sub-group.
    """

    def __init__(self, core: SuperOffload, sub_group: Mapping[int, int]) -> None:
        self._core, self._sub_group = core, sub_group
        self._originals: list[tuple[Any, str, Any]] = []

    def before_all_gather(self, module: Any) -> None:
        """Wrap the two functions with which DeepSpeed all-gathers a parameter, so that both wait for its new weights and find them."""

        def waiting(function: Callable[..., Any], own: Any) -> Callable[..., Any]:
            def all_gather(param_list: Any = None, *arguments: Any, **keywords: Any) -> Any:
                parameters = [own] if param_list is None else list(param_list)
                self._core.wait_for_weights(self._sub_groups(parameters))
                return streaming.gather(function, parameters, *arguments, **keywords)

            return all_gather

        for parameter in module.parameters():
            for name in ("all_gather", "all_gather_coalesced"):
                self._replace(parameter, name, waiting(getattr(parameter, name), parameter))

    def before_layers(self, coordinator: Any) -> None:
        """Wrap the function with which DeepSpeed makes the computing stream wait for a layer's weights, to measure these waits.

        On a GPU the all-gathers, and their waits, are in a stream of their own: how long they take says nothing about the computation.
        """
        fetch: Callable[[Any, bool], None] = coordinator.fetch_sub_module
        sub_groups: dict[int, frozenset[int]] = {}

        def measured_fetch(current_submodule: Any, forward: bool) -> None:
            key = current_submodule.ds_id
            if key not in sub_groups:
                sub_groups[key] = self._sub_groups(
                    iter_params(current_submodule, recurse=z3_leaf_module(current_submodule))
                )
            with self._core.measuring_wait(sub_groups[key]):
                fetch(current_submodule, forward)

        self._replace(coordinator, "fetch_sub_module", measured_fetch)

    def restore(self) -> None:
        """Put DeepSpeed's own functions back. Safe to call twice."""
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals.clear()

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, function)

    def _sub_groups(self, parameters: Any) -> frozenset[int]:
        return frozenset(
            self._sub_group[parameter.ds_id]
            for parameter in parameters
            if parameter.ds_id in self._sub_group
        )
