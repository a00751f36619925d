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
from collections.abc import Callable, Iterator
from typing import Any

from so_tui.machine.software import INSTALL_TRAINING, code_folders, make_code_folders
from so_tui.spec.errors import InputError, Problem, SoTuiError, refuse
from so_tui.trust.text import quoted

_LOG = logging.getLogger(__name__)
_STDERR_LINES = 5
_TERMINATE_S = 5.0
"""From SIGTERM to SIGKILL, and how long the kernel may take after that."""
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


class ToolError(SoTuiError):
    """A helper process could not be started, answered no JSON, ended with an error or took too
    long.
    """


def call_tool(name: str, request: dict[str, Any], *, timeout_s: float = 600.0) -> dict[str, Any]:
    """Run a helper process and return its answer: the last JSON object that it printed.

    Raises:
        InputError: The helper reports problems that the user can fix (exit code 2).
        Refused: The training software is not installed (code ``software-missing``).
        ToolError: Any other failure, with the last lines that the helper wrote to stderr.
    """
    try:
        done = subprocess.run(
            _argv(name),
            input=json.dumps(request),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ToolError(_late(name, timeout_s)) from error
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode != 0:
        raise _failed(name, done.returncode, last, done.stderr)
    return _decoded(name, last)


class Cancel:
    """Ends a helper process from another thread than the one that waits for it. It may be called
    before the start, and repeatedly.
    """

    def __init__(self) -> None:
        self.requested = False
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.requested = True
            self._end()

    def started(self, process: subprocess.Popen[str]) -> None:
        """Register the process to end. The code that starts the process calls this."""
        with self._lock:
            self._process = process
            if self.requested:
                self._end()

    def _end(self) -> None:
        if self._process is not None:
            _signal(self._process, signal.SIGTERM)


class ToolProcess:
    """A helper process that answers in lines, and may be asked more than once. Close it in the end,
    with the processes it started.
    """

    def __init__(self, name: str, cancel: Cancel | None = None) -> None:
        """Start the helper.

        Args:
            name: Its module.
            cancel: Ends it from another thread; its answers then just end.
        """
        self._name, self._cancel = name, cancel
        # `close` closes it.
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            _argv(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            env=_environment(),
            bufsize=1,
            process_group=0,
        )
        if cancel is not None:
            cancel.started(self._process)

    def send(self, request: dict[str, Any]) -> None:
        """Send a request, in ASCII because the helper reads it in its locale's encoding.
        ``answers`` finds out that a helper has ended.
        """
        assert self._process.stdin is not None
        line = f"{json.dumps(request)}\n"
        with contextlib.suppress(
            BrokenPipeError, ValueError
        ):  # ValueError: another thread has closed it
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def end_requests(self) -> None:
        """Tell the helper that no request follows."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield the answers as they come, until the helper ends. Raises the errors of
        ``call_tool``.
        """
        assert self._process.stdout is not None
        line = ""
        for line in self._process.stdout:
            yield _decoded(self._name, line)
        if self._process.wait() != 0 and not (self._cancel is not None and self._cancel.requested):
            self._errors.seek(0)
            raise _failed(self._name, self._process.returncode, line, self._errors.read())

    def end(self) -> None:
        """End the helper's whole group. One that the kernel does not let go is left behind."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            _signal(self._process, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERMINATE_S)

    def close(self) -> None:
        """End the helper."""
        self.end()
        self.end_requests()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()


def stream_tool(
    name: str,
    request: dict[str, Any],
    cancel: Cancel | None = None,
    *,
    timeout_s: float | None = None,
) -> Iterator[dict[str, Any]]:
    """Run a helper process that reports progress, and yield its JSON lines as they come.

    Closing the iterator ends the process and those that it started, as ``cancel`` does; a cancelled
    iterator just ends. Raises the errors of ``call_tool``; without ``timeout_s`` the helper may
    take as long as it wants.
    """
    with contextlib.closing(ToolProcess(name, cancel)) as process:
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            process.end()

        timer = threading.Timer(timeout_s or 0.0, expire)
        timer.daemon = True
        if timeout_s is not None:
            timer.start()
        process.send(request)
        process.end_requests()
        try:
            yield from process.answers()
        except ToolError as error:
            if expired.is_set():
                raise ToolError(_late(name, timeout_s)) from error
            raise
        finally:
            timer.cancel()


def last_answer(
    name: str,
    request: dict[str, Any],
    tell: Callable[[str], None],
    *,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Run a helper process that tells in words what it does, and return its last answer; otherwise
    as ``stream_tool``.
    """
    answer: dict[str, Any] = {}
    for answer in stream_tool(name, request, timeout_s=timeout_s):
        if message := answer.get("message"):
            tell(str(message))
    return answer


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _late(name: str, timeout_s: float | None) -> str:
    return f"so_tui_trainer.tools.{name} gave no answer within {timeout_s or 0:,.0f} s"


def problem_of(entry: dict[str, Any]) -> Problem:
    """Convert a problem from a helper's answer. Older helpers' answers have no code."""
    texts = {
        key: str(entry.get(key, ""))
        for key in ("field", "value", "message", "remedy", "default", "file")
    }
    return Problem(str(entry.get("code") or "unknown"), **texts)


def _argv(name: str) -> list[str]:
    argv = [sys.executable, "-P", "-m", f"so_tui_trainer.tools.{name}"]
    _LOG.info("calling %s", quoted(*argv))
    return argv


def _environment() -> dict[str, str]:
    """Return the environment of a helper. Raises ToolError if others can write the folders of
    compiled code.
    """
    # Progress bars of the libraries would go to stderr and be mistaken for the error.
    fixed = {
        "PYTHONSAFEPATH": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment = {**os.environ, **fixed, **code_folders(os.environ)}
    try:
        make_code_folders(environment)
    except OSError as error:
        message = (
            f"there is no private folder for compiled code: {error}. Set XDG_CACHE_HOME to a "
            "folder of your own"
        )
        raise ToolError(message) from error
    return environment


def _decoded(name: str, text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError: also an integer of thousands of digits
        raise ToolError(f"so_tui_trainer.tools.{name} answered no JSON: {text[:200]!r}") from error
    if not isinstance(answer, dict):
        raise ToolError(f"so_tui_trainer.tools.{name} answered no JSON object: {text[:200]!r}")
    return answer


def _failed(name: str, code: int, last_line: str, stderr: str) -> SoTuiError:
    if code == InputError.exit_code and (problems := _decoded(name, last_line).get("problems")):
        return InputError([problem_of(entry) for entry in problems])
    lines = [line for line in stderr.splitlines() if line.strip()][-_STDERR_LINES:]
    if lines and (missing := _MISSING_MODULE.search(lines[-1])):
        message = f"The Python module {missing[1]} is not installed here. {INSTALL_TRAINING}"
        return refuse("software-missing", message)
    return ToolError(
        f"so_tui_trainer.tools.{name} failed (exit code {code}): "
        + (" / ".join(lines) or "it wrote nothing")
    )
