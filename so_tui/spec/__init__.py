"""What a user asks for: specs and presets, their checks and their files. Cheap to import and
independent of the machine.
"""

from so_tui.spec.check import check_tree, problems_in
from so_tui.spec.errors import InputError, Problem, Refusal, Refused, SoTuiError, first_line
from so_tui.spec.keys import FieldInfo, field_index
from so_tui.spec.merge import (
    complete_tree,
    differences,
    of_a_source,
    parse_value,
    spec_tree,
    with_values,
)
from so_tui.spec.presets import (
    Catalog,
    check_user_name,
    create_preset,
    delete_preset,
    find_preset,
    load_catalog,
    resolve_source,
    save_preset,
)
from so_tui.spec.run_spec import (
    BenchmarkSpec,
    CheckpointSpec,
    DataSource,
    DataSpec,
    ModelSpec,
    OffloadSpec,
    ParameterBlock,
    Preset,
    RunSpec,
    Tensor,
    TrainSpec,
    decays,
)

__all__ = [
    "BenchmarkSpec",
    "Catalog",
    "CheckpointSpec",
    "DataSource",
    "DataSpec",
    "FieldInfo",
    "InputError",
    "ModelSpec",
    "OffloadSpec",
    "ParameterBlock",
    "Preset",
    "Problem",
    "Refusal",
    "Refused",
    "RunSpec",
    "SoTuiError",
    "Tensor",
    "TrainSpec",
    "check_tree",
    "check_user_name",
    "complete_tree",
    "create_preset",
    "decays",
    "delete_preset",
    "differences",
    "field_index",
    "find_preset",
    "first_line",
    "load_catalog",
    "of_a_source",
    "parse_value",
    "problems_in",
    "resolve_source",
    "save_preset",
    "spec_tree",
    "with_values",
]
