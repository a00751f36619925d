"""Measure a machine's rates, each in a process of its own. Answers with a line for each
measurement, then the figures.

Request: ``nodes`` [{"id", "cpus"}] (cores that this process may use), ``gpus`` [{"index", "cpus",
"rank_cpus"}] (the cores near the GPU, and those of its rank when all GPUs train). Answers:
``{"message"}`` lines, then ``{"rates", "done": true}`` with the fields of
``so_tui.plan.measured.Rates``. GPUs are numbered as by NVML.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from so_tui.spec import SoTuiError
from so_tui.units import thousands
from so_tui_trainer.tools.channel import Answer, serve

Fields = dict[str, Any]
"""An object within a request or an answer."""
Points = list[tuple[int, float]]
"""Numbers of cores, nodes or ranks, and a rate for each."""
_ADAM_PARAMETERS = 64_000_000
"""Parameters of a measurement at full size."""
_ADAM_BYTES = 18
"""Memory of a measurement per parameter."""
_SECONDS = 0.4
"""Length of one measurement."""
_LIMIT_S = 60.0
"""A measurement that takes longer has failed."""


def _work(request: Answer) -> Iterator[Answer]:
    """Measure everything that the request asks for.

    Yields:
        Messages, then the rates.
    """
    begun = time.monotonic()
    rates: Fields = {"measured": datetime.now(UTC).isoformat(timespec="seconds")}
    yield {"message": "compiling the CPU Adam kernel, unless it is cached"}
    gpus = request["gpus"]
    on_gpus = _gpus(gpus) if gpus else ()
    for answer in chain(_cpu(request["nodes"], gpus), on_gpus):
        rates |= answer.pop("rates", {})
        yield answer
    rates["seconds"] = round(time.monotonic() - begun, 1)
    yield {"rates": rates, "done": True}


def _cpu(nodes: Sequence[Fields], gpus: Sequence[Fields]) -> Iterator[Answer]:
    """Measure Adam on growing numbers of cores, on every node, and by several ranks together."""
    points: Points = []
    together: Points = []
    bandwidth: Points = []
    for node in nodes:
        cpus = node["cpus"]
        # Over all numbers of cores: on a busy host, all cores may be slower than half of them.
        best = fastest_step = 0.0
        # The first node gets a curve: few cores, where it rises, and the default shares of cores.
        has_curve = node is nodes[0]
        shares = (0, 0.25, 0.5, 0.7, 0.8, 0.9, 1) if has_curve else (0.5, 1)
        rounded = round if has_curve else math.ceil
        for count in sorted({max(1, rounded(len(cpus) * share)) for share in shares}):
            found = _adam(cpus[:count])
            best = max(best, *found.values())
            fastest_step = max(fastest_step, found["step_bytes_per_s"])
            if has_curve:
                # More cores than the memory can feed slow Adam down a little, but a rank need not
                # use all.
                points.append((count, fastest_step))
            cores = "1 core" if count == 1 else f"{count} cores"
            yield {
                "message": (
                    f"node {node['id']}: CPU Adam on {cores}: "
                    f"{found['step_bytes_per_s'] / 1e9:.1f} GB/s"
                )
            }
        bandwidth.append((node["id"], best))
    for ranks in _rank_counts(nodes, gpus):
        cpus = nodes[0]["cpus"]
        share = len(cpus) // ranks
        slowest = slowest_together(
            [cpus[rank * share : (rank + 1) * share] for rank in range(ranks)]
        )
        together.append((ranks, slowest))
        yield {
            "message": (
                f"node {nodes[0]['id']}: CPU Adam of {ranks} ranks together, {share} cores each: "
                f"{slowest / 1e9:.1f} GB/s each"
            )
        }
    rates = {
        "adam": points,
        "adam_together": together,
        "node_bytes_per_s": bandwidth,
    }
    yield {"message": "CPU measured", "rates": rates}


def _rank_counts(nodes: Sequence[Fields], gpus: Sequence[Fields]) -> tuple[int, ...]:
    """Return how many ranks may share the first node: 2, 4, ... up to the number of its GPUs,
    limited by its cores.
    """
    if not nodes:
        return ()
    cpus = set(nodes[0]["cpus"])
    near = sum(not gpu["cpus"] or not cpus.isdisjoint(gpu["cpus"]) for gpu in gpus)
    return _up_to(min(near, len(cpus)))


def _up_to(most: int) -> tuple[int, ...]:
    return tuple(sorted({count for count in (2, 4, 8, most) if 2 <= count <= most}))


def _adam(cpus: Sequence[int]) -> dict[str, float]:
    return _finish(_start_adam(cpus))


def slowest_together(shares: Sequence[Sequence[int]]) -> float:
    """Run several workers together, each on cores of its own.

    Args:
        shares: The cores of each worker.

    Returns:
        Bytes per second of the slowest.
    """
    answers = finish_all([_start_adam(cpus, together=len(shares)) for cpus in shares])
    return min(float(answer["step_bytes_per_s"]) for answer in answers)


def _start_adam(cpus: Sequence[int], together: int = 1) -> subprocess.Popen[str]:
    from superoffload import kernel, worker

    free = psutil.virtual_memory().free
    parameters = int(min(_ADAM_PARAMETERS, free / 8 / _ADAM_BYTES / together))
    request: Fields = {
        "worker": worker.__file__,
        "cpus": list(cpus),
        "parameters": parameters,
        # Longer, so that all of them overlap for most of it.
        "seconds": _SECONDS * (2 if together > 1 else 1),
    }
    script = Path(__file__).with_name("adam_rate.py")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_", "KMP_", "GOMP_"))
    }
    with kernel.opened(kernel.library()) as library:
        request["library"] = kernel.loadable(library)
        return _start(
            [sys.executable, "-I", "-S", str(script), json.dumps(request)], environment, library
        )


def _gpus(gpus: Sequence[Fields]) -> Iterator[Answer]:
    """Measure the first GPU by itself, then all GPUs together."""
    first = gpus[0]
    request = {"cpus": first["cpus"], "seconds": _SECONDS}
    rates = _finish(start_gpu(request, first["index"]))
    d2h, h2d = rates["down_bytes_per_s"] / 1e9, rates["up_bytes_per_s"] / 1e9
    yield {
        "message": (
            f"GPU {first['index']}: {thousands(round(rates['matrix_flops'] / 1e12))} TFLOPS, "
            f"{d2h:.0f} GB/s d2h, {h2d:.0f} GB/s h2d"
        ),
        "rates": rates,
    }
    yield from _attention(request, first["index"])
    if len(gpus) < 2:
        return
    # The processes meet in a file and on the loopback interface: a store with a port would listen
    # on every network.
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_RAS_ENABLE": "0"}
    with tempfile.TemporaryDirectory() as meeting:
        shared = {"ranks": len(gpus), "counts": _up_to(len(gpus)), "store": f"{meeting}/store"}
        children = [
            start_gpu(
                request | shared | {"cpus": gpu["rank_cpus"], "rank": rank},
                gpu["index"],
                **loopback,
            )
            for rank, gpu in enumerate(gpus)
        ]
        answers = finish_all(children)
    slowest = min(answer["peer_bytes_per_s"] for answer in answers)
    yield {
        "message": f"between {len(gpus)} GPUs: {slowest / 1e9:.0f} GB/s",
        "rates": {"peer_bytes_per_s": slowest},
    }
    together = answers[0]["small_layer_together"]
    times = ", ".join(
        f"{thousands(round(1e6 * seconds))} µs on {count}" for count, seconds in together
    )
    yield {
        "message": (
            f"layer launch overhead: {thousands(round(1e6 * rates['small_layer_s']))} µs on one "
            f"GPU, {times} together"
        ),
        "rates": {"small_layer_together": together},
    }


def _attention(request: Fields, gpu: int) -> Iterator[Answer]:
    """Measure attention in a process of its own. Plans do without it where a backend of others does
    not work.
    """
    try:
        rates = _finish(start_gpu(request | {"attention": True}, gpu))
    except SoTuiError as error:
        yield {"message": f"attention: {error}"}
        return
    for backend, found in rates["attention"]:
        speeds = ", ".join(
            f"{forward / 1e12:.0f} / {backward / 1e12:.0f} at {thousands(length)}"
            for length, forward, backward in found
        )
        yield {
            "message": (
                f"attention, {backend}, TFLOPS forward / backward by tokens of a document: {speeds}"
            )
        }
    yield {"message": "attention measured", "rates": rates}


def start_gpu(request: Fields, gpu: int, **environment: str) -> subprocess.Popen[str]:
    """Start a measurement of ``gpu_rates`` on the GPU with this index."""
    script = str(Path(__file__).with_name("gpu_rates.py"))
    visible = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(gpu)}
    return _start(
        [sys.executable, "-P", script, json.dumps(request)], os.environ | visible | environment
    )


def _start(
    argv: Sequence[str], environment: dict[str, str], *inherited: int
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        pass_fds=inherited,
    )


def finish_all(children: Sequence[subprocess.Popen[str]]) -> list[Fields]:
    """Return the last line of each child. If one fails, the others may wait for it and are killed.

    Raises:
        SoTuiError: A child failed or took too long.
    """
    with ThreadPoolExecutor(
        len(children)
    ) as threads:  # One each, so that no child blocks on a full pipe.
        answers = [threads.submit(_finish, child) for child in children]
        try:
            ended, _ = wait(answers, return_when=FIRST_EXCEPTION)
            for answer in ended:
                answer.result()
            return [answer.result() for answer in answers]
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()


def _finish(child: subprocess.Popen[str]) -> Fields:
    """Return the last line of a child.

    Raises:
        SoTuiError: The child failed, with what it wrote to stderr, or took too long.
    """
    try:
        out, errors = child.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        child.kill()
        child.communicate()
        raise SoTuiError(f"a measurement took longer than {_LIMIT_S:.0f} s") from error
    if child.returncode != 0:
        raise SoTuiError(
            "a measurement failed: "
            + (errors.strip().rpartition("\n")[2] or f"exit code {child.returncode}")
        )
    result: Fields = json.loads(out.strip().rpartition("\n")[2])
    return result


if __name__ == "__main__":
    sys.exit(serve(_work))
