"""Pretrained weights: from the cache without asking the network, or from a host that answers."""

from __future__ import annotations

import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from come.bench.checkpoints import read_weights
from come.errors import ModelError

PATIENCE = 3.0  # seconds that a host has to answer
CHECKPOINT = "give --checkpoint FILE"


def timm_weights(name: str, config: Any) -> dict[str, Any]:
    """Where timm is to take pretrained weights from, as its `pretrained_cfg_overlay`: a file of the cache, or the network.

    It raises `ModelError` if they are not in the cache, and the host does not answer. `config` is a `PretrainedCfg` of timm.
    """
    if not config.hf_hub_id:
        if isinstance(config.url, str) and config.url:
            require_download(name, config.url)
        return {}
    repository, _, revision = config.hf_hub_id.partition("@")
    files = (config.hf_hub_filename,) if config.hf_hub_filename else ("model.safetensors", "pytorch_model.bin")
    found = hub_file(name, repository, files, revision or None)
    if found is None:
        return {}
    plain = found.endswith(".safetensors")
    return {"custom_load": False, **({"file": found} if plain else {"state_dict": read_weights(found)})}


def hub_file(
    name: str, repository: str, files: Sequence[str], revision: str | None = None, instead: str = CHECKPOINT
) -> str | None:
    """The first of `files` that is in the cache of the Hugging Face Hub, as a path; None if the Hub must be asked, and answers.

    If it does not answer, a `ModelError` names the model and what to do `instead`.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    for file in files:
        found = try_to_load_from_cache(repository, file, revision=revision)
        if isinstance(found, str):
            return found
    offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    _require_answer(name, constants.ENDPOINT, Path(constants.HF_HUB_CACHE), offline, instead)
    return None


def require_download(name: str, url: str) -> None:
    """Raise `ModelError` unless what torch downloads from `url` is in its cache, or the host answers."""
    cache = Path(torch.hub.get_dir(), "checkpoints")
    if not (cache / Path(urlsplit(url).path).name).exists():
        _require_answer(name, url, cache)


def _require_answer(name: str, url: str, cache: Path, silence: str = "", instead: str = CHECKPOINT) -> None:
    if silence := silence or no_answer(url):
        raise ModelError(
            f"cannot reach {urlsplit(url).netloc} to download the weights of {name} ({silence}); {instead}, "
            f"or download them on a machine with a network and copy its cache folder to {cache}"
        )


def no_answer(url: str, patience: float = PATIENCE) -> str:
    """Why the host of `url` does not answer, in a few words; "" if it does, whatever it says.

    Proxies are those of the environment.

    Example:
        >>> bool(no_answer("http://localhost:1/weights"))
        True
    """
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    if "all" in proxies or any(proxy.startswith("socks") for proxy in proxies.values()):
        return ""  # urllib cannot ask through such a proxy; the downloader may
    silence = [f"no answer within {patience:g} seconds"]

    def ask() -> None:
        request = urllib.request.Request(f"{parts.scheme}://{parts.netloc}/", method="HEAD")
        try:
            urllib.request.build_opener().open(request, timeout=patience).close()
            silence[0] = ""
        except urllib.error.HTTPError as error:
            error.close()
            silence[0] = ""
        except Exception as error:  # of urllib, http.client, ssl or socket
            reason = getattr(error, "reason", error)
            certificate = isinstance(reason, ssl.SSLCertVerificationError)  # it answers; downloaders know other ones
            silence[0] = "" if certificate else getattr(reason, "strerror", None) or str(reason) or type(error).__name__

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name has no time limit of its own
    asking.start()
    asking.join(patience + 0.5)
    return silence[0]
