"""What an interpreter is built for, and what it lacks to train."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from so_tui.machine import interpreter
from so_tui.machine.interpreter import _faults, architecture_of

AARCH64 = b"\x7fELF\2\1\1" + bytes(9) + b"\3\0\xb7\0"


def test_this_interpreter_is_built_for_this_machine() -> None:
    with Path(sys.executable).open("rb") as file:
        if file.read(2) == b"#!":
            pytest.skip("a script starts this Python, in an emulator")
    assert architecture_of(sys.executable) == platform.machine()


@pytest.mark.parametrize(
    ("content", "architecture"),
    [
        (AARCH64 + bytes(40), "aarch64"),
        (AARCH64[:-2] + b"\x3e\0", "x86_64"),
        (AARCH64[:-2] + b"\xf3\0", ""),  # RISC-V
        (AARCH64[:5] + b"\2" + AARCH64[6:], ""),  # the other byte order
        (AARCH64[:-1], ""),
        (b"#!/bin/sh\nexec /opt/python\n", ""),
    ],
)
def test_header_says_the_architecture(content: bytes, architecture: str, tmp_path: Path) -> None:
    (tmp_path / "python").write_bytes(content)
    assert architecture_of(str(tmp_path / "python")) == architecture


@pytest.mark.parametrize("name", ["python3", "", "/no/such/python", "/dev/zero", "/"])
def test_of_what_is_no_file_nothing_is_known(name: str) -> None:
    assert architecture_of(name) == ""


@pytest.mark.parametrize(
    ("versions", "build", "gpus", "said"),
    [
        ({"torch": "2.11.0", "deepspeed": "0.19.8"}, {"cuda": "13.0"}, 4, []),
        ({"torch": "2.10.0+cpu", "deepspeed": "0.19.8"}, {}, 0, []),
        ({"torch": "2.10.0+cpu", "deepspeed": "0.19.8"}, {}, 4, ["for the CPU only"]),
        ({"torch": "2.11.0", "deepspeed": "0.17.0"}, {"cuda": "13.0"}, 1, ["0.17.0"]),
        ({}, {}, 0, ["torch, deepspeed"]),
    ],
)
def test_what_an_interpreter_lacks_is_named(
    versions: dict[str, str],
    build: dict[str, str],
    gpus: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interpreter, "package_version", versions.get)
    monkeypatch.setattr(interpreter, "torch_build", lambda: build)
    for word, fault in zip(said, _faults(gpus), strict=True):
        assert word in fault
