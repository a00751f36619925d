"""Write ``docs/chat-templates.md``: what is trained of 13 kinds of conversation under each chat
template of TRL's wheel, and how that differs from the masks of TRL's own training templates.

python -m benchmarks.chat_templates
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from so_tui.spec import DataSpec, InputError
from so_tui_trainer.data.chat import Chat, TemplateError, chat_of
from so_tui_trainer.data.encoder import Encoder
from so_tui_trainer.data.sources import Opened, open_sources
from so_tui_trainer.data.spans import Segment, Written, calls_of, documents_of, reasoning_of
from so_tui_trainer.data.turns import TOOLS, Conversation, Message

PAGE = Path(__file__).resolve().parents[1] / "docs/chat-templates.md"
VERSION = "1.16.0"
SHA256 = "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"
_LONG = 1 << 20

Verdict = Literal["proven", "split", "unproven", "refused", "wrong"]
"""``wrong``: our own rendering of the server's prompt, or of the parts, disagrees."""
Rule = Literal[
    "newline", "question", "empty", "unproven", "split", "ends-otherwise", "stop", "opening"
]


Twin = Literal["none", "equal", "explained", "other-text"]


class Cell(NamedTuple):
    """What became of one kind of conversation under one template."""

    verdict: Verdict
    kinds: frozenset[str] = frozenset()
    """Kinds that are counted in addition to the verdict."""
    reason: str = ""
    twin: Twin = "none"
    """How the documents compare with those of the training template."""
    rules: frozenset[Rule] = frozenset()
    """What explains the differences."""
    unexplained: tuple[str, ...] = ()


# Conversations.


def _call(city: str) -> dict[str, Any]:
    function = {"name": "tide_at", "arguments": {"port": city}}
    return {"type": "function", "id": "c12345678", "function": function}


def _result(text: str) -> dict[str, str]:
    return {"role": "tool", "name": "tide_at", "tool_call_id": "c12345678", "content": text}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


_PORT = {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]}
_TIDE = {"name": "tide_at", "description": "Height of the tide", "parameters": _PORT}
_ONE = [_user("Who keeps the light?"), _says("The keeper does.")]
_TWO = [*_ONE, _user("Since when?"), _says("For nine years.")]
_THINKING = [_user("How much is 6 times 7?"), _says("42.", reasoning_content="Six sevens add up.")]
_ASKING = _user("How high is the tide at Brest?")
_CALLING = _says("", tool_calls=[_call("Brest")])
_TOLD = [_result("5.1 m"), _says("It stands at five metres.")]
ROWS: dict[str, dict[str, Any]] = {
    "one round": {"messages": _ONE},
    "several rounds": {"messages": _TWO},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, *_TWO]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, *_ONE]},
    "reasoning": {"messages": _THINKING},
    "reasoning in each round": {
        "messages": [
            *_THINKING,
            _user("And half of it?"),
            _says("21.", reasoning_content="Halve both digits."),
        ]
    },
    "one call": {"messages": [_ASKING, _CALLING, *_TOLD]},
    "parallel calls": {
        "messages": [
            _user("And at Brest and Calais?"),
            _says("", tool_calls=[_call("Brest"), _call("Calais")]),
            _result("5.1 m"),
            _result("6.4 m"),
            _says("Five and six metres."),
        ]
    },
    "repeated calls": {"messages": [_ASKING, _CALLING, _result("try again"), _CALLING, *_TOLD]},
    "text beside a call": {
        "messages": [_ASKING, _says("I will look it up.", tool_calls=[_call("Brest")]), *_TOLD]
    },
    "empty answer": {"messages": [_user("Anyone there?"), _says(""), *_TWO]},
    "truncated": {"messages": [_user("Count."), _says(" ".join(map(str, range(1, 60))))]},
    "unicode": {
        "messages": [_user("Grüße über 🌊?"), _says("Žluťoučký kůň — 海は広い 🌊\n\n  eingerückt")]
    },
}
"""By kind."""
for _row in ROWS.values():
    if any("tool_calls" in turn for turn in _row["messages"]):
        _row["tools"] = [{"type": "function", "function": _TIDE}]
_KEPT = 20
"""Tokens of the truncated answer that fit."""


