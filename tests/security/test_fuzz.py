"""Whatever is in a file that others wrote: an error meant for it, within 2 s and 200 MB."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from so_tui.cli import main
from so_tui.launch.launch import read_launch
from so_tui.machine import load_machine
from so_tui.plan.planner import make_plan
from so_tui.runs import RunDirectory, RunReader, read_spec, read_state, state, state_with_truth
from so_tui.runs.directory import run_id
from so_tui.runs.metrics import StepRows
from so_tui.spec import SoTuiError, find_preset, spec_tree
from so_tui.trust.text import printable
from tests.support.machines import machine_json
from tests.support.make_run import quad_machine, write_run

LIMIT_S = 2.0
LIMIT_BYTES = 200 << 20
few = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


Tree = dict[str, Any] | list[Any]

_TEXTS = [
    *("", "x\n", "\x1b]52;c;cm0=\x07", "\x9b31m", "\u202e\u2066", "\ud800", "a\0b", "[red]"),
    *("../../etc/passwd", "/dev/zero", "a" * 100_000, "nan"),
]
_NUMBERS = [
    *(0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**64), 10**400),
    *(1e300, -1e300, 5e-324, float("nan"), float("inf"), float("-inf")),
]


_NESTED = [json.loads("[" * levels + "1" + "]" * levels) for levels in (20, 200)]
HOSTILE = st.one_of(
    st.sampled_from([*_TEXTS, *_NUMBERS, None, True, False, [], {}, [[]], {"": {}}, {"a": None}]),
    st.sampled_from([*_NESTED, [0] * 10_000, {str(number): number for number in range(2_000)}]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        st.lists,
        max_leaves=8,
    ),
)


@st.composite
def harmed_trees(draw: st.DrawFn, valid: Tree) -> Tree:
    """Return a copy of a tree with one to three values replaced, removed, wrapped or repeated."""
    tree = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        if not tree:
            break
        parent, key = draw(st.sampled_from(list(_places(tree))))
        match draw(st.sampled_from(("replace", "replace", "remove", "wrap", "add"))):
            case "replace":
                parent[key] = copy.deepcopy(draw(HOSTILE))
            case "remove":
                del parent[key]
            case "wrap":
                parent[key] = [parent[key]]
            case "add" if isinstance(parent, dict):
                parent[draw(st.sampled_from(_TEXTS))] = copy.deepcopy(draw(HOSTILE))
            case "add":
                parent.extend([copy.deepcopy(draw(HOSTILE))] * draw(st.integers(1, 50)))
    return tree


@st.composite
def harmed_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """Return a document torn, flipped, spliced, repeated, or replaced altogether."""
    at = draw(st.integers(0, max(0, len(valid) - 1)))
    match draw(st.sampled_from(("tear", "flip", "insert", "repeat", "nest", "replace", "empty"))):
        case "tear":
            return valid[:at]
        case "flip" if valid:
            flipped = valid[at] ^ (1 << draw(st.integers(0, 7)))
            return valid[:at] + bytes([flipped]) + valid[at + 1 :]
        case "insert":
            return valid[:at] + draw(st.binary(max_size=40)) + valid[at:]
        case "repeat":
            return valid * draw(st.integers(2, 5))
        case "nest":
            opened = draw(st.sampled_from([b"[", b'{"a":', b"("]))
            return valid[:at] + opened * draw(st.sampled_from([100, 100_000])) + valid[at:]
        case "replace":
            return draw(st.binary(max_size=200))
    return b""


def harmed_json(valid: bytes) -> st.SearchStrategy[bytes]:
    """Return strategies for a JSON document: harmed as a tree, or as bytes."""
    return harmed_bytes(valid) | harmed_trees(json.loads(valid)).map(
        lambda t: json.dumps(t).encode()
    )


def harmed_lines(valid: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy for lines of JSON: a few of them harmed, or the bytes of all."""
    lines = valid.splitlines()

    @st.composite
    def some(draw: st.DrawFn) -> bytes:
        changed = list(lines)
        for _ in range(draw(st.integers(1, 3))):
            place = draw(st.integers(0, len(changed) - 1))
            changed[place] = draw(harmed_json(lines[place]))
        return b"\n".join(changed) + b"\n"

    return harmed_bytes(valid) | some()


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every value of a tree as its parent and its key."""
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def tried(example: st.SearchStrategy[Any], try_one: Callable[[Any], None], most: int = 30) -> None:
    """Try some examples, which are the same each time."""
    settings(few, max_examples=most)(given(example)(try_one))()


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fail if the block takes too long; let it fail if it takes too much memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text().partition("VmData:")[2]
    used_bytes = int(status.split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + LIMIT_BYTES, hard))
    begun = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert time.process_time() - begun < LIMIT_S


def answered(call: Callable[[], object], *refusals: type[Exception]) -> None:
    with bounded(), contextlib.suppress(SoTuiError, *refusals):
        call()


def printed(*arguments: str) -> None:
    """Run a command: it may refuse, and what it prints is text."""
    out, err = io.StringIO(), io.StringIO()
    with bounded(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = int(error.code or 0)
    assert code in (0, 1, 2, 3, 4)
    for text in (out.getvalue(), err.getvalue()):
        assert printable(text) == text


def harmed(path: Path) -> st.SearchStrategy[bytes]:
    content = path.read_bytes()
    if path.suffix == ".json" or path.parent.name == "control":
        return harmed_json(content)
    return harmed_lines(content) if path.suffix == ".jsonl" else harmed_bytes(content)


def harmed_files(paths: Sequence[Path], use: Callable[[], None], most: int = 30) -> None:
    whole = {path: path.read_bytes() for path in sorted(paths)}

    def try_one(change: tuple[Path, bytes]) -> None:
        path, content = change
        path.write_bytes(content)
        try:
            use()
        finally:
            path.write_bytes(whole[path])

    one = st.sampled_from(list(whole))
    tried(one.flatmap(lambda path: st.tuples(st.just(path), harmed(path))), try_one, most)


def test_any_file_of_a_run(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"steps": 100, "total": 100, "seconds_of_samples": 60}
    run = write_run(tmp_path / "runs", state="failed", name="fuzzed", **sizes)
    for action in state.ACTIONS:
        state.request(run, action, reason="x")
    commands = ("runs", "runs --json", "watch fuzzed --plain", "logs fuzzed")

    def use() -> None:
        read_all(run)
        for command in commands:
            printed(*command.split(), "--runs-dir", str(tmp_path / "runs"))

    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert {"run.json", "state.json", "spec.json"} <= {path.name for path in files}
    harmed_files(files, use, most=12)


def read_all(run: RunDirectory) -> None:
    """Read everything that the screen and the commands read of a run."""
    for read in (read_state, read_spec, state_with_truth):
        answered(partial(read, run))
    for action in state.ACTIONS:
        answered(partial(state.details, run, action))
    answered(lambda: run_id(run), OSError, ValueError)
    answered(lambda: read_launch(run, 1), OSError, ValueError)
    with bounded():
        reader = RunReader(run)
        while reader.poll().more:
            continue
        reader.poll()
        list(StepRows(reader.metrics, ("loss", "step_s")).read(60.0))
        list(reader.metrics.steps(0, 1000))
        reader.metrics.recent(100)
        for samples in reader.samples.values():
            list(samples.history(0.0, 1e10, 50))


def test_checkpoints(tmp_path: Path) -> None:
    from so_tui_trainer.checkpoint_folder import newest
    from so_tui_trainer.failures import TrainingError
    from tests.support.checkpoints import written

    good = written(tmp_path, 3, "", find_preset("tiny").spec)
    files = list(good.rglob("*.json"))
    assert len(files) == 2
    harmed_files(files, lambda: answered(lambda: newest(tmp_path), TrainingError))


def test_presets(tmp_path: Path) -> None:
    path, machine = tmp_path / "preset.toml", tmp_path / "machine.json"
    machine.write_bytes(machine_json(quad_machine()))
    preset = find_preset("llama-3.1-8b")

    def try_one(harmed: dict[str, object] | bytes) -> None:
        try:
            path.write_bytes(
                harmed if isinstance(harmed, bytes) else tomli_w.dumps(harmed).encode()
            )
        except (TypeError, ValueError, AttributeError):  # TOML has no null, text no lone surrogates
            return
        printed("plan", str(path), "--machine", str(machine))

    whole = Path(preset.path).read_bytes()
    tried(harmed_trees(spec_tree(preset.spec)) | harmed_bytes(whole), try_one)


def test_machine_files(tmp_path: Path) -> None:
    path = tmp_path / "harmed.json"
    spec = find_preset("qwen3-14b").spec

    def try_one(content: bytes) -> None:
        path.write_bytes(content)
        answered(lambda: make_plan(spec, load_machine(path)))

    tried(harmed_json(machine_json(quad_machine(2, 8))), try_one)


def test_set_values() -> None:
    keys = ["train.steps", "data.sequence_length", "offload.ratio", "train.micro_batch"]
    keys += ["gpus", "name", "checkpoint.folder", "model.id"]
    values = st.text(max_size=40) | st.integers().map(str) | st.floats().map(str)
    changes = st.tuples(st.sampled_from(keys), values).map("=".join)
    tried(changes, lambda change: printed("plan", "tiny", "--set", change))
