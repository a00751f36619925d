"""Attacks n6 to n12: what authors of models, data, machine files, presets and runs may write."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.attacks.attack import Verdict, attack, judged
from benchmarks.attacks.foreign import _SECRET, _private
from benchmarks.attacks.limits import bounded
from benchmarks.attacks.others import last_line
from benchmarks.attacks.stage import Stage

_COMMAND_S = 120.0
_WORDS = "the-owners-private-words"


def _private_tokenizer(stage: Stage) -> Path:
    """Make a private tokenizer for the owner, with a private word in it."""
    tree = json.loads((stage.ground.tokenizer / "tokenizer.json").read_text())
    last = max(token["id"] for token in tree["added_tokens"])
    tree["added_tokens"].append(tree["added_tokens"][-1] | {"id": last + 1000, "content": _WORDS})
    return _private(stage, "private.json", json.dumps(tree))


def _naming(stage: Stage, folder: Path, **changes: Any) -> Path:
    """Make a tokenizer of the attacker's whose tokenizer_config.json has further keys."""
    stage.model(folder, stage.other)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return stage.published(folder, stage.other)


def _exports(stage: Stage, tokenizer: Path) -> Verdict:
    run = stage.run_of(stage.other, stage.scratch / "run")
    spec = json.loads((run / "spec.json").read_text())
    spec["model"]["tokenizer"] = str(tokenizer)
    (run / "spec.json").write_text(json.dumps(spec))
    stage.published(run, stage.other)
    out = stage.owner.home / "out"
    victim = stage.so_tui("export", str(run), "--to", str(out))
    victim.end(_COMMAND_S)
    found = [path.name for path in out.glob("*") if _WORDS in path.read_text(errors="replace")]
    return judged(found, f"the private word is in {found}", last_line(victim))


@attack("n6a", "tokenizer_config.json of others names a private tokenizer_file: export")
def _(stage: Stage) -> Verdict:
    private = _private_tokenizer(stage)
    folder = _naming(stage, stage.scratch / "tokenizer", tokenizer_file=str(private))
    return _exports(stage, folder)


@attack("n6b", "the same without a tokenizer.json of its own, and by a relative path")
def _(stage: Stage) -> Verdict:
    private = _private_tokenizer(stage)
    relative = os.path.relpath(private, stage.scratch / "tokenizer")
    given = {"tokenizer_file": relative, "fast_tokenizer_files": [relative]}
    folder = _naming(stage, stage.scratch / "tokenizer", **given)
    (folder / "tokenizer.json").unlink()
    return _exports(stage, folder)


@attack("n6c", "vocab_file and merges_file of a tokenizer_config.json name private files")
def _(stage: Stage) -> Verdict:
    vocabulary = {chr(33 + place): place for place in range(94)} | {_WORDS: 94, "<|eos|>": 95}
    private = _private(stage, "vocab.json", json.dumps(vocabulary))
    merges = _private(stage, "merges.txt", "#version: 0.2\n")
    given = {"vocab_file": str(private), "merges_file": str(merges)}
    folder = _naming(stage, stage.scratch / "tokenizer", tokenizer_class="GPT2Tokenizer", **given)
    (folder / "tokenizer.json").unlink()
    return _exports(stage, folder)


@attack("n6d", "a tokenizer_config.json names a pipe, or a file without end")
def _(stage: Stage) -> Verdict:
    pipe = stage.scratch / "pipe"
    os.mkfifo(pipe)
    pipe.chmod(0o666)
    took = 0.0
    for number, named in enumerate((pipe, Path("/dev/zero"))):
        folder = stage.scratch / f"tokenizer{number}"
        _naming(stage, folder, tokenizer_file=str(named), vocab_file=str(named))
        (folder / "tokenizer.json").unlink()
        began = time.monotonic()
        victim = stage.so_tui("data", "tiny", "--set", f"model.tokenizer={folder}")
        victim.end(60)
        took = max(took, time.monotonic() - began)
    return judged(took > 55, f"`data` took {took:.0f} s", f"{took:.0f} s; {last_line(victim)}")


def _data(stage: Stage, folder: Path, *more: str) -> str:
    stage.published(folder, stage.other)
    return stage.so_tui("data", "tiny", "--set", f"data.source={folder}", *more).end(_COMMAND_S)


