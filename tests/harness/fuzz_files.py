"""Feed broken and hostile files to everything that reads one, and count what comes back.

python tests/harness/fuzz_files.py [--cases 10000] [--seconds 600] [--seed 0] [--only images,config]

A case is accepted, refused with a `come.ComeError`, or something else: a crash, or an image of the wrong shape. The last count
must be 0; the exit code says so. The strategies are also those of `tests/test_fuzz_files.py`. See SECURITY.md.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gzip
import io
import json
import os
import pickle
import random
import shutil
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, reduce
from itertools import islice
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import torch
from cells import apart, forge
from hypothesis import strategies as st
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as safetensors_bytes

import come
from come.bench import Plan, RunFolder, cli, models
from come.bench import run as run_plan
from come.bench.cli.options import from_toml
from come.bench.data import Preprocess, Stream, open_source
from come.state import saving
from come.testing import TinyClassifier

sys.path.append(str(Path(__file__).parents[1]))
import cifar10_files as cifar10

SMALL = Preprocess(size=32, resize=36)

# ---- values that are not what a reader expects ----

TEXTS = (
    "", " ", "tent", "em", "fog", "fashion", "../../etc/passwd", "/etc/passwd", "a/../..", "~nobody-here/x", "x\0y",
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "[/red]", "[bold]", "{0}", "%s", "$(id)", "`id`", "-rf",
    "\x1b[31mred\x1b[0m", "line\nbreak", "tab\t", "\u202eevil", "é\u0301", "😀", "²", "٣", "\ud800", "x" * 5000, "NaN",
    "=1+1", "@SUM(A1)",
)  # fmt: skip
NUMBERS = (-1, 0, 1, 2, 5, 6, 99, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64, 10**30, -(10**30))
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.5, 1e15, 1e308, float("inf"), float("-inf"), float("nan"))
BIG, DEEP = "@a number of 5000 digits@", "@100000 brackets@"
"""Stand for text that no writer makes; see `raw`."""

leaves = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.integers(), st.sampled_from(FLOATS), st.floats(),
    st.sampled_from(TEXTS), st.text(max_size=8),
)  # fmt: skip
junk = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TEXTS), inner, max_size=3)
)
json_junk = st.one_of(junk, st.sampled_from((BIG, DEEP)))
scribbles = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.text(alphabet='[]{}",:=.-+eE0123456789 \n#\\utrfn', max_size=60).map(str.encode),
)
splices = st.lists(
    st.tuples(st.sampled_from(("cut", "set", "set", "insert")), st.integers(0, 10**6), st.binary(max_size=4)),
    max_size=2,
)


def spliced(content: bytes, wounds: list[tuple[str, int, bytes]]) -> bytes:
    """Bytes with some cut off, changed or put in; every other time near the front, where headers are."""
    whole = bytearray(content)
    for how, where, value in wounds:
        at = where % (len(whole) + 1) if where % 2 else where % 64
        whole[at : {"cut": None, "set": at + len(value), "insert": at}[how]] = value
    return bytes(whole)


def raw(text: str) -> bytes:
    """Put in what stands for too long a number and too deep a nesting."""
    text = text.replace(json.dumps(BIG), "9" * 5000).replace(json.dumps(DEEP), "[" * 100_000)
    return text.encode("utf-8", "surrogatepass")


Change = tuple[int, str, Any]
"""One wound in a JSON value: at which of all its places, how, and what is put there."""


def changed(whole: Any, change: Change) -> Any:
    where, how, value = change
    places = _places(whole)
    if not places:
        return value
    holder, key = places[where % len(places)]
    if how == "delete":
        del holder[key]
    elif how == "add" and isinstance(holder, dict):
        holder[str(value)[:20]] = value
    else:
        holder[key] = {"wrap": [holder[key]], "text": str(holder[key])}.get(how, value)
    return whole


def _places(value: Any) -> list[tuple[Any, Any]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in list(keys) for place in [(value, key), *_places(value[key])]]


changes = st.lists(
    st.tuples(st.integers(0, 10**6), st.sampled_from(("replace", "delete", "wrap", "add", "text")), json_junk),
    max_size=3,
)


def wounded(text: str | bytes, wounds: list[Change]) -> bytes:
    """A JSON text with the wounds in it."""
    return raw(json.dumps(reduce(changed, wounds, json.loads(text))))


# ---- configuration files ----

VALUES: dict[str, tuple[Any, ...]] = {
    "methods": (["tent"], ["tent", "sar:lr=0.1"], ["tent:" * 20], ["tent:lr="], "tent", [[]], []),
    "corruptions": (["fog"], ["fog", "fog"], "fog", [["fog"]], [1]),
    "objectives": (["em"], ["come:tau=2"], ["come:tau=x"], {"em": 1}),
    "seeds": ([0], [0, 0], [-1], [2**64], [True], [0.5], 0, ["0"], [-(2**63), 2**63 - 1]),
    "setting": ("lifelong", "open-world", "in-distribution", "mixed", []),
    "severity": (1, 5, 0, 2.0, True, "5"),
    "set": ({"tent": {"lr": 1}}, {"tent": 1}, [], {"tent": {"select": "[/x]"}}, {"tent": {"lr": []}}, "x"),
    "data": ("fashion:10", "folder:..", 1),
    "outliers": (["fashion-outliers:far"], ["x"], "x"),
    "batch-size": (1, 10**9, 10**9 + 1),
    "limit": (1, 2**63),
    "outlier-ratio": (0.5, 0, 1),
    "imbalance": (1, 1e9, 0.5),
}
KEYS = sorted({*(name.replace("hyper", "set") for name in Plan.model_fields), *VALUES, "x", ""})


@st.composite
def _options(draw: st.DrawFn) -> bytes:
    """Half of them only with values of the table above: some of these are plans."""
    other = st.nothing() if draw(st.booleans()) else junk
    keys = draw(st.lists(st.sampled_from(sorted(VALUES) if other.is_empty else KEYS), max_size=4, unique=True))
    values = {key: draw(st.sampled_from(VALUES[key]) | other if key in VALUES else other) for key in keys}
    return "\n".join(f"{json.dumps(k)} = {toml(v)}" for k, v in values.items()).encode("utf-8", "surrogatepass")


def toml(value: Any) -> str:
    """TOML of a value; None has none, so a date stands for it."""
    if value is None:
        return "1979-05-27T07:32:00Z"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)} = {toml(v)}" for key, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


configs = st.one_of(_options(), _options(), scribbles)


def read_config(case: bytes, folder: Path) -> None:
    path = folder / "c.toml"
    path.write_bytes(case)
    plan = Plan(**from_toml(path))
    assert plan.slug
    assert all(cell.key for cell in islice(plan.cells(100), 50))


# ---- manifests ----

MANIFEST = json.dumps(
    {"format": "come-stream-2", "data": "fashion:20", "order": [3, 1, 2, 0], "shifts": [["fog", 5], [None, 5]], "seed": 0,
     "then": [], "kinds": [0, 1, 0, -1], "domain": "fog", "outliers": "fashion-outliers:far"}
)  # fmt: skip
manifests = st.one_of(
    changes.map(lambda wounds: wounded(MANIFEST, wounds)),
    changes.map(lambda wounds: wounded(MANIFEST, wounds)),
    st.tuples(st.sampled_from(sorted(json.loads(MANIFEST))), json_junk).map(  # a key that is there twice
        lambda pair: raw(f"{MANIFEST[:-1]}, {json.dumps(pair[0])}: {json.dumps(pair[1])}}}")
    ),
    json_junk.map(lambda value: raw(json.dumps(value))),
    scribbles,
)


def read_manifest(case: bytes, folder: Path) -> None:
    path = folder / "s.json"
    path.write_bytes(case)
    stream = Stream.load(path)
    assert hash(stream) is not None
    stream.save(path)
    assert Stream.load(path) == stream
    for i in range(min(len(stream), 4)):
        source = open_source("fashion-outliers:far") if stream.kind(i) < 0 else open_source("fashion:20")
        loaded = source.load([stream.order[i]], *stream.shifts[max(0, stream.kind(i))])
        assert loaded.indices.tolist() == [stream.order[i]]


# ---- run folders ----


def _kept_folder() -> Path:
    """A folder for as long as this process lives."""
    path = Path(tempfile.mkdtemp(prefix="come-fuzz-kept-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


RUN = Plan(data="fashion:100", methods=("source", "tent"), corruptions=("fog",), limit=16)


@cache
def finished_run() -> Path:
    """A small run, to be wounded; made once."""
    path = _kept_folder()
    run_plan(RUN, path)
    return path


@dataclass(frozen=True)
class Damage:
    """What happens to one file of a run folder."""

    file: int
    wounds: list[Change] | None
    content: bytes
    place: int
    forged: bool
    """Make the checksum and the name of the cell hold: else hardly a wound gets past them."""


damages = st.lists(
    st.builds(
        Damage, st.integers(0, 40), st.none() | changes | changes, scribbles, st.integers(0, 10**5), st.booleans()
    ),
    min_size=1,
    max_size=3,
)


def _damaged(case: list[Damage], folder: Path) -> Path:
    run = shutil.copytree(finished_run(), folder / "run")
    for damage in case:
        cells = sorted(run.glob("cells/*.safetensors"))
        path = [*cells * 5, run / "run.json", *sorted(run.glob("streams/*.json"))][damage.file % (5 * len(cells) + 2)]
        with contextlib.suppress(ValueError, RecursionError, SafetensorError):  # wounded before
            if damage.wounds is None:
                how = ("set", "cut", "insert")[damage.place % 3]
                path.write_bytes(spliced(path.read_bytes(), [(how, damage.place, damage.content)]))
            elif path.suffix == ".json":
                path.write_bytes(wounded(path.read_bytes(), damage.wounds))
            else:
                rows, about = apart(path.read_bytes())
                rows = _other_rows(rows, damage.place) if damage.place % 2 else rows
                text = wounded(about["record"], damage.wounds).decode()
                if damage.forged:
                    forge(path, text, rows)
                else:
                    path.write_bytes(safetensors_bytes(rows, {**about, "record": text}))
    return run


def _other_rows(rows: dict[str, torch.Tensor], place: int) -> dict[str, torch.Tensor]:
    """Rows that come would not write: a column is gone, short, of another kind, or holds other values."""
    if not rows:
        return {"label": torch.zeros(3)}
    name = sorted(rows)[place % len(rows)]
    column = rows.pop(name)
    if column.is_complex() or column.ndim != 1:  # wounded before
        return rows
    other = (
        None, column[:3], column[:, None], column.to(torch.complex64), column.double() * float("nan"), column.bool(),
        column.double() + 1e30, torch.tensor(1.0), -column.long(), column.to(torch.float8_e4m3fn),
    )[place // 16 % 10]  # fmt: skip
    return rows if other is None else {**rows, name: other.contiguous()}


def _command(*arguments: str) -> None:
    """A command as `come` runs it, but for the exit code."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.app(list(arguments), standalone_mode=False)
        except Exception as error:
            if not isinstance(error, come.ComeError) and hasattr(error, "format_message"):
                raise come.ConfigError(error.format_message()) from error
            raise


