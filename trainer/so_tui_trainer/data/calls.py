"""Read calls of tools and descriptions of tools from the forms that data sets have.

A call becomes ``{"type": "function", "id": ..., "function": {"name": ..., "arguments": object}}``
(the id only where there is one), a description ``{"type": "function", "function": {...}}``. Chat
templates take these forms.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

CALL_KEYS = frozenset(("id", "type", "index", "function"))
"""Keys of a call that are understood."""
_ARGUMENT_KEYS = ("arguments", "parameters")


class RowError(Exception):
    """A row that cannot be read."""

    def __init__(self, column: str, message: str) -> None:
        """Name the column, with the path of a nested value (``messages[0].role``), and what is
        wrong with it.
        """
        super().__init__(f"column {column}: {message}")


class UnreadCallError(Exception):
    """A call in an unknown form."""


def short_repr(value: object) -> str:
    """Return a value as Python writes it, in at most 60 characters."""
    text = "empty" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def as_list(value: object, column: str) -> list[Any]:
    """Return a list, which may be written as JSON. A single object becomes a list of one, an empty
    value an empty list.

    Raises:
        RowError: It is neither.
    """
    known = value
    if isinstance(value, str):
        try:
            known = json.loads(value) if value.strip() else None
        except json.JSONDecodeError as error:
            raise RowError(column, f"is not JSON ({error.msg})") from error
        except RecursionError as error:
            raise RowError(column, "is nested too deeply") from error
        except ValueError as error:  # Python converts integers of up to 4,300 digits
            raise RowError(column, "has a number of thousands of digits") from error
    if not known:
        return []
    if isinstance(known, Mapping):
        return [known]
    if not isinstance(known, list):
        raise RowError(column, f"is {short_repr(value)}, not a list")
    return known


def calls_of(value: object, column: str) -> list[dict[str, Any]]:
    """Return the calls in a list, in a single object, or in either as JSON.

    Raises:
        RowError: Something in it is no call.
        UnreadCallError: Arguments are not a JSON object.
    """
    return [_call(call, f"{column}[{index}]") for index, call in enumerate(as_list(value, column))]


def _call(value: object, column: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RowError(column, f"is {short_repr(value)}, not a call with `name` and `arguments`")
    inner = value.get("function")
    function = inner if isinstance(inner, Mapping) else value
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RowError(column, "is a call without the `name` of a function")
    own = {**value, **function}
    given = [
        item
        for key in _ARGUMENT_KEYS
        for item in (value.get(key), function.get(key) if function is not value else None)
        if item is not None
    ]
    further = {
        key: item
        for key, item in own.items()
        if item is not None and key not in ("type", "function", "name", *_ARGUMENT_KEYS)
    }
    if not given and not further.keys() <= CALL_KEYS:
        raise UnreadCallError(f"a call of {name} has no `arguments`, but {', '.join(further)}")
    found = [_arguments(item, name) for item in given]
    if any(item != found[0] for item in found):
        raise UnreadCallError(f"a call of {name} has arguments twice")
    return {
        "type": "function",
        **further,
        "function": {"name": name, "arguments": found[0] if found else {}},
    }


def _arguments(given: Any, name: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. Some data sets write JSON in JSON."""
    for _ in range(2):
        if isinstance(given, str):
            given = _decoded(given) if given.strip() else None
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise UnreadCallError(f"the arguments of {name} are {short_repr(given)}, not a JSON object")
    return dict(given)


_LONGEST_PYTHON = 100_000
"""Characters of a call that may be written as Python writes values; reading them takes much more
memory than JSON.
"""