@attack("n7a", "README.md of a data folder names files outside")
def _(stage: Stage) -> Verdict:
    private = _private(stage, "private.jsonl", json.dumps({"text": _SECRET}) + "\n")
    folder = stage.scratch / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps({"text": "a row of the attacker"}) + "\n")
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files: {private}\n---\n"
    )
    said = _data(stage, folder)
    return judged("private words" in said, "`data` shows the private row", said[-150:])


@attack("n7b", "a Parquet file says that a column has pictures, whose paths are opened")
def _(stage: Stage) -> Verdict:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pipe = stage.scratch / "pipe"
    os.mkfifo(pipe)
    pipe.chmod(0o666)
    folder = stage.scratch / "data"
    folder.mkdir()
    took, said = 0.0, ""
    for kind in ("Image", "Audio", "Pdf", "Video"):
        features = {"text": {"dtype": "string", "_type": "Value"}, "x": {"_type": kind}}
        picture = pa.array(
            [{"bytes": None, "path": str(pipe)}],
            pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        )
        table = pa.table({"text": ["a row"], "x": picture}).replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": features}})}
        )
        pq.write_table(table, folder / "a.parquet")
        began = time.monotonic()
        said = _data(stage, folder)
        took = max(took, time.monotonic() - began)
    return judged(took > 60, f"it took {took:.0f} s", f"{took:.0f} s {said[-150:]}")


def _complaints(stage: Stage, longest_s: float, *command: str) -> list[str]:
    """Run a command on hostile input. Return what is wrong if it crashes or takes too long."""
    began = time.monotonic()
    said = stage.so_tui(*command).end(longest_s + 10)
    took_s = time.monotonic() - began
    wrong = "Traceback" in said or took_s > longest_s
    return [f"{' '.join(command)} {took_s:.0f} s: {said[-150:]}"] if wrong else []


@attack("n7c", "rows with NaN, big integers, the same key twice, dates far off")
def _(stage: Stage) -> Verdict:
    folder = stage.scratch / "data"
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
        place = folder / f"d{number}"
        place.mkdir(parents=True)
        (place / "a.jsonl").write_text(row + "\n")
        said = _data(stage, place)
        if "Traceback" in said or "\x00" in said or "panicked" in said:
            bad.append(f"{row[:40]}: {said[-120:]}")
    return judged(bad, " / ".join(bad), "all are rows or refused by name")


@attack("n8", "model.safetensors.index.json names a private file as a part: generate, export")
def _(stage: Stage) -> Verdict:
    model = stage.exported(stage.scratch / "model", stage.other)
    weights = next(model.glob("*.safetensors"))
    private = _private(stage, "private.safetensors", "")
    private.write_bytes(weights.read_bytes())
    header = weights.read_bytes()
    size = int.from_bytes(header[:8], "little")
    names = [name for name in json.loads(header[8 : 8 + size]) if name != "__metadata__"]
    weights.unlink()
    said = ""
    succeeded = []
    for named in (str(private), os.path.relpath(private, model)):
        index = {"metadata": {"total_size": len(header)}, "weight_map": dict.fromkeys(names, named)}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        stage.published(model, stage.other)
        victim = stage.so_tui("generate", str(model), "--prompt", "hello")
        said = victim.end(_COMMAND_S)
        if not victim.process.returncode:
            succeeded.append(named)
    return judged(succeeded, f"it loaded the private weights {succeeded}", said[-200:])


@attack("n9", "a link of others in a shared HF_HOME to a private chat template: export")
def _(stage: Stage) -> Verdict:
    private = _private(stage, "private.txt", _WORDS)
    home = stage.shared("huggingface", 0o2777)
    snapshot = home / "hub" / "models--people--own" / "snapshots" / ("a" * 40)
    stage.model(snapshot, stage.other)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    (snapshot / "chat_template.jinja").symlink_to(private)
    stage.published(home / "hub", stage.other)
    run = stage.run_of(stage.owner, stage.owner.home / "run")
    spec = json.loads((run / "spec.json").read_text())
    spec["model"]["tokenizer"] = "people/own"
    (run / "spec.json").write_text(json.dumps(spec))
    out = stage.owner.home / "out"
    victim = stage.so_tui("export", str(run), "--to", str(out), HF_HOME=str(home))
    victim.end(_COMMAND_S)
    found = [path.name for path in out.glob("*") if _WORDS in path.read_text(errors="replace")]
    # the commit's name as a path
    (refs / "main").write_text(os.path.relpath(stage.owner.home, snapshot.parent))
    again = stage.so_tui("data", "tiny", "--set", "model.tokenizer=people/own", HF_HOME=str(home))
    again.end(_COMMAND_S)
    return judged(
        found, f"the private text is in {found}", f"{last_line(victim)}; {last_line(again)}"
    )