def read_run(case: list[Damage], folder: Path) -> None:
    """Read every record, and print the report in one of its forms; once in a while the page, which takes seconds."""
    damaged, place = _damaged(case, folder), case[0].place
    run = RunFolder.existing(damaged)
    for record in run.records():
        assert len(run.rows(record.key)["label"]) == record.result.samples
    for cell in RUN.cells(100):
        record = run.record(cell)
        assert record is None or record.cell == cell
    form = ("--format", ("md", "latex", "csv", "json")[place % 4]) if place % 97 != 50 else ()
    _command("report", str(damaged), *form, *(("--score", "energy") if place % 3 else ()))
    _command("compare", str(finished_run()), str(damaged), "--all")


# ---- folders of images ----


def png(width: int, height: int, data: bytes = b"", color: int = 2, depth: int = 8) -> bytes:
    """A PNG that declares any size, with whatever data."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    body = chunk(b"IDAT", data) if data else b""
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IEND", b"")


def _saved(picture: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


@cache
def pictures() -> dict[str, bytes]:
    """Whole images of all kinds, and files that only say that they are one."""
    grey = np.random.default_rng(0).integers(0, 200, (40, 48, 3), dtype=np.uint8)
    rgb = Image.fromarray(grey)
    exif = Image.Exif()
    exif[0x0112] = 6
    palette = rgb.quantize(16)
    many = {"save_all": True, "append_images": [rgb.rotate(90), rgb.rotate(180)]}
    return {
        "png": _saved(rgb, "PNG"),
        "jpeg": _saved(rgb, "JPEG"),
        "progressive": _saved(rgb, "JPEG", progressive=True),
        "cmyk": _saved(rgb.convert("CMYK"), "JPEG"),
        "rotated": _saved(rgb, "JPEG", exif=exif),
        "grey": _saved(rgb.convert("L"), "PNG"),
        "alpha": _saved(rgb.convert("RGBA"), "PNG"),
        "grey alpha": _saved(rgb.convert("LA"), "PNG"),
        "one bit": _saved(rgb.convert("1"), "PNG"),
        "16 bit": _saved(Image.fromarray(grey[..., 0].astype(np.uint16) * 256), "PNG"),
        "float": _saved(Image.fromarray(grey[..., 0].astype(np.float32)), "TIFF"),
        "32 bit": _saved(Image.fromarray(grey[..., 0].astype(np.int32)), "TIFF"),
        "palette": _saved(palette, "PNG", transparency=bytes(range(16))),
        "palette one": _saved(palette, "PNG", transparency=3),
        "gif": _saved(rgb, "GIF", **many),
        "webp": _saved(rgb, "WEBP"),
        "webp many": _saved(rgb, "WEBP", **many),
        "apng": _saved(rgb, "PNG", **many),
        "tiff": _saved(rgb, "TIFF", compression="tiff_lzw"),
        "tiff many": _saved(rgb, "TIFF", **many),
        "tiff jpeg": _saved(rgb, "TIFF", compression="jpeg"),
        "bmp": _saved(rgb, "BMP"),
        "ppm": _saved(rgb, "PPM"),
        "pgm 16": b"P5 4 4 65535 " + bytes(range(32)),
        "one": _saved(Image.new("RGB", (1, 1)), "PNG"),
        "exact": _saved(rgb.resize((32, 32)), "PNG"),
        "wide": _saved(Image.new("RGB", (10_000, 1)), "PNG"),
        "high": _saved(Image.new("L", (1, 60_000)), "PNG"),
        "bomb": png(60_000, 60_000),
        "warned": png(10_000, 10_000, zlib.compress(bytes(1000))),
        "no data": png(5_000, 5_000),
        "short data": png(64, 64, zlib.compress(bytes(100))),
        "no width": png(0, 5),
        "ppm bomb": b"P6 90000 90000 255 ",
        "ppm none": b"P6 0 0 255 ",
        "bmp bomb": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 2**30, -(2**30), 1, 24, *6 * [0]),
        "text chunk": png(8, 8)[:33] + _text_bomb() + png(8, 8)[33:],
        "eps": _saved(rgb, "EPS"),
        "psd": b"8BPS" + bytes(40),
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
        "text": b"no image at all",
        "empty": b"",
    }


def _text_bomb() -> bytes:
    body = b"zTXtx\0\0" + zlib.compress(bytes(10**7), 9)
    return struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))


OUTSIDE = (255, 0, 255)
"""The color of the image outside of the folder: it must never be seen."""

NAMES = (
    "a", "<img src=x onerror=alert(1)>", "'\"`$(id)", "new\nline", "é😀\u202e", "-rf", "x" * 240, "..a", "[bold]", "\x1b[31m",
    "%s", " ", "a.png.png", "\udcff",
)  # fmt: skip
KINDS = (*4 * ("file",), "link in", "link out", "link gone", "link loop", "folder", "folder loop", "pipe")
CLASSES = (*4 * ("own",), "link in", "link out", "link loop", "file")


@dataclass(frozen=True)
class Item:
    """One entry of a folder of images."""

    name: str
    ending: str
    kind: str
    picture: str
    wounds: list[tuple[str, int, bytes]]


def mended(content: bytes) -> bytes:
    """A PNG with right checksums, so that its decoder goes on to what is wrong in it."""
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return content
    whole, at = bytearray(content), 8
    while at + 12 <= len(whole):
        (size,) = struct.unpack_from(">I", whole, at)
        if at + 12 + size > len(whole):
            break
        struct.pack_into(">I", whole, at + 8 + size, zlib.crc32(whole[at + 4 : at + 8 + size]))
        at += 12 + size
    return bytes(whole)


items = st.builds(
    Item,
    st.sampled_from(NAMES),
    st.sampled_from((".png", ".JPEG", ".jpg", ".tif", ".webp", ".bmp", ".ppm", ".gif", "")),
    st.sampled_from(KINDS),
    st.sampled_from(sorted(pictures())),
    splices,
)
folders = st.tuples(
    st.sampled_from(("folder", "folder", "tiny-imagenet", "imagenet-c")),
    st.sampled_from(("raise", "skip")),
    st.lists(st.tuples(st.sampled_from(CLASSES), st.lists(items, max_size=3)), min_size=1, max_size=3),
)


def _build(root: Path, outside: Path, classes: list[tuple[str, list[Item]]]) -> None:
    (outside / "class").mkdir(parents=True)
    root.mkdir(parents=True)
    Image.new("RGB", (32, 32), OUTSIDE).save(outside / "class" / "secret.png")
    for number, (kind, entries) in enumerate(classes):
        place = root / f"{number} {NAMES[number % len(NAMES)][:20]}".replace("/", "_")
        if kind == "own":
            place.mkdir()
            for entry in entries:
                _place(place / f"{entry.name}{entry.ending}", entry, outside)
        elif kind == "file":
            place.touch()
        else:
            place.symlink_to({"link in": root, "link out": outside / "class", "link loop": place}[kind])


def _place(path: Path, item: Item, outside: Path) -> None:
    if path.is_symlink() or path.exists():
        return
    if item.kind == "file":
        path.write_bytes(mended(spliced(pictures()[item.picture], item.wounds)))
    elif item.kind == "folder":
        path.mkdir()
    elif item.kind == "pipe":
        os.mkfifo(path)
    elif item.kind == "link in":
        (path.parent / "there.png").write_bytes(pictures()["png"])
        path.symlink_to("there.png")
    else:
        target = {"link out": outside / "class" / "secret.png", "link gone": outside / "none.png", "link loop": path}
        path.symlink_to(target.get(item.kind, ".."))


def read_images(case: tuple[str, Any, list[tuple[str, list[Item]]]], folder: Path) -> None:
    kind, on_bad_image, classes = case
    root = folder / "root"
    _build(root / "fog" / "5" if kind == "imagenet-c" else root, folder / "outside", classes)
    source = open_source(f"{kind}:{root}", SMALL, on_bad_image)
    loaded = source.load(range(len(source)), "fog" if source.holds else None, 5)
    assert loaded.images.shape == (len(source) - loaded.bad, 3, 32, 32)
    assert loaded.images.dtype == torch.uint8
    assert len(loaded.labels) == len(loaded.images)
    assert loaded.bad == 0 or on_bad_image == "skip"
    secret = torch.tensor(OUTSIDE, dtype=torch.uint8).view(1, 3, 1, 1)
    assert not (loaded.images == secret).flatten(1).all(1).any(), "an image from outside of the folder was read"


# ---- arrays of CIFAR-C ----


def npy(header: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    """A .npy file that declares anything."""
    text = header.encode("latin1", "replace") + b"\n"
    size = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + size + text + data


def _array(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value, allow_pickle=True)
    return file.getvalue()


class Marker:
    """Makes a folder when it is unpickled, wherever that is."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@cache
