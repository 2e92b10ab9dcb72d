"""Data sets of Hugging Face `datasets`: from the Hub, its cache, a folder or a parquet file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from come.bench.data.encoded import EncodedSource, place_and_options
from come.bench.downloads import no_answer
from come.errors import ComeError, ConfigError, InputError, one_line, pip_install, unknown

OPTIONS = ("split", "image", "label", "classes", "config", "revision", "streaming")
"""What may follow a name, as KEY=VALUE."""
SPLITS = ("test", "validation", "val")
"""Default splits; the first that exists is used if there are several splits and none is named."""


class HuggingFaceSource(EncodedSource):
    """`hf:NAME`: a data set of the Hub, a folder (of `save_to_disk`, of parquet files, of images) or a parquet file.

    Options follow the name, as in "hf:acme/photos:split=test:label=breed":

    * split: by default the only one, or test, or validation
    * image, label: columns; by default the only one of images, and the only one of class labels or the one called label
    * classes: how many there are, for labels that are plain integers; by default one more than the largest
    * config, revision: of a data set of the Hub
    * streaming: read only this many samples, the first ones, into memory, without downloading the rest
    """

    def _open(self, rest: str) -> None:
        place, given = place_and_options("hf", rest, OPTIONS)
        with _reading(self.name, place) as hf:
            self.roots = _folders(hf, Path(os.path.expanduser(place)))
            self._split, data = _opened(hf, self.name, place, given)
            self._columns = dict(data.features or {})
            images = [column for column, feature in self._columns.items() if isinstance(feature, hf.Image)]
            self._image = self._column(given, "image", images)
            if self._image not in images:
                raise InputError(
                    f"{self.name} must have a column of images, got {self._described()}; name one with image=COLUMN, or "
                    "cast it: data.cast_column(COLUMN, datasets.Image())"
                )
            labels = [column for column, feature in self._columns.items() if isinstance(feature, hf.ClassLabel)]
            self._label = self._column(given, "label", labels or [c for c in ("label", "labels") if c in self._columns])
            wanted = sorted({column for column in (self._image, self._label) if column})
            self._data: Any = data.cast_column(self._image, hf.Image(decode=False)).select_columns(wanted)
            if "streaming" in given:  # a stream of datasets cannot be indexed
                self._data = list(islice(self._data, given["streaming"]))
            if not len(self._data):
                raise InputError(f"the split {self._split} of {self.name} is empty; choose another with split=NAME")
            self._read_labels(given.get("classes"))

    def _read_labels(self, classes: int | None) -> None:
        """All labels, and how many classes there are: none where labels are missing, or hidden (-1)."""
        if self._label is None:
            return self._set_labels([-1] * len(self._data))
        found = [row[self._label] for row in self._data] if isinstance(self._data, list) else self._data[self._label][:]
        if all(isinstance(value, str) for value in found):
            number = {text: i for i, text in enumerate(sorted(set(found)))}
            found = [number[value] for value in found]
        elif not all(type(value) is int for value in found):
            raise InputError(
                f"the column {self._label!r} of {self.name} must hold integers or texts without gaps, got "
                f"{_kind(self._columns[self._label])}; choose another with label=COLUMN"
            )
        self._set_labels(found, classes or getattr(self._columns[self._label], "num_classes", None))

    def require(self, corruptions: Sequence[str | None], severity: int) -> None:
        """Raise `InputError` unless there are labels, and the first image can be read."""
        if self._label is None:
            raise InputError(
                f"{self.name} has no column of labels, got {self._described()}; name one with label=COLUMN, or give it as "
                "--outliers"
            )
        if not self.num_classes:
            raise InputError(
                f"the labels of {self.name} are hidden (-1) in split {self._split}; choose another: split=NAME"
            )
        self.load([0])

    def _column(self, given: dict[str, Any], role: str, found: Sequence[str]) -> str | None:
        """The column named by an option, or else the only one found."""
        if role in given:
            if (column := str(given[role])) not in self._columns:
                raise unknown(f"column in {self.name}", column, self._columns)
            return column
        if len(found) > 1:
            raise ConfigError(
                f"{self.name} has {len(found)} columns to choose from; add {role}={f' or {role}='.join(found)}"
            )
        return found[0] if found else None

    def _described(self) -> str:
        """The columns and what they hold."""
        columns = [f"{column} ({_kind(feature)})" for column, feature in self._columns.items()]
        return ", ".join(columns) or "none that is known before it is read (leave streaming out)"

    def _encoded(self, index: int, corruption: str | None, severity: int) -> Path | bytes:
        found = self._data[index][self._image]
        return found["bytes"] if found["bytes"] is not None else Path(found["path"])


def _kind(feature: Any) -> str:
    name = type(feature).__name__
    return str(feature.dtype) if name == "Value" else name


def _folders(hf: Any, local: Path) -> tuple[Path, ...]:
    """Where image files may be that a table names: in the given folder, or in the caches of `datasets`."""
    from huggingface_hub import constants

    caches = hf.config.HF_DATASETS_CACHE, hf.config.DOWNLOADED_DATASETS_PATH, constants.HF_HUB_CACHE
    own = [local if local.is_dir() else local.parent] if local.exists() else []
    return (*own, *map(Path, caches))


def _opened(hf: Any, name: str, place: str, given: dict[str, Any]) -> tuple[str, Any]:
    """The name of a split, and the split."""
    local = Path(os.path.expanduser(place))
    if any((local / mark).is_file() for mark in ("state.json", "dataset_dict.json")):  # of save_to_disk
        found = hf.load_from_disk(str(local))
        splits = found if isinstance(found, hf.DatasetDict) else {str(found.split or "train"): found}
        split = _chosen(name, given.get("split"), list(splits))
        return split, splits[split]
    where: dict[str, Any] = {"path": str(local) if local.is_dir() else place}
    if place.endswith(".parquet"):
        where = {"path": "parquet", "data_files": str(local)}
    if "revision" in given:
        where["revision"] = str(given["revision"])
    config = str(given["config"]) if "config" in given else None
    split = _chosen(name, given.get("split"), hf.get_dataset_split_names(config_name=config, **where))
    return split, hf.load_dataset(name=config, split=split, streaming="streaming" in given, **where)


def _chosen(name: str, given: object, known: list[str]) -> str:
    """The given split, or the default one."""
    if given is not None:
        if given not in known:
            raise unknown(f"split in {name}", given, known)
        return str(given)
    found = known if len(known) == 1 else [split for split in SPLITS if split in known]
    if not found:
        raise ConfigError(f"{name} has {len(known)} splits; add split={' or split='.join(known)}")
    return found[0]


@contextmanager
def _reading(name: str, place: str) -> Iterator[Any]:
    """Import `datasets` and turn its errors into one sentence each; without a network it looks into its cache only."""
    try:
        hf: Any = import_module("datasets")
    except ImportError as error:
        raise ConfigError(f"{name} needs datasets, which is missing; install it with: {pip_install('data')}") from error
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError

    local = os.path.exists(os.path.expanduser(place))
    if not local and (place.endswith(".parquet") or place.startswith((".", "/", "~"))):
        raise InputError(f"{place} does not exist; give a folder, a parquet file, or the name of a data set of the Hub")
    offline = hf.config.HF_HUB_OFFLINE
    silence = "HF_HUB_OFFLINE is set" if offline else "" if local else no_answer(constants.ENDPOINT)
    verbosity, bars = hf.logging.get_verbosity(), not hf.are_progress_bars_disabled()
    try:
        hf.config.HF_HUB_OFFLINE = bool(silence)  # or it would ask for half a minute
        hf.logging.set_verbosity(hf.logging.CRITICAL)
        if not sys.stderr.isatty():
            hf.disable_progress_bars()
        yield hf
    except ComeError:
        raise
    except hf.exceptions.DatasetNotFoundError as error:
        if "gated" in str(error):
            raise InputError(
                f"{name} is gated; accept its terms at {constants.ENDPOINT}/datasets/{place}, and log in: hf auth login"
            ) from error
        if "Revision" in str(error):
            raise InputError(f"{place} has no such revision; leave it out, or give one that it has") from error
        raise InputError(
            f"the Hub has no data set {place!r} that you can read; check the name, and if it is private log in: hf auth login"
        ) from error
    except HFValidationError as error:
        raise InputError(
            f"{name} must be hf:NAME with a data set of the Hub, such as hf:uoft-cs/cifar10, a folder or a parquet file"
        ) from error
    except Exception as error:  # of datasets or pyarrow
        if silence and not local:
            raise InputError(
                f"cannot reach the Hub for {name} ({silence}), and it is not in the cache; give hf:FOLDER, which save_to_disk "
                "wrote, or try again with a network"
            ) from error
        why = one_line(error.__cause__ or error, first=True).rstrip(".")
        raise InputError(
            f"datasets cannot open {name}: {why}; change its options, or save it with save_to_disk and give that folder"
        ) from error
    finally:
        hf.config.HF_HUB_OFFLINE = offline
        hf.logging.set_verbosity(verbosity)
        if bars:
            hf.enable_progress_bars()
