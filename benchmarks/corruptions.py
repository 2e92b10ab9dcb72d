"""Time the corruptions: ms per image on one CPU thread beside `imagecorruptions`, or images/s on a GPU.

    python benchmarks/corruptions.py                      # 224x224, severity 5, one thread
    python benchmarks/corruptions.py --device cuda        # images/s at batch 256

The reference is timed in the same run when `imagecorruptions` can be imported; else its recorded times are
printed, marked "recorded" (one core of another machine).
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from come.corruptions import corrupt, jpeg_backend, names

RECORDED_MS = {
    "gaussian_noise": 2.8, "shot_noise": 6.3, "impulse_noise": 1.8, "defocus_blur": 2.2, "glass_blur": 589.0,
    "motion_blur": 6.0, "zoom_blur": 57.0, "snow": 6.2, "frost": 5.2, "fog": 1.8, "brightness": 15.5,
    "contrast": 1.6, "elastic_transform": 11.0, "pixelate": 0.2, "jpeg_compression": 0.3, "speckle_noise":
    2.8, "gaussian_blur": 4.0, "spatter": 2.9, "saturate": 15.5,
}  # fmt: skip


def picture(size: int, batch: int) -> torch.Tensor:
    """Smooth colour patterns with some grain, uint8 (B, 3, size, size): easy to compress, like
    photographs.
    """
    generator = torch.Generator().manual_seed(0)
    axis = torch.linspace(0.0, 1.0, size)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    out = []
    for _ in range(batch):
        p = torch.rand(3, 8, generator=generator)
        planes = [
            torch.sin(9 * p[c, 0] * x + 9 * p[c, 1] * y + 6 * p[c, 2]) + torch.sin(30 * p[c, 3] * x * y)
            for c in range(3)
        ]
        image = torch.stack(planes) * 0.22 + 0.5 + 0.02 * torch.randn(3, size, size, generator=generator)
        square = slice(int(size * 0.3), int(size * 0.6))
        image[:, square, square] = p[:, 4:5, None]
        out.append(image)
    return (torch.stack(out).clamp(0, 1) * 255).to(torch.uint8)


def load_reference() -> Callable[..., Any] | None:
    """Import `imagecorruptions`, lending it the NumPy and scikit-image names it was written for."""
    try:
        import numpy as np
        import skimage.filters

        warnings.simplefilter("ignore")
        if not hasattr(np, "float_"):
            np.float_ = np.float64
        package = importlib.import_module("imagecorruptions")
        module = importlib.import_module("imagecorruptions.corruptions")
        module.cv2.setNumThreads(1)
    except ImportError:
        return None
    plain = skimage.filters.gaussian

    def gaussian(image: Any, *args: Any, multichannel: bool = False, **kwargs: Any) -> Any:
        return plain(image, *args, channel_axis=-1 if multichannel else None, **kwargs)

    module.gaussian = gaussian
    return package.corrupt


def milliseconds(works: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Median time of each call, after one to warm up; they take turns, so that they share what else runs."""
    times: list[list[float]] = [[] for _ in works]
    for repeat in range(repeats + 1):
        for work, spent in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            if repeat:
                spent.append(time.perf_counter() - start)
    return [1e3 * statistics.median(spent) for spent in times]


def on_cpu(args: argparse.Namespace) -> None:
    """Print ms per image of ours and the reference, and the ratio."""
    torch.set_num_threads(1)
    batch = args.batch or 16
    images = picture(args.size, batch)
    arrays = [image.permute(1, 2, 0).contiguous().numpy() for image in images]
    reference = load_reference()
    print(
        f"{args.size}x{args.size}, severity {args.severity}, batch {batch}, one CPU thread, torch {torch.__version__}"
    )
    print(f"reference: imagecorruptions, {'same run' if reference else 'recorded times'}")
    print(f"{'corruption':<20}{'ours ms':>10}{'theirs ms':>11}{'ratio':>8}")
    for name in args.names or names():
        number = 1 if name == "glass_blur" else batch
        works: list[Callable[[], Any]] = [lambda n=name: corrupt(images, n, args.severity, table="imagenet")]
        if reference is not None:
            works.append(
                lambda n=name, k=number: [reference(a, severity=args.severity, corruption_name=n) for a in arrays[:k]]
            )
        spent = milliseconds(works, min(args.repeats, 3) if name == "glass_blur" else args.repeats)
        ours = spent[0] / batch
        theirs = spent[1] / number if reference is not None else RECORDED_MS[name]
        note = "" if theirs >= ours / 1.1 else "  slower"
        print(f"{name:<20}{ours:>10.3f}{theirs:>11.3f}{theirs / ours:>8.2f}{note}", flush=True)


def on_gpu(args: argparse.Namespace) -> None:
    """Print images per second on a GPU, input and output on the device."""
    batch = args.batch or 256
    images = picture(args.size, min(batch, 16)).repeat(-(-batch // 16), 1, 1, 1)[:batch].to(args.device)
    print(
        f"{args.size}x{args.size}, severity {args.severity}, batch {batch}, {torch.cuda.get_device_name(args.device)}"
    )
    print(f"{'corruption':<20}{'images/s':>12}{'peak GiB':>10}")

    def work(name: str) -> None:
        corrupt(images, name, args.severity, table="imagenet")
        torch.cuda.synchronize()

    for name in args.names or names():
        torch.cuda.reset_peak_memory_stats()
        with jpeg_backend("auto"):
            rate = batch / milliseconds([lambda n=name: work(n)], args.repeats)[0] * 1e3
        peak = torch.cuda.max_memory_allocated() / 2**30
        note = "" if rate >= 3000 else "  below 3000"
        print(f"{name:<20}{rate:>12,.0f}{peak:>10.2f}{note}", flush=True)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="corruptions to time (default: all)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=0, help="default 16 on the CPU, 256 on a GPU")
    parser.add_argument("--severity", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    on_cpu(args) if args.device == "cpu" else on_gpu(args)


if __name__ == "__main__":
    main()
