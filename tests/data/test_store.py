"""Images are decoded once for a run, wherever they are kept, and corrupted in chunks without a difference."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
from PIL import Image

import come
from come import corruptions
from come.bench.data import (
    Account,
    DatasetSource,
    FashionSource,
    Preprocess,
    Stream,
    batches,
    loading,
    open_source,
    store,
)
from come.bench.data.source import Loaded
from come.bench.data.store import DecodedStore, DeviceCache

SMALL = Preprocess(32, 32)


@pytest.fixture
def folder(tmp_path):
    draw = torch.Generator().manual_seed(0)
    for k in range(2):
        (tmp_path / str(k)).mkdir()
        for i in range(4):
            pixels = torch.randint(256, (40, 36, 3), generator=draw, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / str(k) / f"{i}.png")
    return tmp_path


def counted(source):
    """The source, and a list of the samples that were decoded."""
    decoded, load = [], source.load

    def count(indices, *more):
        decoded.extend(indices)
        return load(indices, *more)

    source.load = count
    return source, decoded


def same(one: Loaded, two: Loaded) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one[:3], two[:3], strict=True)) and one.bad == two.bad


def test_a_sample_is_decoded_once(folder):
    plain = open_source(f"folder:{folder}", SMALL)
    source, decoded = counted(open_source(f"folder:{folder}", SMALL))
    kept = DecodedStore(source)
    decoded.clear()  # one was looked at for its size
    for asked in ([3, 1], [1, 3, 5], [7, 0, 2, 4, 6], list(range(8)), [6, 6, 0]):
        assert same(kept.load(asked), plain.load(asked))
    assert sorted(decoded) == list(range(8))
    assert kept.holds_all(range(8))


def test_samples_that_are_not_used_and_unknown_ones(folder):
    source, decoded = counted(open_source(f"folder:{folder}", SMALL))
    kept, plain = DecodedStore(source, [6, 1, 3]), open_source(f"folder:{folder}", SMALL)
    decoded.clear()
    for _ in range(2):
        for asked in ([6, 1], [1, 5], [3, 6, 3]):
            assert same(kept.load(asked), plain.load(asked))
    assert sorted(decoded) == [1, 3, 5, 5, 6]
    assert kept.holds_all([1, 3, 6])
    assert not kept.holds_all([5])
    for asked in ([1, 8], [1, -1]):
        with pytest.raises(come.InputError, match=f"there is no sample {asked[1]}"):
            kept.load(asked)


def test_corruptions_that_a_source_holds_are_kept_apart(folder, tmp_path):
    for i, name in enumerate(("fog", "snow")):
        for severity in (1, 5):
            for k in range(2):
                place = tmp_path / "c" / name / str(severity) / str(k)
                place.mkdir(parents=True)
                Image.new("RGB", (32, 32), (50 * i, 40 * severity, k)).save(place / "a.png")
    source, decoded = counted(open_source(f"imagenet-c:{tmp_path / 'c'}", SMALL))
    plain = open_source(f"imagenet-c:{tmp_path / 'c'}", SMALL)
    kept = DecodedStore(source, None, [("fog", 5), ("snow", 1), ("fog", 5)])
    decoded.clear()
    for _ in range(3):
        for shift in (("fog", 5), ("snow", 1), ("snow", 5)):
            assert same(kept.load([1, 0], *shift), plain.load([1, 0], *shift))
    assert len(decoded) == 2 + 2 + 3 * 2  # the last one is no part of the run


@pytest.mark.parametrize("first", [True, False])
def test_bad_images_are_counted_each_time(folder, first):
    (folder / "0" / ("0.png" if first else "2.png")).write_bytes(b"no image")
    source, decoded = counted(open_source(f"folder:{folder}", SMALL, "skip"))
    kept = DecodedStore(source)
    decoded.clear()
    stream = Stream.shuffled(source.name, len(source), corruption="fog", severity=5, seed=0)
    for _ in range(2):
        account = Account()
        found = list(batches(kept, stream, SMALL, batch_size=3, account=account))
        assert account.bad == 1
        assert sum(len(batch.labels) for batch in found) == 7
    assert len(decoded) == 8
    strict = DecodedStore(open_source(f"folder:{folder}", SMALL))
    for _ in range(2):
        with pytest.raises(come.InputError, match="cannot read"):
            strict.load(range(8))


def test_images_of_different_sizes_work_as_without():
    data = [(torch.full((3, 16 + i % 2, 16), i, dtype=torch.uint8), i) for i in range(6)]
    plain = DatasetSource(data, num_classes=6, name="mine")
    kept = DecodedStore(plain)
    stream = Stream.of("mine", (0, 2, 1, 3), "fog", 5, 0)
    for _ in range(2):
        one, two = (list(batches(source, stream, SMALL, batch_size=2)) for source in (plain, kept))
        assert all(torch.equal(a.images, b.images) for a, b in zip(one, two, strict=True))
    with pytest.raises(RuntimeError, match="equal size"):
        list(batches(kept, Stream.of("mine", (0, 1), "fog", 5, 0), SMALL, batch_size=2))


@pytest.mark.parametrize("room", ["memory", "disk", "little", "none"])
def test_where_images_are_kept_and_that_nothing_is_left(folder, tmp_path_factory, monkeypatch, room):
    memory, disk = tmp_path_factory.mktemp("memory"), tmp_path_factory.mktemp("disk")
    monkeypatch.setattr(store, "MEMORY", memory)
    monkeypatch.setattr(store.tempfile, "tempdir", str(disk))
    places = []
    made = store.tempfile.TemporaryFile
    monkeypatch.setattr(store.tempfile, "TemporaryFile", lambda **given: places.append(given["dir"]) or made(**given))
    if room != "memory":
        monkeypatch.setattr(store, "SHARE_OF_MEMORY", 0.0)
    if room == "none":
        monkeypatch.setattr(store, "SHARE_OF_DISK", 0.0)
    source, decoded = counted(open_source(f"folder:{folder}", SMALL))
    kept = DecodedStore(source)
    if room == "little":
        monkeypatch.setattr(DecodedStore, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    decoded.clear()
    for _ in range(2):
        kept.load(range(8))
    assert places == {"memory": [memory], "none": []}.get(room, [disk])
    assert len(decoded) == (8 if room in ("memory", "disk") else 16)
    assert not os.listdir(memory)  # the file has no name, so nothing is left of it whatever happens
    assert not os.listdir(disk)


def test_workers_fill_what_all_read(folder):
    source, decoded = counted(open_source(f"folder:{folder}", SMALL))
    stream = Stream.shuffled(source.name, 8, corruption="fog", severity=5, seed=1)
    expected = torch.cat(
        [b.images for b in batches(open_source(f"folder:{folder}", SMALL), stream, SMALL, batch_size=3)]
    )
    kept = DecodedStore(source)
    decoded.clear()
    for workers in (2, 2, 0):
        found = list(batches(kept, stream, SMALL, batch_size=3, workers=workers))
        assert torch.equal(torch.cat([b.images for b in found]), expected)
    assert sorted(decoded) == list(range(8))  # once
    assert kept.holds_all(range(8))


def test_a_copy_that_has_no_file_decodes_for_itself(folder):
    kept = DecodedStore(open_source(f"folder:{folder}", SMALL))
    assert same(pickle.loads(pickle.dumps(kept)).load([2]), kept.load([2]))


@pytest.mark.parametrize("name", corruptions.names())
def test_chunks_are_corrupted_as_batches_are(name, monkeypatch):
    source = FashionSource(size=40)
    stream = Stream.shuffled("fashion", 40, corruption=name, severity=5, seed=3)
    found = {}
    for values in (1, 2**19):
        monkeypatch.setitem(loading.CHUNK_VALUES, "cpu", values)
        for size in (1, 7):
            made = batches(source, stream, Preprocess(32), batch_size=size)
            found[values, size] = torch.cat([batch.images for batch in made])
    first = found[1, 1]
    assert all(torch.equal(other, first) for other in found.values())


def test_chunks_grow_so_that_the_first_batch_comes_soon(monkeypatch):
    source, decoded = counted(FashionSource(size=64))
    stream = Stream.shuffled("fashion", 64, corruption="fog", severity=1, seed=0)
    made = batches(source, stream, Preprocess(32), batch_size=4)
    next(made)
    assert len(decoded) == 4
    assert sum(len(batch.labels) for batch in made) == 60


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_gpu
@pytest.mark.parametrize("fits", [True, False])
def test_batches_on_a_gpu_are_those_of_the_cpu(fits, monkeypatch):
    if not fits:
        monkeypatch.setattr(store, "SHARE_OF_DEVICE", 0.0)
    plain, source = FashionSource(size=300), DeviceCache(FashionSource(size=300))
    kinds = tuple(i % 3 - 1 for i in range(300))  # outliers, fog and clean images
    outliers = DeviceCache(FashionSource(size=300))
    stream = Stream(
        data="fashion", order=tuple(range(300)), shifts=(("fog", 3), (None, 5)), kinds=kinds, outliers="fashion", seed=2
    )
    expected = list(batches(plain, stream, Preprocess(32), batch_size=16, outliers=plain))
    for number in range(3):
        found = []
        for batch in batches(source, stream, Preprocess(32), batch_size=16, outliers=outliers, device="cuda"):
            torch.cuda._sleep(10**6)  # the next chunk is made meanwhile
            found.append(batch)
        for one, two in zip(expected, found, strict=True):
            assert torch.equal(one.labels, two.labels.cpu())
            assert torch.equal(one.indices, two.indices)
            clean = one.kinds != 0
            assert torch.allclose(one.images[clean], two.images.cpu()[clean], atol=1e-5)
            assert (one.images - two.images.cpu()).abs().max() < 0.05
        assert source.holds_all([i for i in range(300) if kinds[i] >= 0]) == fits, number
    assert (source.bytes > 0) == fits


@needs_gpu
def test_nothing_waits_for_the_gpu_once_images_are_there():
    source = DeviceCache(FashionSource(size=256))
    stream = Stream.shuffled("fashion", 256, corruption="gaussian_noise", severity=5, seed=0)
    for _ in range(2):  # tensors that are kept are made
        list(batches(source, stream, Preprocess(32), batch_size=16, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert sum(len(b.labels) for b in batches(source, stream, Preprocess(32), batch_size=16, device="cuda")) == 256
    finally:
        torch.cuda.set_sync_debug_mode("default")
