"""The comparison's figures: what counts as useful, over which time, and what the table makes of
it.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.comparison import figures, ground, original
from benchmarks.comparison.figures import Step
from benchmarks.comparison.parts import BY_NAME, SEQUENCES, SHAPES, published_ds_config
from tests.support.python_path import printed

TINY, FULL = SHAPES["tiny"], SHAPES["qwen3-4b"]

ROWS = [
    {"instruction": f"Say {n} words", "input": "" if n % 3 else "slowly", "output": "word " * n}
    for n in range(1, 31)
]
ROOT = Path(figures.__file__).parents[2]
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


def test_tokens_per_second_leave_warm_up_out() -> None:
    told = figures.measured(_steps((60.0, 900), (1.0, 100), (3.0, 500)), warmup=1)
    assert told["useful_tokens_per_s"] == pytest.approx(600 / 4)
    assert told["positions_per_s"] == pytest.approx(2000 / 4)
    assert told["padding"] == pytest.approx(0.7)
    assert told["step_s"] == 2.0
    with pytest.raises(ValueError, match="nothing after 3"):
        figures.measured(_steps((1.0, 1), (1.0, 1), (1.0, 1)), warmup=3)


def test_the_docs_show_the_table_of_the_data() -> None:
    data, text = ROOT / "benchmarks/results/compare-h200.json", ROOT / "docs/comparison.md"
    shown = "Not measured yet"
    if data.exists():
        shown = figures.table(json.loads(data.read_text()), "qwen3-4b")
    assert shown in text.read_text()


def test_useful_tokens_follow_deepspeeds_loader(tmp_path: Path) -> None:
    from deepspeed.runtime.dataloader import DeepSpeedDataLoader
    from transformers import AutoTokenizer, default_data_collator

    from benchmarks.comparison.original_ground import useful_tokens

    script, source = tmp_path / "script.py", tmp_path / "rows.json"
    script.write_text(SCRIPT)
    source.write_text(json.dumps(ROWS))
    laid = ground.lay(tmp_path / "work", source, TINY)
    scope: dict[str, Any] = {}
    exec(SCRIPT, scope)
    tokenizer = AutoTokenizer.from_pretrained(laid.tokenizer)
    rows = ground.read_rows(Path(laid.rows).read_text())
    loader = DeepSpeedDataLoader(
        [dict(scope["preprocess_alpaca_example"](row, tokenizer, 64)) for row in rows],
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


def test_the_published_configuration_is_taken_as_it_is_written() -> None:
    config = published_ds_config(SHELL, SEQUENCES, 1, FULL)
    offload = {"device": "cpu", "pin_memory": True, "ratio": 0.9, "super_offload": True}
    assert config["train_batch_size"] == 4
    assert "gradient_clipping" not in config
    assert config["zero_optimization"]["offload_optimizer"] == offload
    long = published_ds_config(SHELL, SEQUENCES, 8, FULL)
    assert (long["train_batch_size"], long["gradient_accumulation_steps"]) == (32, 8)
    tiny = published_ds_config(SHELL, SEQUENCES, 1, TINY)["zero_optimization"]
    assert "super_offload" not in tiny["offload_optimizer"]
    with pytest.raises(ValueError, match="no DeepSpeed configuration"):
        published_ds_config("echo nothing", SEQUENCES, 1, FULL)


@pytest.mark.slow
def test_a_part_is_measured_once_and_shown_in_the_table(tmp_path: Path) -> None:
    rows, script, out = (tmp_path / name for name in ("rows.json", "script.py", "out.json"))
    rows.write_text(json.dumps(ROWS))
    (tmp_path / original.SHELL).write_text(SHELL)
    part = BY_NAME["original-packed"]
    program = str(ROOT / "benchmarks" / "compare.py")
    measure = [str(rows), "--original", str(script), "--work", str(tmp_path / "work")]
    measure += ["--only", part.name]

    def told(*arguments: str) -> str:
        return printed(program, "--out", str(out), "--shape", "tiny", *arguments)

    assert part.title in told(*measure)
    (row,) = json.loads(out.read_text())
    assert len(row["steps"]) == len(row["losses"]) == part.steps
    assert row["losses"][-1] < row["losses"][0]
    shown = figures.measured(row["steps"], part.warmup)
    assert row["useful_tokens_per_s"] == shown["useful_tokens_per_s"]
    assert told("--table") == figures.table([row], "tiny") + "\n"
    assert "already measured" in told(*measure)
    assert json.loads(out.read_text()) == [row]
