"""Streams: replayed from manifests, which may hold anything, and made of nothing but the sources that are given."""

from __future__ import annotations

import json
import os
import pickle
import time

import pytest

import come
from come.bench.data import FashionOutlierSource, FashionSource, Preprocess, Stream, batches, streams
from come.bench.data.reading import read_regular
from come.bench.data.streams import OUTLIER

GOOD = {
    "format": "come-stream-2", "data": "fashion", "order": [2, 0, 1], "shifts": [["fog", 5], [None, 5]], "kinds": [0, 1, 0],
    "then": [], "seed": 3, "domain": "fog", "outliers": None,
}  # fmt: skip


def load(tmp_path, text):
    path = tmp_path / "s.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Stream.load(path)


def test_streams_are_written_down_and_read_back(tmp_path):
    stream = Stream.shuffled("fashion", 20, corruption="fog", severity=2, seed=5)
    stream.save(tmp_path / "stream.json")
    again = Stream.load(tmp_path / "stream.json")
    assert again == stream == pickle.loads(pickle.dumps(stream))
    assert (hash(again), again.digest) == (hash(stream), stream.digest)
    assert sorted(stream.order) == list(range(20))
    other = Stream.shuffled("fashion", 20, corruption="fog", severity=2, seed=6)
    assert other.order != stream.order
    assert other.digest != stream.digest
    with pytest.raises(ValueError, match="frozen"):
        stream.seed = 1


def test_a_manifest_of_an_earlier_version_is_read(tmp_path):
    assert load(tmp_path, json.dumps(GOOD)) == Stream(
        data="fashion", order=(2, 0, 1), shifts=(("fog", 5), (None, 5)), kinds=(0, 1, 0), seed=3, domain="fog"
    )


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"format": "come-stream-1"}', '{"format": "come-stream-9", "order": []}']
)
def test_foreign_manifests_are_refused(tmp_path, text):
    with pytest.raises(come.InputError, match=r"cannot read the stream .*give a manifest that come wrote"):
        load(tmp_path, text)


@pytest.mark.parametrize("field", GOOD)
def test_no_field_may_be_missing_or_of_another_kind(tmp_path, field):
    for change in ({}, {field: 1.5}, {field: True}, {field: {}}, {field: [[]]}):
        with pytest.raises(come.InputError, match="cannot read the stream"):
            load(tmp_path, json.dumps({**{k: v for k, v in GOOD.items() if k != field}, **change}))


def changed(**change):
    return json.dumps({**GOOD, **change})


