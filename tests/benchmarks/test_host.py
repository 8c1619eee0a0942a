"""The script that counts what the host does for a layer, in its tiny form."""

from __future__ import annotations

import json
import sys

import pytest

from tests.benchmarks import host, host_report


@pytest.mark.slow
def test_every_layer_has_its_counts(tmp_path, monkeypatch):
    asked = ["host", "--out", str(tmp_path), "--device", "cpu", "--tiny", "--only", "packfree$"]
    monkeypatch.setattr(sys, "argv", asked)
    host.main()
    about, *rows = map(json.loads, (tmp_path / "host.jsonl").read_text().splitlines())
    assert about["workload"] == "machine"
    assert [row["workload"] for row in rows] == list(host.LAYERS.values())
    for row in rows:
        assert row["frames"] > 50 and row["c_calls"] > 50 and row["host_ms"] > 0, row
        assert row["dispatched"] > row["allocations"] > 0 and row["nodes"] > 10, row
        assert row["launches"] == 0, "a CPU launches none"
        assert max(row["own_us"].values()) == next(iter(row["own_us"].values())) > 0, row["own_us"]
    (text,) = host_report.tables(tmp_path / "host.jsonl").values()
    cells = [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]]
    assert cells[:4] == [
        "attention layer, packfree",
        f"{rows[1]['host_ms']:.2f}",
        "",
        str(rows[1]["frames"]),
    ]


def test_without_a_result_there_is_no_table(tmp_path):
    assert host_report.tables(host_report.newest(tmp_path)) == {}
