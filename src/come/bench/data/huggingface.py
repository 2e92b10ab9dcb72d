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

from come.bench.checkpoints import first_line
from come.bench.data.pictures import OnBadImage, Pictures, place_and_options
from come.bench.data.preprocess import Preprocess
from come.bench.downloads import no_answer
from come.errors import ComeError, ConfigError, InputError, pip_install, unknown

OPTIONS = ("split", "image", "label", "classes", "config", "revision", "streaming")
"""What may follow a name, as KEY=VALUE."""
SPLITS = ("test", "validation", "val")
"""The one that is used where nobody names one and there are several, the first that is there."""


class HuggingFaceSource(Pictures):
    """`hf:NAME`: a data set of the Hub, a folder (of `save_to_disk`, of parquet files, of images) or a parquet file.

    Options follow the name, as in "hf:acme/photos:split=test:label=breed":

    * split: by default the only one, or test, or validation
    * image, label: columns; by default the only one of images, and the only one of class labels or the one called label
    * classes: how many there are, for labels that are plain integers; by default one more than the largest
    * config, revision: of a data set of the Hub
    * streaming: how many samples to read, the first ones, without downloading the rest; they are kept in memory

    Example:
        >>> import datasets, tempfile
        >>> from PIL import Image
        >>> data = datasets.Dataset.from_dict({"image": [Image.new("RGB", (8, 8))] * 2, "label": ["dog", "cat"]})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = data.to_parquet(f"{folder}/photos.parquet")
        ...     HuggingFaceSource("hf:mine", f"{folder}/photos.parquet:streaming=2", Preprocess(4, 4)).labels()
        tensor([1, 0])

    Args:
        name: the specification.
        rest: what follows "hf:".
        preprocess: makes squares of the pictures.
        on_bad_image: "raise" or "skip".

    Raises:
        ConfigError: `datasets` is missing, or there is no such option, split or column.
        InputError: there is no such data set, or it cannot be read.
    """

    def __init__(self, name: str, rest: str, preprocess: Preprocess, on_bad_image: OnBadImage = "raise") -> None:
        super().__init__(name, preprocess, on_bad_image)
        place, given = place_and_options("hf", rest, OPTIONS)
        with _reading(name, place) as zoo:
            self.roots = _folders(zoo, Path(os.path.expanduser(place)))
            self._split, data = _opened(zoo, name, place, given)
            self._columns = dict(data.features or {})
            self._image = self._column(
                given, "image", [c for c, f in self._columns.items() if isinstance(f, zoo.Image)]
            )
            if self._image is None or not isinstance(self._columns[self._image], zoo.Image):
                raise InputError(
                    f"{name} must have a column of images, got {self._said()}; name one with image=COLUMN, or cast it: "
                    "data.cast_column(COLUMN, datasets.Image())"
                )
            named = [c for c, f in self._columns.items() if isinstance(f, zoo.ClassLabel)]
            self._label = self._column(given, "label", named or [c for c in ("label", "labels") if c in self._columns])
            wanted = sorted({column for column in (self._image, self._label) if column})
            self._data: Any = data.cast_column(self._image, zoo.Image(decode=False)).select_columns(wanted)
            if "streaming" in given:  # of an iterable there is no sample by its number
                self._data = list(islice(self._data, given["streaming"]))
            if not len(self._data):
                raise InputError(f"the split {self._split} of {name} is empty; choose another with split=NAME")
            self._read_labels(given.get("classes"))

    def _read_labels(self, classes: int | None) -> None:
        """All labels, and how many classes there are: none where labels are missing, or hidden (-1)."""
        if self._label is None:
            self._keep_labels([-1] * len(self._data))
            return
        found = [row[self._label] for row in self._data] if isinstance(self._data, list) else self._data[self._label][:]
        if all(isinstance(value, str) for value in found):
            number = {text: i for i, text in enumerate(sorted(set(found)))}
            found = [number[value] for value in found]
        elif not all(type(value) is int for value in found):
            raise InputError(
                f"the column {self._label!r} of {self.name} must hold integers or texts without gaps, got "
                f"{_kind(self._columns[self._label])}; choose another with label=COLUMN"
            )
        self._keep_labels(found, classes or getattr(self._columns[self._label], "num_classes", None))

    def require(self, corruptions: Sequence[str | None], severity: int) -> None:
        """Raise `InputError` unless there are labels, and the first picture can be read."""
        if self._label is None:
            raise InputError(
                f"{self.name} has no column of labels, got {self._said()}; name one with label=COLUMN, or give it as --outliers"
            )
        if not self.num_classes:
            raise InputError(
                f"the labels of {self.name} are hidden (-1) in split {self._split}; choose another: split=NAME"
            )
        self.load([0])

    def _column(self, given: dict[str, Any], role: str, found: Sequence[str]) -> str | None:
        if role in given:
            if (column := str(given[role])) not in self._columns:
                raise unknown(f"column in {self.name}", column, self._columns)
            return column
        if len(found) > 1:
            raise ConfigError(
                f"{self.name} has {len(found)} columns to choose from; add {role}={f' or {role}='.join(found)}"
            )
        return found[0] if found else None

    def _said(self) -> str:
        """Its columns, with what they hold."""
        said = [f"{column} ({_kind(feature)})" for column, feature in self._columns.items()]
        return ", ".join(said) or "none that is known before it is read (leave streaming out)"

    def _called(self, index: int, corruption: str | None, severity: int) -> str:
        return f"sample {index} of {self.name}"

    def _encoded(self, index: int, corruption: str | None, severity: int) -> Path | bytes:
        found = self._data[index][self._image]
        return found["bytes"] if found["bytes"] is not None else Path(found["path"])


