"""What an export holds for every architecture, may replace and leaves behind."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from msgspec.structs import replace
from transformers import CONFIG_MAPPING, AutoConfig

from so_tui.launch.helper_jobs import ExportProgress, in_steps
from so_tui.runs import create_run, read_spec
from so_tui.runs.directory import run_id
from so_tui.spec import InputError, ModelSpec, RunSpec
from so_tui_trainer import export as whole
from so_tui_trainer.export import (
    ExportMarker,
    Stage,
    export,
    refuse_foreign,
    refuse_without_room,
    replacing,
)
from so_tui_trainer.model.config import load_config
from so_tui_trainer.tools.channel import with_newest
from so_tui_trainer.tools.export import _export_run
from tests.support.launching import tiny
from tests.support.model_checkpoints import checkpoint_of, run_with_checkpoints
from tests.support.models import (
    ONE_OF_EACH,
    OTHERS,
    another,
    causal_model,
    load_pretrained,
    scaled_down,
)
from tests.support.problems import refusal

MARK = ExportMarker(run="r", step=5, version="1")


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write(folder: Path, text: str) -> None:
    with replacing(folder, MARK) as partial:
        (partial / "weights").write_text(text)


def base_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("a base model")


@pytest.mark.parametrize("make", [base_model, lambda path: path.write_text("a file")])
def test_what_is_no_export_is_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    there = tmp_path / "base"
    make(there)
    link = tmp_path / "link"
    link.symlink_to(there)
    before = contents(tmp_path)
    for target in (there, link):
        with pytest.raises(InputError) as caught:
            export(tmp_path / "no checkpoint", target, "r", tiny())
        assert (caught.value.problems[0].field, caught.value.problems[0].value) == (
            "--to",
            str(there),
        )
        assert "empty folder" in caught.value.problems[0].remedy
    assert contents(tmp_path) == before


def test_an_empty_folder_and_an_export_are_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    refuse_foreign(folder)
    write(folder, "first")
    assert json.loads((folder / "so_tui_export.json").read_text()) == {
        "run": "r",
        "step": 5,
        "version": "1",
    }
    (folder / "gone").touch()
    write(folder, "second")
    assert (folder / "weights").read_text() == "second"
    assert not (folder / "gone").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_export_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, "first")
    before = contents(tmp_path)
    with pytest.raises(OSError, match="full"), replacing(folder, MARK):
        raise OSError("the disk is full")
    assert contents(tmp_path) == before


def test_a_full_disk_is_reported_beforehand(tmp_path: Path) -> None:
    refuse_without_room(tmp_path / "a" / "b", 1)
    assert refusal(lambda: refuse_without_room(tmp_path / "a" / "b", 1 << 62)).code == "disk-full"
    assert not list(tmp_path.iterdir())


def test_what_was_put_there_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(InputError), replacing(tmp_path / "model", MARK):
        base_model(tmp_path / "model")
    assert contents(tmp_path) == {
        "model/config.json": "{}",
        "model/model.safetensors": "a base model",
    }


@pytest.mark.parametrize("suffix", [".partial", ".old"])
def test_other_folders_are_no_leftovers_of_an_export(suffix: str, tmp_path: Path) -> None:
    base_model(tmp_path / f"model{suffix}")
    before = contents(tmp_path)
    with pytest.raises(InputError), replacing(tmp_path / "model", MARK):
        pytest.fail("began to write")
    assert contents(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of other users")
@pytest.mark.parametrize("suffix", ["", ".partial", ".old"])
def test_another_users_export_is_not_replaced(suffix: str, tmp_path: Path) -> None:
    theirs = tmp_path / f"model{suffix}"
    write(theirs, "theirs")
    os.chown(theirs, 61_000, 61_000)
    before = contents(tmp_path)
    with pytest.raises(InputError) as caught, replacing(tmp_path / "model", MARK):
        pytest.fail("began to write")
    assert caught.value.problems[0].code == "not-your-folder"
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ONE_OF_EACH.values(), ids=ONE_OF_EACH.keys())
def test_exports_load_silently_and_compute_the_same(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the states of two ranks, in two sub-groups each."""
    torch.manual_seed(0)
    spec = replace(with_model(), model=replace(scaled_down(name), id="builtin:tiny"))
    model: Any = causal_model(load_config(spec.model), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                # Norms and biases are not all ones and zeros.
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    checkpoint_of(model, spec, tmp_path / "checkpoint")
    transformers_log = logging.getLogger("transformers")
    monkeypatch.setattr(transformers_log, "propagate", True)
    with caplog.at_level(logging.WARNING), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        export(tmp_path / "checkpoint", tmp_path / "model", "r", spec)
        loaded, info = load_pretrained(tmp_path / "model")
    assert [record.getMessage() for record in caplog.records] == []
    assert [str(warning.message) for warning in warned if "transformers" in warning.filename] == []
    assert not any(info.values()), info
    assert loaded.dtype == torch.bfloat16
    written = whole.of_checkpoint(tmp_path / "checkpoint", spec)
    # Not model.bfloat16(), which rounds the frequencies of the rotary embedding too.
    expected: Any = causal_model(loaded.config, dtype=torch.bfloat16)
    expected.load_state_dict({key: value.bfloat16() for key, value in model.state_dict().items()})
    ids = torch.arange(5, 69)[None]
    with torch.no_grad():
        logits, wanted, from_checkpoint = (
            each.eval()(input_ids=ids).logits for each in (loaded, expected, written)
        )
    assert torch.equal(logits, wanted)
    assert torch.equal(from_checkpoint, wanted)


def test_a_tied_model_is_built_from_its_checkpoint(tmp_path: Path) -> None:
    spec = tiny()
    spec = with_model(config=spec.model.config | {"tie_word_embeddings": True})
    model: Any = causal_model(load_config(spec.model), dtype=torch.float32)
    checkpoint_of(model, spec, tmp_path)
    written: Any = whole.of_checkpoint(tmp_path, spec)
    assert written.lm_head.weight is written.get_input_embeddings().weight
    ids = torch.arange(5, 69)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            written.eval().float()(input_ids=ids).logits,
            model.eval()(input_ids=ids).logits,
            rtol=0.02,
            atol=0.02,
        )


