"""Image classifiers of transformers: from the Hugging Face Hub, its cache, or a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from come.bench.checkpoints import head_size
from come.bench.data.preprocess import Preprocess
from come.bench.downloads import hub_file
from come.errors import ModelError, missing, one_line, shown
from come.registry import parse
from come.state.hub import explained

WEIGHTS = tuple(f"{stem}{end}" for stem in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json"))
INSTEAD = "give hf:FOLDER, a folder that save_pretrained wrote"


def load_transformers(name: str, spec: str, state: dict[str, Tensor] | None) -> tuple[nn.Module, Preprocess]:
    """A classifier of transformers, and what its image processor says of its inputs.

    `spec` is a model of the Hub or a folder, and arguments of `from_pretrained`: "google/vit-base-patch16-224:revision=main".
    Where the caller has weights of its own, only the shape of their head matters here: no others are read.
    """
    try:
        zoo: Any = import_module("transformers")
    except ModuleNotFoundError as error:
        raise missing(name, error, "hf") from error

    place, given = parse(spec)
    where: dict[str, Any] = {"revision": given["revision"]} if "revision" in given else {}
    if Path(place).expanduser().is_dir():
        place = str(Path(place).expanduser())
    else:
        where["local_files_only"] = _is_cached(name, place, given.get("revision"), with_weights=state is None)
    with _quiet(zoo.logging):
        try:
            config, found = zoo.AutoConfig.from_pretrained(place, **(given | where)), {}
            dense = any("SemanticSegmentation" in name for name in config.architectures or ())
            kind = zoo.AutoModelForSemanticSegmentation if dense else zoo.AutoModelForImageClassification
            if state is None:
                module, found = kind.from_pretrained(place, output_loading_info=True, **(given | where))
            else:
                module = kind.from_config(config)
                if (classes := head_size(module, state, config.num_labels)) is not None:
                    config.num_labels = classes
                    module = kind.from_config(config)
        except Exception as error:  # of transformers, of the Hub, or of code that both call
            raise ModelError(
                f"transformers cannot make {name}: {one_line(error, first=True)}; name an image classifier, or a "
                "model for semantic segmentation, and arguments that it has"
            ) from error
        if absent := sorted(found.get("missing_keys", ())):
            raise ModelError(
                f"{name} has no weights for {', '.join(absent[:3])}; choose a model that is trained to classify "
                "or segment images, or give --checkpoint FILE"
            )
        try:
            processor = zoo.AutoImageProcessor.from_pretrained(place, **where)
        except Exception as error:
            raise ModelError(
                f"{name} has no image processor that transformers can read; save one beside its weights: "
                f"processor.save_pretrained(FOLDER), then give hf:FOLDER"
            ) from error
    return module.float(), read_processor(name, processor.to_dict())


def read_processor(name: str, about: Mapping[str, Any]) -> Preprocess:
    """The preprocessing that an image processor of transformers describes, by the fields of its preprocessor_config.json.

    >>> found = read_processor("hf:x", {"size": {"shortest_edge": 256}, "crop_size": 224, "do_center_crop": True})
    >>> found.resize, found.size, found.mean
    (256, 224, (0.0, 0.0, 0.0))
    """
    resize = _side(name, "size", about.get("size"))
    size = _side(name, "crop_size", about.get("crop_size")) if about.get("do_center_crop") else resize
    if about.get("crop_pct") and resize < 384:  # ConvNext: larger images are resized only
        resize = int(resize / about["crop_pct"])
    # Ours are images in [0, 1], theirs are pixels times a factor.
    scale = 255 * about.get("rescale_factor", 1 / 255) if about.get("do_rescale", True) else 255.0
    mean, std = (about["image_mean"], about["image_std"]) if about.get("do_normalize") else ((0.0,) * 3, (1.0,) * 3)
    kind = Image.Resampling(int(about.get("resample") or Image.Resampling.BILINEAR)).name.lower()
    return Preprocess(size, resize, kind, *(tuple(value / scale for value in values) for values in (mean, std)))


def _side(name: str, field: str, given: Any) -> int:
    """Pixels of a side, of 224, {"shortest_edge": 224} or {"height": 224, "width": 224}."""
    sides = set(given.values()) if isinstance(given, Mapping) else {given}
    if len(sides) != 1 or not isinstance(side := sides.pop(), int):
        raise ModelError(
            f"{field} of the image processor of {name} must be one side of a square, got {shown(given)}; change it in a copy "
            "of its folder, and give hf:FOLDER"
        )
    return side


def _is_cached(name: str, repository: str, revision: str | None, *, with_weights: bool) -> bool:
    """Whether all files of a model are in the cache of the Hub; `ModelError` if they are not, and cannot be downloaded."""
    from huggingface_hub import errors as hub
    from huggingface_hub import hf_hub_download

    needed = [("config.json",), ("preprocessor_config.json", "processor_config.json"), *[WEIGHTS][: int(with_weights)]]
    try:
        if all(hub_file(name, repository, files, revision, INSTEAD) for files in needed):
            return True
        with explained(ModelError, name, repository, revision, INSTEAD):
            hf_hub_download(repository, "config.json", revision=revision)
    except hub.HFValidationError as error:
        raise ModelError(
            f"{name} must be hf:NAME with a model of the Hub, such as hf:google/vit-base-patch16-224, or a folder; there is "
            f"no folder {shown(repository)}"
        ) from error
    except hub.EntryNotFoundError as error:
        raise ModelError(f"{repository} has no config.json, so transformers cannot make it; choose another") from error
    return False


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without bars and tables of transformers: what matters of them is raised."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):  # a head that is made, and then replaced, draws numbers
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
