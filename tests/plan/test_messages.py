"""The words of facts, a few of them in full."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from so_tui.machine.types import Network
from so_tui.plan.notes import (
    AnyFact,
    Change,
    Fact,
    NextBest,
    Note,
    RemoteCode,
    TooFewGpus,
)
from so_tui.plan.plan import Plan
from so_tui.plan.show import plan_tree
from so_tui.plan.terms import TERM_NAMES, Formula, TermKind
from so_tui.spec import Problem
from tests.support.planning import QUAD, recommended

GIB = 2**30


@pytest.mark.parametrize(
    ("fact", "text"),
    [
        (
            NextBest(
                mode="superoffload",
                ratio=0.35,
                micro_batch=4,
                policy="none",
                slower=-0.021,
                alike=True,
                chosen_for="no-offload",
                more_gpu_bytes=-12 * GIB,
            ),
            (
                "about as fast as superoffload at ratio 0.35, micro-batch 4, activation "
                "checkpointing none (planned 2.1% faster, less than plans are off): offloads "
                "nothing, leaves 12.0 GiB less of each GPU"
            ),
        ),
        (
            RemoteCode(model="/models/a\x1bb", revision=""),
            (
                "model.trust_remote_code is on: Python code of the folder /models/a\\x1bb runs "
                "with your rights; launch it only if you have read that code"
            ),
        ),
    ],
)
def test_words(fact: Fact, text: str) -> None:
    assert fact.message == text


VALUES: dict[str, object] = {
    "problems": (Problem(code="c", field="gpus", value="", message="m", remedy="r"),),
    "changes": (Change("a.b", 1, 2),),
    "policy": "full",
    "mode": "gpu",
    "why": "no-gpu",
    "pool": "gpu",
    "hosts": (),
    "savings": (),
    "obstacle": "head-size",
    "mixing": ("linear_attention",),
    "asked": (1,),
    "present": (0,),
    "model": "org/model",
    "revision": "main",
    "network": Network(gbit_per_s=200, source=""),
    "states": "bf16-moments",
}


def test_every_fact_has_a_code_of_its_own_and_words() -> None:
    kinds = get_args(AnyFact)
    codes = [kind.__struct_config__.tag for kind in kinds]
    assert len(set(codes)) == len(kinds) > 30
    assert codes[kinds.index(TooFewGpus)] == "too-few-gpus"
    for kind in kinds:
        required = [field.name for field in msgspec.structs.fields(kind) if field.required]
        given = {name: VALUES.get(name, 1) for name in required}
        if kind is TooFewGpus:
            given |= {"asked": 2, "present": 1}
        assert kind(**given).message or kind is Note, kind


def test_every_term_has_a_name() -> None:
    assert TERM_NAMES.keys() == set(get_args(TermKind))
    assert str(Formula("{} B x {} ({:.1%})", (4, 14_000_000, 0.05))) == "4 B x 14.00 M (5.0%)"


def test_facts_are_beside_their_texts_in_json() -> None:
    plan = recommended("llama-3.3-70b", QUAD, gpus="4")
    tree = plan_tree(plan)
    texts = {
        roles: tuple(fact["message"] for fact in tree["facts"] if fact["role"] in roles)
        for roles in (("reason", "remedy"), ("remedy",))
    }
    assert tuple(texts.values()) == (tree["reasons"], tree["remedies"])
    first = tree["facts"][0]
    assert (first["code"], first["pool"], first["fatal"]) == ("shortage", "node", True)
    assert tree["shortage"]["place"] == "host node 0"
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
