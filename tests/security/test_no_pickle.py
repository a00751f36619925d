"""No file that somebody else could have written is ever unpickled, because a pickle runs whatever code it names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.python_path import ROOT

SOURCES = sorted((*(ROOT / "so_tui").rglob("*.py"), *(ROOT / "trainer").rglob("*.py")))
LOADERS = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "joblib.load",
    "dill.load",
    "dill.loads",
    "shelve.open",
    "marshal.loads",
}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_unpickles_nothing(path: Path) -> None:
    for call in (
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    ):
        name = ast.unparse(call.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert name not in LOADERS, f"{path}:{call.lineno}"
        assert name.rpartition(".")[2] not in OBJECT_COLLECTIVES, (
            f"{path}:{call.lineno} pickles what ranks exchange"
        )
        if name.endswith("torch.load") or name == "load":
            assert name != "torch.load" or given.get("weights_only") == "True", (
                f"{path}:{call.lineno}"
            )
        if name in ("np.load", "numpy.load"):
            assert given.get("allow_pickle", "False") == "False", f"{path}:{call.lineno}"
