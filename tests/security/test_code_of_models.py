"""Python code that comes with a model runs only if the user has said yes to exactly this code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from so_tui.cli import main
from so_tui.folders import consents_file, user_folder
from so_tui.launch.helper_jobs import code_of, describe_model
from so_tui.runs import RunDirectory, create_run, read_spec
from so_tui.spec import ModelSpec, find_preset, load_catalog
from so_tui.spec.consents import allow, consents, revoke
from so_tui.ui.dialogs import Notice
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.export import of_folder
from so_tui_trainer.model.config import load_config
from so_tui_trainer.model.weights import meta_model
from tests.support.hub import loopback_hub
from tests.support.own_code import MODEL, change, own_code, trusted
from tests.support.problems import refusal
from tests.support.screen import opened
from tests.support.users import SharedMachine

pytestmark = pytest.mark.slow
SLOW_S = 120.0
"""Helper processes import transformers, which takes its time on a busy machine."""


@pytest.fixture(autouse=True, scope="module")
def _modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Import code from a folder of these tests."""
    from transformers import dynamic_module_utils
    from transformers.utils import hub

    folder = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", folder)
        for module in (dynamic_module_utils, hub):
            patch.setattr(module, "HF_MODULES_CACHE", folder)
        yield


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.fixture
def model(tmp_path: Path, trace: Path) -> ModelSpec:
    return own_code(tmp_path / "model", trace)


def in_whole(model: ModelSpec) -> object:
    return of_folder(Path(model.id), model)


def test_code_runs_once_it_is_allowed(model: ModelSpec, trace: Path) -> None:
    for load in (load_config, load_tokenizer, in_whole):
        problem = refusal(partial(load, model))
        assert (problem.code, problem.value) == ("code-not-trusted", model.id)
    assert not trace.exists()
    code = trusted(model)
    assert code.hash in problem.message
    assert all(name in problem.message for name in code.files)
    assert type(load_tokenizer(model)).__name__ == "OwnTokenizer"
    assert type(meta_model(load_config(model))).__name__ == "OwnModel"
    assert type(in_whole(model)).__name__ == "OwnModel"
    assert set(trace.read_text().split()) == set(code.files)


def test_without_the_flag_allowed_code_does_not_run(model: ModelSpec, trace: Path) -> None:
    trusted(model)
    plain = replace(model, trust_remote_code=False)
    for load in (load_config, in_whole):
        assert refusal(partial(load, plain)).code == "model-needs-remote-code"
    assert not trace.exists()


@pytest.mark.parametrize("how", ["changed", "added", "linked", "revoked"])
def test_changed_code_does_not_run(model: ModelSpec, trace: Path, tmp_path: Path, how: str) -> None:
    trusted(model)
    file = Path(model.id) / "modeling_own.py"
    match how:
        case "changed":
            file.write_text(file.read_text() + "\n")
        case "added":
            file.with_name("more.py").write_text("")
        case "linked":
            (tmp_path / "other.py").write_text(file.read_text() + "#")
            file.unlink()
            file.symlink_to(tmp_path / "other.py")
        case "revoked":
            assert revoke(model.id)
    assert refusal(lambda: load_config(model)).code == "code-not-trusted"
    assert not trace.exists()


def test_code_changed_after_the_check_is_not_run(model: ModelSpec, trace: Path) -> None:
    """The copy that was hashed is loaded."""
    trusted(model)
    config = load_config(model)
    for file in Path(model.id).glob("*.py"):
        file.write_text(f"open({str(trace)!r}, 'a').write('hostile ')\n")
    change(Path(model.id) / "config.json", auto_map={"AutoModelForCausalLM": "configuration_own.X"})
    assert type(meta_model(config)).__name__ == "OwnModel"
    assert "hostile" not in trace.read_text()


