"""Every architecture: packed documents train as if each were alone, and positions are scaled."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from benchmarks.architecture_models import KINDS, MULTIMODAL, of_kind
from so_tui.spec import ModelSpec, check_tree
from so_tui.spec.attention import Needs, Present
from so_tui_trainer.data.batches import Batches
from so_tui_trainer.export import export
from so_tui_trainer.model import attention
from so_tui_trainer.model.build import _refuse_unlisted, build, refuse_unsupported
from so_tui_trainer.model.config import disable_dropout, load_config
from so_tui_trainer.model.trained import TrainedModel
from so_tui_trainer.model.weights import meta_model
from tests.support.attention import PLAIN
from tests.support.documents import documents, loss_alone, spec
from tests.support.launching import tiny
from tests.support.model_checkpoints import checkpoint_of
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
    load_pretrained,
    scaled_down,
)
from tests.support.problems import refusal, rejected
from tests.support.python_path import ROOT, printed
from tests.support.small_training import Trained


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
    config = {"model_type": kind, "pad_token_id": 0} | {
        key: value for key, value in shape.items() if value is not None
    }
    check_packing(ModelSpec(id=kind, weights="random", config=config))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_dynamic_frequencies_are_those_of_each_length(kind: str) -> None:
    """Short documents, and long ones of several lengths; Gemma 3 turns kinds of layers apart."""
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    rope = {"full_attention": dynamic, "sliding_attention": plain}
    shape = {key: value for key, value in SMALL.items() if value is not None}
    shape |= {"max_position_embeddings": 40, "rope_parameters": dynamic}
    if kind == "gemma3_text":
        shape["rope_parameters"] = rope
    else:
        shape.pop("layer_types")
    check_packing(ModelSpec(id=kind, weights="random", config={"model_type": kind, **shape}))


def test_frequencies_of_code_that_is_not_known_are_refused() -> None:
    spec = replace(
        LLAMA, config=LLAMA.config | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    )
    causal = meta_model(load_config(spec))
    refuse_unsupported(causal, spec)
    rotary: Any = causal.get_submodule("model.rotary_emb")
    del rotary.rope_type  # as in code that comes with a model
    with rejected("model-rotary-unknown"):
        refuse_unsupported(causal, spec)


def each_alone(causal: Any, batches: Batches, rows: int, weight: float) -> Trained:
    """Return loss and gradients of the documents of the first rows, each computed alone."""
    indices = map(int, batches._indices(0, rows))
    members = [int(member) for index in indices for member in batches.sequences.of(index)]
    return stepped(causal, loss_alone(causal, batches._documents, members) * weight)


def stepped(causal: PreTrainedModel, loss: Tensor) -> Trained:
    causal.zero_grad()
    torch.autograd.backward(loss)
    return loss.item(), gradients_of(causal)


def forget(rotary: Any, _: object) -> None:
    """Make a rotary embedding as if it had computed nothing."""
    rotary.__dict__["_buffers"] = type(rotary)(rotary.config)._buffers
    for name in [name for name in vars(rotary) if name.endswith("max_seq_len_cached")]:
        setattr(rotary, name, rotary.original_max_seq_len)


def check_packing(model: ModelSpec) -> None:
    config = load_config(model)
    disable_dropout(config)
    causal: Any = causal_model(config, dtype=torch.float32, attention="eager")
    # As `presets add` writes it: with the kind of each layer.
    kinds = getattr(config, "layer_types", None)
    listed = model.config | ({"layer_types": list(kinds)} if kinds else {})
    packed = replace(spec(data__sequence_length="128"), model=replace(model, config=listed))
    batches = Batches(documents(30, longest=120), packed, 0)
    batch = next(batches.micro_batches(1))
    weight = 1 / len(batch.targets)
    # transformers keeps dynamic frequencies of a longer sequence before this one.
    fresh = [
        module.register_forward_pre_hook(forget)
        for module in causal.modules()
        if "dynamic" in str(getattr(module, "rope_type", ""))
    ]
    alone = each_alone(causal, batches, len(batch.input_ids), weight)
    for hook in fresh:
        hook.remove()
    assert len(alone[1]) == sum(each.requires_grad for each in causal.parameters())
    masked = ["eager", "sdpa"] if causal._supports_sdpa else ["eager"]
    for implementation in (*masked, attention.register(PLAIN)):
        causal.set_attn_implementation(implementation)
        found = stepped(causal, TrainedModel(causal, implementation)(batch, weight))
        assert found[0] == pytest.approx(alone[0], rel=1e-5), implementation
        are_close(found[1], alone[1], 1e-3, 1e-5)


def test_a_model_with_unlisted_recurrent_layers_is_refused() -> None:
    """Data is laid out by the spec: without the list, documents would meet in them."""
    model = another("qwen3_next")
    model.config.pop("layer_types")
    causal = causal_model(load_config(model))
    with rejected("recurrent-layers-unlisted", field="model.config.layer_types"):
        _refuse_unlisted(causal, model)


@pytest.mark.parametrize("kind", IN_ROWS)
def test_documents_in_rows_train_as_if_each_were_alone(kind: str) -> None:
    """Padding after a document changes no loss or gradient. Packed, the same model is refused."""
    config = load_config(another(kind))
    needs = attention.needs_of(meta_model(config))
    implementation = attention._decide(another(kind), needs, Present(generation=9)).backend
    assert (needs.rows, implementation) == (True, "sdpa")
    causal = causal_model(config, dtype=torch.float32, attention=implementation)
    in_rows = spec(data__sequence_length="128", data__packing="false", train__micro_batch="3")
    batches = Batches(documents(6), in_rows, 0)
    batch = next(batches.micro_batches(1))
    assert not batch.real.all()
    weight = 1 / len(batch.targets)
    # transformers keeps dynamic frequencies of a longer sequence before this one.
    fresh = [
        module.register_forward_pre_hook(forget)
        for module in causal.modules()
        if "dynamic" in str(getattr(module, "rope_type", ""))
    ]
    alone = each_alone(causal, batches, len(batch.input_ids), weight)
    for hook in fresh:
        hook.remove()
    found = stepped(causal, TrainedModel(causal, implementation)(batch, weight))
    assert found[0] == pytest.approx(alone[0], rel=1e-5)
    are_close(found[1], alone[1], 1e-3, 1e-5)
    packed = replace(spec(data__packing="true"), model=another(kind))
    with rejected("packing-mixes-documents"):
        build(packed, torch.device("cpu"), {})


@pytest.mark.skipif("gemma4_text" not in OTHERS, reason="this transformers does not know Gemma 4")
def test_the_widest_heads_decide() -> None:
    meta = meta_model(load_config(another("gemma4_text")))
    assert attention.needs_of(meta) == Needs(head_size=32)


def decided(asked: Any, needs: Needs, generation: int | None) -> str:
    """Return the backend of a model that asks for one, on a GPU of a generation."""
    model = ModelSpec(id="any", attention=asked)
    return attention._decide(model, needs, Present(generation=generation)).backend


def test_sinks_are_never_left_out() -> None:
    plain, needs = (
        attention.needs_of(meta_model(load_config(scaled_down(name))))
        for name in ("qwen3-14b", "gpt-oss-20b")
    )
    assert not plain.sinks
    assert needs == Needs(head_size=16, sinks=True, plain=False)
    assert [decided("auto", needs, each) for each in (9, None)] == ["torch-flash", "eager"]


WIDE, CAPPED = Needs(head_size=320), Needs(head_size=64, softcap=True)


@pytest.mark.parametrize(
    ("asked", "needs", "generation", "code"),
    [
        ("flash-attn-2", Needs(head_size=64), None, "attention-needs-gpu"),
        ("flash_attention_2", Needs(head_size=64), 9, "attention-package-missing"),
        ("flash-attn-4", Needs(head_size=64), 8, "attention-other-gpu"),
        ("torch-flash", WIDE, 9, "attention-head-size"),
        ("torch-flash", CAPPED, 9, "attention-without-softcap"),
        ("sdpa", Needs(head_size=16, sinks=True, plain=False), 9, "attention-without-sinks"),
    ],
)
def test_a_backend_that_cannot_be_used_is_refused(
    asked: Any, needs: Needs, generation: int | None, code: str
) -> None:
    problem = refusal(lambda: decided(asked, needs, generation))
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
    rows, script = tmp_path / "rows.json", ROOT / "benchmarks" / "architectures.py"
    command = [str(script), "--out", str(rows), "--device", "cpu", "--fork", "--jobs", "2"]
    printed(*command, "--only", *names, timeout_s=1200)
    found = json.loads(rows.read_text())
    assert {row["name"] for row in found} == set(names)
    for row in found:
        assert all(row[name] for name in ("trains", "resume_exact", "export_equal")), row


POSITIONS, FACTOR = 64, 4.0


@pytest.mark.parametrize("kind", ["yarn", "linear"])
@pytest.mark.parametrize("name", ["qwen3-14b", "seed-oss-36b"])
def test_positions_are_scaled_and_exported(name: str, kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = scaled_down(name)
    shape = plain.config | {"max_position_embeddings": POSITIONS}
    model = replace(plain, id="builtin:tiny", config=shape, rope_scaling=kind, rope_factor=FACTOR)
    assert model.positions == POSITIONS * FACTOR
    ours: Any = causal_model(load_config(model))
    # As in a config.json of transformers 4.56.
    original = {"original_max_position_embeddings": POSITIONS} if kind == "yarn" else {}
    asked = shape | {
        "rope_scaling": {"rope_type": kind, "factor": FACTOR, **original},
        "max_position_embeddings": int(POSITIONS * FACTOR),
    }
    asked.pop("model_type")
    theirs: Any = causal_model(AutoConfig.for_model(shape["model_type"], **asked))
    unscaled: Any = causal_model(load_config(replace(model, rope_scaling="model", rope_factor=1.0)))
    for other in (theirs, unscaled):
        other.load_state_dict(ours.state_dict())
    ids = torch.arange(5, 5 + 2 * POSITIONS)[None]
    with torch.no_grad():
        found, wanted, without = (
            each.eval()(input_ids=ids).logits for each in (ours, theirs, unscaled)
        )
    assert torch.equal(found, wanted)
    assert not torch.allclose(found, without)

    spec = replace(tiny(data__sequence_length="128"), model=model)
    checkpoint_of(ours, spec, tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "model", "r", spec)
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    rope = written["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == (kind, FACTOR)
    assert written["max_position_embeddings"] == POSITIONS * FACTOR
    loaded, _ = load_pretrained(tmp_path / "model")
    found_rope, our_rope = loaded.get_submodule("model.rotary_emb"), ours.model.rotary_emb
    torch.testing.assert_close(found_rope.inv_freq, our_rope.inv_freq)
    assert found_rope.attention_scaling == our_rope.attention_scaling


LLAMA = scaled_down("llama-3.1-8b")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 99}
HYBRID = {"model_type": "granitemoehybrid", "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama3", LLAMA.config | {"rope_scaling": LLAMA3_ROPE, "max_position_embeddings": 256}),
        ("several", another("gemma3_text").config),
        ("none", GPT2),
        ("own", scaled_down("phi-4").config),
        ("own of experts", LLAMA.config | {"model_type": "phimoe"}),
        ("unused", HYBRID | {"layer_types": ["mamba", "attention"]}),
    ],
)
def test_positions_that_cannot_be_scaled_are_refused(kind: str, config: dict[str, Any]) -> None:
    """In the unused kind no layer turns anything by its position, though it is described."""
    scaled = replace(LLAMA, config=config, rope_scaling="yarn", rope_factor=2.0)
    with rejected("rope-not-scalable", field="model.rope_scaling"):
        load_config(scaled)


@pytest.mark.parametrize("given", [{"rope_scaling": "yarn"}, {"rope_factor": 2.0}])
def test_a_scaling_needs_its_factor(given: dict[str, Any]) -> None:
    tree = {"name": "x", "model": {"id": "m"} | given, "data": {"source": "x"}}
    with rejected("rope-factor"):
        check_tree(tree | {"train": {"steps": 1}})