def _sysroot(stage: Stage, files: dict[str, str]) -> Path:
    root = stage.scratch / "sysroot"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return stage.published(root, stage.other)


@attack("n10a", "inspect --sysroot: lists of billions of cores")
def _(stage: Stage) -> Verdict:
    bomb = "0-4000000000"
    root = _sysroot(
        stage,
        {
            "sys/devices/system/cpu/online": bomb,
            "sys/devices/system/cpu/present": bomb,
            "sys/devices/system/node/online": bomb,
            "sys/devices/system/node/possible": bomb,
            "sys/devices/system/node/node0/cpulist": bomb,
            "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: " + "9" * 5000 + " kB\n",
            "proc/meminfo": "MemTotal: " + "9" * 400 + " kB\n",
            "proc/cpuinfo": "processor : 0\n" * 100_000,
        },
    )
    return bounded(stage, "inspect", "--sysroot", str(root))


@attack("n10b", "inspect --sysroot: pipes and links to themselves in place of files")
def _(stage: Stage) -> Verdict:
    names = (
        "sys/devices/system/cpu/online",
        "sys/devices/system/node/online",
        "proc/meminfo",
        "proc/cpuinfo",
        "sys/devices/system/node/node0/cpulist",
        "proc/self/status",
        "proc/self/cgroup",
        "proc/mounts",
        "proc/self/mountinfo",
        "proc/stat",
        "proc/version",
    )
    root = _sysroot(stage, dict.fromkeys(names, ""))
    for name in names:
        (root / name).unlink()
        os.mkfifo(root / name)
    stage.published(root, stage.other)
    return bounded(stage, "inspect", "--sysroot", str(root))


@attack("n10c", "a machine file with huge, negative and endless numbers")
def _(stage: Stage) -> Verdict:
    text = stage.so_tui("machines", "gh200-480", "--json").end(60)
    tree = json.loads(text)
    spots = list(_numbers(tree))
    path = stage.scratch / "machine.json"
    bad = []
    for value in (10**18, -1, 1e308, 10**400):
        for keep in (0, 1, 2):  # all numbers, or every second or third
            changed = json.loads(text)
            for number, spot in enumerate(spots):
                if keep == 0 or number % (keep + 1) == 0:
                    _put(changed, spot, value)
            path.write_text(json.dumps(changed))
            stage.published(path, stage.other)
            bad += _complaints(stage, 25, "plan", "tiny", "--machine", str(path))
    return judged(bad, f"{len(bad)}: {bad[:1]}", "all are planned or refused")


