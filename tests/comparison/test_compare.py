"""The comparison's figures: what counts as useful, over which time, and what the table makes of
it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.comparison import figures, ground, original, processes
from benchmarks.comparison.figures import Step
from benchmarks.comparison.parts import (
    BY_NAME,
    PARTS,
    SEQUENCES,
    SHAPES,
    published_ds_config,
    spec_changes,
)
from benchmarks.comparison.processes import Ended, Line
from so_tui.spec import find_preset, with_values

TINY, FULL = SHAPES["tiny"], SHAPES["qwen3-4b"]

ROWS = [
    {
        "instruction": f"Say {number} words",
        "input": "" if number % 3 else "slowly",
        "output": "word " * number,
    }
    for number in range(1, 31)
]

SHELL = """#!/bin/bash
cat > "$DS_CONFIG_JSON" << EOF
{"train_batch_size": $BATCH_SIZE, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 3, "reduce_bucket_size": 4e8,
 "sub_group_size": 4e8, "offload_optimizer": {"device": "cpu", "pin_memory": true, "ratio": 0.90, "super_offload": true}}}
EOF
cat > "$DS_CONFIG_JSON" << EOF
{"train_batch_size": 1}
EOF
"""  # noqa: E501

SCRIPT = """
def preprocess_alpaca_example(example, tokenizer, max_length):
    text = example["instruction"] + example["output"]
    return tokenizer(text, truncation=True, max_length=max_length, padding="max_length")
