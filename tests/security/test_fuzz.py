"""Whatever is in a file that others wrote: an error meant for it, within 2 s and 200 MB.

``SO_TUI_FUZZ_S=600`` tries new examples for ten minutes; by default the same few are tried.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
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
from so_tui.spec import InputError, SoTuiError, find_preset, spec_tree
from so_tui.trust.text import printable
from tests.support.machines import machine_json
from tests.support.make_run import quad_machine, write_run
from tests.support.mutations import harmed_bytes, harmed_json, harmed_lines, harmed_trees

LIMIT_S = 2.0
LIMIT_BYTES = 200 << 20
LONG_S = float(os.environ.get("SO_TUI_FUZZ_S", "0"))
EXAMPLES = 30
TARGETS = 6
"""Tests in this file that share the time of a long run."""

few = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
many = settings(
    few, max_examples=500, derandomize=False, phases=(Phase.generate, Phase.shrink), print_blob=True
)
tried = settings(many if LONG_S else few)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fail if the block takes too long; let it fail if it takes too much memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData")
    )
    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + LIMIT_BYTES, hard))
    begun = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert time.process_time() - begun < LIMIT_S


def repeated(try_some: Callable[[], None]) -> None:
    """Try some examples; in a long run again and again, for this test's share of the time."""
    end = time.monotonic() + LONG_S / TARGETS
    try_some()
    while time.monotonic() < end:
        try_some()


def answered(call: Callable[[], object]) -> None:
    """Call something that may refuse its input."""
    with bounded(), contextlib.suppress(SoTuiError):
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


@pytest.fixture(scope="module")
def valid_run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of a hundred steps with every kind of file."""
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        run = write_run(
            folder / "runs",
            gpus=4,
            steps=100,
            total=100,
            state="failed",
            seconds_of_samples=60,
            name="fuzzed",
        )
    for action in state.ACTIONS:
        state.request(run, action, reason="x")
    return run


def harmed(path: Path) -> st.SearchStrategy[bytes]:
    content = path.read_bytes()
    if path.suffix == ".json" or path.parent.name == "control":
        return harmed_json(content)
    return harmed_lines(content) if path.suffix == ".jsonl" else harmed_bytes(content)


def test_any_file_of_a_run(valid_run: RunDirectory, tmp_path: Path) -> None:
    files = (path for path in valid_run.path.rglob("*") if path.is_file())
    names = sorted(path.relative_to(valid_run.path) for path in files)
    assert {"run.json", "state.json", "spec.json"} <= {str(name) for name in names}
    copy = RunDirectory(shutil.copytree(valid_run.path, tmp_path / "runs" / "fuzzed"))

    @settings(tried, max_examples=12)
    @given(
        st.sampled_from(names).flatmap(
            lambda name: st.tuples(st.just(name), harmed(valid_run.path / name))
        )
    )
    def try_one(change: tuple[Path, bytes]) -> None:
        name, content = change
        (copy.path / name).write_bytes(content)
        try:
            read_all(copy)
            for arguments in (
                ("runs",),
                ("runs", "--json"),
                ("watch", "fuzzed", "--plain"),
                ("logs", "fuzzed"),
            ):
                printed(*arguments, "--runs-dir", str(tmp_path / "runs"))
        finally:
            shutil.copyfile(valid_run.path / name, copy.path / name)

    repeated(try_one)


def read_all(run: RunDirectory) -> None:
    """Read everything that the screen and the commands read of a run."""
    for read in (read_state, read_spec, state_with_truth):
        answered(partial(read, run))
    with contextlib.suppress(OSError, ValueError):
        run_id(run)
    for action in state.ACTIONS:
        answered(partial(state.details, run, action))
    with bounded(), contextlib.suppress(OSError, ValueError):
        read_launch(run, 1)
    with bounded():
        reader = RunReader(run)
        while reader.poll().more:
            continue
        reader.poll()
        list(StepRows(reader.metrics, ("loss", "step_s")).read(60.0))
        for _ in reader.metrics.steps(0, 1000):
            continue
        reader.metrics.recent(100)
        for samples in reader.samples.values():
            list(samples.history(0.0, 1e10, 50))


def test_presets_as_trees(tmp_path: Path) -> None:
    valid = spec_tree(find_preset("llama-3.1-8b").spec)
    path = tmp_path / "preset.toml"

    @tried
    @given(harmed_trees(valid))
    def try_one(tree: dict[str, object]) -> None:
        try:
            path.write_text(tomli_w.dumps(tree), encoding="utf-8")
        except (
            TypeError,
            ValueError,
            AttributeError,
        ):  # TOML has no null, and text no lone surrogates
            return
        printed("plan", str(path), "--as-given", "--machine", str(machine_file(tmp_path)))

    repeated(try_one)


def test_presets_as_bytes(tmp_path: Path) -> None:
    text = (Path(find_preset("tiny").path)).read_bytes()
    path = tmp_path / "preset.toml"

    @tried
    @given(harmed_bytes(text))
    def try_one(content: bytes) -> None:
        path.write_bytes(content)
        answered(lambda: find_preset(str(path)))

    repeated(try_one)


def machine_file(folder: Path) -> Path:
    path = folder / "machine.json"
    if not path.exists():
        path.write_bytes(machine_json(quad_machine()))
    return path


def test_machine_files(tmp_path: Path) -> None:
    path = tmp_path / "harmed.json"
    spec = find_preset("qwen3-14b").spec

    @tried
    @given(harmed_json(machine_json(quad_machine(2, 8))))
    def try_one(content: bytes) -> None:
        path.write_bytes(content)
        with bounded():
            try:
                machine = load_machine(path)
            except InputError:
                return
            with contextlib.suppress(SoTuiError):
                make_plan(spec, machine)
        printed("inspect", "--json")

    repeated(try_one)


def test_checkpoints(tmp_path: Path) -> None:
    from so_tui_trainer.checkpoint_folder import newest
    from so_tui_trainer.failures import TrainingError
    from tests.support.checkpoints import written

    good = written(tmp_path, 3, "", find_preset("tiny").spec)
    names = [path.relative_to(good) for path in sorted(good.rglob("*.json"))]
    assert len(names) == 2

    @tried
    @given(
        st.sampled_from(names).flatmap(
            lambda name: st.tuples(st.just(name), harmed_json((good / name).read_bytes()))
        )
    )
    def try_one(change: tuple[Path, bytes]) -> None:
        name, content = change
        before = (good / name).read_bytes()
        (good / name).write_bytes(content)
        try:
            with bounded(), contextlib.suppress(TrainingError):
                newest(tmp_path)
        finally:
            (good / name).write_bytes(before)

    repeated(try_one)


def test_set_values() -> None:
    keys = [
        "train.steps",
        "data.sequence_length",
        "offload.ratio",
        "train.micro_batch",
        "gpus",
        "name",
        "checkpoint.folder",
        "model.id",
    ]

    @tried
    @given(
        st.sampled_from(keys), st.text(max_size=40) | st.integers().map(str) | st.floats().map(str)
    )
    def try_one(key: str, value: str) -> None:
        printed("plan", "tiny", "--as-given", "--set", f"{key}={value}")

    repeated(try_one)
