"""Packed documents of every architecture train as if each were alone, whatever attention runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING

from benchmarks.architecture_models import KINDS, MULTIMODAL, of_kind
from so_tui.spec import ModelSpec
from so_tui.spec.attention import Needs, Present
from so_tui_trainer.data.batches import Batches
from so_tui_trainer.data.documents import Documents
from so_tui_trainer.model import attention, checkpointing
from so_tui_trainer.model.build import _refuse_unlisted, build
from so_tui_trainer.model.config import disable_dropout, load_config
from so_tui_trainer.model.trained import TrainedModel
from so_tui_trainer.model.weights import meta_model
from tests.support.attention import PLAIN
from tests.support.documents import documents, spec
from tests.support.models import (
    IN_ROWS,
    LATENT,
    LONGROPE,
    ONE_OF_EACH,
    OTHERS,
    RECURRENT,
    SMALL,
    another,
    are_close,
    causal_model,
    gradients_of,
    known,
    scaled_down,
)
from tests.support.problems import refusal
from tests.support.python_path import printed


@pytest.mark.parametrize(
    "model",
    [*map(scaled_down, ONE_OF_EACH.values()), *map(another, [*OTHERS, *RECURRENT])],
    ids=[*ONE_OF_EACH, *OTHERS, *RECURRENT],
)
def test_packed_documents_train_as_if_each_were_alone(model: ModelSpec) -> None:
    """In every attention that the CPU runs; flash with plain kernels in place of CUDA's."""
    check_packing(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", sorted(known(KINDS).keys() - {*ONE_OF_EACH, *OTHERS, *RECURRENT, *IN_ROWS})
)
def test_so_do_those_of_the_other_kinds_in_the_table(kind: str) -> None:
    check_packing(of_kind(kind))


WITH_LONGROPE = known(
    {
        "phi3": {"hidden_size": 32, "head_dim": None},
        "minicpm3": LATENT | {"head_dim": None, "qk_rope_head_dim": 8},
    }
)


@pytest.mark.parametrize("kind", WITH_LONGROPE)
def test_frequencies_are_those_of_each_documents_own_length(kind: str) -> None:
    """Short and long documents in one micro-batch: LongRoPE turns them differently."""
    shape = SMALL | LONGROPE | {"layer_types": None} | WITH_LONGROPE[kind]
    config = {
        "model_type": kind,
        "pad_token_id": 0,
        **{key: value for key, value in shape.items() if value is not None},
    }
    check_packing(ModelSpec(id=kind, weights="random", config=config))


def loss_alone(causal: Any, docs: Documents, batches: Batches, rows: int) -> Tensor:
    """Return the sum of the losses of the documents of the first rows, each computed alone."""
    total = torch.zeros(())
    for index in batches._indices(0, rows):
        for document in batches.sequences.of(int(index)):
            part = slice(docs.offsets[document], docs.offsets[document + 1])
            ids = torch.tensor(docs.tokens[part], dtype=torch.int64)[None]
            labels = torch.where(torch.tensor(docs.trained[part]), ids[0], -100)[1:]
            logits = causal(input_ids=ids).logits[0, :-1]
            total = total + cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return total


def check_packing(model: ModelSpec) -> None:
    torch.manual_seed(0)
    config = load_config(model)
    disable_dropout(config)
    causal = causal_model(config, dtype=torch.float32, attention="eager")
    docs = documents(30, longest=120)
    batches = Batches(
        docs,
        replace(spec(data__sequence_length="128"), model=listed(model, config)),
        0,
    )
    batch = next(batches.micro_batches(1))
    weight = 1 / len(batch.targets)
    alone = loss_alone(causal, docs, batches, len(batch.input_ids))
    torch.autograd.backward(alone * weight)
    expected = gradients_of(causal)
    assert len(expected) == sum(each.requires_grad for each in causal.parameters())
    for implementation in (
        "eager",
        *(["sdpa"] if causal._supports_sdpa else []),
        attention.register(PLAIN),
    ):
        causal.zero_grad()
        causal.set_attn_implementation(implementation)
        packed = TrainedModel(causal, implementation)(batch, weight)
        torch.autograd.backward(packed)
        torch.testing.assert_close(packed, alone * weight, msg=implementation)
        are_close(gradients_of(causal), expected, 1e-3, 1e-5)