@pytest.mark.parametrize("reference", ["other/repo--modeling_own.OwnModel", "/tmp/x.OwnModel", "x"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_elsewhere_is_refused(
    model: ModelSpec, trace: Path, reference: str, file: str
) -> None:
    trusted(model)
    change(Path(model.id) / file, auto_map=MODEL | {"AutoModelForCausalLM": reference})
    assert refusal(lambda: load_config(model)).code == "code-elsewhere"
    assert not trace.exists()


def test_a_tokenizer_elsewhere_is_asked_for_by_itself(
    model: ModelSpec, trace: Path, tmp_path: Path
) -> None:
    other = own_code(tmp_path / "other", trace)
    trusted(model)
    both = replace(model, tokenizer=other.id)
    problem = refusal(lambda: load_tokenizer(both))
    assert (problem.code, problem.field) == ("code-not-trusted", "model.tokenizer")
    assert not trace.exists()


def test_a_record_that_others_can_write_allows_nothing(model: ModelSpec, trace: Path) -> None:
    trusted(model)
    assert consents_file().stat().st_mode & 0o777 == 0o600
    for path in (consents_file(), consents_file().parent):
        mode = path.stat().st_mode
        path.chmod(0o777)
        assert refusal(lambda: load_config(model)).code == "consents-not-own"
        path.chmod(mode)
    assert not trace.exists()
    load_config(model)


def test_the_command_allows_lists_and_revokes(
    model: ModelSpec, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trust", model.id]) == 2  # no terminal to ask on
    assert "read it in" in (said := capsys.readouterr().err).lower()
    assert said.endswith(f"so-tui trust {model.id} --yes\n")
    assert main(["trust", model.id, "--yes"]) == 0
    (known,) = consents()
    assert (known.source, known.hash) == (model.id, code_of(model.id).hash)
    capsys.readouterr()
    assert main(["trust"]) == 0
    assert known.hash in capsys.readouterr().out
    assert main(["trust", model.id, "--revoke"]) == 0
    assert main(["trust", model.id, "--revoke"]) == 2
    assert not consents()
    assert not trace.exists()


def test_the_command_names_a_folder_that_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (str(tmp_path / "none"), "./none", "owner/none"):
        assert main(["trust", name]) == 2
        said = capsys.readouterr().err
        assert f"SOURCE = {name}: " in said
        assert "folder" in said.partition(". Name a folder")[0]
        assert "HF_HUB_OFFLINE" not in said


def test_adding_a_model_asks_first(model: ModelSpec, trace: Path) -> None:
    problem = refusal(lambda: describe_model(model.id, trust_remote_code=True))
    assert problem.code == "code-not-trusted"
    assert not trace.exists()
    allow(code_of(model.id))
    assert describe_model(model.id, name="own", trust_remote_code=True)[0].name == "own"
    assert trace.exists()


PRESET = """
extends = "tiny"
name = "theirs"
[model]
id = "{model}"
weights = "pretrained"
trust_remote_code = true
"""


@pytest.mark.parametrize("command", ["data", "fetch", "prepare", "run --plain", "run --detach"])
@pytest.mark.parametrize("own", [True, False])
def test_commands_run_no_code_that_was_not_allowed(
    model: ModelSpec,
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    own: bool,
) -> None:
    preset = tmp_path / "theirs.toml"
    preset.write_text(PRESET.format(model=model.id))
    if not own:
        preset.chmod(0o666)
    verb, *options = command.split()
    assert main([verb, str(preset), *options]) == 2
    err = capsys.readouterr().err
    assert ("so-tui trust" if own else "counts as false") in err
    assert not trace.exists()


def test_the_flag_does_not_count_in_files_of_others(tmp_path: Path) -> None:
    preset = tmp_path / "theirs.toml"
    preset.write_text(PRESET.format(model="org/model"))
    assert find_preset(str(preset)).spec.model.trust_remote_code
    preset.chmod(0o666)
    found = find_preset(str(preset))
    assert not found.spec.model.trust_remote_code
    assert [problem.code for problem in found.problems] == ["trust-not-own"]


def test_an_own_preset_inherits_no_trust_of_others() -> None:
    user_folder().mkdir(parents=True)
    theirs, mine = (user_folder() / f"{name}.toml" for name in ("theirs", "mine"))
    theirs.write_text(PRESET.format(model="org/model"))
    mine.write_text('extends = "theirs"\nname = "mine"\n')
    assert find_preset("mine").spec.model.trust_remote_code
    theirs.chmod(0o666)
    found = find_preset("mine")
    assert not found.spec.model.trust_remote_code
    assert [problem.code for problem in found.problems] == ["trust-not-own"]
    assert [problem.code for problem in load_catalog().problems] == ["trust-not-own"]


@pytest.mark.parametrize(
    ("option", "harmless"),
    [
        ("--reservation=week", True),
        ("--mem=0", True),
        ("--container-image=/tmp/x", False),
        ("--cont=/tmp/x", False),
        ("--environment=/tmp/x", False),
        ("--uenv=x", False),
        ("--bbf=/tmp/x", False),
        ("--nodelist=n1", False),
        ("--mail-user=a@b", False),
        ("--prolog=/tmp/x", False),
    ],
)
def test_options_of_slurm_in_files_of_others(tmp_path: Path, option: str, harmless: bool) -> None:
    preset = tmp_path / "theirs.toml"
    preset.write_text(f'extends = "tiny"\n[slurm]\noptions = ["{option}"]\n')
    assert find_preset(str(preset)).spec.slurm.options == (option,)
    preset.chmod(0o666)
    if harmless:
        assert find_preset(str(preset)).spec.slurm.options == (option,)
    else:
        problem = refusal(lambda: find_preset(str(preset)))
        assert (problem.code, option in problem.value) == ("option-not-own", True)


def test_a_shared_module_folder_is_not_imported_from(model: ModelSpec, trace: Path) -> None:
    trusted(model)
    modules = Path(os.environ["HF_MODULES_CACHE"])
    modules.chmod(0o777)
    assert refusal(lambda: load_config(model)).code == "model-config-unreadable"
    modules.chmod(0o700)
    assert not trace.exists()


def test_a_folder_of_too_many_files_is_refused(model: ModelSpec) -> None:
    for number in range(1001):
        (Path(model.id) / f"{number}.json").touch()
    assert refusal(lambda: load_config(model)).code == "code-too-large"


@pytest.mark.parametrize("command", ["data", "trust"])
@pytest.mark.parametrize("answer", ["n", "y"])
def test_a_terminal_is_asked_once(
    model: ModelSpec, trace: Path, tmp_path: Path, answer: str, command: str
) -> None:
    preset = tmp_path / "theirs.toml"
    preset.write_text(PRESET.format(model=model.id))
    ours, theirs = os.openpty()
    named = str(preset) if command == "data" else model.id
    argv = [sys.executable, "-P", "-m", "so_tui", command, named]
    with subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        while b"[y/N]" not in said:
            said += os.read(ours, 1 << 16)
        assert all(name.encode() in said for name in ("modeling_own.py", "SHA-256", model.id))
        assert not trace.exists()
        os.write(ours, f"{answer}\n\x04".encode())  # and the end of the input
        said = b""
        with suppress(OSError):  # the terminal's end
            while part := os.read(ours, 1 << 16):
                said += part
    os.close(ours)
    assert b"[y/N]" not in said
    assert process.returncode == (0 if answer == "y" else 2)
    assert bool(consents()) == (answer == "y")
    assert trace.exists() == (answer == "y" and command == "data")


async def test_the_preview_asks(model: ModelSpec, trace: Path, tmp_path: Path) -> None:
    user_folder().mkdir(parents=True)
    (user_folder() / "theirs.toml").write_text(PRESET.format(model=model.id))
    async with opened(tmp_path / "runs", (160, 45)) as ui:
        await ui.press("1", "slash", *"theirs", "enter", "d")
        await ui.until(lambda: isinstance(ui.app.screen, Notice), SLOW_S)
        assert all(word in ui.text() for word in ("modeling_own.py", "SHA-256"))
        await ui.press("escape")
        assert not consents()
        await ui.press("r")
        await ui.until(lambda: isinstance(ui.app.screen, Notice), SLOW_S)
        assert not trace.exists()
        await ui.pilot.click("#offer")
        await ui.until(trace.exists, SLOW_S)


def test_a_branch_that_moves_runs_no_other_code(
    model: ModelSpec, trace: Path, tmp_path: Path
) -> None:
    old = {path.name: path.read_bytes() for path in Path(model.id).iterdir()}
    new = old | {"modeling_own.py": old["modeling_own.py"] + b"\n"}
    with loopback_hub(tmp_path / "hub") as hub:
        hub.add("models", "owner/model", old, new, tag="v1")
        asked = code_of("owner/model@v1")
        assert (asked.source, asked.name) == ("owner/model", "owner/model@v1")
        allow(asked)
        add = partial(describe_model, "owner/model", trust_remote_code=True)
        assert refusal(add).value == "owner/model"
        assert not trace.exists()
        assert add(revision="v1")[0].model.trust_remote_code
        assert trace.exists()


def test_a_run_that_others_can_write_lets_no_code_run(tmp_path: Path) -> None:
    spec = find_preset("tiny").spec.changed("model", trust_remote_code=True)
    run = create_run(spec, tmp_path / "runs")
    assert read_spec(run).model.trust_remote_code
    run.spec_path.chmod(0o666)
    assert not read_spec(run).model.trust_remote_code


def test_a_run_of_another_user_lets_no_code_run(machine: SharedMachine, tmp_path: Path) -> None:
    """Whether it is this user's own is judged of the file that was read, wherever links lead."""
    spec = find_preset("tiny").spec.changed("model", trust_remote_code=True)
    ours, theirs = (create_run(spec, tmp_path / name) for name in ("ours", "theirs"))
    machine.other.give(theirs.path)
    link = machine.scratch / "run"
    link.symlink_to(ours.path)
    assert read_spec(RunDirectory(link)).model.trust_remote_code
    link.unlink()
    link.symlink_to(theirs.path)
    assert not read_spec(RunDirectory(link)).model.trust_remote_code
