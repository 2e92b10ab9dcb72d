"""WebDataset shards: tar files in which the files of a sample stand next to each other and share a name."""

from __future__ import annotations

import glob
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from come.bench.data.encoded import EncodedSource, place_and_options
from come.bench.data.preprocess import MAX_BYTES
from come.bench.data.reading import IMAGE_ENDINGS, TarHeader, as_input_error, require_regular
from come.errors import ConfigError, InputError, one_line, pip_install, shown

OPTIONS = ("image", "label", "classes")  # what may follow the shards, as KEY=VALUE
MAX_SHARDS = 100_000
MAX_LABEL = 2**20  # bytes of a file with a label

Part = tuple[int, int]  # where a file of a sample begins in its shard, and how many bytes it has


class ShardSource(EncodedSource):
    """`webdataset:SHARDS`: local tar files, `photos-{000..003}.tar` or `photos-*.tar`; nothing in them is executed.

    Their headers are read once, each image when it is asked for. Options follow, as in "webdataset:a.tar:label=json.breed":

    * image: the ending of the images; by default any of jpg, png, ...
    * label: the ending of the labels; by default cls, an integer, or else json.label, the field `label` of a JSON object
    * classes: how many there are; by default one more than the largest label
    """

    def _open(self, rest: str) -> None:
        pattern, given = place_and_options("webdataset", rest, OPTIONS)
        try:
            grouped = import_module("webdataset.tariterators").group_by_keys
        except ImportError as error:
            raise ConfigError(
                f"{self.name} needs webdataset, which is missing; install it with: {pip_install('data')}"
            ) from error
        self._samples: list[tuple[Path, str, Part]] = []  # of each, its shard, its name, and where its image is
        labels = list[int]()
        for shard in _shards(pattern):
            for key, parts in _read(grouped, shard):
                wanted = given.get("image")
                images = [e for e in parts if (f".{e}" in IMAGE_ENDINGS if wanted is None else e == wanted)]
                if len(images) != 1:
                    raise InputError(
                        f"sample {shown(key)} of {shard} must have one image ({wanted or 'jpg, png, ...'}), got "
                        f"{', '.join(parts)}; name its ending with image=ENDING"
                    )
                self._samples.append((shard, f"{shard}/{key}.{images[0]}", parts[images[0]]))
                labels.append(_label(shard, key, parts, str(given.get("label", ""))))
        if not labels:
            raise InputError(
                f"{self.name} has no samples; give shards with files such as 0001.jpg and 0001.cls in them"
            )
        self._set_labels(labels, given.get("classes"))

    def _called(self, index: int, corruption: str | None, severity: int) -> str:
        return self._samples[index][1]

    def _encoded(self, index: int, corruption: str | None, severity: int) -> bytes:
        shard, _, part = self._samples[index]
        return _bytes(shard, part, MAX_BYTES)


def _shards(pattern: str) -> list[Path]:
    """The files that a pattern names, in its order."""
    from braceexpand import braceexpand

    found: list[Path] = []
    try:
        for one in islice(braceexpand(os.path.expanduser(pattern), escape=False), MAX_SHARDS + 1):
            found += map(Path, [one] if os.path.exists(one) or not glob.has_magic(one) else sorted(glob.glob(one)))
    except ValueError as error:
        raise ConfigError(f"braces in {shown(pattern)} must be closed, as in photos-{{000..003}}.tar") from error
    if not 0 < len(found) <= MAX_SHARDS:
        raise InputError(
            f"{shown(pattern)} must name from 1 to {MAX_SHARDS} tar files, got {len(found)}; check the path"
        )
    for path in found:
        with as_input_error(f"cannot read the shard {path}", "check the path, or download it again"):
            require_regular(path)
    return found


def _read(grouped: Callable[..., Any], shard: Path) -> Iterator[tuple[str, dict[str, Part]]]:
    """The name of each sample of a shard, and where its files are, by ending."""
    repair = "give a tar file that is not compressed, or download it again"
    with as_input_error(f"cannot read the shard {shard}", repair):
        size, files = shard.stat().st_size, list[dict[str, Any]]()
        with tarfile.open(shard, "r:", tarinfo=TarHeader) as archive:
            for member in archive:
                if member.size < 0:  # of a pax header; what it says of the next file is not read yet
                    raise ValueError(f"a file in it has {member.size} bytes")
                if member.offset_data + member.size > size:
                    raise ValueError("it is cut off")
                if member.isfile():
                    files.append({"fname": member.name, "data": (member.offset_data, member.size), "__url__": ""})
        for sample in grouped(files):
            yield sample["__key__"], {ending: part for ending, part in sample.items() if isinstance(part, tuple)}


def _label(shard: Path, key: str, parts: dict[str, Part], wanted: str) -> int:
    """The label of a sample; -1 where there is none and none was asked for."""
    ending, _, field = (wanted or ("cls" if "cls" in parts else "json.label")).partition(".")
    if ending not in parts:
        if not wanted:
            return -1
        raise InputError(
            f"sample {shown(key)} of {shard} must have a label ({wanted}), got {', '.join(parts)}; name its ending with "
            "label=ENDING"
        )
    try:
        found: Any = json.loads(_bytes(shard, parts[ending], MAX_LABEL))
        if field:
            found = found.get(field) if isinstance(found, dict) else None
        if type(found) is not int or not -1 <= found < 2**31:
            raise ValueError(shown(found))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"the label of sample {shown(key)} of {shard} must be an integer in {ending}{field and f', field {field!r}'}, got "
            f"{one_line(error)}; name another with label=ENDING or label=json.FIELD"
        ) from error
    return found


def _bytes(shard: Path, part: Part, limit: int) -> bytes:
    begin, length = part
    if length > limit:
        raise ValueError(f"it has {length} bytes, more than {limit}")
    with shard.open("rb") as file:
        file.seek(begin)
        return file.read(length)