@pytest.mark.parametrize(
    "kind", sorted(OTHERS.keys() & {"deepseek_v3", "ernie4_5_moe", "gemma4_text"})
)
def test_untrained_weights_are_exported(kind: str, tmp_path: Path) -> None:
    """Buffers, or frozen parameters (ERNIE 4.5), of the weights: no checkpoint has them."""
    torch.manual_seed(0)
    model: Any = causal_model(load_config(another(kind)), dtype=torch.float32)
    trained = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    kept = {
        name: torch.rand_like(tensor)
        for name, tensor in model.state_dict().items()
        if name not in trained
    }
    assert kept
    model.load_state_dict(kept, strict=False)
    base = tmp_path / "base"
    model.save_pretrained(base)
    trained_on = ModelSpec(id=str(base), tokenizer="builtin:tiny")
    spec = replace(with_model(), model=trained_on)
    loaded, info = load_pretrained(write_export(spec, model, tmp_path))
    assert not any(info.values()), info
    written = whole.of_checkpoint(tmp_path / "checkpoint", spec)
    for found in (loaded, written):
        for name, tensor in kept.items():
            torch.testing.assert_close(
                found.state_dict()[name].float(), tensor, rtol=0.01, atol=0.01
            )


@pytest.mark.skipif("apertus" not in CONFIG_MAPPING, reason="older transformers do not have it")
def test_constants_that_only_a_constructor_knows_are_exported(tmp_path: Path) -> None:
    """Apertus stores two of its activation, which no initialisation of weights touches."""
    shape = tiny().model.config | {"model_type": "apertus", "hidden_act": "xielu"}
    spec = with_model(config=shape)
    model: Any = causal_model(load_config(spec.model), dtype=torch.float32)
    kept = {name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()}
    assert kept
    loaded, _ = load_pretrained(write_export(spec, model, tmp_path))
    for found in (loaded, whole.of_checkpoint(tmp_path / "checkpoint", spec)):
        for name, tensor in kept.items():
            assert torch.equal(found.state_dict()[name], tensor.bfloat16()), name