def mark() -> Marker:
    """One whose folder must not be there at the end."""
    return Marker(_kept_folder() / "unpickled")


@cache
def arrays() -> dict[str, bytes]:
    """Arrays that are right for one of the two files, or for none."""
    zipped = io.BytesIO()
    np.savez(zipped, a=np.zeros(3))
    objects = np.empty(10, dtype=object)
    objects[:] = [mark()] * 10

    def declared(kind: str, shape: str, data: bytes = b"") -> bytes:
        return npy(f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}", data)

    return {
        "labels": _array(np.arange(10) % 5),
        "images": _array(np.zeros((10, 8, 8, 3), dtype=np.uint8)),
        "objects": _array(objects),
        "float labels": _array(np.full(10, np.nan)),
        "unsigned labels": _array(np.full(10, 2**64 - 1, dtype=np.uint64)),
        "texts": _array(np.array(["a"] * 10)),
        "dates": _array(np.zeros(10, dtype="datetime64[s]")),
        "complex": _array(np.ones(10, dtype=complex)),
        "fields": _array(np.zeros(10, dtype=[("a", "i4")])),
        "no axis": _array(np.array(3)),
        "no rows": _array(np.zeros(0, dtype=int)),
        "no pixels": _array(np.zeros((10, 0, 8, 3), dtype=np.uint8)),
        "float images": _array(np.zeros((10, 8, 8, 3))),
        "huge labels": declared("'<i8'", "(100000000000000,)"),
        "huge images": declared("'|u1'", "(10, 100000, 100000, 3)"),
        "overflow": declared("'<i8'", f"({2**62}, {2**62})"),
        "long": declared("'<i8'", f"({'9' * 5000},)"),
        "negative": declared("'<i8'", "(-10,)", bytes(80)),
        "bool": declared("'<i8'", "(True,)", bytes(8)),
        "descr": declared("[[[]]]", "(10,)", bytes(80)),
        "deep": npy("(" * 5000),
        "code": npy("__import__('os').getcwd()"),
        "long header": npy("{" + " " * 10**6, version=(2, 0)),
        "zip": zipped.getvalue(),
        "pickle": pickle.dumps([1, 2]),
        "empty": b"",
    }


