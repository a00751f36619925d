"""Write ``docs/codes.md``: the exit codes, and every code with the messages and remedies that the
program's source gives it.

python docs/make_codes.py
"""

from __future__ import annotations

import ast
import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

from so_tui.commands.parser import EXIT_CODES
from so_tui.doctor.checks import wordings
from so_tui.launch.supervisor.ending import Outcome, Who, outcome_text
from so_tui.runs.records import OutcomeCode

PAGE = Path(__file__).with_name("codes.md")
SOURCES = ("so_tui", "trainer")
GAP = "…"
"""Stands for what only the running program knows."""

_INTRODUCTION = """\
# Exit codes and error codes

<!-- Written by `python docs/make_codes.py`; a test keeps it current. -->

Search this page for a code or for words of a message. Codes stay when wording changes, so scripts should compare codes: the `code` of
`state.json` and of records in `metrics/`, and of findings in `so-tui doctor --json`. "…" stands for names and numbers that the program
fills in. [When something fails](failures.md) goes by symptom.
"""  # noqa: E501


class Entry(NamedTuple):
    """A code where the source gives it a message."""

    kind: str
    """What carries it: ``Problem``, ``Finding`` ..."""
    source: str
    """``so_tui`` or ``trainer``."""
    code: str
    message: str
    remedy: str = ""
    severity: str = ""
    cost: str = ""


class Shape(NamedTuple):
    """How a call makes an entry."""

    kind: str
    parameters: tuple[str, ...]
    """Names of positional arguments."""
    parts: Mapping[str, ast.expr]
    """Which expression is the code, the message, the remedy; in terms of the parameters."""
    scope: Mapping[str, tuple[ast.expr, ...]]
    """Local names of a function that only passes its arguments on."""


def _shape(kind: str, *parameters: str, **parts: str) -> Shape:
    return Shape(
        kind, parameters, {part: ast.Name(parameter) for part, parameter in parts.items()}, {}
    )


_PROBLEM = _shape(
    "Problem",
    *("code", "field", "value", "message", "remedy"),
    code="code",
    message="message",
    remedy="remedy",
)
_SHAPES = {
    "Problem": _PROBLEM,
    "reject": _PROBLEM,
    "Refusal": _shape("Problem", "code", "message", code="code", message="message"),
    "refuse": _shape("Problem", "code", "message", code="code", message="message"),
    "OffloadError": _shape("Engine", "message", code="code", message="message"),
    "WorkerLostError": _shape("Engine", "message", code="code", message="message"),
    "TrainingError": _shape(
        "Outcome",
        "code",
        "reason",
        "suggestion",
        code="code",
        message="reason",
        remedy="suggestion",
    ),
    "WarningRecord": _shape("Warning", code="code", message="message", remedy="suggestion"),
    # ``Recorder.warn`` and the callbacks of that signature, which reach the record through a second
    # function.
    "warn": _shape(
        "Warning",
        "code",
        "message",
        "suggestion",
        code="code",
        message="message",
        remedy="suggestion",
    ),
}


class _Function(NamedTuple):
    node: ast.FunctionDef
    calls: tuple[ast.Call, ...]


class _Module(NamedTuple):
    source: str
    constants: Mapping[str, tuple[ast.expr, ...]]
    functions: tuple[_Function, ...]


def entries(root: Path) -> tuple[Entry, ...]:
    """Return all entries of the sources below ``root``, each once, in the order of the files."""
    modules = [
        _module(source, path)
        for source in SOURCES
        for path in sorted((root / source).rglob("*.py"))
    ]
    shared = dict(_SHAPES)
    for module in modules:
        shared |= {
            name: shape
            for name, shape in _forwarders(module, shared)
            if not name.startswith("_") and name not in _SHAPES
        }
    defined = [
        (name, value)
        for module in modules
        for name, value in module.constants.items()
        if name.isupper() and name[0] != "_"
    ]
    times = Counter(name for name, _ in defined)
    public = {
        name: value for name, value in defined if times[name] == 1
    }  # Who imports one of several is not known here.
    found = (
        entry
        for module in modules
        for entry in _entries_of(module, shared | dict(_forwarders(module, shared)), public)
    )
    return tuple(dict.fromkeys(found))


def _module(source: str, path: Path) -> _Module:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    calls = [
        tuple(node for node in ast.walk(function) if isinstance(node, ast.Call))
        for function in functions
    ]
    return _Module(source, _assigned(tree.body), tuple(map(_Function, functions, calls)))


