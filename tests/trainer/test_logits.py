"""No model of the installed transformers changes its logits in a way that the loss would leave out
unnoticed.
"""

from __future__ import annotations

import inspect
import re

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from so_tui_trainer.model.loss import LOGIT_KEYS

CHANGES = re.compile(
    r"self\.(?:config\.(?:text_config\.)?)?(\w*(?:logits?_s|logits_mup|multiplier|cap(?:ping)?\b|"
    r"unpadded)\w*)"
)
"""What a forward pass reads that scales, caps or cuts logits."""
READ_ALREADY = {"logit_softcap"}
"""A module that is made of a configuration key which is known."""
OTHER_NAMES = {
    "granite": "logits_scaling",
    "gemma2": "final_logit_softcapping",
    "cohere": "logit_scale",
}


def keys_read(kind: str) -> set[str]:
    """Return the configuration keys with which a model's forward pass changes its logits."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    return set(CHANGES.findall(inspect.getsource(model_class.forward)))


@pytest.mark.parametrize("kind", OTHER_NAMES)
def test_keys_are_found_in_the_source(kind: str) -> None:
    assert keys_read(kind) == {OTHER_NAMES[kind]}


def test_every_key_with_which_a_model_changes_its_logits_is_known() -> None:
    """A model with one that is not would be trained with a wrong loss."""
    unknown = {
        kind: keys - {*LOGIT_KEYS, *READ_ALREADY}
        for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if (keys := keys_read(kind))
    }
    assert not {kind: keys for kind, keys in unknown.items() if keys}
