"""Helper processes for work that needs torch, transformers or datasets:
``python -m so_tui_trainer.tools.<name>``, with JSON in and out.

Their imports may take seconds and they may crash; this program stays light and is not affected.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from so_tui.folders import UNCACHED_COMPILERS
from so_tui.launch.helper_limits import (
    LARGEST_LOG_BYTES,
    LONGEST_ANSWER,
    limits_of,
    restrict,
    taken_bytes,
)
from so_tui.machine.software import INSTALL_TRAINING, code_folders, make_code_folders
from so_tui.spec.errors import InputError, Problem, SoTuiError, refuse, reject
from so_tui.trust.decoding import Tree
from so_tui.trust.text import quoted
from so_tui.units import significant

_LOG = logging.getLogger(__name__)
_TERMINATE_S = 5.0
"""From SIGTERM to SIGKILL, and how long the kernel may take after that."""
_POLL_S = 0.1
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


_COMPILING = ("build_ops", "calibrate", "generate")
"""Helpers that compile, and get no relative paths."""
_REMEDY = "`so-tui --verbose` with the same command shows what the process wrote."
_LARGEST_TAIL = 1 << 16

Tell = Callable[[str], object]
"""Takes what is done, or was measured, in words."""


class ToolError(SoTuiError):
    """A helper process could not be started, answered no JSON, ended with an error or took too
    long.

    Args:
        found: What happened, or the problem.
    """

    def __init__(self, found: str | Problem) -> None:
        self.problem = (
            found
            if isinstance(found, Problem)
            else Problem("helper-failed", "so_tui_trainer.tools", "", found, _REMEDY)
        )
        super().__init__(str(found).strip())


class ToolProcess:
    """A helper process that answers in lines, and may be asked more than once. Close it in the end,
    with the processes it started.
    """

    def __init__(
        self,
        name: str,
        cancel: threading.Event | None = None,
        weights_bytes: int = 0,
        timeout_s: float = threading.TIMEOUT_MAX,
    ) -> None:
        """Start the helper.

        Args:
            name: Its module.
            cancel: Ends it once it is set, even before the start; its answers then just end.
            weights_bytes: Size of the weights that it loads, which it has memory for.
            timeout_s: How long it may take.
        """
        self._name, self._cancel = name, cancel or threading.Event()
        self._limits, self._timeout_s = limits_of(name, weights_bytes), timeout_s
        # `close` closes it.
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._note = tempfile.TemporaryFile()  # noqa: SIM115
        note = self._note.fileno()
        environment = _environment() | {"SO_TUI_HELPER": f"{note}:{self._limits.row_s}"}
        inherited, self._lifeline = os.pipe()
        argv = [sys.executable, "-P", "-m", f"so_tui_trainer.tools.{name}"]
        _LOG.info("calling %s", quoted(*argv))
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            env=environment,
            # Linkers search the working folder first, and another user may be able to write in it.
            # Helpers that read files need the folder, and no package explains that it is gone.
            cwd="/" if name in _COMPILING else os.getcwd(),  # noqa: PTH109
            bufsize=1,
            process_group=0,
            pass_fds=(note, inherited),
        )
        restrict(name, self._process.pid, inherited)
        _RUNNING.add(self)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._lines = self._process.stdin, self._process.stdout
        self._failure: SoTuiError | None = None
        """Why this program has ended it."""
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._enforce, name=f"limits of {name}", daemon=True)
        self._watch.start()

    def send(self, request: object) -> None:
        """Send a request, in ASCII because the helper reads it in its locale's encoding.
        ``answers`` finds out that a helper has ended.

        Raises:
            InputError: It has text that is no Unicode (code ``not-utf8``).
        """
        tree = msgspec.to_builtins(request)
        for key, value in tree.items():
            text = json.dumps(value, ensure_ascii=False)
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise reject(
                    "not-utf8",
                    key,
                    text[max(0, error.start - 20) : error.end + 20],
                    "is not valid UTF-8",
                    "Save the text, or rename the file, in UTF-8.",
                ) from error
        # ValueError: another thread has closed the pipe.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._requests.write(f"{json.dumps(tree)}\n")
            self._requests.flush()

    def end_requests(self) -> None:
        """Tell the helper that no request follows."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()

    def answers(self) -> Iterator[Tree]:
        """Yield the answers as they come, until the helper ends.

        Raises:
            InputError: The helper reports problems that the user can fix (exit code 2), took more
                than it may, or mapped a file that was cut short (``helper-file-cut``).
            Refused: The training software is not installed (code ``software-missing``).
            ToolError: Any other failure, with the last lines that the helper wrote to stderr.
        """
        problems = None
        for line in iter(partial(self._lines.readline, LONGEST_ANSWER + 1), ""):
            if len(line) > LONGEST_ANSWER:
                self._signal(signal.SIGKILL)
                raise self._wrote_too_much()
            answer = _decoded(self._name, line)
            problems = answer.get("problems")
            if problems is None:
                yield answer
        code = self._process.wait()
        if code == 0 or self._cancel.is_set():
            return
        lines = self._log_lines()
        if self._failure is not None:
            raise self._failure
        if code == -signal.SIGXCPU:
            raise self._took_too_much(
                "helper-cpu-limit",
                "row_s",
                self._limits.row_s,
                "took more CPU time than a row or a file may",
            )
        if code == -signal.SIGBUS:
            raise reject(
                "helper-file-cut",
                self._doing,
                "",
                "could not be read to its end: the file was cut short meanwhile, or its disk or "
                "/dev/shm failed or is full",
                "Try again while no one writes there, from a complete copy in a folder of your "
                "own if others could.",
            )
        if problems:
            found = msgspec.convert(problems, list[Problem])
            raise InputError(found) if code == InputError.exit_code else ToolError(found[0])
        if lines and (missing := _MISSING_MODULE.search(lines[-1])):
            message = f"The Python module {missing[1]} is not installed here. {INSTALL_TRAINING}"
            raise refuse("software-missing", message)
        raise ToolError(self._death(code, lines))

    def _log_lines(self) -> list[str]:
        """Return the last lines that the helper wrote to stderr, and log them."""
        self._errors.seek(max(0, os.fstat(self._errors.fileno()).st_size - _LARGEST_TAIL))
        lines = [line.rstrip() for line in self._errors if line.strip()]
        for line in lines:
            _LOG.info("%s wrote: %s", self._name, line)
        return lines

    def _death(self, code: int, lines: list[str]) -> Problem:
        """Return the problem of a helper that could not say what is wrong."""
        how = f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        return Problem(
            "helper-failed",
            f"tools.{self._name}",
            "",
            f"failed ({how}) at {self._doing}: {lines[-1] if lines else 'it wrote nothing'}",
            f"The system ends processes if memory runs out: free some. {_REMEDY}"
            if code == -signal.SIGKILL
            else _REMEDY,
        )

    def _enforce(self) -> None:
        """End the helper when it is cancelled, is late, or takes more than it may."""
        ends_at = time.monotonic() + self._timeout_s
        while not self._closed.wait(_POLL_S) and self._process.poll() is None:
            late = time.monotonic() > ends_at
            if late or self._cancel.is_set():
                if late:
                    self._failure = ToolError(
                        f"so_tui_trainer.tools.{self._name} gave no answer within "
                        f"{self._timeout_s:,.0f} s"
                    )
                self.end()
                return
            taken, allowed = taken_bytes(self._process.pid, self._limits)
            if taken > allowed:
                took = f"took {significant(taken / 1e9)} GB of memory, more than it may"
                self._failure = self._took_too_much(
                    "helper-memory-limit", "memory_gb", round(allowed / 1e9, 1), took
                )
            elif os.fstat(self._errors.fileno()).st_size > LARGEST_LOG_BYTES:
                self._failure = self._wrote_too_much()
            if self._failure is not None:
                self._signal(signal.SIGKILL)
                return

    @property
    def _doing(self) -> str:
        """What the helper noted last."""
        text = os.pread(self._note.fileno(), 1 << 12, 0).rstrip(b"\0").decode(errors="replace")
        return text or f"so_tui_trainer.tools.{self._name}"

    def _wrote_too_much(self) -> InputError:
        return reject(
            "helper-output-limit",
            self._doing,
            "",
            f"wrote more than {LONGEST_ANSWER >> 20} MiB of text",
            "Correct or remove what it reads; `--verbose` shows what it wrote.",
        )

    def _took_too_much(self, code: str, key: str, value: float, took: str) -> InputError:
        return reject(
            code,
            f"helpers.{key}",
            f"{value:g}",
            f"{self._doing} {took}",
            f"Correct or remove it, or allow more: `so-tui settings helpers.{key}={2 * value:g}`.",
        )

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def end(self) -> None:
        """End the helper's whole group. One that the kernel does not let go is left behind."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERMINATE_S)

    def close(self) -> None:
        """End the helper."""
        _RUNNING.discard(self)
        self.end()
        self._closed.set()
        self._watch.join()
        os.close(self._lifeline)
        self.end_requests()
        self._lines.close()
        self._errors.close()
        self._note.close()


_RUNNING: weakref.WeakSet[ToolProcess] = weakref.WeakSet()


def end_all() -> None:
    """End every helper of this process. Threads that wait for one then go on."""
    for process in tuple(_RUNNING):
        process._cancel.set()


def stream_tool(
    name: str,
    request: Tree,
    cancel: threading.Event | None = None,
    *,
    timeout_s: float = threading.TIMEOUT_MAX,
) -> Iterator[Tree]:
    """Run a helper process that reports progress, and yield its JSON lines as they come.

    Closing the iterator ends the process and those that it started, as ``cancel`` does; a cancelled
    iterator just ends. Raises the errors of ``ToolProcess.answers``; without ``timeout_s`` the
    helper may take as long as it wants.
    """
    with contextlib.closing(ToolProcess(name, cancel, timeout_s=timeout_s)) as process:
        process.send(request)
        process.end_requests()
        yield from process.answers()


def call_tool(
    name: str,
    request: Tree,
    tell: Tell = lambda _: None,
    *,
    timeout_s: float = threading.TIMEOUT_MAX,
) -> Tree:
    """Run a helper process and return its last answer. ``tell`` receives its
    progress messages; see ``stream_tool`` for the rest.
    """
    answer: Tree = {}
    for answer in stream_tool(name, request, timeout_s=timeout_s):
        if message := answer.get("message"):
            tell(str(message))
    if not answer:
        raise ToolError(f"so_tui_trainer.tools.{name} ended without an answer")
    return answer


def _environment() -> dict[str, str]:
    """Return the environment of a helper. Raises ToolError if others can write the folders of
    compiled code.
    """
    # Progress bars of the libraries would go to stderr and be mistaken for the error.
    environment = {
        **os.environ,
        "PYTHONSAFEPATH": "1",
        "PYTHONUTF8": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "USE_HUB_KERNELS": "0",
        **UNCACHED_COMPILERS,
        **code_folders(os.environ),
    }
    try:
        return environment | make_code_folders(environment)
    except OSError as error:
        raise ToolError(
            f"there is no private folder for compiled code: {error}. Set XDG_CACHE_HOME to a "
            "folder that only you can write, in folders in which only you can rename"
        ) from error


def _decoded(name: str, text: str) -> Tree:
    try:
        return msgspec.convert(json.loads(text), Tree)
    # ValueError includes msgspec.ValidationError, and an integer of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise ToolError(
            f"so_tui_trainer.tools.{name} answered no JSON object: {text[:200]!r}"
        ) from error