def opened_rows(folder: Path) -> Opened:
    """Write the rows to a file, and open it as a user's source is opened."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS.values()), encoding="utf-8")
    return open_sources(DataSpec(source=str(path)))[0]


# Templates and tokenizers.


class UnavailableError(Exception):
    """The wheel cannot be fetched."""


def templates(folder: Path) -> dict[str, str]:
    """Fetch TRL's wheel into a folder, and return its chat templates by name.

    Raises:
        UnavailableError: pip cannot fetch it.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    done = subprocess.run(
        [*command, str(folder), f"trl=={VERSION}"], capture_output=True, text=True, check=False
    )
    wheel = next(folder.glob("trl-*.whl"), None)
    if done.returncode or wheel is None:
        raise UnavailableError((done.stderr.strip() or "pip fetched no wheel").splitlines()[-1])
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"{wheel.name} is not the wheel that this program reads ({SHA256})")
    with zipfile.ZipFile(wheel) as archive:
        return {
            PurePosixPath(name).stem: archive.read(name).decode()
            for name in sorted(archive.namelist())
            if "chat_templates/" in name and name.endswith(".jinja")
        }


_NAMES = r"[^\s<>|｜{}'\"]+"
_SPECIAL = re.compile(
    rf"<\|{_NAMES}\|?>|<{_NAMES}\|>|<｜{_NAMES}｜>|\[gMASK\]|</?s>"
    r"|<(?:bos|eos|sop|start_of_turn|end_of_turn|end_of_utterance)>"
)


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, and for each special token of a template."""
    names = sorted({*_SPECIAL.findall(template), "<s>", "</s>"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    found = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, bos_token="<s>", eos_token="</s>"
    )
    found.chat_template = template
    return found


# One template and one conversation.


class _Span(NamedTuple):
    """What is trained of one answer in one document, in tokens."""

    answer: int
    """Its index in the conversation."""
    start: int
    end: int


class _Beside(NamedTuple):
    """A document compared with what a training template marks."""

    twin: Twin
    rules: frozenset[Rule] = frozenset()
    unexplained: tuple[str, ...] = ()


class _Case:
    """One conversation under one template."""

    def __init__(self, chat: Chat, turns: Conversation) -> None:
        self.chat, self.turns = chat, turns

    @cached_property
    def questions(self) -> dict[int, str]:
        """The prompt that a server would send, rendered again, by the index of the answer."""
        return {
            index: self.chat.render(self.turns[:index], ask=True, thinks=self.thinks(index))
            for index, turn in enumerate(self.turns)
            if turn.answers
        }

    def thinks(self, index: int) -> bool:
        return bool(reasoning_of(self.turns[index]).strip())

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.chat.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def text(self, ids: Sequence[int]) -> str:
        return str(self.chat.tokenizer.decode([*ids]))

    def spans(self, document: Sequence[Segment]) -> list[_Span] | None:
        """Return what is trained; none if a trained part does not stand behind a question, or
        lacks what its turn says without that being counted.
        """
        found, before = [], ""
        for segment in document:
            if segment.trained:
                index = next((i for i, text in self.questions.items() if text == before), None)
                if index is None:
                    return None
                start = len(self.ids(before))
                found.append(_Span(index, start, start + len(self.ids(segment.text))))
            before += segment.text
        return found

    def lacks(self, written: Written, document: Sequence[Segment], spans: Sequence[_Span]) -> bool:
        """Return whether something that an answer has is neither trained nor counted."""
        trained = [segment.text for segment in document if segment.trained]
        for span, text in zip(spans, trained, strict=True):
            turn = self.turns[span.answer]
            parts = [call["function"]["arguments"]["port"] for call in calls_of(turn)]
            if "text-dropped" not in written.kinds:
                parts.append(turn.content.strip())
            if "reasoning-dropped" not in written.kinds:
                parts.append(reasoning_of(turn).strip())
            if any(part not in text for part in parts):
                return True
        return False

    # Beside a training template.

    def twin(self, template: str, last: int) -> tuple[list[int], list[bool]]:
        """Return the tokens of the conversation up to an answer under a training template, and its
        mask.
        """
        thinks = self.thinks(last)
        kept = self.turns[: last + 1]
        tools = [tool for turn in kept if turn.role == TOOLS for tool in dict(turn.extra)[TOOLS]]
        found: Any = self.chat.tokenizer.apply_chat_template(
            [self._as_taken(turn) for turn in kept if turn.role != TOOLS],
            tools=tools or None,
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
            enable_thinking=thinks,
            thinking=thinks,
        )
        return found["input_ids"], [bool(flag) for flag in found["assistant_masks"]]

    def beside(
        self,
        template: str,
        ids: list[int],
        flags: list[bool],
        spans: Sequence[_Span],
        trained_anywhere: set[int],
        limit: int,
    ) -> _Beside:
        """Compare a document with what a training template marks."""
        theirs, mask = self.twin(template, spans[-1].answer)
        theirs, mask = theirs[:limit], mask[:limit]
        if theirs[: len(ids)] != ids:
            return _Beside("other-text")
        ours = [*flags, *[False] * (len(theirs) - len(ids))]
        elsewhere = trained_anywhere - {span.answer for span in spans}
        rules, unexplained = set(), []
        for start, end, is_ours in _runs(ours, mask):
            if rule := self.explain(theirs, (start, end), spans, elsewhere, ours=is_ours):
                rules.add(rule)
            else:
                whose = "we" if is_ours else "they"
                part = self.text(theirs[start:end])
                unexplained.append(f"only {whose} train {part!r} of {self.text(theirs)!r}")
        return _Beside(
            "equal" if ours == mask else "explained", frozenset(rules), tuple(unexplained)
        )

    def _as_taken(self, turn: Message) -> dict[str, Any]:
        more = dict(turn.extra)
        if self.chat.reasoning_key and "reasoning_content" in more:
            more[self.chat.reasoning_key] = more.pop("reasoning_content")
        return {"role": turn.role, "content": turn.content, **more}

    def explain(
        self,
        ids: Sequence[int],
        run: tuple[int, int],
        spans: Sequence[_Span],
        elsewhere: set[int],
        *,
        ours: bool,
    ) -> Rule | None:
        """Return the rule that explains why a run of tokens is trained by one of the two only.

        Args:
            ids: The tokens of the document.
            run: Its first token, and the one behind its last.
            spans: What we train.
            elsewhere: Answers that we train in another document.
            ours: Whether we train it.
        """
        start, end = run
        text = self.text(ids[start:end])
        token = text.strip()
        special = self.chat.stops_at(token, 0) == token
        starts = {span.start for span in spans}
        ends = {span.end for span in spans}
        if ours:
            if end in ends and special and token:
                return "stop"
            return "opening" if start in starts else None
        if start in ends and special and token != self.chat.stop:
            return "ends-otherwise" if token else "newline"
        said = [turn.content for turn in self.turns if turn.content and turn.role != "assistant"]
        if end in starts and not any(part in text for part in said):
            return "question"
        for index, turn in enumerate(self.turns):
            if turn.role == "assistant" and index not in {span.answer for span in spans}:
                first, last = self._region(self.text(ids), index)
                if first <= start and end <= last:
                    if not turn.answers:
                        return "empty"
                    return "split" if index in elsewhere else "unproven"
        return None

    def _region(self, text: str, index: int) -> tuple[int, int]:
        """Return between which tokens a turn stands: those of the texts before it and behind it
        that are not the assistant's.
        """
        first = 0
        for number, turn in enumerate(self.turns):
            place = text.find(turn.content, first)
            if turn.role == "assistant" or not turn.content or place < 0:
                continue
            if number > index:
                return len(self.ids(text[:first])), len(self.ids(text[:place]))
            first = place + len(turn.content)
        return len(self.ids(text[:first])), len(self.ids(text))


def _runs(ours: Sequence[bool], theirs: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    """Yield the runs of tokens that one of two masks trains, and whether it is ours."""
    start = 0
    for at in range(1, len(ours) + 1):
        if at == len(ours) or (ours[at], theirs[at]) != (ours[start], theirs[start]):
            if ours[start] != theirs[start]:
                yield start, at, ours[start]
            start = at


def judge(template: str, twin: str, opened: Opened, number: int) -> Cell:
    """Return what becomes of a conversation.

    Args:
        template: The chat template.
        twin: The same with generation tags; empty without one.
        opened: The conversations.
        number: Which, from 0.
    """
    try:
        chat = chat_of(tokenizer_for(template))
    except InputError as error:
        return Cell("refused", reason=error.problems[0].message)
    (turns,) = opened.conversations(number, number + 1)
    try:
        written = documents_of(chat, turns)
    except TemplateError as error:
        return Cell("refused", reason=str(error))
    case = _Case(chat, turns)
    found = [case.spans(document) for document in written.documents]
    if written.unproven:
        cell = Cell("unproven", written.kinds, written.unproven)
    else:
        cell = Cell("split" if len(found) > 1 else "proven", written.kinds - {"turns-split"})
        trained = [span.answer for spans in found for span in spans or ()]
        if (
            None in found
            or sorted(trained) != [*case.questions]
            or any(
                case.lacks(written, document, spans or [])
                for document, spans in zip(written.documents, found, strict=True)
            )
        ):
            return cell._replace(verdict="wrong", reason=repr(written.documents))
    limit = _LONG
    if [*ROWS][number] == "truncated" and not written.unproven:
        limit = max((span.start for spans in found for span in spans or ()), default=0) + _KEPT
    encoder = Encoder(chat, "assistant", limit)
    (encoded,) = encoder.documents(opened, number, number + 1)
    if len(encoded.documents) != len(found) or encoded.counts.truncated != int(limit < _LONG):
        return cell._replace(verdict="wrong", reason=repr(encoded.counts))
    if not twin:
        return cell
    trained_anywhere = {span.answer for spans in found for span in spans or ()}
    compared = [
        case.beside(twin, ids.tolist(), flags.tolist(), spans, trained_anywhere, limit)
        for (ids, flags), spans in zip(encoded.documents, found, strict=True)
        if spans
    ]
    order: tuple[Twin, ...] = ("other-text", "explained", "equal")
    return cell._replace(
        twin=next((name for name in order if name in [one.twin for one in compared]), "none"),
        rules=frozenset().union(*(one.rules for one in compared)),
        unexplained=tuple(text for one in compared for text in one.unexplained),
    )


def judged(found: Mapping[str, str], opened: Opened) -> dict[tuple[str, str], Cell]:
    """Return what becomes of each kind of conversation under each template."""
    return {
        (name, kind): judge(template, found.get(f"{name}_training", ""), opened, number)
        for name, template in found.items()
        if not name.endswith("_training")
        for number, kind in enumerate(ROWS)
    }


def problems(cells: Mapping[tuple[str, str], Cell]) -> list[str]:
    """Return what no verdict and no rule explains."""
    return [
        f"{name}, {kind}: {problem}"
        for (name, kind), cell in cells.items()
        for problem in (*([cell.reason] if cell.verdict == "wrong" else []), *cell.unexplained)
    ]


# The page.

_INTRODUCTION = f"""\
# Chat templates