def _forwarders(module: _Module, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
    """Yield the functions that make an entry of a code which they are given."""
    for function, calls in module.functions:
        parameters = [
            argument.arg for argument in (*function.args.posonlyargs, *function.args.args)
        ]
        for call in calls:
            shape = shapes.get(_called(call))
            if shape is None or shape.scope or function.name in _SHAPES:
                continue
            parts = _bound(shape, call)
            if isinstance(code := parts.get("code"), ast.Name) and code.id in parameters:
                names = tuple(name for name in parameters if name != "self")
                yield (
                    function.name,
                    Shape(shape.kind, names, parts, _assigned(ast.walk(function)) | {"": ()}),
                )


def _entries_of(
    module: _Module, shapes: Mapping[str, Shape], public: Mapping[str, tuple[ast.expr, ...]]
) -> Iterator[Entry]:
    for function, calls in module.functions:
        for call in calls:
            if shape := shapes.get(_called(call)):
                # A code that is written out belongs to the message assigned last; others are chosen
                # together with their messages.
                fixed = isinstance(_arguments(shape, call).get("code"), ast.Constant)
                scope = {
                    **public,
                    **module.constants,
                    **_assigned(ast.walk(function), call.lineno if fixed else None),
                }
                yield from _entry(module.source, shape, call, scope)


def _entry(
    source: str, shape: Shape, call: ast.Call, scope: Mapping[str, tuple[ast.expr, ...]]
) -> Iterator[Entry]:
    """Yield the entries that a call makes: one, or several where its code is one of several."""
    given = _arguments(shape, call)
    # What a forwarder was given counts in its caller's scope, so it is written out first.
    outer = {
        name: tuple(ast.Constant(text) for text in _texts(value, scope))
        for name, value in given.items()
    }
    inner = {**shape.scope, **outer}
    texts = {part: _texts(value, inner) for part, value in shape.parts.items()}
    codes = [code for code in texts.get("code", ()) if code and GAP not in code]
    messages = texts.get("message", (GAP,))
    remedies = texts.get("remedy", ("",))
    # Where a code and its message are chosen together, they pair up.
    pairs = (
        zip(codes, messages, strict=True)
        if len(codes) == len(messages) > 1
        else product(codes, [" / ".join(messages)])
    )
    for index, (code, message) in enumerate(pairs):
        remedy = remedies[index] if len(remedies) == len(codes) else " / ".join(remedies)
        yield Entry(shape.kind, source, code, message, remedy)


def _bound(shape: Shape, call: ast.Call) -> dict[str, ast.expr]:
    """Return the parts of a call of one of the types themselves."""
    given = _arguments(shape, call)
    return {
        part: given[name.id]
        for part, name in shape.parts.items()
        if isinstance(name, ast.Name) and name.id in given
    }


def _arguments(shape: Shape, call: ast.Call) -> dict[str, ast.expr]:
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return dict(zip(shape.parameters, call.args, strict=False)) | named


def _texts(node: ast.expr, scope: Mapping[str, tuple[ast.expr, ...]]) -> tuple[str, ...]:
    """Return the texts that an expression can have, with gaps."""
    match node:
        case ast.Constant(value=value):
            return (str(value),)
        case ast.JoinedStr(values=values):
            return _joined([_texts(value, scope) for value in values])
        case ast.FormattedValue(value=value) if isinstance(value, ast.Name | ast.Constant):
            return _texts(value, scope)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _joined([_texts(left, scope), _texts(right, scope)])
        case ast.IfExp(body=body, orelse=orelse):
            return _distinct((*_texts(body, scope), *_texts(orelse, scope)))
        case ast.Name(id=name) if scope.get(name):
            known = {other: values for other, values in scope.items() if other != name}
            return _distinct(text for value in scope[name] for text in _texts(value, known))
        case ast.Attribute(value=ast.Name(id="OutcomeCode"), attr=attribute):
            return (OutcomeCode[attribute].value,)
    return (GAP,)


def _joined(parts: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the concatenations. More than four are a gap where they differ."""
    texts = _distinct("".join(choice) for choice in product(*parts))
    return (
        texts
        if len(texts) <= 4
        else ("".join(part[0] if len(part) == 1 else GAP for part in parts),)
    )


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _assigned(
    nodes: Iterable[ast.AST], before: int | None = None
) -> dict[str, tuple[ast.expr, ...]]:
    """Return what is assigned to each name: everything, or only the last before a line."""
    found: dict[str, list[ast.expr]] = {}
    assignments = [
        node for node in nodes if isinstance(node, ast.Assign) and len(node.targets) == 1
    ]
    for node in sorted(assignments, key=lambda node: node.lineno):
        if before is not None and node.lineno >= before:
            break
        for name, value in _pairs(node.targets[0], node.value):
            found[name] = [value] if before is not None else [*found.get(name, ()), value]
    return {name: tuple(values) for name, values in found.items()}


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match target, value:
        case ast.Name(id=name), _:
            yield name, value
        case ast.Tuple(elts=targets), ast.Tuple(elts=values):
            for one, its in zip(targets, values, strict=False):
                yield from _pairs(one, its)


def _called(call: ast.Call) -> str:
    function = call.func
    return (
        function.attr
        if isinstance(function, ast.Attribute)
        else function.id
        if isinstance(function, ast.Name)
        else ""
    )


def page(root: Path) -> str:
    """Return the page."""
    found = (*_outcomes(root), *_findings(), *entries(root))
    parts = [_INTRODUCTION, "\n## Exit codes\n", "| code | meaning |\n|---|---|"]
    parts += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    for section in _SECTIONS:
        parts.append(f"\n## {section.title}\n\n{section.text}\n")
        parts += _table(
            [
                entry
                for entry in found
                if entry.kind == section.kind and section.source in ("", entry.source)
            ]
        )
    return "\n".join(parts) + "\n"


class _Section(NamedTuple):
    title: str
    kind: str
    source: str
    text: str


_SECTIONS = (
    _Section(
        "Why a run ended",
        "Outcome",
        "",
        "The exit code is 1. Reason and remedy are in `state.json`, on the dashboard, and the "
        "last lines of `so-tui run --plain`. They\n"
        "go on with the command that resumes the run, and say from which step.",
    ),
    _Section(
        "Warnings of a run",
        "Warning",
        "",
        "The run goes on. They are records of the kind `warning`, and stand on the dashboard.",
    ),
    _Section(
        "What doctor finds",
        "Finding",
        "",
        "A finding that blocks makes `so-tui run` refuse (exit code 3), and `so-tui doctor` "
        "return 3.",
    ),
    _Section(
        "Settings, commands and runs",
        "Problem",
        "so_tui",
        "Exit code 2 for what you typed or wrote, 3 where the machine or the run is in the way.",
    ),
    _Section(
        "Models, data and checkpoints",
        "Problem",
        "trainer",
        "Found before the start where possible (exit code 2 or 3), otherwise the run ends with "
        "this code.",
    ),
    _Section(
        "The engine",
        "Engine",
        "",
        "In a run they are the reason why it ended; in a script of your own, "
        "`superoffload.OffloadError.code`.",
    ),
)


def _outcomes(root: Path) -> Iterator[Entry]:
    """Yield how the supervisor words what it concludes itself, with examples of what it fills in,
    and what the other codes mean.
    """
    described = _described_members(
        ast.parse((root / "so_tui" / "runs" / "records.py").read_text(encoding="utf-8"))
    )
    for code in OutcomeCode:
        who: Who = (
            "launcher"
            if code is OutcomeCode.LAUNCHER_LOST
            else "runner"
            if code is OutcomeCode.RUNNER_LOST
            else "rank"
        )
        facts: dict[str, Any] = {
            "rank": 1,
            "pid": 4242,
            "signal": signal.SIGKILL,
            "count": 1,
            "limit_s": 300,
            "job": "1234",
            "node": "node7",
        }
        outcome = Outcome(state="failed", code=code, who=who, detail=GAP, **facts)
        reason, suggestion = outcome_text(outcome, "RUN", saved_step=60)
        remedy = suggestion.partition("`so-tui resume")[0].strip()
        if reason != GAP:
            yield Entry("Outcome", "so_tui", code.value, reason, remedy)
        elif code.name in described:
            yield Entry("Outcome", "so_tui", code.value, described[code.name])


def _findings() -> Iterator[Entry]:
    for name, wording in wordings().items():
        texts = (wording.title, wording.remedy, wording.cost)
        message, remedy, cost = (re.sub(r"{\w+}", GAP, text) for text in texts)
        severity = " or ".join(filter(None, (wording.severity, wording.lesser)))
        yield Entry("Finding", "so_tui", wording.code or name, message, remedy, severity, cost)


def _described_members(module: ast.Module) -> dict[str, str]:
    """Return the text below each member of ``OutcomeCode`` that has one."""
    (enumeration,) = (
        node
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name == OutcomeCode.__name__
    )
    found = {}
    for member, text in pairwise(enumeration.body):
        match member, text:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(
                value=ast.Constant(value=str(described))
            ):
                found[name] = described
    return found


def _table(found: list[Entry]) -> Iterator[str]:
    """Yield the rows of a section by code, with everything that is said of a code in one row."""
    by_code: dict[str, list[Entry]] = {}
    for entry in sorted(found, key=lambda entry: entry.code):
        by_code.setdefault(entry.code, []).append(entry)
    costs = any(entry.cost for entry in found)
    yield (
        "| code | message | cost | remedy |\n|---|---|---|---|"
        if costs
        else "| code | message | remedy |\n|---|---|---|"
    )
    for code, same in by_code.items():
        severity = f" ({same[0].severity})" if same[0].severity not in ("", GAP) else ""
        columns = [
            [entry.message for entry in same],
            *([[entry.cost for entry in same]] if costs else []),
            [entry.remedy for entry in same],
        ]
        yield f"| `{code}`{severity} | {' | '.join(_cell(texts) for texts in columns)} |"


def _cell(texts: list[str]) -> str:
    # Texts that differ only in their quotes are one.
    distinct = {
        text.replace("`", ""): text
        for text in sorted(_distinct(texts), key=lambda text: text.count("`"))
    }
    return "<br>".join(_escaped(text) for text in distinct.values() if text.strip(f"{GAP} .:()"))


def _escaped(text: str) -> str:
    """Return text for a table of Markdown: outside of `code`, nothing is markup."""
    parts = re.split("(`[^`]*`)", " ".join(text.split()))
    return "".join(
        part if part.startswith("`") else re.sub(r"([\\*_<\[\]])", r"\\\1", part) for part in parts
    ).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.parents[1]), encoding="utf-8")