_array_files = st.tuples(st.sampled_from(sorted(arrays())), splices)
cifars = st.tuples(st.just(("labels", [])) | _array_files, st.just(("images", [])) | _array_files, st.integers(-1, 2))


def read_cifar(case: Any, folder: Path) -> None:
    labels, images, index = case
    for name, (kind, wounds) in (("labels", labels), ("fog", images)):
        (folder / f"{name}.npy").write_bytes(spliced(arrays()[kind], wounds))
    source = open_source(f"cifar10-c:{folder}")
    loaded = source.load([index], "fog", 5)
    assert loaded.images.ndim == 4
    assert loaded.images.dtype == torch.uint8
    assert 0 <= int(loaded.labels[0]) < 10


# ---- CIFAR-10 ----


@cache
def cifar10_files() -> dict[str, dict[str, bytes]]:
    """One small set of files in each layout, and in archives."""
    found: dict[str, dict[str, bytes]] = {}
    batches = {name: (pixels[:2], labels[:2]) for name, (pixels, labels) in cifar10.made_up().items()}
    place = _kept_folder()
    for layout, save in {
        "pickled": cifar10.save_pickled,
        "python 3": partial(cifar10.save_pickled, dump=cifar10.by_python_3),
        "binary": cifar10.save_binary,
        "sheets": cifar10.save_sheets,
    }.items():
        save(place / layout, batches)
        found[layout] = {file.name: file.read_bytes() for file in (place / layout).iterdir()}
        archive = cifar10.pack(place / f"{layout}.tgz", place / layout)
        unpacked = gzip.decompress(archive.read_bytes())
        found |= {f"{layout}.tgz": {"a.tgz": archive.read_bytes()}, f"{layout}.tar": {"a.tgz": unpacked}}
    return found


