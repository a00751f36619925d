"""Attacks n6 to n12: what authors of models, data, machine files, presets and runs may write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.attacks.attack import Verdict, attack, judged
from benchmarks.attacks.foreign import SECRET, exports
from benchmarks.attacks.limits import bounded
from benchmarks.attacks.stage import Content, Stage, cases, changed, read, write

_ROW = {"text": SECRET}
_LAST = 253402300800.0
"""The first second that has no date: of the year 10,000."""
_CONSUMED = ("data", "tiny", "--set")


def _private_tokenizer(stage: Stage) -> Path:
    """Make a private tokenizer for the owner, with a private word in it."""
    tree = read(stage.ground.tokenizer / "tokenizer.json")
    last = max(token["id"] for token in tree["added_tokens"])
    tree["added_tokens"].append(tree["added_tokens"][-1] | {"id": last + 1000, "content": SECRET})
    return stage.private("private.json", tree)


def _naming(stage: Stage, *, own: bool = False, name: str = "tokenizer", **changes: Any) -> Path:
    """Make a tokenizer of the attacker's whose tokenizer_config.json has further keys.

    Args:
        stage: The stage.
        own: Whether it has a tokenizer.json of its own.
        name: The name of its folder.
        changes: The keys.
    """
    folder = stage.model(name)
    changed(folder / "tokenizer_config.json", **changes)
    if not own:
        (folder / "tokenizer.json").unlink()
    return folder


def _exports(stage: Stage, tokenizer: Path) -> Verdict:
    run = stage.run_of(stage.other, "run", tokenizer=tokenizer)
    return exports(stage, run)


@attack("n6a", "tokenizer_config.json of others names a private tokenizer_file: export")
def _(stage: Stage) -> Verdict:
    private = _private_tokenizer(stage)
    return _exports(stage, _naming(stage, own=True, tokenizer_file=private))


@attack("n6b", "the same without a tokenizer.json of its own, and by a relative path")
def _(stage: Stage) -> Verdict:
    named = os.path.relpath(_private_tokenizer(stage), stage.scratch / "tokenizer")
    return _exports(stage, _naming(stage, tokenizer_file=named, fast_tokenizer_files=[named]))


@attack("n6c", "vocab_file and merges_file of a tokenizer_config.json name private files")
def _(stage: Stage) -> Verdict:
    vocabulary = {chr(33 + place): place for place in range(94)} | {SECRET: 94, "<|eos|>": 95}
    names: dict[str, Any] = {
        "vocab_file": stage.private("vocab.json", vocabulary),
        "merges_file": stage.private("merges.txt", "#version: 0.2\n"),
    }
    return _exports(stage, _naming(stage, tokenizer_class="GPT2Tokenizer", **names))


@attack("n6d", "a tokenizer_config.json names a pipe, or a file without end")
def _(stage: Stage) -> Verdict:
    bad = []
    for named in (str(write(stage.scratch / "pipe", None)), "/dev/zero"):
        name = f"for{Path(named).name}"
        folder = _naming(stage, name=name, tokenizer_file=named, vocab_file=named)
        bad += stage.complaints(55, *_CONSUMED, f"model.tokenizer={folder}")
    return judged(bad, bad, "both are refused")


@attack("n7a", "README.md of a data folder names files outside")
def _(stage: Stage) -> Verdict:
    private = stage.private("private.jsonl", _ROW)
    readme = f"---\nconfigs:\n- config_name: default\n  data_files: {private}\n---\n"
    folder = stage.foreign("data", {"a.jsonl": {"text": "a row"}, "README.md": readme})
    said = stage.said(*_CONSUMED, f"data.source={folder}")
    return judged(SECRET in said, "`data` shows the private row", said)


@attack("n7b", "a Parquet file says that a column has pictures, whose paths are opened")
def _(stage: Stage) -> Verdict:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pipe = write(stage.scratch / "pipe", None)
    pipe.chmod(0o666)
    bad = []
    for kind in ("Image", "Audio", "Pdf", "Video"):
        features = {"text": {"dtype": "string", "_type": "Value"}, "x": {"_type": kind}}
        picture = pa.array(
            [{"bytes": None, "path": str(pipe)}],
            pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        )
        table = pa.table({"text": ["a row"], "x": picture}).replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": features}})}
        )
        folder = stage.foreign(kind, {"note": ""})
        pq.write_table(table, folder / "a.parquet")
        bad += stage.complaints(60, *_CONSUMED, f"data.source={folder}")
    return judged(bad, bad, "none is opened")


@attack("n7c", "rows with NaN, big integers, the same key twice, dates far off")
def _(stage: Stage) -> Verdict:
    rows = (
        '{"text": NaN}',
        '{"text": 1e999}',
        '{"text": ' + "9" * 5000 + "}",
        '{"text": "a", "text": "b"}',
        '{"text": "\\ud800"}',
        '{"text": "x\\u0000y"}',
        '{"messages": [{"role": "user", "role": "assistant", "content": {"a": 1}}]}',
        '{"messages": {"0": 1}}',
        '{"text": ["a", {"b": null}]}',
        '{"conversations": 7}',
    )
    bad = []
    for number, row in enumerate(rows):
        folder = stage.foreign(f"d{number}", {"a.jsonl": f"{row}\n"})
        bad += stage.complaints(60, *_CONSUMED, f"data.source={folder}")
    return judged(bad, bad, "all are rows or refused by name")


@attack("n8a", "model.safetensors.index.json names a private file as a part: generate, export")
def _(stage: Stage) -> Verdict:
    model = stage.exported()
    weights = next(model.glob("*.safetensors"))
    content = weights.read_bytes()
    private = stage.private("private.safetensors", content)
    tensors = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    weights.unlink()
    said, succeeded = "", []
    for named in (str(private), os.path.relpath(private, model)):
        parts = dict.fromkeys(tensors.keys() - {"__metadata__"}, named)
        index = {"metadata": {"total_size": len(content)}, "weight_map": parts}
        stage.foreign("model", {"model.safetensors.index.json": index})
        victim = stage.answered(model)
        said = victim.text
        succeeded += [] if victim.code else [named]
    return judged(succeeded, f"it loaded the private weights {succeeded}", said)


@attack("n8b", "the weights of a foreign model are a link to private ones: generate")
def _(stage: Stage) -> Verdict:
    model = stage.exported()
    weights = next(model.glob("*.safetensors"))
    write(weights, stage.private("private.safetensors", weights.read_bytes()))
    stage.other.give(model)
    victim = stage.answered(model)
    return judged(not victim.code, "it loaded the private weights", victim.text)


@attack("n9", "a link of others in a shared HF_HOME to a private chat template: export")
def _(stage: Stage) -> Verdict:
    home = stage.shared("huggingface", 0o2777)
    model = home / "hub" / "models--people--own"
    snapshot = stage.model(model / "snapshots" / ("a" * 40))
    write(model / "refs/main", "a" * 40)
    write(snapshot / "chat_template.jinja", stage.private("private.txt", SECRET))
    stage.published(home / "hub")
    run = stage.run_of(stage.owner, "run", tokenizer="people/own")
    verdict = exports(stage, run, HF_HOME=home)
    # the commit's name as a path
    write(model / "refs/main", os.path.relpath(stage.owner.home, snapshot.parent))
    again = stage.said(*_CONSUMED, "model.tokenizer=people/own", HF_HOME=home)
    return verdict._replace(evidence=f"{verdict.evidence}; {again}")


def _inspects(stage: Stage, files: Mapping[str, Content]) -> Verdict:
    return bounded(stage, "inspect", "--sysroot", stage.foreign("sysroot", files))


_CORES = "sys/devices/system/cpu/online"
_NODES = "sys/devices/system/node/online"
_CORES_OF_NODE = "sys/devices/system/node/node0/cpulist"


@attack("n10a", "inspect --sysroot: lists of billions of cores")
def _(stage: Stage) -> Verdict:
    lists = (
        _CORES,
        _NODES,
        _CORES_OF_NODE,
        "sys/devices/system/cpu/present",
        "sys/devices/system/node/possible",
    )
    memory = {
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: " + "9" * 5000 + " kB\n",
        "proc/meminfo": "MemTotal: " + "9" * 400 + " kB\n",
        "proc/cpuinfo": "processor : 0\n" * 100_000,
    }
    return _inspects(stage, dict.fromkeys(lists, "0-4000000000") | memory)


@attack("n10b", "inspect --sysroot: pipes and links to themselves in place of files")
def _(stage: Stage) -> Verdict:
    of_process = ("proc/self/status", "proc/self/cgroup", "proc/self/mountinfo", "proc/mounts")
    of_host = ("proc/meminfo", "proc/cpuinfo", "proc/stat", "proc/version")
    files = (_CORES, _NODES, _CORES_OF_NODE, *of_process, *of_host)
    return _inspects(stage, dict.fromkeys(files))


@attack("n10c", "a machine file with huge, negative and endless numbers")
def _(stage: Stage) -> Verdict:
    text, bad = stage.said("machines", "gh200-480", "--json"), []
    for value in (10**18, -1, 1e308, 10**400):
        for step in (1, 2, 3):  # all numbers, or every second or third
            tree = _with_numbers(json.loads(text), value, step)
            path = stage.foreign("machine", {"a.json": tree}) / "a.json"
            bad += stage.complaints(35, "plan", "tiny", "--machine", path)
    return judged(bad, bad, "all are planned or refused")


def _with_numbers(tree: Any, value: object, step: int = 1) -> Any:
    """Put a number in the place of every ``step``th one of a tree, but for its version."""
    for number, at in enumerate(_numbers(tree)):
        if at != ("v",) and number % step == 0:
            part = tree
            for key in at[:-1]:
                part = part[key]
            part[at[-1]] = value
    return tree


def _numbers(tree: Any, at: tuple[Any, ...] = ()) -> Iterable[tuple[Any, ...]]:
    """Yield where a tree has numbers."""
    if isinstance(tree, (dict, list)):
        for key, value in [*(tree.items() if isinstance(tree, dict) else enumerate(tree))]:
            yield from _numbers(value, (*at, key))
    elif isinstance(tree, (int, float)) and not isinstance(tree, bool):
        yield at


_PRESETS = """
{"gpus": 16, "nodes": 256}
{"train": {"steps": 1000000000000000000}}
{"train": {"gradient_accumulation": 65536, "micro_batch": 4096}}
{"train": {"tokens_per_step": 1000000000000}}
{"train": {"epochs": 1e308, "steps": 0}}
{"data": {"sequence_length": 1048576}}
{"data": {"held_out": 1e300}}
{"checkpoint": {"keep": 1000000000000000000, "every_minutes": 1e308}}
{"offload": {"sub_group_size": 1000000000000000000}}
"""


@attack("n11a", "presets with the largest values that keys take: plan, dry run")
def _(stage: Stage) -> Verdict:
    bad = []
    long: tuple[dict[str, Any], ...] = (
        {"prompts": {"texts": ["x" * 1000] * 1000}},
        {"slurm": {"time_limit": "9" * 4000}},
        {"title": "x" * 1_000_000},
        {"name": "n" * 5000},
        {"model": {"leaf_modules": ["(a+)+$" * 1000] * 100}},
        {"checkpoint": {"folder": "x" * 5000}},
        {"data": {"source": "x" * 100_000}},
    )
    for number, changes in enumerate((*cases(_PRESETS), *long)):
        path = stage.preset(f"p{number}.toml", **changes)
        for command in (("plan", path), ("run", path, "--dry-run")):
            bad += stage.complaints(45, *command)
    return judged(bad, bad, "all are planned or refused")


_CONFIGS = """
{"hidden_size": 1000000000000000}
{"vocab_size": 1000000000000000000}
{"num_attention_heads": 1000000000}
{"num_hidden_layers": 999, "num_experts": 1000000}
{"hidden_size": -1}
{"hidden_size": 0}
{"num_attention_heads": 0}
{"rope_theta": 1e308}
{"rope_scaling": {"rope_type": "yarn", "factor": 1e300}}
{"head_dim": 1000000000}
{"torch_dtype": "os.system"}
{"dtype": "__class__"}
{"hidden_act": "../../x"}
{"quantization_config": {"quant_method": "mxfp4"}}
{"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 0]}}
{"max_position_embeddings": 1000000000000000000}
{"intermediate_size": 100000000000000}
{"num_labels": 100000000}
"""


@attack("n11b", "a model of enormous numbers, and config.json with odd types: plan, presets add")
def _(stage: Stage) -> Verdict:
    bad = []
    long: tuple[dict[str, Any], ...] = (
        {"layer_types": ["x" * 1000] * 100_000},
        {"vocab_size": "9" * 5000},
        {"id2label": {str(n): "x" for n in range(300_000)}},
    )
    for number, config in enumerate((*cases(_CONFIGS), *long)):
        model = stage.model(f"m{number}", **config)
        bad += stage.complaints(80, "presets", "add", model, "--name", f"m{number}")
    return judged(bad, bad, "all are made or refused")


_ODD = (
    '{"v": 1, "v": 2}',
    "NaN",
    "[" * 100_000,
    "{" + '"a":{' * 50_000,
    "9" * 5000,
    '"\\ud800"',
    "null",
    "[]",
    "{}",
    "\x00" * 100,
    "\ufeff{}",
)
_NUMBERS = (10**18, -(10**18), 1e308, 10**400, -1, 1e17, _LAST, 1 << 63)


def _odd_runs(stage: Stage, runs: Path) -> list[str]:
    """Make runs of the attacker's, each with one odd file or with odd figures. Return their
    names.
    """
    files = ("run.json", "state.json", "notes.json", "spec.json", "answers.json")
    made = [(name, odd) for name in files for odd in (*_ODD, *_NUMBERS)]
    for number, (name, odd) in enumerate(made):
        path = stage.run_of(stage.other, runs / f"t{number}") / name
        if isinstance(odd, str):
            path.write_text(odd)
        elif path.exists():
            write(path, _with_numbers(read(path), odd))
        stage.published(path.parent)
    for number, odd in enumerate(_NUMBERS):
        theirs = stage.run_of(stage.other, runs / f"s{number}")
        for path in (*theirs.glob("metrics/0*l"), *theirs.glob("samples.*/0*l")):
            lines = map(json.loads, path.read_text().splitlines())
            path.write_text("".join(json.dumps(_with_numbers(line, odd)) + "\n" for line in lines))
    return [*(f"t{number}" for number in range(len(made))), *(f"s{n}" for n in range(8))]


@attack("n12", "one odd file in a foreign run hides or stops all runs: runs, compare, watch, note")
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    stage.run_of(stage.owner, runs / "mine")
    names = _odd_runs(stage, runs)
    commands = [("runs",), ("runs", "--json"), *(("compare", "mine", name) for name in names)]
    commands += [(word, name) for name in names for word in ("note", "logs", "watch")]
    bad = []
    for (command, *_), code, said in stage.each(commands, "--runs-dir", runs):
        waits = command == "watch" and code == -14  # a run that may go on is watched
        hidden = command == "runs" and "mine" not in said
        if (code < 0 and not waits) or hidden or "Traceback" in said:
            bad.append(f"{command} {code} {said}")
    return judged(bad, bad, f"each of {len(names)} is shown or named")
