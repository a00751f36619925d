"""The log: bounded under the processes that write it, readable for people."""

from __future__ import annotations

import select
import subprocess
import sys
from pathlib import Path

import pytest

from so_tui.runs import LogReader, RunDirectory, RunReader, log_readers, new_attempt
from so_tui.runs.reader import _readable, trim_log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


def add(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def all_lines(path: Path) -> list[str]:
    """Return every line of a log as it is now, the unfinished one included."""
    reader, found = LogReader(path), list[str]()
    while lines := reader.poll(limit_s=60.0):
        found += lines
    return [*found, reader.partial] if reader.partial else found


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"windows line\r", "windows line"),
        (b" 10%|#   |\r 50%|##  |\r100%|####|", "100%|####|"),
        (b" 50%|##  |\r        \r", " 50%|##  |"),
        (b"\x1b[32mgreen\x1b[0m and \x1b[1;31mred\x1b[m", "green and red"),
        (b"\x1b]0;title\x07text\x1b[A\x1b[2K", "text"),
        (b"a\tb\x00\x08c", "a\tbc"),
        ("a\x9b31mb\u202ec\u200bd".encode(), "a\\x9b31mb\\u202ec\\u200bd"),
        (b"a\x9b31mb", "a\ufffd31mb"),
        ("Grüße ⣿".encode(), "Grüße ⣿"),
    ],
)
def test_a_line_reads_as_a_terminal_shows_it(raw: bytes, shown: str) -> None:
    assert _readable(raw) == shown


def test_lines_come_once_and_whole(path: Path) -> None:
    reader = LogReader(path)
    assert reader.poll() == ()
    for text, lines, partial in (
        (b"one\ntw", ("one",), "tw"),
        (b"", (), "tw"),
        (b"o\n 1%\r 2%", ("two",), " 2%"),
        (b"\r99%\nend \xc3", ("99%",), "end \ufffd"),
        (b"\x84\n", ("end Ä",), ""),
    ):
        add(path, text)
        assert (reader.poll(), reader.partial) == (lines, partial)
    assert all_lines(path) == ["one", "two", "99%", "end Ä"]


def test_the_tail_starts_at_a_line_and_goes_on(path: Path) -> None:
    add(path, b"".join(b"line %d\n" % i for i in range(10_000)))
    reader = LogReader(path)
    assert reader.tail(2) == ("line 9998", "line 9999")
    assert LogReader(path).poll(limit_bytes=100, at_end=True)[0] == "line 9991"
    assert LogReader(path).tail(20_000) == tuple(f"line {i}" for i in range(10_000))
    add(path, b"new\n")
    assert reader.poll() == ("new",)


def test_a_poll_is_bounded_and_says_that_there_is_more(path: Path) -> None:
    add(path, b"line\n" * 100_000)
    assert len(LogReader(path).poll(limit_bytes=1000, limit_s=5)) == 200
    reader = LogReader(path)
    lines = reader.poll(limit_s=0)
    assert 0 < len(lines) < 100_000
    assert reader.behind
    while reader.behind:
        lines += reader.poll(limit_s=0)
    assert len(lines) == 100_000
    assert (reader.poll(limit_s=0), reader.behind) == ((), False)


def test_endless_lines_are_read_in_parts(path: Path, tmp_path: Path) -> None:
    add(path, b"y" * 1_000_000)
    assert sum(map(len, all_lines(path))) == 1_000_000
    add(tmp_path / "bar", b"".join(b"\r%06d of many" % i for i in range(50_000)))
    reader = LogReader(tmp_path / "bar")
    assert (reader.poll(limit_s=5), reader.partial) == ((), "049999 of many")


WRITE_LOG = """
import os, sys, time
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for i in range(int(sys.argv[2])):
    if i % 250 == 0:
        print(flush=True)
        sys.stdin.readline()
    os.write(fd, b"line %08d %s\\n" % (i, b"." * 40))
    if i % 15 == 0:
        time.sleep(0.001)
"""
"""It waits for its reader from time to time, which a busy machine may hold up for longer than a
trimmed log lasts.
"""


def limit_logs(patch: pytest.MonkeyPatch, head_bytes: int, tail_bytes: int) -> None:
    patch.setattr("so_tui.runs.reader.HEAD_BYTES", head_bytes)
    patch.setattr("so_tui.runs.reader.TAIL_BYTES", tail_bytes)


def test_trimming_under_a_writer_keeps_places(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail, count = 50_000, 30_000
    limit_logs(monkeypatch, 10_000, tail)
    path.touch()
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE_LOG, path, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    reader = LogReader(path)
    lines: list[str] = []
    largest = trims = 0
    while writer.stdout.readline():
        writer.stdin.write(b"\n")
        writer.stdin.flush()
        portion_is_written = False
        while not portion_is_written:
            portion_is_written = bool(select.select([writer.stdout], [], [], 0)[0])
            lines += reader.poll(limit_s=1)
            largest = max(largest, path.stat().st_size)
            trims += trim_log(path) > 0
    writer.communicate()
    lines += reader.poll(limit_bytes=1 << 24, limit_s=5)
    assert trims > 10
    assert largest < 4 * tail
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line ")]
    assert numbers == sorted(set(numbers))
    assert len(numbers) > 0.99 * count
    content = path.read_bytes()
    assert content.startswith(b"line 00000000")
    assert content.rstrip().endswith(b"line %08d %s" % (count - 1, b"." * 40))
    assert content.count(b"were dropped here") == 1


def test_a_slow_reader_reports_what_it_missed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_logs(monkeypatch, 100, 300)
    assert trim_log(path) == 0, "there is none yet"
    reader = LogReader(path)
    add(path, b"first\n")
    assert reader.poll() == ("first",)
    dropped = 0
    for part in range(5):
        add(path, b"".join(b"%03d %02d\n" % (part, i) for i in range(100)))
        dropped += trim_log(path)
    lines = reader.poll()
    (gap,) = [line for line in lines if "dropped here" in line]
    assert f"{dropped} bytes" in gap
    assert (lines[0], lines[-1]) == ("000 00", "004 99")
    assert trim_log(path) == 0
    assert LogReader(path).tail(3) == ("004 97", "004 98", "004 99")


def test_the_log_of_the_newest_attempt_is_followed(run: RunDirectory) -> None:
    reader = RunReader(run, log_lines=2)

    def read() -> list[tuple[int, str, str]]:
        return [(line.attempt, line.host, line.text) for line in reader.poll().log_lines]

    assert (read(), log_readers(run)) == ([], ())
    new_attempt(run)
    add(run.log_path(1, "node1"), b"a\nb\n")
    assert read() == [(1, "node1", "a"), (1, "node1", "b")]
    new_attempt(run)
    add(run.log_path(1, "node1"), b"late\n 5%")
    add(run.log_path(2, "node1"), b"c\n")
    assert read() == [(1, "node1", "late"), (2, "node1", "c")]
    assert [line.text for line in RunReader(run).poll().log_lines] == ["c"]
    add(run.log_path(2, "node1"), b"50%")
    assert (read(), reader.log_partial) == ([], "50%")
    assert log_readers(run)[0].tail(5) == ("c",)