cifar10s = st.deferred(
    lambda: st.tuples(
        st.sampled_from([(layout, name) for layout, names in cifar10_files().items() for name in sorted(names)]),
        splices,
    )
)


def read_cifar10(case: Any, folder: Path) -> None:
    (layout, wounded), wounds = case
    for name, content in cifar10_files()[layout].items():
        content = spliced(content, wounds) if name == wounded else content
        (folder / name).write_bytes(gzip.compress(content, 1) if layout.endswith(".tar") else content)
    source = open_source(f"cifar10:{folder / 'a.tgz' if '.t' in layout else folder}")
    assert source.load([0]).images.shape == (1, 3, 32, 32)
    assert source.source_images(2).dtype == torch.uint8
    assert 0 <= int(source.labels().max()) < 10


# ---- specifications on the command line ----

SPECS = (
    "", ":", "folder", "folder:", "folder:../x", "folder:..", "folder:/etc/passwd", "folder:/dev/null", "folder:\0",
    "folder:a\0b", "folder:" + "x" * 300, "folder:" + "x/" * 5000, "folder:~nobody-here", "folder:\ud800", "folder:\n",
    "fashion:-1", "fashion:0", "fashion:99999999999", "fashion:²", "fashion:٣", "fashion:1.5", "fashion:" + "9" * 5000,
    "fashion: 5", "fashion:+5",
    "fashion:100", "fashion-outliers:", "fashion-outliers:up", "torchvision:", "torchvision:..", "torchvision:CIFAR10:\0",
    "torchvision:CIFAR10:/etc", "torchvision:CIFAR10:" + "x" * 300, "torchvision:MNIST:..",
    "torchvision:ImageFolder:..", "torchvision:LSUN:.",
    "torchvision:FakeData", "torchvision:__init__", "torchvision:Kinetics:/tmp", "torchvision:EMNIST:x", "imagenet-c:\0",
    "imagenet-c:" + "x" * 300, "cifar10-c:\0", "cifar100-c:..", "tiny-imagenet:" + "x" * 5000, "http://example.org/x",
    "cifar10", "cifar10:", "cifar10:..", "cifar10:\0", "cifar10:/dev/zero", "cifar10:" + "x" * 5000,
    "unknown:x", "imagenet:..", "imagenet-r:\0", "openood:..", "openood:..:list=\0", "openood:..:list=/dev/zero",
    "webdataset:\0", "webdataset:{", "webdataset:..", "webdataset:x{1..3}:classes=x", "webdataset:pipe:ls", "hf:\0", "hf:..",
    "hf:.:split=\0",
)  # fmt: skip
KINDS_OF_DATA = (
    "folder", "fashion", "fashion-outliers", "torchvision", "imagenet-c", "cifar10", "cifar10-c", "imagenet", "openood",
    "webdataset", "x",
)  # fmt: skip
MODELS = (
    "", ":", "fashion-vit", "timm:", "timm:..", "timm:hf-hub:x/y", "timm:test_resnet.nonsense", "timm:\0", "torchvision:",
    "resnet", "torchvision:../x", "local-dir:/tmp", "timm:local-dir:/tmp",
)  # fmt: skip
specs = st.one_of(
    st.tuples(st.just("data"), st.sampled_from(SPECS)),
    st.tuples(
        st.just("data"),
        st.tuples(
            st.sampled_from(KINDS_OF_DATA),
            st.sampled_from(TEXTS) | st.text(max_size=10) | st.integers().map(str),
        ).map(":".join),
    ),
    st.tuples(st.just("model"), st.sampled_from(MODELS) | st.text(max_size=10).map("timm:".__add__)),
    st.tuples(st.just("seeds"), st.sampled_from(TEXTS) | st.sampled_from(("--5", "5-", "1,²", "9" * 5000, str(2**64)))),
    st.tuples(st.just("set"), st.sampled_from(TEXTS) | st.text(max_size=10).map("tent.lr=".__add__)),
    st.tuples(st.sampled_from(("config", "stream", "checkpoint")), st.sampled_from(TEXTS)),
)


