"""``[data]``: rows, and how they become sequences."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from so_tui.spec.sections.section import Section

DataFormat = Literal["auto", "alpaca", "sharegpt", "messages", "prompt-completion", "text"]
LossOn = Literal["assistant", "last-turn", "all"]


class DataSource(Section, frozen=True):
    """One source of a mixture. Absent values are those of the section."""

    source: Annotated[str, Meta(min_length=1, description="Hub id, file or folder.")]
    weight: Annotated[
        float, Meta(gt=0, description="Relative share of this source's rows in the mixture.")
    ] = 1.0
    subset: str = ""
    split: str = ""
    format: DataFormat | None = None


class DataSpec(Section, frozen=True):
    source: Annotated[
        str | tuple[DataSource, ...],
        Meta(
            description="Hub id, file (JSON, JSONL, Parquet, CSV, TSV) or folder; or a mixture: a list of `{source, weight}`, each with "
            "an optional `subset`, `split` and `format`. Weights are shares of the rows: an epoch includes every row of every source "
            "at least once, and rows of a source with a larger share several times."
        ),
    ]
    subset: Annotated[
        str,
        Meta(
            description="Subset (configuration) of a data set on the hub; if empty, its only one."
        ),
    ] = ""
    split: Annotated[
        str,
        Meta(
            min_length=1,
            description="Split of the data set, with the slice syntax of `datasets` (`train[:10%]`).",
        ),
    ] = "train"
    format: Annotated[
        DataFormat, Meta(description="Format of the rows; `auto` detects it from the columns.")
    ] = "auto"
    loss: Annotated[
        LossOn,
        Meta(
            description="Tokens that carry loss: those of all answers of the `assistant`, of the `last-turn` only, or `all`. The stop "
            "token of an answer is included."
        ),
    ] = "assistant"
    sequence_length: Annotated[
        int,
        Meta(
            ge=16,
            le=1_048_576,
            description="Tokens in a training sequence.",
            extra={"unit": "tokens"},
        ),
    ] = 4096
    held_out: Annotated[
        float,
        Meta(
            ge=0,
            description="Rows to evaluate on instead of training on them, selected with the seed: a share below 1, or a number.",
            extra={"unit": "rows"},
        ),
    ] = 0.0
    evaluation: Annotated[
        str,
        Meta(description="Separate data to evaluate on (hub id, file or folder); empty for none."),
    ] = ""
    evaluation_split: Annotated[
        str,
        Meta(
            description="Split of `evaluation` or `source` to evaluate on; if empty, that of `split`."
        ),
    ] = ""
    packing: Annotated[
        bool,
        Meta(description="Fill each sequence with several rows; attention does not cross rows."),
    ] = True

    @property
    def evaluates(self) -> bool:
        """Whether there is data to evaluate on."""
        return bool(self.held_out or self.evaluation or self.evaluation_split)

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """Sources with all values filled in; a single source has weight 1."""
        given = (DataSource(source=self.source),) if isinstance(self.source, str) else self.source
        return tuple(
            DataSource(
                source=part.source,
                weight=part.weight,
                subset=part.subset or self.subset,
                split=part.split or self.split,
                format=part.format or self.format,
            )
            for part in given
        )