HOSTILE = {
    "another field": (changed(more=1), "does not have the fields of format 'come-stream-2'"),
    "another format": (changed(format="come-stream-9"), "format must be 'come-stream-2', got 'come-stream-9'"),
    "a text for an integer": (changed(seed="3"), "seed must be a valid integer, got '3'"),
    "a whole float": (changed(order=[2.0, 0, 1]), "order.0 must be a valid integer, got 2.0"),
    "a shift of three": (changed(shifts=[["fog", 5, 5]]), "shifts.0 must have at most 2 items"),
    "no shift": (changed(shifts=[]), "shifts must be a list of 1 to 1000"),
    "many shifts": (changed(shifts=[["fog", 5]] * 10**5), "shifts must be a list of 1 to 1000"),
    "a severity": (changed(shifts=[[None, 6]] * 3), "shifts.0.1 must be less than or equal to 5, got 6"),
    "a kind": (changed(kinds=[0, 1, 2]), "kinds holds a value outside 0 to 1"),
    "an outlier of no source": (changed(kinds=[0, 1, -1]), "kinds holds a value outside 0 to 1"),
    "a second shift of one kind only": (changed(then=[["fog", 1]]), "then must be one for each of 2, got 1"),
    "a second shift that does not exist": (changed(then=[["frog", 1], [None, 1]]), "no corruption 'frog'"),
    "many second shifts": (changed(then=[["fog", 1]] * 10**5), "then must be a list of 1 to 1000"),
    "too few kinds": (changed(kinds=[0]), "kinds must be one for each of 3, got 1"),
    "a negative index": (changed(order=[2, 0, -1]), "order.2 must be greater than or equal to 0, got -1"),
    "an index of 64 bits": (changed(order=[2, 0, 2**63]), "order.2 must be less than"),
    "an integer of a million digits": (changed().replace("[2, 0", f"[{'9' * 10**6}, 0"), "Exceeds the limit"),
    "a seed of 65 bits": (changed(seed=2**64), "seed must be less than .*, got 18446744073709551616"),
    "not a number": (changed(seed=float("nan")), "seed must be a valid integer, got nan"),
    "infinite": (changed().replace('"seed": 3', '"seed": 1e999'), "seed must be a valid integer, got inf"),
    "deep lists": (changed().replace("[2, 0, 1]", "[" * 10**6), "Expected `int`|recursion"),
    "deep objects": ('{"a":' * 10**6, "recursion|truncated"),
    "a deep unknown field": ('{"a":' + "[" * 10**6 + "]" * 10**6 + "}", "recursion|fields"),
    "a lone surrogate": (changed(domain="\ud800"), "domain must be printable text"),
    "not UTF-8": (changed(domain="x" * 9).encode().replace(b"xxxxxxxxx", b"\xff"), "invalid start byte"),
    "a domain of 1 MB": (changed(domain="x" * 2**20), "domain must be printable text of 1 to 1000 characters, got 'xx"),
    "data of 1001": (changed(data="x" * 1001), "data must be printable text of 1 to 1000 characters"),
    "outliers of two lines": (changed(outliers="a\nb"), "outliers must be printable text"),
    "an escape sequence": (changed(domain="\x1b[31m"), r"domain must be printable text .*, got '\\x1b\[31m'"),
    "a corruption of 1 MB": (changed(shifts=[["x" * 2**20, 5]] * 2), "shifts.0.0 must be printable text"),
    "a corruption that does not exist": (changed(shifts=[["fogg", 5]] * 2), "no corruption 'fogg'; did you mean 'fog'"),
    "a format of 1 MB": (changed(format="x" * 2**20), "format must be 'come-stream-2', got 'xx"),
    "a field of 1 MB": (changed(**{"x" * 2**20: 1}), "does not have the fields"),
    "more behind it": (changed() + "{}", "Extra data"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_get_one_short_line_at_once(tmp_path, name):
    text, message = HOSTILE[name]
    since = time.perf_counter()
    with pytest.raises(come.InputError, match=message) as raised:
        load(tmp_path, text)
    assert time.perf_counter() - since < 2
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 700 + len(str(tmp_path))


def test_what_is_not_a_regular_file_is_not_read(tmp_path):
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "link").symlink_to("pipe")
    for place in (tmp_path, tmp_path / "pipe", tmp_path / "link", "/dev/zero", "/dev/null"):
        if os.path.exists(place):
            since = time.perf_counter()
            with pytest.raises(come.InputError, match="it is not a regular file; give a manifest"):
                Stream.load(place)
            assert time.perf_counter() - since < 2
    for place, message in ((tmp_path / "missing", "No such file"), ("a\0b", "null"), ("x" * 5000, "too long")):
        with pytest.raises(come.InputError, match=f"cannot read the stream .*: .*{message}"):
            Stream.load(place)


def test_a_pipe_in_the_place_of_a_file_that_was_there_does_not_block(tmp_path, monkeypatch):
    if not hasattr(os, "mkfifo"):
        pytest.skip("no pipes here")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("come.bench.data.reading.require_regular", lambda path: None)
    with pytest.raises(OSError, match=r"^it is not a regular file$"):
        read_regular(tmp_path / "pipe", 10)


def test_files_have_a_largest_size(tmp_path, monkeypatch):
    (tmp_path / "s.json").write_bytes(b"1234")
    assert read_regular(tmp_path / "s.json", 4) == b"1234"
    with pytest.raises(OSError, match=r"^it is longer than 3 bytes$"):
        read_regular(tmp_path / "s.json", 3)
    monkeypatch.setattr(streams, "MAX_BYTES", 3)
    with pytest.raises(come.InputError, match="it is longer than 3 bytes; give a manifest"):
        Stream.load(tmp_path / "s.json")


def test_bad_streams():
    with pytest.raises(come.ConfigError, match=r"shifts\.0\.1 must be less than or equal to 5, got 6"):
        Stream.of("fashion", (0,), "fog", 6, 0)
    with pytest.raises(come.ConfigError, match="did you mean 'fog'"):
        Stream.of("fashion", (0,), "fogg", 5, 0)
    with pytest.raises(come.ConfigError, match=r"order\.0 must be greater than or equal to 0, got -1"):
        Stream.of("fashion", (-1,), "fog", 5, 0)
    with pytest.raises(come.ConfigError, match="data must be printable text of 1 to 1000 characters"):
        Stream.of("folder:" + "x" * 1000, (0,), "fog", 5, 0)


def test_what_a_stream_names_is_not_opened(monkeypatch):
    """A manifest of others could name any folder."""
    stream = Stream(
        data="folder:/etc", order=(0, 3), shifts=(("fog", 5),), kinds=(0, OUTLIER), seed=7, domain="x",
        outliers="folder:/home",
    )  # fmt: skip
    with pytest.raises(come.InputError, match="the stream has outliers of 'folder:/home'; pass their source"):
        batches(FashionSource(size=4), stream, Preprocess(32))
    outliers = FashionOutlierSource("fashion-outliers:far", "far")
    (batch,) = batches(FashionSource(size=4), stream, Preprocess(32), outliers=outliers)
    assert batch.labels[1] == -1
