"""Made-up files of CIFAR-10, in each layout that it is published in."""

from __future__ import annotations

import json
import pickle
import struct
import tarfile

import numpy as np
from PIL import Image

PARTS = {f"data_batch_{i}": 10 for i in range(1, 6)} | {"test_batch": 20}
"""How many images each batch has."""


def made_up():
    """Of each batch the pixels (N, 3072) uint8, red, green and blue, and the labels."""
    draw = np.random.default_rng(0)
    return {
        name: (draw.integers(0, 256, (size, 3072), dtype=np.uint8), [i % 10 for i in range(size)])
        for name, size in PARTS.items()
    }


def by_python_2(pixels, labels):
    """A batch as Python 2 pickled it: protocol 2, with texts that are bytes."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    return b"".join(
        (
            b"\x80\x02}q\x01(" + text(b"batch_label") + b"q\x02" + text(b"testing batch 1 of 1") + b"q\x03",
            text(b"labels") + b"]q\x04(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e",
            text(b"data") + b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85",
            text(b"b") + b"\x87R(K\x01" + b"M" + struct.pack("<H", len(pixels)) + b"M\x00\x0c\x86cnumpy\ndtype\n",
            text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\x00tb\x89T",
            struct.pack("<I", pixels.size) + pixels.tobytes() + b"tb",
            text(b"filenames") + b"]q\x07(" + text(b"a.png") + b"h\x03eu.",
        )
    )


def save_pickled(folder, batches, dump=by_python_2):
    """As torchvision unpacks it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (pixels, labels) in batches.items():
        (folder / name).write_bytes(dump(pixels, labels))


def by_python_3(pixels, labels):
    """A batch as somebody saves it again."""
    return pickle.dumps({"data": pixels, "labels": labels}, protocol=4)


def save_binary(folder, batches):
    """The binary version."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (pixels, labels) in batches.items():
        rows = np.concatenate([np.array(labels, np.uint8)[:, None], pixels], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())


def save_sheets(folder, batches):
    """The npm package, unpacked."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (pixels, _) in batches.items():
        Image.fromarray(pixels.reshape(-1, 3, 1024).transpose(0, 2, 1)).save(folder / f"{name}.png")
    for part in ("train", "test"):
        chosen = [labels for name, (_, labels) in batches.items() if (name == "test_batch") == (part == "test")]
        (folder / f"{part}_lables.json").write_text(json.dumps([label for labels in chosen for label in labels]))


def pack(archive, folder):
    """All of a folder in a .tar.gz."""
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, folder.name)
    return archive
