"""Records: lines of a file, and whether they are stale."""

from __future__ import annotations

from fedhb.runs import records


def test_a_line_ends_where_json_ends_it(tmp_path):
    key = {"cell": "a\u2028b\x85c", "seed": 0}
    records.append(tmp_path / "records.jsonl", {"key": key})
    assert [r["key"] for r in records.read(tmp_path / "records.jsonl")] == [key]


def test_a_line_cut_short_is_passed_over_and_hurts_no_other(tmp_path):
    path = tmp_path / "records.jsonl"
    records.append(path, {"key": {"seed": 0}})
    with path.open("ab") as file:
        file.write(b'{"key": {"seed": 1}, "resu')
    assert [r["key"] for r in records.read(path)] == [{"seed": 0}]
    records.append(path, {"key": {"seed": 2}})
    records.append(path, {"key": {"seed": 3}})
    assert [r["key"]["seed"] for r in records.read(path)] == [0, 2, 3]
    path.write_bytes(path.read_bytes() + b"[1]\n\xff\n{}\n")
    assert [r["key"]["seed"] for r in records.read(path)] == [0, 2, 3]


def test_a_setting_that_is_new_matters_only_where_it_is_not_what_there_was_before():
    def effective(settings, names):
        return dict.fromkeys(names, 0) | dict(settings)

    record = {"settings": {"lr": 0.1}}
    assert records.changed(record, {"lr": 0.1, "new": 0}, effective) == []
    assert records.changed(record, {"lr": 0.1, "new": 1}, effective) == ["new"]
    assert records.changed(record, {"new": 0}, effective) == ["lr"]
    assert records.changed(record, {"lr": 0.1, "new": 0}, lambda settings, names: settings) == [
        "new"
    ]
    assert records.changed({"settings": {"a": [1, 2]}}, {"a": (1, 2)}, effective) == []


def test_the_newest_valid_record_counts():
    key = {"seed": 0}
    kept = [{"key": key, "settings": {"a": a}, "result": n} for n, a in enumerate((1, 1, 2, 3))]
    for now, result, stale in ((1, 1, []), (2, 2, []), (9, 3, ["a"])):
        (found,) = records.current(
            kept, [(key, {"a": now})], lambda settings, names: settings
        ).values()
        assert (found["result"], found["stale"]) == (result, stale)