def test_exports_keep_the_settings_of_generation(tmp_path: Path) -> None:
    """They are a file of their own, which weights and configuration know nothing of."""
    from transformers import GenerationConfig

    base = chat_model(tmp_path / "base")
    make: Any = GenerationConfig
    given = make(eos_token_id=1, do_sample=True, temperature=0.6, top_p=0.9)
    given.save_pretrained(base)
    made = exported(base, tmp_path)
    assert (made.do_sample, made.temperature, made.top_p) == (True, 0.6, 0.9)
    assert made.eos_token_id == [1, STOP_ID]
    assert exported(base, tmp_path).eos_token_id == [1, STOP_ID]


def test_contradicting_generation_settings_are_exported(tmp_path: Path) -> None:
    base = chat_model(tmp_path / "base")
    (base / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 1], "temperature": 0.9, "do_sample": False})
    )
    made = exported(base, tmp_path)
    assert made.temperature in (None, 1.0)
    assert made.eos_token_id == [7, 1, STOP_ID]
    (base / "generation_config.json").unlink()
    assert exported(base, tmp_path).eos_token_id == STOP_ID


def test_a_replaced_checkpoint_is_exported_from_the_newer(tmp_path: Path) -> None:
    run = run_with_checkpoints(tmp_path, 5)
    events = _export_run({"run": str(run.path), "to": str(tmp_path / "model")})
    assert "step 5 " in next(events)["message"]
    shutil.copytree(run.checkpoints_dir / "step-000005", run.checkpoints_dir / "step-000006")
    manifest = run.checkpoints_dir / "step-000006" / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace('"step":5,', '"step":6,'))
    shutil.rmtree(run.checkpoints_dir / "step-000005")
    assert "step 6 " in next(events)["message"]
    last = list(events)[-1]
    assert (last["step"], last["done"]) == (6, True)
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_exports_say_how_far_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("so_tui_trainer.tools.channel._PROGRESS_S", 0.0)
    run = run_with_checkpoints(tmp_path, 5)
    answers = list(_export_run({"run": str(run.path), "to": str(tmp_path / "model")}))
    told = [
        msgspec.convert(answer["progress"], ExportProgress)
        for answer in answers
        if "progress" in answer
    ]
    parts = [progress.doing for progress in told]
    assert parts == sorted(parts), "read, then written"
    for doing in set(parts):
        done = [progress.done_bytes for progress in told if progress.doing == doing]
        assert done == sorted(done)
    tensors = sum(
        1 for _ in causal_model(load_config(tiny().model), dtype=torch.float32).named_parameters()
    )
    assert {progress.total_tensors for progress in told if progress.doing == "reading"} <= {tensors}
    written = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert told[-1].doing == "writing"
    assert told[-1].done_bytes == told[-1].total_bytes
    assert 0.9 * written < told[-1].total_bytes <= written


def test_a_folder_that_has_its_name_already_is_written(tmp_path: Path) -> None:
    stage = Stage()
    stage.write(tmp_path / "renamed", {"weight": torch.zeros(8, dtype=torch.bfloat16)})
    assert stage.done_bytes() == stage.total_bytes == 16


def test_what_is_said_last_is_of_the_end(tmp_path: Path) -> None:
    run = run_with_checkpoints(tmp_path, 5)
    may_end, done = threading.Event(), threading.Event()

    def work(_: object) -> None:
        may_end.wait(60)
        done.set()

    def progress() -> dict[str, object]:
        known: dict[str, object] = {"done": done.is_set()}
        may_end.set()  # the work ends while this is asked
        assert done.wait(60)
        time.sleep(0.05)
        return known

    assert list(with_newest(run, read_spec(run), "exporting", work, progress))[-1] == {"done": True}


