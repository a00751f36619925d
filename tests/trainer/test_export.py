"""What an export holds, may replace and leaves behind; runs converted for DeepSpeed, and back."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from transformers import CONFIG_MAPPING, GenerationConfig

from so_tui.cli import main
from so_tui.launch.helper_jobs import ExportProgress, from_deepspeed
from so_tui.runs import RunDirectory, list_runs, read_state
from so_tui.runs.directory import run_id
from so_tui.spec import InputError, ModelSpec, RunSpec
from so_tui_trainer import checkpoint_folder
from so_tui_trainer.checkpoint_folder import optimizer_folder
from so_tui_trainer.data.tokens import load_tokenizer
from so_tui_trainer.export import (
    ExportMarker,
    export,
    of_checkpoint,
    refuse_foreign,
    refuse_without_room,
    replacing,
)
from so_tui_trainer.model.config import load_config
from so_tui_trainer.tools.convert import convert
from so_tui_trainer.tools.export import _export_run
from tests.support.engine import by_name
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
from tests.support.problems import refusal, rejected

MARK = ExportMarker(run="r", step=5, version="1")
IDS = torch.arange(5, 69)[None]
STOP_ID = 2048
"""Of ``<|eot|>``, which the embedded tokenizer does not have."""


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def write(folder: Path, text: str) -> None:
    with replacing(folder, MARK) as partial:
        (partial / "weights").write_text(text)


def base_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("a base model")


def with_model(**model: object) -> RunSpec:
    spec = tiny(data__sequence_length="128")
    return replace(spec, model=replace(spec.model, **model))


def write_export(spec: RunSpec, model: Any, folder: Path) -> Path:
    checkpoint_of(model, spec, folder / "checkpoint")
    export(folder / "checkpoint", folder / "model", "r", spec)
    return folder / "model"


def told(run: RunDirectory, folder: Path) -> list[dict[str, Any]]:
    return list(_export_run({"run": str(run.path), "to": str(folder / "model")}))


@pytest.mark.parametrize("make", [base_model, lambda path: path.write_text("a file")])
def test_what_is_no_export_is_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    there, link = tmp_path / "base", tmp_path / "link"
    make(there)
    link.symlink_to(there)
    before = contents(tmp_path)
    for target in (there, link):
        problem = refusal(lambda to=target: export(tmp_path / "none", to, "r", tiny()))  # type: ignore[misc]
        assert (problem.field, problem.value) == ("--to", str(there))
    assert contents(tmp_path) == before


def test_an_empty_folder_and_an_export_are_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    refuse_foreign(folder)
    write(folder, "first")
    (folder / "gone").touch()
    write(folder, "second")
    marker = '{"run":"r","step":5,"version":"1"}'
    assert contents(tmp_path) == {"model/weights": "second", "model/so_tui_export.json": marker}


def test_an_export_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
    write(tmp_path / "model", "first")
    before = contents(tmp_path)
    with pytest.raises(OSError, match="full"), replacing(tmp_path / "model", MARK):
        raise OSError("the disk is full")
    assert contents(tmp_path) == before


def test_a_full_disk_is_reported_beforehand(tmp_path: Path) -> None:
    refuse_without_room(tmp_path / "a" / "b", 1)
    assert refusal(lambda: refuse_without_room(tmp_path / "a" / "b", 1 << 62)).code == "disk-full"
    assert not list(tmp_path.iterdir())


def test_what_was_put_there_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(InputError), replacing(tmp_path / "model", MARK):
        base_model(tmp_path / "model")
    base_model(tmp_path / "other")
    assert contents(tmp_path / "model") == contents(tmp_path / "other")


@pytest.mark.parametrize("suffix", ["", ".partial", ".old"])
@pytest.mark.parametrize("owner", ["mine", "theirs"])
def test_other_folders_are_no_leftovers_of_an_export(
    owner: str, suffix: str, tmp_path: Path
) -> None:
    there = tmp_path / f"model{suffix}"
    if owner == "theirs":
        if os.geteuid() != 0:
            pytest.skip("only root can make folders of other users")
        write(there, "theirs")
        os.chown(there, 61_000, 61_000)
    else:
        base_model(there)
    before = contents(tmp_path)
    code = "not-your-folder" if owner == "theirs" else "export-would-overwrite"
    with rejected(code), replacing(tmp_path / "model", MARK):
        pytest.fail("began to write")
    assert contents(tmp_path) == before


TIED = tiny().model.config | {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    "shape",
    [*(scaled_down(name).config for name in ONE_OF_EACH.values()), TIED],
    ids=[*ONE_OF_EACH, "tied"],
)
def test_exports_load_silently_and_compute_the_same(
    shape: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the states of two ranks, in two sub-groups each."""
    torch.manual_seed(0)
    spec = with_model(config=shape)
    model: Any = causal_model(load_config(spec.model), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                # Norms and biases are not all ones and zeros.
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loaded, info = load_pretrained(write_export(spec, model, tmp_path))
    assert [record.getMessage() for record in caplog.records] == []
    assert [str(warning.message) for warning in warned if "transformers" in warning.filename] == []
    assert not any(info.values()), info
    assert loaded.dtype == torch.bfloat16
    written = of_checkpoint(tmp_path / "checkpoint", spec)
    # Not model.bfloat16(), which rounds the frequencies of the rotary embedding too.
    expected: Any = causal_model(loaded.config, dtype=torch.bfloat16)
    expected.load_state_dict({key: value.bfloat16() for key, value in model.state_dict().items()})
    with torch.no_grad():
        logits, wanted, from_checkpoint = (
            each.eval()(input_ids=IDS).logits for each in (loaded, expected, written)
        )
    assert torch.equal(logits, wanted)
    assert torch.equal(from_checkpoint, wanted)


def keeps(spec: RunSpec, model: Any, kept: dict[str, torch.Tensor], folder: Path) -> None:
    """Assert that an export and a model of a checkpoint have tensors that are not trained."""
    assert kept
    loaded, info = load_pretrained(write_export(spec, model, folder))
    assert not any(info.values()), info
    for found in (loaded, of_checkpoint(folder / "checkpoint", spec)):
        for name, tensor in kept.items():
            stored = found.state_dict()[name].float()
            torch.testing.assert_close(stored, tensor, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    "kind", sorted(OTHERS.keys() & {"deepseek_v3", "ernie4_5_moe", "gemma4_text"})
)
def test_untrained_weights_are_exported(kind: str, tmp_path: Path) -> None:
    """Buffers, or frozen parameters (ERNIE 4.5), of the weights: no checkpoint has them."""
    torch.manual_seed(0)
    model: Any = causal_model(load_config(another(kind)), dtype=torch.float32)
    parameters = model.named_parameters(remove_duplicate=False)
    trained = {name for name, parameter in parameters if parameter.requires_grad}
    kept = {
        name: torch.rand_like(tensor)
        for name, tensor in model.state_dict().items()
        if name not in trained
    }
    model.load_state_dict(kept, strict=False)
    model.save_pretrained(tmp_path / "base")
    base = ModelSpec(id=str(tmp_path / "base"), tokenizer="builtin:tiny")
    keeps(replace(with_model(), model=base), model, kept, tmp_path)


@pytest.mark.skipif("apertus" not in CONFIG_MAPPING, reason="older transformers do not have it")
def test_constants_that_only_a_constructor_knows_are_exported(tmp_path: Path) -> None:
    """Apertus stores two of its activation, which no initialisation of weights touches."""
    shape = tiny().model.config | {"model_type": "apertus", "hidden_act": "xielu"}
    spec = with_model(config=shape)
    model: Any = causal_model(load_config(spec.model), dtype=torch.float32)
    states = model.state_dict()
    kept = {name: tensor for name, tensor in model.named_buffers() if name in states}
    keeps(spec, model, kept, tmp_path)


def chat_model(folder: Path, **generation: object) -> Path:
    """A model's folder without weights, whose chat template ends answers with another token."""
    tokenizer: Any = load_tokenizer(tiny().model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot|>"]})
    assert tokenizer.convert_tokens_to_ids("<|eot|>") == STOP_ID
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|eot|>{% endfor %}"
    tokenizer.save_pretrained(folder)
    config = load_config(tiny().model)
    config.vocab_size = STOP_ID + 8
    config.save_pretrained(folder)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("given", "kept", "ends"),
    [
        (
            {"eos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.9},
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            [1, STOP_ID],
        ),
        # Settings that contradict each other are left out.
        (
            {"eos_token_id": [7, 1], "temperature": 0.9, "do_sample": False},
            {"temperature": GenerationConfig().temperature},  # type: ignore[no-untyped-call]
            [7, 1, STOP_ID],
        ),
        (
            {"watermarking_config": 3},
            {"watermarking_config": None},
            STOP_ID,
        ),  # so are unusable ones
        ({}, {}, STOP_ID),
    ],
    ids=["settings", "contradicting", "unusable", "none"],
)
def test_exports_keep_the_settings_of_generation(
    given: dict[str, Any], kept: dict[str, Any], ends: object, tmp_path: Path
) -> None:
    """They are a file of their own, which weights and configuration know nothing of."""
    base = chat_model(tmp_path / "base", **given)
    spec = with_model(id=str(base), weights="pretrained", tokenizer="", config={})
    model: Any = causal_model(load_config(spec.model), dtype=torch.float32)
    for _ in range(2):
        folder = write_export(spec, model, tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made: Any = GenerationConfig.from_pretrained(folder)
        assert {name: getattr(made, name) for name in kept} == kept
        assert made.eos_token_id == ends


def test_a_replaced_checkpoint_is_exported_from_the_newer(tmp_path: Path) -> None:
    run = run_with_checkpoints(tmp_path, 5)
    events = _export_run({"run": str(run.path), "to": str(tmp_path / "model")})
    assert "step 5 " in next(events)["message"]
    newer = run.checkpoints_dir / "step-000006"
    (run.checkpoints_dir / "step-000005").rename(newer)
    manifest = newer / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace('"step":5,', '"step":6,'))
    assert "step 6 " in next(events)["message"]
    last = list(events)[-1]
    assert (last["step"], last["done"]) == (6, True)
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_exports_say_how_far_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("so_tui_trainer.tools.channel._PROGRESS_S", 0.0)
    progress = [
        msgspec.convert(answer["progress"], ExportProgress)
        for answer in told(run_with_checkpoints(tmp_path, 5), tmp_path)
        if "progress" in answer
    ]
    order = [(each.doing, each.done_bytes) for each in progress]
    assert order == sorted(order), "read, then written"
    model = causal_model(load_config(tiny().model), dtype=torch.float32)
    tensors = {each.total_tensors for each in progress if each.doing == "reading"}
    assert tensors <= {len(list(model.named_parameters()))}
    last, written = progress[-1], (tmp_path / "model" / "model.safetensors").stat().st_size
    assert (last.doing, last.done_bytes) == ("writing", last.total_bytes)
    assert 0.9 * written < last.total_bytes <= written


def test_a_damaged_checkpoint_is_named_and_left_alone(tmp_path: Path) -> None:
    run = run_with_checkpoints(tmp_path, 5, 6)
    states = run.checkpoints_dir / "step-000006" / "optimizer" / "rank_00001.states"
    states.write_bytes(states.read_bytes()[:-100])
    first, *_, last = told(run, tmp_path)
    assert "step-000006 cannot be used" in first["message"]
    assert "rank_00001.states" in first["message"]
    assert last["step"] == 5
    assert states.is_file()
    (run.checkpoints_dir / "step-000005" / "checkpoint.json").write_text("{")
    problem = refusal(lambda: told(run, tmp_path))
    assert (problem.code, problem.field) == ("checkpoints-unreadable", "run")
    run.manifest_path.unlink()
    run.manifest_path.symlink_to(run.manifest_path.name)
    assert refusal(lambda: told(run, tmp_path)).code == "unreadable-run"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return run_with_checkpoints(tmp_path / "runs", 5)


def converted(run: RunDirectory, folder: Path) -> str:
    """Convert a run for DeepSpeed; return the arguments that make a run of it in ``back``."""
    *_, answer = convert({"run": str(run.path), "to": str(folder / "theirs")})
    assert answer["step"] == 5
    return f"convert {folder / 'theirs'} --runs-dir {folder / 'back'}"


def test_a_converted_run_keeps_states_and_place_in_the_data(
    run: RunDirectory, tmp_path: Path
) -> None:
    back_again = converted(run, tmp_path)
    assert main(f"{back_again} --as tiny --set train.steps=9".split()) == 0
    (back,) = list_runs(tmp_path / "back")
    state = read_state(back)
    assert (state.state, state.step, state.saved_step, state.total_steps) == ("stopped", 5, 5, 9)
    before, after = (
        checkpoint_folder.newest(made.checkpoints_dir, run_id(made)) for made in (run, back)
    )
    assert before is not None
    assert after is not None
    assert (after.manifest.step, after.manifest.consumed_sequences) == (5, 10)
    assert after.manifest.data == before.manifest.data
    ours, theirs = (
        {name: states for name, (_, states) in by_name(optimizer_folder(found.path)).items()}
        for found in (before, after)
    )
    assert ours == theirs


def test_what_is_there_is_refused_and_stays(run: RunDirectory, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "weights").write_text("mine")
    assert refusal(lambda: converted(run, tmp_path)).code == "export-would-overwrite"
    assert (theirs / "weights").read_text() == "mine"


def test_a_checkpoint_of_another_model_leaves_no_run_behind(
    run: RunDirectory, tmp_path: Path
) -> None:
    back = tmp_path / "back"
    problem = refusal(lambda: from_deepspeed(tmp_path / "runs", tiny(), back, lambda _: None))
    assert problem.code == "not-deepspeeds"
    assert list_runs(back) == ()
    assert main(f"{converted(run, tmp_path)} --as qwen3-14b".split()) == 2
    assert list_runs(back) == ()
