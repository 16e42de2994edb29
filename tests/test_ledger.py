"""Finished cells as JSON lines: none lost, none computed twice."""

import json
import subprocess
import sys

import pytest

from unnorm.errors import BrokenFile, InvalidValue
from unnorm.ledger import Ledger, alone, key_of, read_lines


def test_what_was_written_is_there_again(tmp_path):
    path = tmp_path / "results.jsonl"
    ledger = Ledger(path)
    ledger.write([{"kind": "run", "key": "a", "x": 1.5}, {"kind": "clock", "seconds": 2}])
    ledger.write([{"kind": "run", "key": "b", "x": float("nan"), "y": [float("inf")]}])
    again = Ledger(path)
    assert again.records == ledger.records
    assert again.of("run") == [
        {"kind": "run", "key": "a", "x": 1.5},
        {"kind": "run", "key": "b", "x": None, "y": [None]},
    ]
    assert again.missing(["a", "c", "b"]) == ["c"]


@pytest.mark.parametrize("torn", ['{"kind": "run", "key": "b', '{"kind"', "{"])
def test_half_a_line_is_cut_off_and_the_next_begins_anew(tmp_path, torn):
    path = tmp_path / "results.jsonl"
    whole = '{"kind": "run", "key": "a"}\n'
    path.write_text(whole + torn)
    ledger = Ledger(path)
    assert ledger.keys == {"a"}
    ledger.write([{"kind": "run", "key": "b"}])
    assert path.read_text() == whole + '{"kind": "run", "key": "b"}\n'


def test_a_whole_line_without_its_end_is_kept(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"key": "a"}\n{"key": "b"}')
    ledger = Ledger(path)
    ledger.write([{"key": "c"}])
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["a", "b", "c"]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"key": "a"}\n\nbroken\n{"key": "b"}\n')
    with pytest.raises(BrokenFile, match="Line 3 of '.*results.jsonl' is not JSON"):
        Ledger(path)
    with pytest.raises(InvalidValue, match="cannot be read"):
        read_lines(tmp_path / "nothing")


def test_what_cannot_be_written_is_said(tmp_path):
    with pytest.raises(InvalidValue, match="cannot be written"):
        Ledger(tmp_path / "no" / "folder.jsonl").write([{"key": "a"}])


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "results.jsonl"
    ledger = Ledger(path)
    ledger.write([{"key": "a"}])

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InvalidValue, match="cannot be written: No space left on device"):
        ledger.write([{"key": "b"}])
    monkeypatch.undo()
    assert ledger.keys == {"a"}
    ledger.write([{"key": "c"}])
    assert [record["key"] for record in Ledger(path).records] == ["a", "c"]


def test_a_key_is_of_the_content_alone():
    spec = {"lr": 0.1, "hidden": (300, 300), "seed": 0}
    assert key_of(spec) == key_of({"seed": 0, "hidden": [300, 300], "lr": 0.1})
    assert len({key_of(spec | {"seed": seed}) for seed in range(100)}) == 100


def test_one_process_at_a_time(tmp_path):
    """Another is refused while one is at work, and may go on when that one was killed."""
    hold = "import sys, time; from pathlib import Path; from unnorm.ledger import alone\n"
    hold += "with alone(Path(sys.argv[1])):\n    print('in', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"in\n"
        with pytest.raises(InvalidValue, match="Another process is at work"), alone(tmp_path):
            pass
        other.kill()
    with alone(tmp_path):
        pass