def listed(model: ModelSpec, config: Any) -> ModelSpec:
    """Return a model's spec as ``presets add`` writes it: with the kind of each layer."""
    kinds = getattr(config, "layer_types", None)
    return replace(model, config=model.config | ({"layer_types": list(kinds)} if kinds else {}))


def test_a_model_with_unlisted_recurrent_layers_is_refused() -> None:
    """Data is laid out by the spec: without the list, documents would meet in them."""
    model = another("qwen3_next")
    unlisted = replace(
        model, config={key: value for key, value in model.config.items() if key != "layer_types"}
    )
    causal = causal_model(load_config(unlisted))
    problem = refusal(lambda: _refuse_unlisted(causal, unlisted))
    assert (problem.code, problem.field) == (
        "recurrent-layers-unlisted",
        "model.config.layer_types",
    )


@pytest.mark.parametrize("kind", IN_ROWS)
def test_documents_in_rows_train_as_if_each_were_alone(kind: str) -> None:
    """Padding after a document changes no loss or gradient. Packed, the same model is refused."""
    torch.manual_seed(0)
    config = load_config(another(kind))
    needs = attention.needs_of(meta_model(config), deterministic=False)
    implementation = attention._decide(another(kind), needs, Present(generation=9)).backend
    assert (needs.rows, implementation) == (True, "sdpa")
    causal = causal_model(config, dtype=torch.float32, attention=implementation)
    docs = documents(6)
    batches = Batches(
        docs, spec(data__sequence_length="128", data__packing="false", train__micro_batch="3"), 0
    )
    batch = next(batches.micro_batches(1))
    assert not batch.real.all()
    weight = 1 / len(batch.targets)
    alone = loss_alone(causal, docs, batches, len(batch.input_ids))
    torch.autograd.backward(alone * weight)
    expected = gradients_of(causal)
    causal.zero_grad()
    found = TrainedModel(causal, implementation)(batch, weight)
    torch.autograd.backward(found)
    torch.testing.assert_close(found, alone * weight)
    are_close(gradients_of(causal), expected, 1e-3, 1e-5)
    packed = spec(data__packing="true")
    problem = refusal(lambda: build(replace(packed, model=another(kind)), torch.device("cpu"), {}))
    assert problem.code == "packing-mixes-documents"


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize("name", ["qwen3-14b", "gpt-oss-20b"])
def test_sequences_end_to_end_train_as_those_in_rows(name: str, packing: str) -> None:
    """Loss and gradients, with far less padding."""
    torch.manual_seed(0)
    implementation = attention.register(PLAIN)
    causal = causal_model(
        load_config(scaled_down(name)), dtype=torch.float32, attention=implementation
    )
    batches = Batches(
        documents(30),
        spec(data__sequence_length="128", data__packing=packing, train__micro_batch="4"),
        0,
    )
    found = []
    for end_to_end in (False, True):
        batches.end_to_end = end_to_end
        batch = next(batches.micro_batches(1))
        causal.zero_grad()
        loss = TrainedModel(causal, implementation)(batch, 1 / len(batch.targets))
        torch.autograd.backward(loss)
        found.append((loss.item(), gradients_of(causal), batch.input_ids.numel()))
    (expected, theirs, more), (loss, ours, fewer) = found
    assert loss == pytest.approx(expected, rel=1e-6)
    assert fewer < more
    assert ours.keys() == theirs.keys()
    are_close(ours, theirs, 1e-4, 1e-6)