"""


def _steps(*steps: tuple[float, int]) -> list[Step]:
    return [Step(step_s=seconds, useful_tokens=tokens, positions=1000) for seconds, tokens in steps]


def test_tokens_per_second_leaves_warm_up_out_and_weighs_steps_by_their_length() -> None:
    told = figures.measured(_steps((60.0, 900), (1.0, 100), (3.0, 500)), warmup=1)
    assert told["useful_tokens_per_s"] == pytest.approx(600 / 4)
    assert told["positions_per_s"] == pytest.approx(2000 / 4)
    assert told["padding"] == pytest.approx(0.7)
    assert told["step_s"] == 2.0
    with pytest.raises(ValueError, match="nothing after 3"):
        figures.measured(_steps((1.0, 1), (1.0, 1), (1.0, 1)), warmup=3)


def _row(part: str, tokens_per_s: float, shape: str = "qwen3-4b") -> dict[str, Any]:
    return {"part": part, "shape": shape} | figures.measured(_steps((1.0, int(tokens_per_s))), 0)


def test_the_table_has_the_newest_row_of_each_part_and_says_by_how_much_it_is_behind() -> None:
    rows = [
        _row("original", 50),
        _row("original", 100),
        _row("ours", 750),
        _row("original-packed", 300),
        _row("gpu", 7, shape="tiny"),
        {"part": "trl", "shape": "qwen3-4b", "error": "exit code 1\nno such package"},
    ]
    lines = figures.table(rows, "qwen3-4b").splitlines()
    cells = {
        line.split(" | ")[0].removeprefix("| "): line.removesuffix(" |").split(" | ")[1:]
        for line in lines[2:]
        if line.startswith("|")
    }
    assert [BY_NAME[name].title for name in ("ours", "original-packed", "original")] == list(cells)
    assert cells[BY_NAME["original"].title][-2:] == ["100", "7.50"]
    assert cells[BY_NAME["original-packed"].title][-1] == "2.50"
    assert lines[-1].endswith("not measured (no such package)")


def test_a_padding_trainers_speed_is_also_told_for_rows_of_mean_length() -> None:
    row = _row("original", 100) | {"data": {"tokens_per_row": 200.0}}  # 1,000 positions a second
    row["at_mean_row"] = figures.at_mean_row(row, 4096)
    assert row["at_mean_row"] == pytest.approx(1000 / 4096 * 200)
    assert "| 100 (49 with rows of mean length) |" in figures.table([row], "qwen3-4b")


def test_the_docs_show_the_table_of_the_data_or_say_that_there_is_none() -> None:
    root = Path(figures.__file__).parents[2]
    data, text = (
        root / "benchmarks/results/compare-h200.json",
        (root / "docs/comparison.md").read_text(),
    )
    if data.exists():
        assert figures.table(json.loads(data.read_text()), "qwen3-4b") in text
    else:
        assert "Not measured yet" in text


def test_a_later_error_does_not_hide_what_was_measured() -> None:
    rows = [_row("ours", 750), {"part": "ours", "shape": "qwen3-4b", "error": "out of memory"}]
    assert figures.newest(rows, "qwen3-4b")["ours"]["useful_tokens_per_s"] == 750
    assert "not measured" not in figures.table(rows, "qwen3-4b")


def test_steps_of_the_original_last_from_line_to_line() -> None:
    part = BY_NAME["original"]
    lines = []
    for number in range(1, part.steps + 1):
        text = (
            f"Step {number:4d} | Loss: 1.5000 | Time:  {number}00ms | TFLOPS: 99.00 | Tokens/s:   "
            "2500"
        )
        # Its two handlers print each line twice.
        lines += [
            Line(10.0 * number, f"10:00:00 - finetune_zero3 - INFO - {text}"),
            Line(10.0 * number + 1, f"INFO:finetune_zero3:{text}"),
        ]
    tokens = list(range(100, 100 + part.steps))
    row = original.row(Ended(tuple(lines), None, False, 1.0), part, FULL, tokens, 60)
    assert [step["step_s"] for step in row["steps"]] == [0.1] + [10.0] * (part.steps - 1)
    assert [step["useful_tokens"] for step in row["steps"]] == tokens
    assert {step["positions"] for step in row["steps"]} == {SEQUENCES * 4096}
    assert row["reported"]["tokens_per_s"] == [2500.0] * part.steps
    assert (
        "exit code 3"
        in original.row(Ended(tuple(lines[:4]), 3, False, 1.0), part, FULL, tokens, 60)["error"]
    )


def test_useful_tokens_of_the_original_follow_the_order_of_deepspeeds_loader(
    tmp_path: Path,
) -> None:
    from deepspeed.runtime.dataloader import DeepSpeedDataLoader
    from transformers import AutoTokenizer, default_data_collator

    from benchmarks.comparison.original_ground import useful_tokens

    laid = _laid(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    scope: dict[str, Any] = {}
    exec(SCRIPT, scope)
    tokenizer = AutoTokenizer.from_pretrained(laid.tokenizer)
    rows = ground.read_rows(Path(laid.rows).read_text())
    prepared = [dict(scope["preprocess_alpaca_example"](row, tokenizer, 64)) for row in rows]
    loader = DeepSpeedDataLoader(
        prepared,
        SEQUENCES,
        pin_memory=False,
        local_rank=0,
        tput_timer=None,
        collate_fn=default_data_collator,
        num_local_io_workers=0,
        data_parallel_world_size=1,
        data_parallel_rank=0,
    )
    seen = [int(batch["attention_mask"].sum()) for batch in islice(iter(loader), 5)]
    assert useful_tokens(script, Path(laid.rows), laid.tokenizer, 64, 5) == seen
    assert len(set(seen)) > 1


def test_packed_batches_become_what_hugging_faces_loss_wants(tmp_path: Path) -> None:
    import torch

    from benchmarks.comparison.packed import labels
    from so_tui_trainer.data import documents, tokens
    from so_tui_trainer.data.batches import Batches

    laid = _laid(tmp_path)
    changes = spec_changes(BY_NAME["original-packed"], TINY, laid.rows, laid.tokenizer) | {
        "train.micro_batch": "2"
    }
    spec = with_values(find_preset(TINY.preset).spec, changes)
    batches = Batches(
        documents.read(tokens.prepare(spec, tmp_path / "cache"), spec.data), spec, rank=0
    )
    (batch,) = batches.micro_batches(1)
    wanted = labels(batch)
    trained = wanted != -100
    assert int(trained.sum()) == batches.counts(1).trained_tokens > 0
    assert torch.equal(wanted[trained], batch.input_ids[trained])
    assert not trained[
        batch.position_ids == 0
    ].any()  # the loss shifts by one: a document's first token must not be a target


def _laid(folder: Path) -> ground.Ground:
    source = folder / "rows.json"
    source.write_text(json.dumps(ROWS))
    return ground.lay(folder / "work", source, TINY)


def test_the_ground_has_every_row_and_is_laid_once(tmp_path: Path) -> None:
    laid = _laid(tmp_path)
    assert ground.read_rows(Path(laid.rows).read_text()) == ROWS
    assert [file.name for file in Path(laid.rows_folder).iterdir()] == ["train.jsonl"]
    assert laid.facts["rows"] == len(ROWS)
    assert laid.facts["tokens_per_row"] * len(ROWS) / laid.facts[
        "tokens_per_word"
    ] == pytest.approx(sum(len(_text(row).split()) for row in ROWS))
    before = Path(laid.rows).stat().st_mtime_ns
    assert _laid(tmp_path) == laid
    assert Path(laid.rows).stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="instruction"):
        ground.read_rows('[{"text": "no instruction"}]')


def _text(row: dict[str, str]) -> str:
    middle = f"\n\n### Input:\n{row['input']}" if row["input"] else ""
    return f"### Instruction:\n{row['instruction']}{middle}\n\n### Response:\n{row['output']}"


def test_the_published_configuration_is_taken_as_it_is_written() -> None:
    config = published_ds_config(SHELL, SEQUENCES, 1, FULL)
    assert config["train_batch_size"] == 4
    assert "gradient_clipping" not in config
    assert config["zero_optimization"]["offload_optimizer"] == {
        "device": "cpu",
        "pin_memory": True,
        "ratio": 0.9,
        "super_offload": True,
    }
    long = published_ds_config(SHELL, SEQUENCES, 8, FULL)
    assert (long["train_batch_size"], long["gradient_accumulation_steps"]) == (32, 8)
    assert (
        "super_offload"
        not in published_ds_config(SHELL, SEQUENCES, 1, TINY)["zero_optimization"][
            "offload_optimizer"
        ]
    )
    with pytest.raises(ValueError, match="no DeepSpeed configuration"):
        published_ds_config("echo nothing", SEQUENCES, 1, FULL)


def test_every_part_of_ours_is_a_valid_run_of_its_length(tmp_path: Path) -> None:
    for shape in SHAPES.values():
        for part in PARTS:
            changes = spec_changes(part, shape, str(tmp_path / "rows.jsonl"), str(tmp_path))
            spec = with_values(find_preset(shape.preset).spec, changes)
            assert spec.offload.ratio == 0.9
            assert (
                spec.train.gradient_clipping == 1.0
            )  # the default, as the published configuration has it by leaving it out
            assert spec.benchmark.warmup_steps + spec.benchmark.measured_steps == part.steps
    assert max(part.sequences_per_step() for part in PARTS) * FULL.sequence_length <= 131_072


@pytest.mark.slow
def test_a_part_is_measured_once_and_shown_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / original.SHELL).write_text(SHELL)
    out = tmp_path / "out.json"
    compare = [
        sys.executable,
        str(Path(figures.__file__).parents[1] / "compare.py"),
        "--out",
        str(out),
        "--shape",
        "tiny",
    ]
    measure = [
        str(tmp_path / "rows.json"),
        "--original",
        str(tmp_path / "finetune_zero3.py"),
        "--work",
        str(tmp_path / "work"),
    ]

    def told(*arguments: str) -> str:
        return subprocess.run(
            [*compare, *arguments], capture_output=True, text=True, check=True
        ).stdout

    part = BY_NAME["original-packed"]
    printed = told(*measure, "--only", part.name)
    (row,) = json.loads(out.read_text())
    assert len(row["steps"]) == len(row["losses"]) == part.steps
    assert row["losses"][-1] < row["losses"][0]
    assert (
        row["useful_tokens_per_s"]
        == figures.measured(row["steps"], part.warmup)["useful_tokens_per_s"]
    )
    assert told("--table") == figures.table([row], "tiny") + "\n"
    assert part.title in printed
    assert "already measured" in told(*measure, "--only", part.name)
    assert json.loads(out.read_text()) == [row]


def test_a_process_is_ended_when_it_has_said_enough_and_its_children_with_it(
    tmp_path: Path,
) -> None:
    child = (
        "import subprocess, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, 'enough', "
        "sep='\\n', flush=True); time.sleep(60)"
    )
    begin = time.monotonic()
    ended = processes.run(
        [sys.executable, "-c", child], {}, 30, lambda text: text.startswith("enough")
    )
    assert time.monotonic() - begin < 20
    assert not ended.late
    assert not _alive(int(ended.lines[0].text))
    late = processes.run(
        [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"],
        {},
        1.5,
        lambda _: False,
    )
    assert late.late
    assert "took longer than" in processes.row_of(late, 1.5)["error"]


def _alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