<!-- Written by `python -m benchmarks.chat_templates`, which needs a package index. -->

What so-tui trains in 13 kinds of conversation under each chat template that TRL {VERSION} publishes, what it leaves out or
refuses, and why its masks differ from those of TRL's own training templates. [Your data](data.md#what-is-trained) has the rules.

Each template gets a small tokenizer with the special tokens that it names. For each trained answer, the benchmark renders the prompt that a
server would send, and checks that it precedes the answer, and that the answer has the text, reasoning and calls of its turn, unless the table
says that the template leaves them out.

| word | meaning |
|---|---|
| proven | every answer is trained as the model writes it |
| split | the same; an answer that the template changes once later turns follow is a document of its own (`data.split_turns`) |
| no system, no tools, no text, no reasoning | the template leaves this out; `so-tui data` and the plan count the rows |
| reasoning added | the template leaves the reasoning out; so-tui adds it as the model writes it, and trains it |
| unproven | so-tui cannot prove which tokens the model would write: the run is refused, or these answers are context (`data.unproven`) |
| refused | the template rejects the conversation |

"""  # noqa: E501
_NOTES = {
    "system-dropped": "no system",
    "tools-dropped": "no tools",
    "results-dropped": "no results",
    "calls-dropped": "no calls",
    "text-dropped": "no text",
    "reasoning-dropped": "no reasoning",
    "reasoning-composed": "reasoning added",
    "turns-context": "context",
}
_RULES: dict[Rule, str] = {
    "newline": "TRL trains the line break behind the token that stops the model.",
    "question": (
        "TRL trains the end of the prompt that a server would send, such as the role's name or an "
        "empty thought, which the model never writes."
    ),
    "empty": "TRL trains the end of an empty answer; so-tui does not.",
    "ends-otherwise": (
        "TRL trains the token that ends an earlier answer or the whole text, although another one "
        "stops the model."
    ),
    "unproven": (
        "TRL trains a turn although the template leaves out its call; so-tui refuses the row."
    ),
    "split": (
        "TRL trains an earlier answer in a form that the model does not write; so-tui trains it in "
        "a document of its own."
    ),
    "stop": "TRL does not train the token after a call that stops generation; so-tui does.",
    "opening": (
        "TRL does not train the start of an answer that is not in the server's prompt, so that the "
        "model has to write it; so-tui does."
    ),
}


def page(cells: Mapping[tuple[str, str], Cell]) -> str:
    """Return the page."""
    names = list(dict.fromkeys(name for name, _ in cells))
    lines = [f"| template | {' | '.join(ROWS)} |", "|---" * (len(ROWS) + 1) + "|"]
    lines += [
        f"| {name} | {' | '.join(_words(cells[name, kind]) for kind in ROWS)} |" for name in names
    ]
    lines += ["", "## Why not", ""]
    reasons: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (name, kind), cell in cells.items():
        if cell.verdict in ("unproven", "refused"):
            reason = re.sub(r"^in message \d+, |: '.*'$", "", cell.reason)
            reasons[cell.verdict, reason][name].append(kind)
    lines += ["| verdict | reason | templates |", "|---|---|---|"]
    for (verdict, reason), found in sorted(reasons.items()):
        where = "; ".join(f"{name} ({_kinds(kinds)})" for name, kinds in found.items())
        lines.append(f"| {verdict} | {reason} | {where} |")
    return _INTRODUCTION + "\n".join([*lines, "", *_beside(cells)]) + "\n"


def _kinds(kinds: Sequence[str]) -> str:
    return "all" if len(kinds) == len(ROWS) else ", ".join(kinds)


def _words(cell: Cell) -> str:
    if cell.verdict not in ("proven", "split"):
        return cell.verdict
    return ", ".join([cell.verdict, *(_NOTES[kind] for kind in sorted(cell.kinds))])


def _beside(cells: Mapping[tuple[str, str], Cell]) -> Iterator[str]:
    """Yield the lines about training templates."""
    twins = defaultdict(list)
    rules: dict[Rule, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (name, kind), cell in cells.items():
        twins[cell.twin].append((name, kind))
        for rule in cell.rules:
            rules[rule][name] += 1
    compared = len(twins["equal"]) + len(twins["explained"])
    yield from ("## Beside TRL's training templates", "")
    yield (
        f"A training template marks what is trained. {compared} pairs of a template and a kind "
        "write the same text\n"
        f"with it: in {len(twins['equal'])} the same tokens are trained, in "
        f"{len(twins['explained'])} these rules explain every difference."
    )
    yield from ("", "| difference | templates (kinds of conversation) |", "|---|---|")
    for rule, sentence in _RULES.items():
        where = ", ".join(f"{name} ({count})" for name, count in rules[rule].items())
        yield f"| {sentence} | {where} |"
    other = defaultdict(list)
    for name, kind in twins["other-text"]:
        other[name].append(kind)
    yield from ("", "These training templates write another text, in all or in some documents:", "")
    yield from (f"- {name}: {_kinds(kinds)}" for name, kinds in other.items())


def main() -> None:
    """Write the page, or fail with what nothing explains."""
    with tempfile.TemporaryDirectory() as made:
        cells = judged(templates(Path(made)), opened_rows(Path(made)))
    if found := problems(cells):
        raise SystemExit("\n".join(found))
    PAGE.write_text(page(cells), encoding="utf-8")


if __name__ == "__main__":
    main()
