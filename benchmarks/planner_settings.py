"""What ``planner.py`` measures, on which machines, and how long each setting takes there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from so_tui.machine.types import Gpu, Machine, Mpam, NumaNode, Software
from so_tui.plan.plan import Plan

SHAPES: dict[str, dict[str, int | bool]] = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "1.7b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4b": {},
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
"""What of the Qwen3 4B shape each size changes."""


@dataclass(frozen=True)
class Setting:
    size: str
    mode: str
    gpus: int
    micro_batch: int = 4
    ratio: float = 0.9
    accumulation: int = 1
    kept: str = "full"
    clipping: float = 1.0
    cores: float = 0.9
    states: str = "fp32"

    @property
    def key(self) -> str:
        values = asdict(self)
        if self.states == "fp32":
            del values["states"]  # rows from before there were other formats keep their keys
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


OFFLOAD, ZERO, GPU = "superoffload", "zerooffload", "gpu"
SETS: dict[str, tuple[Setting, ...]] = {
    "fit": (
        Setting("1.7b", OFFLOAD, 1),
        Setting("1.7b", GPU, 1, micro_batch=2, kept="none"),
        Setting("1.7b", ZERO, 1, ratio=1.0),
        Setting("4b", OFFLOAD, 1, ratio=0.3),
        Setting("4b", OFFLOAD, 1, micro_batch=2, ratio=0.7, kept="selective", clipping=0.0),
        Setting("4b", GPU, 1, micro_batch=8),
        Setting("4b", ZERO, 1, micro_batch=2, ratio=0.5),
        Setting("4b", OFFLOAD, 1, micro_batch=8, ratio=1.0),
        Setting("8b", OFFLOAD, 1, micro_batch=2, ratio=0.3, clipping=0.0),
        Setting("4b", GPU, 2, kept="selective"),
        Setting("8b", GPU, 2, micro_batch=2),
        Setting("1.7b", OFFLOAD, 2, ratio=1.0, kept="none", accumulation=2),
        Setting("4b", ZERO, 2, ratio=0.5),
        Setting("4b", OFFLOAD, 2, micro_batch=8),
        Setting("8b", OFFLOAD, 2, micro_batch=2, ratio=0.7, kept="selective", clipping=0.0),
    ),
    "states": (
        Setting("4b", OFFLOAD, 1),
        Setting("4b", OFFLOAD, 1, states="bf16-moments"),
        Setting("4b", OFFLOAD, 1, states="int8-moments"),
        Setting(
            "1.7b",
            OFFLOAD,
            1,
            micro_batch=2,
            ratio=1.0,
            kept="selective",
            accumulation=2,
            states="int8-moments",
        ),
    ),
    "check": (
        Setting("4b", OFFLOAD, 1),
        Setting("1.7b", GPU, 1),
        Setting("8b", OFFLOAD, 1, micro_batch=2, ratio=0.5),
        Setting("1.7b", OFFLOAD, 1, micro_batch=8, ratio=1.0, kept="selective", clipping=0.0),
        Setting("8b", OFFLOAD, 1, micro_batch=2, ratio=0.7, kept="selective", accumulation=2),
        Setting("4b", ZERO, 1, micro_batch=8, ratio=0.7),
        Setting("1.7b", ZERO, 1, ratio=0.3, kept="selective"),
        Setting("8b", GPU, 2),
        Setting("4b", OFFLOAD, 2, micro_batch=2, ratio=0.7, kept="none"),
        Setting("8b", OFFLOAD, 2, micro_batch=2, ratio=0.3, clipping=0.0),
        Setting("1.7b", OFFLOAD, 2, micro_batch=8, ratio=0.5, kept="selective", accumulation=2),
        Setting("8b", ZERO, 2, micro_batch=2, ratio=0.5),
        Setting("1.7b", ZERO, 2, micro_batch=8, ratio=0.9, kept="none"),
        Setting("4b", OFFLOAD, 4, micro_batch=2, ratio=0.5, kept="selective"),
        Setting("8b", GPU, 4),
        Setting("8b", OFFLOAD, 4, micro_batch=2, ratio=0.3, clipping=0.0),
        Setting("1.7b", OFFLOAD, 4, micro_batch=8, ratio=1.0, kept="none"),
        Setting("8b", OFFLOAD, 4, micro_batch=2, ratio=0.9, kept="selective"),
        Setting("4b", GPU, 4, micro_batch=2, kept="none"),
        Setting("1.7b", ZERO, 4, micro_batch=2, ratio=1.0, kept="none"),
        Setting("4b", OFFLOAD, 4, micro_batch=2, ratio=0.7, clipping=0.0),
        Setting("8b", ZERO, 4, micro_batch=2, ratio=0.5),
    ),
}
"""Small on the host where nothing else is asked of a setting: pages of states are what starting
waits for.
"""

WITH_LESS = "recommended with {:g} GiB"
"""Label of what is recommended for a GPU with so much memory."""
START_S = 38.0
"""Processes, imports, the data's cache, the first kernels, and the end, on an H200 host."""
_WEIGHTS_BYTES_PER_S = 1.0e9
"""A rank's weights through the host into DeepSpeed's flat array."""
_STATES_BYTES_PER_S = 2.6e9
"""Optimizer states on the host, made and given back again."""


def seconds_of(plan: Plan, steps: int) -> float:
    """About how long a run of so many steps takes from its start to its end, by what three runs
    took.
    """
    named = {term.name: term.bytes for term in plan.breakdown}
    host = sum(
        term.bytes
        for term in plan.breakdown
        if term.location == "node" and term.confidence == "exact"
    )
    return (
        START_S
        + named["weights"] / _WEIGHTS_BYTES_PER_S
        + host / _STATES_BYTES_PER_S
        + steps * (plan.step_s or 0.0)
    )


def h200_host(gpus: int) -> Machine:
    """A host with so many H200s, for planning without one: 16 cores and 126 GiB of usable memory
    for each GPU, one NUMA node.
    """
    cpus = tuple(range(16 * gpus))
    memory = 126 * 2**30 * gpus
    name = "NVIDIA H200"
    return Machine(
        hostname=f"h200-x{gpus}",
        cpu_name="x86",
        architecture="x86_64",
        page_size_bytes=4096,
        online_cpus=cpus,
        allowed_cpus=cpus,
        host_memory_bytes=memory,
        shm_total_bytes=memory,
        mpam=Mpam(state="off", evidence=""),
        software=Software(python="3.12", torch="2.11.0"),
        numa_nodes=(NumaNode(id=0, kind="cpu", cpus=cpus, memory_total_bytes=memory),),
        gpus=tuple(
            Gpu(
                index=index,
                name=name,
                pci_bus_id="",
                numa_node=0,
                cpus=cpus,
                memory_total_bytes=143_771 * 2**20,
            )
            for index in range(gpus)
        ),
    )