def _numbers(tree: Any, at: tuple[Any, ...] = ()) -> Iterable[tuple[Any, ...]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _numbers(value, (*at, key))
    elif isinstance(tree, list):
        for place, value in enumerate(tree):
            yield from _numbers(value, (*at, place))
    elif isinstance(tree, (int, float)) and not isinstance(tree, bool):
        yield at


def _put(tree: Any, at: tuple[Any, ...], value: Any) -> None:
    for key in at[:-1]:
        tree = tree[key]
    tree[at[-1]] = value


@attack("n11a", "presets with the largest values that keys take: plan, dry run")
def _(stage: Stage) -> Verdict:
    bad = []
    given: tuple[dict[str, Any], ...] = (
        {"gpus": 16, "nodes": 256},
        {"train": {"steps": 10**18}},
        {"train": {"gradient_accumulation": 65_536, "micro_batch": 4096}},
        {"train": {"tokens_per_step": 10**12}},
        {"train": {"epochs": 1e308, "steps": 0}},
        {"data": {"sequence_length": 1_048_576}},
        {"data": {"held_out": 1e300}},
        {"checkpoint": {"keep": 10**18, "every_minutes": 1e308}},
        {"prompts": {"texts": ["x" * 1000] * 1000}},
        {"slurm": {"time_limit": "9" * 4000}},
        {"title": "x" * 1_000_000},
        {"name": "n" * 5000},
        {"model": {"leaf_modules": ["(a+)+$" * 1000] * 100}},
        {"offload": {"sub_group_size": 10**18}},
        {"checkpoint": {"folder": "x" * 5000}},
        {"data": {"source": "x" * 100_000}},
    )
    for number, changes in enumerate(given):
        path = stage.preset(stage.scratch / f"p{number}.toml", stage.other, **changes)
        for command in (("plan", str(path)), ("run", str(path), "--dry-run")):
            bad += _complaints(stage, 35, *command)
    return judged(bad, f"{len(bad)}: {bad[:2]}", "all are planned or refused")


@attack("n11b", "a model of enormous numbers, and config.json with odd types: plan, presets add")
def _(stage: Stage) -> Verdict:
    bad = []
    given: tuple[dict[str, Any], ...] = (
        {"hidden_size": 10**15},
        {"vocab_size": 10**18},
        {"num_attention_heads": 10**9},
        {"num_hidden_layers": 999, "num_experts": 10**6},
        {"hidden_size": -1},
        {"hidden_size": 0},
        {"num_attention_heads": 0},
        {"rope_theta": 1e308},
        {"rope_scaling": {"rope_type": "yarn", "factor": 1e300}},
        {"head_dim": 10**9},
        {"layer_types": ["x" * 1000] * 100_000},
        {"torch_dtype": "os.system"},
        {"dtype": "__class__"},
        {"hidden_act": "../../x"},
        {"vocab_size": "9" * 5000},
        {"quantization_config": {"quant_method": "mxfp4"}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 0]}},
        {"max_position_embeddings": 10**18},
        {"intermediate_size": 10**14},
        {"id2label": {str(n): "x" for n in range(300_000)}},
        {"num_labels": 10**8},
    )
    for number, config in enumerate(given):
        model = stage.model(stage.scratch / f"m{number}", stage.other, **config)
        bad += _complaints(stage, 80, "presets", "add", str(model), "--name", f"m{number}")
    return judged(bad, f"{len(bad)}: {bad[:2]}", "all are made or refused")


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


@attack("n12", "one odd file in a foreign run hides or stops all runs: runs, compare, watch, note")
def _(stage: Stage) -> Verdict:
    runs = stage.shared("runs")
    stage.run_of(stage.owner, runs / "mine")
    bad = []
    number = 0
    numbers = (10**18, -(10**18), 1e308, 10**400, -1, 1e17, 253402300800.0, 1 << 63)
    for name in ("run.json", "state.json", "notes.json", "spec.json", "answers.json"):
        for odd in (*_ODD, *numbers):
            theirs = stage.run_of(stage.other, runs / f"t{number}")
            number += 1
            path = theirs / name
            if isinstance(odd, str):
                path.write_text(odd)
            elif path.exists():
                tree = json.loads(path.read_text())
                for spot in _numbers(tree):
                    _put(tree, spot, odd)
                path.write_text(json.dumps(tree))
            stage.published(theirs, stage.other)
    for number, odd in enumerate(numbers):
        theirs = stage.run_of(stage.other, runs / f"s{number}")
        for path in (*theirs.glob("metrics/0*"), *theirs.glob("samples.*/0*")):
            if path.suffix == ".index":
                continue
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                for spot in _numbers(line):
                    if spot != ("v",):
                        _put(line, spot, odd)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        stage.published(theirs, stage.other)
    where = ("--runs-dir", str(runs))
    said = stage.so_tui("runs", *where).end(90)
    if "mine" not in said or "Traceback" in said:
        bad.append(f"runs: {said[-200:]}")
    said = stage.so_tui("runs", "--json", *where).end(90)
    if '"mine"' not in said or "Traceback" in said:
        bad.append(f"runs --json: {said[-200:]}")
    names = sorted(path.name for path in runs.iterdir() if path.name != "mine")
    said = stage.so_tui("compare", "mine", *names, *where).end(120)
    if "Traceback" in said or "mine" not in said:
        bad.append(f"compare: {said[-300:]}")
    for name in names:
        for command in (("note", name), ("watch", name, "--plain"), ("logs", name)):
            if command[0] != "watch" and name[0] == "s":
                continue
            victim = stage.so_tui(*command, *where)
            said = victim.end(30)
            if "Traceback" in said or victim.process.returncode < 0:
                bad.append(f"{command}: {victim.process.returncode} {said[-200:]}")
    return judged(bad, f"{len(bad)}: {bad[:2]}", "each is shown or named")