@pytest.mark.parametrize(
    ("policy", "repeated"), [("none", 0), ("selective", 0), ("attention", 0), ("full", 2)]
)
def test_sink_attention_is_kept_with_activations(
    policy: checkpointing.Policy, repeated: int
) -> None:
    calls = 0

    def counted(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        return PLAIN.forward(*arguments)

    found = {}
    kinds: tuple[tuple[checkpointing.Policy, attention.Kernels], ...] = (
        ("none", PLAIN),
        (policy, attention.Kernels(counted, PLAIN.backward)),
    )
    for asked, kernels in kinds:
        torch.manual_seed(0)
        config = load_config(scaled_down("gpt-oss-20b"))
        implementation = attention.register(kernels)
        causal = causal_model(config, dtype=torch.float32, attention=implementation).train()
        checkpointing.install(causal, asked)
        batch = next(Batches(documents(30), spec(data__sequence_length="128"), 0).micro_batches(1))
        torch.autograd.backward(TrainedModel(causal, implementation)(batch, 1 / len(batch.targets)))
        found[kernels] = gradients_of(causal)
    assert calls == config.num_hidden_layers + repeated
    expected, ours = found.values()
    are_close(ours, expected, 1e-5, 1e-7)


@pytest.mark.skipif("gemma4_text" not in OTHERS, reason="this transformers does not know Gemma 4")
def test_the_widest_heads_decide() -> None:
    meta = meta_model(load_config(another("gemma4_text")))
    assert attention.needs_of(meta, deterministic=False) == Needs(head_size=32)


def test_sinks_are_never_left_out() -> None:
    other, meta = (
        meta_model(load_config(scaled_down(name))) for name in ("qwen3-14b", "gpt-oss-20b")
    )
    assert not attention.needs_of(other, deterministic=False).sinks
    needs = attention.needs_of(meta, deterministic=False)
    assert needs == Needs(head_size=16, sinks=True, plain=False)
    for generation, expected in ((9, "torch-flash"), (None, "eager")):
        assert (
            attention._decide(
                scaled_down("gpt-oss-20b"), needs, Present(generation=generation)
            ).backend
            == expected
        )
    problem = refusal(
        lambda: attention._decide(
            ModelSpec(id="any", attention="sdpa"), needs, Present(generation=9)
        )
    )
    assert (problem.code, problem.value) == ("attention-without-sinks", "sdpa")


@pytest.mark.parametrize(
    ("asked", "needs", "generation", "code"),
    [
        ("flash-attn-2", Needs(head_size=64), None, "attention-needs-gpu"),
        ("flash_attention_2", Needs(head_size=64), 9, "attention-package-missing"),
        ("flash-attn-4", Needs(head_size=64), 8, "attention-other-gpu"),
        ("torch-flash", Needs(head_size=320), 9, "attention-head-size"),
        ("torch-flash", Needs(head_size=64, softcap=True), 9, "attention-without-softcap"),
    ],
)
def test_a_backend_that_cannot_be_used_is_refused(
    asked: Any, needs: Needs, generation: int | None, code: str
) -> None:
    problem = refusal(
        lambda: attention._decide(
            ModelSpec(id="any", attention=asked), needs, Present(generation=generation)
        )
    )
    assert (problem.code, problem.value) == (code, asked)


OTHER_KINDS = tuple(sorted(kind for kind in (*KINDS, *MULTIMODAL) if kind in CONFIG_MAPPING))


@pytest.mark.system
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(tuple(ONE_OF_EACH.values()), id="presets"),
        pytest.param(OTHER_KINDS[::2], id="one half of the kinds"),
        pytest.param(OTHER_KINDS[1::2], id="the other half"),
    ],
)
def test_architectures_train_resume_and_export(names: tuple[str, ...], tmp_path: Path) -> None:
    """The benchmark that makes the table, on the CPU and without the launcher."""
    rows = tmp_path / "rows.json"
    script = Path(__file__).parents[2] / "benchmarks" / "architectures.py"
    command = [sys.executable, str(script), "--out", str(rows)]
    command += ["--device", "cpu", "--fork", "--jobs", "2", "--only", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(rows.read_text())
    assert {row["name"] for row in found} == set(names)
    for row in found:
        assert row["trains"], row
        assert row["resume_exact"], row
        assert row["export_equal"], row


@pytest.mark.slow
def test_the_docs_show_the_tables_of_the_data() -> None:
    root = Path(__file__).parents[2]
    script, data = (
        root / "benchmarks" / "architectures.py",
        root / "benchmarks" / "results" / "architectures.json",
    )
    tables = printed(str(script), "--table", "--out", str(data))
    shown = (root / "docs" / "models.md").read_text()
    assert all(table in shown for table in tables.strip().split("\n\n"))