def _decoded(text: str) -> Any:
    """Return the value that a text is, as JSON or, in some data sets, as Python writes it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if len(text) > _LONGEST_PYTHON:
            raise UnreadCallError(f"{short_repr(text)} is not JSON") from error
        try:
            return json.loads(json.dumps(ast.literal_eval(text.strip())))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise UnreadCallError(f"{short_repr(text)} is not JSON") from error


def tools_of(value: object, column: str) -> list[dict[str, Any]]:
    """Return the descriptions of tools in a list, in a single object, or in either as JSON.

    Raises:
        RowError: Something in it is no description.
    """
    return [_tool(tool, f"{column}[{index}]") for index, tool in enumerate(as_list(value, column))]


def _tool(value: object, column: str) -> dict[str, Any]:
    if isinstance(value, str):  # a list of descriptions that are JSON
        (value,) = as_list(value, column) or (None,)
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if (
        not isinstance(value, Mapping)
        or not isinstance(function, Mapping)
        or not isinstance(function.get("name"), str)
    ):
        raise RowError(
            column,
            f"is {short_repr(value)}, not the description of a function: "
            '{"type": "function", "function": {"name": ..., "parameters": ...}}, or what '
            "`function` holds there",
        )
    described = dict(function)
    if function is value and described.get("type") == "function":
        del described["type"]
    if "parameters" not in described and "input_schema" in described:
        described["parameters"] = described.pop("input_schema")
    if "parameters" in described:
        described["parameters"] = _schema(described["parameters"])
    outer = {} if function is value else value
    return {**outer, "type": "function", "function": described}


_JSON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}


def _schema(parameters: Any) -> Any:
    """Return parameters as a JSON schema. In xLAM's rows they are a table of names, each with the
    type in Python.
    """
    if (
        not isinstance(parameters, Mapping)
        or not parameters
        or "properties" in parameters
        or not all(isinstance(item, Mapping) and "type" in item for item in parameters.values())
    ):
        return parameters
    properties, required = {}, []
    for name, item in parameters.items():
        kind, optional, _ = str(item["type"]).partition(", optional")
        base = kind.strip().partition("[")[0].lower()
        properties[name] = {**item, "type": _JSON_TYPES.get(base, kind.strip())}
        if not optional and "default" not in item:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}


# Calls in the text of an answer.

_GLAIVE_CALL = re.compile(r"<functioncall>\s*(?=\{)")
_QUOTED_ARGUMENTS = re.compile(
    r"""\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"arguments"\s*:\s*'(.*)'\s*\}\s*""", re.DOTALL
)
_HERMES_CALL = re.compile(r"<tool_call>\s*([{\[].*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_RESPONSE, _RESPONSE_END = "<tool_response>", "</tool_response>"
Spoken = tuple[str, list[dict[str, Any]]]
"""What an answer says, and its calls."""


def glaive_call(text: str) -> Spoken | None:
    """Return an answer with the call behind ``<functioncall>``, whose arguments may be JSON between
    single quotes; nothing without a call.

    Raises:
        UnreadCallError: The call is not in this form.
    """
    if not (start := _GLAIVE_CALL.search(text)):
        return None
    call = text[start.end() :].strip().removesuffix("<|endoftext|>").strip()
    said, call = text[: start.start()].strip(), call.removesuffix("</functioncall>").strip()
    if not (quoted := _QUOTED_ARGUMENTS.fullmatch(call)):
        return said, _called(_decoded(call))
    name, arguments = quoted.groups()
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        arguments = arguments.replace("\\'", "'")
    return said, _called({"name": name, "arguments": arguments})


def hermes_calls(text: str) -> Spoken | None:
    """Return an answer with the calls in its ``<tool_call>`` elements; nothing without one.

    Raises:
        UnreadCallError: An element is not a call, or text stands behind it.
    """
    calls = [call for match in _HERMES_CALL.finditer(text) for call in _called(_decoded(match[1]))]
    said, *behind = (part.strip() for part in _HERMES_CALL.sub("\0", text).split("\0"))
    if any(behind):
        raise UnreadCallError(f"text stands behind a call: {short_repr(' '.join(behind).strip())}")
    return (said, calls) if calls else None


def _called(value: object) -> list[dict[str, Any]]:
    try:
        return calls_of(value, "call")
    except RowError as error:
        raise UnreadCallError(str(error)) from error


def responses(text: str) -> list[str]:
    """Return the content of each ``<tool_response>`` element, or the text if it is anything
    else.
    """
    before, *elements = text.split(_RESPONSE)
    if before.strip() or not elements:
        return [text]
    return [element.partition(_RESPONSE_END)[0].strip() for element in elements]


_NEXT = re.compile(r"[^\s,]")
_GLAIVE_LIST = re.compile(r"with access to the following functions\. Use them if required ?-")


def listed_tools(system: str) -> list[dict[str, Any]]:
    """Return the tools that the system text of a row of Glaive's lists; none in any other text."""
    if not (sentence := _GLAIVE_LIST.search(system)):
        return []
    try:
        return tools_of([*_objects(system[sentence.end() :])], "system")
    except (ValueError, RecursionError, RowError):
        return []  # The text stays as it is.


def _objects(text: str) -> Iterator[Any]:
    """Yield the JSON objects that follow each other in a text."""
    decoder = json.JSONDecoder()
    at = 0
    while start := _NEXT.search(text, at):
        value, at = decoder.raw_decode(text, start.start())
        yield value
