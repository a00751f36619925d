"""Measure copies between each GPU and the memory of each NUMA node, alone and all GPUs at once.

Request: ``nodes`` [{"id", "cpus"}], ``gpus`` [{"index", "node"}] (the nearest node; None where that
is not known). Answers: ``{"message"}`` lines, then ``{"copies", "done": true}`` with the
fields of ``so_tui.validation.report.CopyRates``. GPUs are numbered as by NVML.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from so_tui_trainer.tools.calibrate import finish_all, start_gpu
from so_tui_trainer.tools.channel import Answer, serve

_SECONDS = 0.2
"""Length of one measurement."""


def _work(request: Answer) -> Iterator[Answer]:
    """Measure every pair, then all GPUs together, each with its nearest node."""
    nodes, gpus, found = request["nodes"], request["gpus"], []
    for gpu in gpus:
        for node in nodes:
            found += _together([(gpu["index"], node)])
            yield {
                "message": (
                    f"GPU {gpu['index']} and node {node['id']}: "
                    f"{found[-1]['pinned_d2h'] / 1e9:.0f} GB/s d2h"
                )
            }
    if len(gpus) > 1:
        near = {node["id"]: node for node in nodes}
        found += _together([(gpu["index"], near.get(gpu["node"], nodes[0])) for gpu in gpus])
        yield {
            "message": (
                f"all {len(gpus)} GPUs at once: {found[-1]['pinned_d2h'] / 1e9:.0f} GB/s d2h each"
            )
        }
    yield {"copies": found, "done": True}


def _together(pairs: list[tuple[int, Answer]]) -> list[Answer]:
    shared = {"seconds": _SECONDS, "copies": True}
    children = [start_gpu(shared | {"cpus": node["cpus"]}, index) for index, node in pairs]
    return [
        {
            "node": node["id"],
            "gpu": index,
            "all_at_once": len(pairs) > 1,
            "pinned_d2h": answer["down_bytes_per_s"],
            "pinned_h2d": answer["up_bytes_per_s"],
            "pageable_d2h": answer["pageable_d2h_bytes_per_s"],
            "pageable_h2d": answer["pageable_h2d_bytes_per_s"],
        }
        for (index, node), answer in zip(pairs, finish_all(children), strict=True)
    ]


if __name__ == "__main__":
    sys.exit(serve(_work))