def test_a_command_is_told_of_every_tenth_and_of_both_ends() -> None:
    def at(doing: Literal["reading", "writing"], done: int) -> ExportProgress:
        return ExportProgress(doing=doing, done_bytes=done, total_bytes=1000)

    read = [at("reading", done) for done in range(0, 1001, 5)]
    written = [at("writing", done) for done in (0, 50, 1000)]
    again: list[ExportProgress | str] = [at("writing", 1000), "done", at("writing", 1000), "done"]
    told = list(in_steps(iter(["exporting step 5", *read, *written, *again]), 10))
    assert [event for event in told if isinstance(event, str)] == [
        "exporting step 5",
        "done",
        "done",
    ]
    assert [event.done_bytes for event in told if isinstance(event, ExportProgress)] == [
        *range(0, 1001, 100),
        0,
        1000,
    ]


@pytest.mark.slow
def test_without_a_network_what_is_in_the_hubs_cache_is_enough(tmp_path: Path) -> None:
    """Compute nodes have none, and every look-up would wait half a minute for it."""
    cached = tmp_path / "hub" / "models--someone--chat"
    chat_model(cached / "snapshots" / "0123")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    spec = tiny(model__id="someone/chat", model__weights="pretrained", data__sequence_length="128")
    run = create_run(spec, tmp_path / "runs")
    model: Any = causal_model(
        AutoConfig.from_pretrained(cached / "snapshots" / "0123"), dtype=torch.float32
    )
    checkpoint_of(model, spec, run.checkpoints_dir / "step-000005", run=run_id(run))
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        environment.pop(name, None)
    asked = json.dumps({"run": str(run.path), "to": str(tmp_path / "model")})
    command = [sys.executable, "-m", "so_tui_trainer.tools.export"]
    done = subprocess.run(
        command, input=asked, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["step"] == 5
    assert "Retrying" not in done.stderr


def test_a_damaged_checkpoint_is_named_and_left_alone(tmp_path: Path) -> None:
    run = run_with_checkpoints(tmp_path, 5, 6)
    states = run.checkpoints_dir / "step-000006" / "optimizer" / "rank_00001.states"
    states.write_bytes(states.read_bytes()[:-100])
    messages = list(_export_run({"run": str(run.path), "to": str(tmp_path / "model")}))
    assert "step-000006 cannot be used" in messages[0]["message"]
    assert "rank_00001.states" in messages[0]["message"]
    assert messages[-1]["step"] == 5
    assert states.is_file()
    (run.checkpoints_dir / "step-000005" / "checkpoint.json").write_text("{")
    problem = refusal(
        lambda: list(_export_run({"run": str(run.path), "to": str(tmp_path / "model")}))
    )
    assert (problem.code, problem.field) == ("checkpoints-unreadable", "run")


def with_model(**model: object) -> RunSpec:
    """Return the tiny preset, whose model is changed."""
    spec = tiny(data__sequence_length="128")
    return replace(spec, model=replace(spec.model, **model))


def write_export(spec: RunSpec, model: Any, folder: Path) -> Path:
    """Export a checkpoint of a model in a folder."""
    checkpoint_of(model, spec, folder / "checkpoint")
    export(folder / "checkpoint", folder / "model", "r", spec)
    return folder / "model"


STOP_ID = 2048
"""Of ``<|eot|>``, which the embedded tokenizer does not have."""


def chat_model(folder: Path) -> Path:
    """A model's folder without weights, whose chat template ends answers with another token."""
    from transformers import AutoTokenizer

    from so_tui.spec import resolve_source

    tokenizer: Any = AutoTokenizer.from_pretrained(resolve_source("builtin:tiny"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot|>"]})
    assert tokenizer.convert_tokens_to_ids("<|eot|>") == STOP_ID
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content + '<|eot|>' }}{% "
        "endfor %}"
    )
    tokenizer.save_pretrained(folder)
    config = load_config(tiny().model)
    config.vocab_size = STOP_ID + 8
    config.save_pretrained(folder)
    return folder


def exported(base: Path, tmp_path: Path) -> Any:
    """The generation config of an export of a checkpoint of this model, without a warning."""
    from transformers import GenerationConfig

    spec = tiny(model__id=str(base), model__weights="pretrained", data__sequence_length="128")
    model: Any = causal_model(load_config(spec.model), dtype=torch.float32)
    folder = write_export(spec, model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return GenerationConfig.from_pretrained(folder)