def open_spec(case: tuple[str, str], folder: Path) -> None:
    option, value = case
    (folder / "a" / "b").mkdir(parents=True)
    os.chdir(folder / "a" / "b")  # so that .. is nothing but a
    if option == "data":
        source = open_source(value, SMALL)
        if len(source) <= 100:
            source.load([0], source.holds[0] if source.holds else None)
    elif option == "model":
        models.load(value, checkpoint=None if value in models.EMBEDDED else _weights_file())
    elif option == "config":
        from_toml(Path(value))
    elif option == "stream":
        Stream.load(Path(value))
    elif option == "checkpoint":
        models.load("timm:test_resnet", checkpoint=value)
    else:
        given = ("--limit", "4", "--methods", "tent", "--corruptions", "fog", f"--{option}={value}")
        _command("bench", *given, "--dry-run")


# ---- checkpoints and saved states ----


@cache
def weights() -> dict[str, torch.Tensor]:
    import timm

    return timm.create_model("test_resnet", num_classes=3).state_dict()


@cache
def _weights_file() -> Path:
    path = _kept_folder() / "w.safetensors"
    path.write_bytes(safetensors_bytes(weights()))
    return path


def header(about: Any, size: int | None = None, data: bytes = b"") -> bytes:
    """A safetensors file that declares anything."""
    text = about if isinstance(about, bytes) else json.dumps(about).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def torch_bytes(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def packed(content: bytes) -> bytes:
    """A torch file whose parts are compressed, as torch never writes them: a few bytes can be gigabytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            new.writestr(item.filename, old.read(item))
    return file.getvalue()


@cache
def checkpoints() -> dict[str, bytes]:
    """Weights, and what is none."""
    good = weights()
    wide = {**good, "fc.weight": torch.zeros(1).expand(10**9, 4), "fc.bias": torch.zeros(1).expand(10**9)}
    half = {"fc.weight": torch.zeros(1, dtype=torch.float16).expand(10**6, 10**6)}
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return {
        "good.safetensors": safetensors_bytes(good),
        "good.pth": torch_bytes({"state_dict": good}),
        "old.pth": torch_bytes(good, _use_new_zipfile_serialization=False),
        "packed.pth": packed(torch_bytes({"w": torch.zeros(10**6)})),
        "pickle.pth": pickle.dumps({"w": mark()}),
        "payload.pth": torch_bytes({"w": mark()}),
        "payload old.pth": torch_bytes({"w": mark()}, _use_new_zipfile_serialization=False),
        "payload.safetensors": pickle.dumps({"w": mark()}),
        "module.pth": torch_bytes(torch.nn.Linear(2, 2)),
        "numbers.pth": torch_bytes({1: torch.zeros(1), None: torch.zeros(2)}),
        "list.pth": torch_bytes([1]),
        "nested.pth": torch_bytes({"state_dict": {"model": {"state_dict": 3}}}),
        "wide.pth": torch_bytes(wide),
        "half.pth": torch_bytes(half),
        "meta.pth": torch_bytes({**good, "fc.weight": torch.zeros(3, 4, device="meta")}),
        "sparse.pth": torch_bytes({"fc.weight": torch.eye(3).to_sparse()}),
        "scalar.pth": torch_bytes({**good, "fc.weight": torch.tensor(1.0)}),
        "none.pth": torch_bytes({**good, "fc.weight": torch.zeros(0, 4)}),
        "complex.pth": torch_bytes({**good, "fc.weight": torch.zeros(3, 4, dtype=torch.complex64)}),
        "shapes.safetensors": safetensors_bytes({**good, "fc.weight": torch.zeros(7, 7)}),
        "flat.safetensors": safetensors_bytes({**good, "fc.weight": torch.tensor(1.0)}),
        "empty.safetensors": safetensors_bytes({}),
        "long.safetensors": header({}, size=2**63),
        "longer.safetensors": header({}, size=10**8 + 1),
        "huge.safetensors": header({"fc.weight": {**one, "shape": [10**9, 10**9]}}, data=bytes(4)),
        "overlap.safetensors": header({"a": one, "b": one}, data=bytes(4)),
        "deep.safetensors": header(b"[" * 10**5),
        "dtype.safetensors": header({"a": {**one, "dtype": "F4", "shape": [8]}}, data=bytes(4)),
        "text.pth": b"no checkpoint",
        "empty.pth": b"",
    }


weight_files = st.tuples(
    st.sampled_from(("good.safetensors", "good.pth")) | st.sampled_from(sorted(checkpoints())), splices
)


def read_checkpoint(case: Any, folder: Path) -> None:
    path = folder / case[0]
    path.write_bytes(spliced(checkpoints()[case[0]], case[1]))
    models.load("timm:test_resnet", checkpoint=path)


@cache
def _states() -> tuple[come.Adapter, dict[str, bytes]]:
    torch.manual_seed(0)
    adapter = come.adapt(TinyClassifier(torch.nn.BatchNorm2d), "tent", lr=1e-2)
    adapter(come.testing.batches(1)[0])
    path = _kept_folder() / "s.safetensors"
    adapter.save(path)
    good = path.read_bytes()
    made = {"good": good, "long": header({}, size=2**63), "pickle": pickle.dumps(mark()), "empty": b""}
    tensors = load_safetensors(good)

    def sealed(parts: dict[str, torch.Tensor]) -> bytes:
        """With a checksum that holds, so that the parts themselves are judged."""
        about = {"format": saving.FORMAT, "version": str(saving.VERSION), "method": "tent", "note": ""}
        return safetensors_bytes(parts, metadata={**about, "sha256": saving._digest(parts, about)})

    for name, value in sorted(tensors.items()):
        made[f"{name} gone"] = sealed({k: v for k, v in tensors.items() if k != name})
        for kind, other in {
            "flat": torch.tensor(0.5),
            "wide": torch.zeros(5, 5),
            "nan": torch.full_like(value.float(), float("nan")),
            "complex": torch.zeros(value.shape, dtype=torch.complex64),
            "none": torch.zeros(0),
        }.items():
            made[f"{name} {kind}"] = sealed({**tensors, name: other})
    made["more"] = sealed({**tensors, "state.": torch.zeros(1), "x": torch.zeros(1)})
    made["unknown memory"] = sealed({**tensors, "state.new": torch.zeros(1)})
    return adapter, made


states = st.deferred(lambda: st.tuples(st.just("good") | st.sampled_from(sorted(_states()[1])), splices))


def read_state(case: Any, folder: Path) -> None:
    adapter, contents = _states()
    path = folder / "s.safetensors"
    path.write_bytes(spliced(contents[case[0]], case[1]))
    adapter.load(path)
    adapter.step(torch.zeros(2, *come.testing.batches(1)[0].shape[1:]))


# ---- running them ----


@dataclass(frozen=True)
class Target:
    """Something that reads files, and the files for it."""

    name: str
    cases: st.SearchStrategy[Any]
    read: Callable[[Any, Path], None]
    weight: float = 1.0
    """How many cases it gets, relative to the others."""

    def __call__(self, case: Any) -> str:
        """Accepted or refused; whatever else happens is raised."""
        before = Path.cwd()
        with tempfile.TemporaryDirectory(prefix="come-fuzz-") as folder, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "left out:")  # what a damaged record is told by
            try:
                self.read(case, Path(folder))
            except come.ComeError as error:
                return "refused" if str(error).strip() else "an error without a word"
            finally:
                os.chdir(before)
                assert not mark().path.exists(), "a file was executed"
        return "accepted"


TARGETS = {
    target.name: target
    for target in (
        Target("config", configs, read_config, 2),
        Target("manifest", manifests, read_manifest, 2),
        Target("run folder", damages, read_run, 2),
        Target("images", folders, read_images, 2),
        Target("cifar-c", cifars, read_cifar),
        Target("cifar-10", cifar10s, read_cifar10),
        Target("specification", specs, open_spec),
        Target("checkpoint", weight_files, read_checkpoint, 0.5),
        Target("saved state", states, read_state, 0.5),
    )
}


def fuzz(target: Target, cases: int, seed: int, until: float) -> tuple[Counter[str], dict[str, str]]:
    """Run that many cases, or as many as there is time for: how many ended how, and an example of each kind of crash."""
    found: Counter[str] = Counter()
    crashes: dict[str, str] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(target.cases)
    def one(case: Any) -> None:
        if time.monotonic() > until:
            return
        try:
            found[target(case)] += 1
        except Exception as error:
            found["something else"] += 1
            package = str(Path(come.__file__).parent)  # a clone may be called come, too
            ours = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(package)]
            place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "fuzz_files.py"
            crashes.setdefault(f"{type(error).__name__} at {place}", f"{str(error)[:100]!r} for {repr(case)[:300]}")

    one()
    return found, crashes


def main() -> int:
    """Parse the command line, fuzz, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="over all targets")
    parser.add_argument("--seconds", type=float, default=900, help="stop after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets with commas between")
    args = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(args.seed)
    chosen = [TARGETS[name.strip()] for name in args.only.split(",")] if args.only else list(TARGETS.values())
    share = args.cases / sum(target.weight for target in chosen)
    until = time.monotonic() + args.seconds
    failed = False
    print("| target | cases | accepted | refused | something else |\n|---|---:|---:|---:|---:|")
    for target in chosen:
        found, crashes = fuzz(target, max(1, round(target.weight * share)), args.seed, until)
        counts = " | ".join(str(found[how]) for how in ("accepted", "refused", "something else"))
        print(f"| {target.name} | {found.total()} | {counts} |", flush=True)
        for kind, example in crashes.items():
            failed = True
            print(f"  {kind}: {example}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
