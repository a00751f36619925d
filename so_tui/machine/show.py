"""Render a Machine with rich, to read well at 80 columns."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from rich.tree import Tree as RichTree

from so_tui.machine.host import cpu_ranges
from so_tui.machine.known import Description
from so_tui.machine.types import Gpu, Machine, NumaNode, Software
from so_tui.trust.text import printable_line
from so_tui.units import GIB, memory_size, page_size, plural


def render(machine: Machine) -> RenderableType:
    """Render the machine: the topology (nodes, cores, memory, GPUs), then software and notes."""
    parts: list[RenderableType] = [tree_of(machine), Text()]
    if machine.live:
        parts += [_software(machine.software), Text()]
    parts += [Text.assemble(("· ", "cyan"), printable_line(note)) for note in machine.notes]
    return Group(*parts)


def render_described(machines: Mapping[str, Description]) -> RenderableType:
    """Render the machines that are known by name."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, description in machines.items():
        memory = memory_size(description.nodes * description.node_mib << 20)
        table.add_row(
            Text(name, style="bold"),
            description.title,
            f"{memory} of host memory",
            Text(description.source, style="dim"),
        )
    told = (
        "so-tui --machine NAME plans for one of them, and so do plan, doctor and run --dry-run. "
        "None was measured."
    )
    return Group(table, Text(), Text(told, style="dim"))


def tree_of(machine: Machine, *, distances: bool = False) -> RichTree:
    """Return the host as a tree of texts: nodes, cores, memory, GPUs and their own memory nodes."""
    tree = RichTree(_title(machine), guide_style="dim")
    own = {gpu.memory_node for gpu in machine.gpus}
    branches: dict[int | None, RichTree] = {}
    for node in machine.cpu_nodes:
        branches[node.id] = tree.add(_node_line(node, machine))
    # Those of no node come after the nodes.
    for gpu in sorted(machine.gpus, key=lambda gpu: gpu.numa_node not in branches):
        _add_gpu(branches.get(gpu.numa_node), tree, gpu, machine)
    for node in machine.cpu_nodes if distances else ():
        if node.distances:
            between = " ".join(map(str, node.distances))
            branches[node.id].add(Text.assemble(("distances  ", "dim"), between))
    for node in machine.numa_nodes:
        if node.kind == "gpu-memory" and node.id not in own:
            size = memory_size(node.memory_total_bytes)
            tree.add(Text.assemble((f"node {node.id}", "bold"), f"  memory without CPUs, {size}"))
    if empty := [node.id for node in machine.numa_nodes if node.kind == "empty"]:
        told = f"{len(empty)} empty nodes ({cpu_ranges(empty)}), reserved for GPU partitions"
        tree.add(Text(told, style="dim"))
    if not machine.gpus:
        tree.add(Text("no GPU", style="dim"))
    return tree


def _title(machine: Machine) -> Text:
    facts = [machine.cpu_name, machine.architecture, plural(len(machine.online_cpus), "core")]
    second = [f"{memory_size(machine.host_memory_bytes)} of host memory"]
    if machine.memory_limit_bytes is not None:
        second.append(f"limited to {memory_size(machine.memory_limit_bytes)}")
    if machine.shm_total_bytes is not None:
        second.append(f"/dev/shm {memory_size(machine.shm_total_bytes)}")
    if machine.page_size_bytes:
        second.append(f"{page_size(machine.page_size_bytes)} pages")
    if machine.network is not None:
        second.append(f"network {machine.network.gbit_per_s:g} Gb/s")
    second.append(f"MPAM {machine.mpam.state}")
    return Text.assemble(
        (machine.label, "bold"),
        "  ",
        printable_line(" · ".join(facts)),
        "\n",
        (" · ".join(second), "dim"),
    )


def _node_line(node: NumaNode, machine: Machine) -> Text:
    allowed = set(node.cpus) & set(machine.allowed_cpus)
    fewer = len(allowed) < len(node.cpus)
    return Text.assemble(
        (f"node {node.id}", "bold"),
        f"  {plural(len(node.cpus), 'core')} {cpu_ranges(node.cpus)} · {_memory(node)}",
        (f" · may use {cpu_ranges(allowed) or 'none'}" if fewer else "", "yellow"),
    )


def _add_gpu(branch: RichTree | None, tree: RichTree, gpu: Gpu, machine: Machine) -> None:
    """Add a GPU to its node's branch, or to the tree if its node is unknown."""
    facts, apart = [gpu.name, gpu.pci_bus_id], not gpu.shares_memory
    if gpu.memory_total_bytes is not None and apart:
        facts.append(memory_size(gpu.memory_total_bytes))
    kinds = (
        ("NVLink-C2C", gpu.c2c),
        ("partitioned" if gpu.vendor == "amd" else "MIG", gpu.mig),
        ("one memory with this node", gpu.shares_memory),
    )
    facts += [text for text, shown in kinds if shown]
    if gpu.compute_mode not in (None, "Default"):
        facts.append(str(gpu.compute_mode))
    name, described = (f"GPU {gpu.index}", "bold green"), printable_line(" · ".join(facts))
    unknown = ("", "") if branch else (" · NUMA node unknown", "yellow")
    leaf = (branch or tree).add(Text.assemble(name, "  ", described, unknown))
    if gpu.memory_node is not None and apart:
        memory = f"  its own memory, {_memory(machine.node(gpu.memory_node))}"
        leaf.add(Text.assemble((f"node {gpu.memory_node}", "bold"), memory))


def _memory(node: NumaNode) -> str:
    parts = [memory_size(node.memory_total_bytes)]
    if node.memory_free_bytes is not None:
        parts.append(f"{memory_size(node.memory_free_bytes)} free")
    if node.file_cache_bytes is not None and node.file_cache_bytes >= GIB:
        parts.append(f"{memory_size(node.file_cache_bytes)} file cache")
    return ", ".join(parts)


def _software(software: Software) -> Table:
    table = Table.grid(Column(style="dim"), "", padding=(0, 2))
    absent = Text("not installed", style="dim")
    for name, version in versions_of(software).items():
        table.add_row(name, printable_line(version) if version is not None else absent)
    return table


def versions_of(software: Software) -> dict[str, str | None]:
    """Return the versions of what a run needs, by name; None for what is not installed."""
    trial = {True: "", False: ", but fails here", None: ""}[software.numactl_works]
    return {
        "python": software.python,
        "torch": software.torch and f"{software.torch} ({software.torch_built_for or 'CPU only'})",
        "deepspeed": software.deepspeed,
        "transformers": software.transformers,
        "datasets": software.datasets,
        "flash-attn": software.flash_attn,
        "flash-attn 4": software.flash_attn_4,
        "numactl": software.numactl and software.numactl + trial,
        "AMD driver" if software.amd_driver else "NVIDIA driver": software.amd_driver
        or software.nvidia_driver,
        "CUDA toolkit": software.cuda_toolkit,
        "compiler": software.compiler,
        "ninja": software.ninja,
    }
