"""Record tests/corruptions/reference.safetensors and reference.json from `imagecorruptions` 1.1.2.

Not a test, and not run by the tests. It needs imagecorruptions, scikit-image, OpenCV, SciPy and safetensors:

    python benchmarks/record_corruptions.py PATH/TO/corruptions.safetensors

The argument is the file of recorded outputs from which the clean images and the outputs of the deterministic
corruptions are taken; the statistics of the random ones are means over many runs made here.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).parents[1] / "tests" / "corruptions"
sys.path.insert(0, str(HERE))
from measures import measures  # noqa: E402 - it lives beside the tests that use it

DETERMINISTIC = (
    "brightness", "contrast", "saturate", "pixelate", "jpeg_compression", "defocus_blur", "gaussian_blur",
    "zoom_blur",
)  # fmt: skip
RANDOM = (
    "gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "glass_blur", "motion_blur", "snow",
    "frost", "fog", "spatter", "elastic_transform",
)  # fmt: skip
RUNS = 40


def main() -> None:
    """Write the two files beside the tests."""
    warnings.simplefilter("ignore")
    np.float_ = np.float64
    import skimage.filters
    from imagecorruptions import corrupt, corruptions

    plain = skimage.filters.gaussian
    corruptions.gaussian = lambda image, *a, multichannel=False, **k: plain(
        image, *a, channel_axis=-1 if multichannel else None, **k
    )
    recorded = load_file(sys.argv[1])
    kept = {"image64": recorded["image64"], "image224": recorded["image224"]}
    for name in DETERMINISTIC:
        keys = [f"64.{name}.{s}" for s in range(1, 6)]
        if name in ("defocus_blur", "zoom_blur"):
            keys.append(f"224.{name}.5")
        for key in keys:
            value = recorded[key]
            if name == "defocus_blur":
                # the recorded file holds these in (N, 3, H, W) memory order under an (N, H, W, 3) shape
                n, height, width, _ = value.shape
                value = value.reshape(n, 3, height, width).transpose(0, 2, 3, 1)
            kept[key] = np.ascontiguousarray(value)
    save_file(kept, HERE / "reference.safetensors")

    np.random.seed(0)
    table: dict[str, dict[str, list[float]]] = {}
    for name in RANDOM:
        for severity in range(1, 6):
            rows = [
                measures(clean, corrupt(clean, severity=severity, corruption_name=name))
                for _ in range(RUNS)
                for clean in recorded["image64"]
            ]
            own = [measures(c, m) for c, m in zip(recorded["image64"], recorded[f"64.{name}.{severity}"], strict=True)]
            table[f"{name}.{severity}"] = {
                "mean": np.mean(rows, 0).round(4).tolist(),
                "deviation": np.std(rows, 0).round(4).tolist(),
                "recorded": np.mean(own, 0).round(4).tolist(),
            }
            print(name, severity, flush=True)
    (HERE / "reference.json").write_text(json.dumps(table, indent=0) + "\n")


if __name__ == "__main__":
    main()
