"""Write one PNG with all 19 corruptions at severities 1 to 5, labelled.

python benchmarks/contact_sheet.py --out sheet.png [--image PHOTO] [--size 224]
"""

from __future__ import annotations

import argparse
import math

import torch
from PIL import Image, ImageDraw

from come.corruptions import corrupt, names


def scene(size: int) -> torch.Tensor:
    """Draw a landscape with a sun, hills, a house and a striped ball, uint8 (1, 3, size, size)."""
    scale = 4
    big = size * scale
    image = Image.new("RGB", (big, big))
    draw = ImageDraw.Draw(image)
    for y in range(big):
        t = y / big
        draw.line([(0, y), (big, y)], fill=(int(70 + 150 * t), int(130 + 90 * t), int(220 - 10 * t)))

    def box(x0: float, y0: float, x1: float, y1: float) -> list[float]:
        return [x0 * big, y0 * big, x1 * big, y1 * big]

    draw.ellipse(box(0.72, 0.08, 0.9, 0.26), fill=(255, 225, 90))
    for shift, colour in ((0.0, (70, 120, 80)), (1.7, (50, 140, 60)), (3.1, (96, 160, 52))):
        base = 0.55 + 0.09 * shift / 1.6
        edge = [(x, big * (base + 0.06 * math.sin(x / big * 7 + shift * 2))) for x in range(0, big + 1, 8)]
        draw.polygon([*edge, (big, big), (0, big)], fill=colour)
    draw.rectangle(box(0.12, 0.46, 0.42, 0.78), fill=(200, 120, 84))
    draw.polygon([(0.08 * big, 0.46 * big), (0.27 * big, 0.28 * big), (0.46 * big, 0.46 * big)], fill=(130, 40, 40))
    for x in (0.17, 0.29):
        draw.rectangle(box(x, 0.52, x + 0.08, 0.6), fill=(240, 240, 200))
        draw.line([((x + 0.04) * big, 0.52 * big), ((x + 0.04) * big, 0.6 * big)], fill=(60, 50, 40), width=scale)
    draw.rectangle(box(0.24, 0.65, 0.31, 0.78), fill=(70, 50, 40))
    draw.ellipse(box(0.58, 0.6, 0.88, 0.9), fill=(230, 230, 235))
    for k in range(0, 6, 2):
        draw.pieslice(box(0.58, 0.6, 0.88, 0.9), 60 * k + 15, 60 * k + 75, fill=(210, 40, 60))
    draw.ellipse(box(0.7, 0.72, 0.76, 0.78), fill=(40, 40, 160))
    image = image.resize((size, size), Image.Resampling.LANCZOS)
    grain = torch.randn(3, size, size, generator=torch.Generator().manual_seed(0)) * 3
    data = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)
    return (data.float() + grain).clamp(0, 255).to(torch.uint8).unsqueeze(0)


def load(path: str, size: int) -> torch.Tensor:
    """Load an image file, cut its middle square out and resize it, uint8 (1, 3, size, size)."""
    with Image.open(path) as file:
        image = file.convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    image = image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.LANCZOS)
    data = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return data.view(size, size, 3).permute(2, 0, 1).unsqueeze(0).contiguous()


def main() -> None:
    """Parse the command line and write the sheet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="contact_sheet.png")
    parser.add_argument("--image", help="an image file (default: a drawn scene)")
    parser.add_argument("--size", type=int, default=224, help="size the image is corrupted at")
    parser.add_argument("--cell", type=int, default=0, help="size it is shown at (default: the same)")
    parser.add_argument("--table", default=None)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    clean = load(args.image, args.size) if args.image else scene(args.size)
    cell, label, head = args.cell or args.size, 110, 18
    sheet = Image.new("RGB", (label + 6 * cell, head + len(names()) * cell), "white")
    draw = ImageDraw.Draw(sheet)

    def paste(images: torch.Tensor, column: int, row: int) -> None:
        tile = Image.fromarray(images[0].permute(1, 2, 0).contiguous().numpy()).resize((cell, cell))
        sheet.paste(tile, (label + column * cell, head + row * cell))

    for column, text in enumerate(("clean", *(f"severity {s}" for s in range(1, 6)))):
        draw.text((label + column * cell + 4, 3), text, fill="black")
    for row, name in enumerate(names()):
        draw.text((4, head + row * cell + cell // 2), name, fill="black")
        paste(clean, 0, row)
        for severity in range(1, 6):
            paste(corrupt(clean, name, severity, seed=args.seed, table=args.table), severity, row)
    sheet.save(args.out)
    print(f"wrote {args.out}, {sheet.width}x{sheet.height}")


if __name__ == "__main__":
    main()