def _kind(feature: Any) -> str:
    name = type(feature).__name__
    return str(feature.dtype) if name == "Value" else name


def _folders(zoo: Any, local: Path) -> tuple[Path, ...]:
    """Where pictures may be that a table names: in the folder that was given, or where `datasets` puts what it loads."""
    from huggingface_hub import constants

    caches = zoo.config.HF_DATASETS_CACHE, zoo.config.DOWNLOADED_DATASETS_PATH, constants.HF_HUB_CACHE
    own = [local if local.is_dir() else local.parent] if local.exists() else []
    return (*own, *map(Path, caches))


def _opened(zoo: Any, name: str, place: str, given: dict[str, Any]) -> tuple[str, Any]:
    """The name of a split, and the split."""
    local = Path(os.path.expanduser(place))
    if any((local / mark).is_file() for mark in ("state.json", "dataset_dict.json")):  # of save_to_disk
        found = zoo.load_from_disk(str(local))
        splits = found if isinstance(found, zoo.DatasetDict) else {str(found.split or "train"): found}
        split = _chosen(name, given.get("split"), list(splits))
        return split, splits[split]
    where: dict[str, Any] = {"path": str(local) if local.is_dir() else place}
    if place.endswith(".parquet"):
        where = {"path": "parquet", "data_files": str(local)}
    if "revision" in given:
        where["revision"] = str(given["revision"])
    config = str(given["config"]) if "config" in given else None
    split = _chosen(name, given.get("split"), zoo.get_dataset_split_names(config_name=config, **where))
    return split, zoo.load_dataset(name=config, split=split, streaming="streaming" in given, **where)


def _chosen(name: str, given: object, known: list[str]) -> str:
    """The split that is given, or the default one."""
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
    """`datasets`, whose errors become one sentence each; without a network it looks into its cache only."""
    try:
        zoo: Any = import_module("datasets")
    except ImportError as error:
        raise ConfigError(f"{name} needs datasets, which is missing; install it with: {pip_install('data')}") from error
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError

    local = os.path.exists(os.path.expanduser(place))
    if not local and (place.endswith(".parquet") or place.startswith((".", "/", "~"))):
        raise InputError(f"{place} does not exist; give a folder, a parquet file, or the name of a data set of the Hub")
    offline = zoo.config.HF_HUB_OFFLINE
    silence = "HF_HUB_OFFLINE is set" if offline else "" if local else no_answer(constants.ENDPOINT)
    verbosity, bars = zoo.logging.get_verbosity(), not zoo.are_progress_bars_disabled()
    try:
        zoo.config.HF_HUB_OFFLINE = bool(silence)  # or it would ask for half a minute
        zoo.logging.set_verbosity(zoo.logging.CRITICAL)
        if not sys.stderr.isatty():
            zoo.disable_progress_bars()
        yield zoo
    except ComeError:
        raise
    except zoo.exceptions.DatasetNotFoundError as error:
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
    except Exception as error:  # of datasets, of pyarrow, or of code that both call
        if silence and not local:
            raise InputError(
                f"cannot reach the Hub for {name} ({silence}), and it is not in the cache; give hf:FOLDER, which save_to_disk "
                "wrote, or try again with a network"
            ) from error
        why = first_line(error.__cause__ or error).rstrip(".")
        raise InputError(
            f"datasets cannot open {name}: {why}; change its options, or save it with save_to_disk and give that folder"
        ) from error
    finally:
        zoo.config.HF_HUB_OFFLINE = offline
        zoo.logging.set_verbosity(verbosity)
        if bars:
            zoo.enable_progress_bars()
