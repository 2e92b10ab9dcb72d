"""Characters, fonts and rasterized masks behind :mod:`come.bench.data.glyphs`.

The fonts are those that ship with matplotlib (DejaVu, STIX and Computer Modern, all freely licensed). Which
characters a font really has is read from its own ``cmap`` table, so a missing character is never drawn as a
replacement box.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from come.errors import InputError, pip_install

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

__all__ = ["CANVAS", "CLASSES", "FONTS", "INK", "NEAR", "Atlas", "Font", "coverage", "find_fonts"]

INSTALL = pip_install("bench")
"""The command that installs what this data set needs."""

ENVIRONMENT = "COME_GLYPH_FONTS"
"""Environment variable that names a folder of fonts to use in place of matplotlib's."""

CANVAS = 64
"""Side of a mask in pixels."""

INK = 50
"""Longest side of a character inside its mask, in pixels, before its stroke is thickened."""

CLASSES: tuple[str, ...] = tuple(
    "23456789"
    "ABCDEFGHJKLMNOPQRSTUVWXYZ"
    "abdefghmnrt"
    "\u03b1\u03b2\u0393\u0394\u03b4\u03b6\u03b7\u03b8\u03bb\u039b"  # Greek alpha ... Lambda
    "\u03bc\u03be\u039e\u03c0\u03c3\u03a3\u03c8\u03c9\u03a9"  # Greek mu ... Omega
    "\u0411\u0414\u0416\u0418\u0426\u0427\u0428"  # Cyrillic Be De Zhe I Tse Che Sha
    "\u042a\u042b\u042d\u042e\u042f\u0402\u040a"  # Cyrillic Hard Yeru E Yu Ya Dje Nje
    "&@#$%?\u00d7\u00f7\u00b1\u2260\u00a7\u00b6\u00a9"  # times, divide ... copyright
    "\u20ac\u00a3\u00a5\u221e\u221a\u2192\u2191\u2200\u2665\u266a"  # euro, pound ... heart, note
)
"""The 100 classes, in label order."""

NEAR: tuple[str, ...] = tuple(
    "\u10d0\u10d1\u10d3\u10d6\u10d7\u10d9\u10db\u10de\u10df\u10e0\u10e1\u10e2"  # Georgian
    "\u10e4\u10e5\u10e6\u10e7\u10e8\u10e9\u10ea\u10ec\u10ed\u10ef\u10f0"
    "\u0531\u0532\u0534\u0538\u0539\u053a\u053d\u053e\u0543"  # Armenian
    "\u0546\u0547\u0549\u054b\u054e\u0553\u0554"
    "\u0628\u062c\u062f\u0633\u0635\u0637\u0639\u0642\u0643\u0644\u0645\u0646\u064a"  # Arabic
    "\u05d0\u05d1\u05d2\u05db\u05dc\u05de\u05e2\u05e4\u05e6\u05e7"  # Hebrew
    "\u0e81\u0e84\u0e87\u0e88\u0e8d\u0e94\u0e95\u0e97\u0e9c\u0e9f\u0ea1\u0ea5\u0eaa"  # Lao
    "\u2660\u2663\u2666\u260e\u2600\u2602\u262f\u2295\u2297\u2203\u21d4\u222e\u2640\u2642\u2318\u265e\u2620"
)
"""Characters of other scripts, and symbols, none of them a class: the ``near`` outliers."""


@dataclass(frozen=True)
class Font:
    """One font file: its name, the stroke thickenings it stands, and whether it is used for letters only."""

    name: str
    strokes: tuple[int, ...]
    letters_only: bool = False


_REGULAR = (0, 1, 2)
_BOLD = (0,)

FONTS: tuple[Font, ...] = (
    Font("DejaVuSans", _REGULAR),
    Font("DejaVuSans-Bold", _BOLD),
    Font("DejaVuSans-Oblique", _REGULAR),
    Font("DejaVuSans-BoldOblique", _BOLD),
    Font("DejaVuSansMono", _REGULAR),
    Font("DejaVuSansMono-Bold", _BOLD),
    Font("DejaVuSansMono-Oblique", _REGULAR),
    Font("DejaVuSansMono-BoldOblique", _BOLD),
    Font("DejaVuSerif", _REGULAR),
    Font("DejaVuSerif-Bold", _BOLD),
    Font("DejaVuSerif-Italic", _REGULAR),
    Font("DejaVuSerif-BoldItalic", _BOLD),
    Font("STIXGeneral", _REGULAR),
    Font("STIXGeneralBol", _BOLD),
    Font("STIXGeneralItalic", _REGULAR),
    Font("STIXGeneralBolIta", _BOLD),
    Font("cmr10", _REGULAR, letters_only=True),
    Font("cmb10", _BOLD, letters_only=True),
    Font("cmss10", _REGULAR, letters_only=True),
    Font("cmtt10", _REGULAR, letters_only=True),
)
"""The fonts in use: those that every matplotlib from 3.8 on has. Computer Modern files keep TeX's symbol places, hence ASCII
letters and digits only."""


def find_fonts(folder: str | os.PathLike[str] | None = None) -> Path:
    """Folder that holds every font of :data:`FONTS`.

    Looked for in ``folder``, else in the folder that the environment variable ``COME_GLYPH_FONTS`` names,
    else in the installed matplotlib (which is not imported).

    Raises:
        InputError: no folder is named and matplotlib is not installed, or a font is missing from the folder.
    """
    chosen = folder if folder is not None else os.environ.get(ENVIRONMENT) or None
    if chosen is not None:
        path = Path(chosen)
    else:
        spec = importlib.util.find_spec("matplotlib")
        if spec is None or spec.origin is None:
            raise InputError(
                f"the glyphs data set draws with the fonts that ship with matplotlib, which is missing; "
                f"run: {INSTALL}, or name a folder with these fonts in {ENVIRONMENT}"
            )
        path = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
    missing = [font.name + ".ttf" for font in FONTS if not (path / f"{font.name}.ttf").is_file()]
    if missing:
        raise InputError(
            f"{len(missing)} of {len(FONTS)} fonts are missing from {str(path)!r} (first: {missing[0]!r}); "
            f"give the folder matplotlib/mpl-data/fonts/ttf of an installed matplotlib, or run: {INSTALL}"
        )
    return path.resolve()


def coverage(file: str | os.PathLike[str]) -> frozenset[int]:
    """Code points for which a font has a glyph other than the replacement box."""
    from fontTools.ttLib import TTFont

    with TTFont(file, lazy=True) as font:
        return frozenset(font.getBestCmap())


@lru_cache(maxsize=4)
def _covered(folder: Path) -> dict[str, frozenset[int]]:
    return {font.name: coverage(folder / f"{font.name}.ttf") for font in FONTS}


class Atlas:
    """Masks of some characters in all fonts that have them, each drawn when first asked for.

    A *slot* is one (character, font, stroke) combination. ``choices[first[c] : first[c] + count[c]]`` are the
    slots of character ``c``; a font with few strokes repeats there, so that a uniform choice gives every font
    the same share.

    Args:
        characters: the characters to hold.
        folder: a folder as :func:`find_fonts` returns it.
    """

    def __init__(self, characters: tuple[str, ...], folder: Path) -> None:
        covered = _covered(folder)
        self.folder = folder
        self.slots: list[tuple[str, Font, int]] = []
        choices: list[int] = []
        first, count = [], []
        for character in characters:
            first.append(len(choices))
            plain = character.isascii() and character.isalnum()
            limit = 2 if character.isalpha() else 1  # thicker strokes would close the gaps of some symbols
            for font in FONTS:
                if ord(character) in covered[font.name] and (plain or not font.letters_only):
                    strokes = [stroke for stroke in font.strokes if stroke <= limit]
                    slots = range(len(self.slots), len(self.slots) + len(strokes))
                    self.slots += [(character, font, stroke) for stroke in strokes]
                    choices += [slot for slot in slots for _ in range(6 // len(strokes))]
            count.append(len(choices) - first[-1])
            if count[-1] == 0:
                raise ValueError(
                    f"no font in {str(folder)!r} has the character {character!r} (U+{ord(character):04X}); leave it out"
                )
        self.choices: npt.NDArray[np.int64] = np.array(choices, dtype=np.int64)
        self.first: npt.NDArray[np.int64] = np.array(first, dtype=np.int64)
        self.count: npt.NDArray[np.int64] = np.array(count, dtype=np.int64)
        self.masks: npt.NDArray[np.uint8] = np.zeros((len(self.slots), CANVAS, CANVAS), dtype=np.uint8)
        self._drawn: npt.NDArray[np.bool_] = np.zeros(len(self.slots), dtype=np.bool_)

    def pick(self, characters: npt.NDArray[np.int64], uniform: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Slot of each character (B,) in the font and stroke that a number in [0, 1) (B,) falls on."""
        count = self.count[characters]
        place = np.minimum((uniform * count).astype(np.int64), count - 1)
        return self.choices[self.first[characters] + place]

    def fetch(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """All masks as one flat array, those of ``slots`` drawn; slot ``s`` begins at ``s * CANVAS ** 2``."""
        for slot in np.unique(slots[~self._drawn[slots]]).tolist():
            character, font, stroke = self.slots[slot]
            self.masks[slot] = draw_mask(self.folder / f"{font.name}.ttf", character, stroke)
            self._drawn[slot] = True
        return self.masks.reshape(-1)


@lru_cache(maxsize=1024)
def _font(file: Path, size: int) -> FreeTypeFont:
    from PIL import ImageFont

    return ImageFont.truetype(str(file), size, layout_engine=ImageFont.Layout.BASIC)


def _ink(file: Path, character: str, size: int, stroke: int) -> Image:
    """The inked rectangle of a character as a grey image."""
    from PIL import Image, ImageDraw

    sheet = Image.new("L", (4 * CANVAS, 4 * CANVAS))
    place = (CANVAS, 3 * CANVAS)
    ImageDraw.Draw(sheet).text(place, character, fill=255, font=_font(file, size), anchor="ls", stroke_width=stroke)
    return sheet.crop(sheet.getbbox() or (0, 0, 1, 1))


def draw_mask(file: Path, character: str, stroke: int = 0) -> npt.NDArray[np.uint8]:
    """One character as a (CANVAS, CANVAS) uint8 mask: ink centred, longest side about :data:`INK` pixels."""
    from PIL import Image

    size = int(CANVAS * INK / max(_ink(file, character, CANVAS, 0).size) + 0.5)
    ink = _ink(file, character, size, stroke)
    mask = Image.new("L", (CANVAS, CANVAS))
    mask.paste(ink, ((CANVAS - ink.width) // 2, (CANVAS - ink.height) // 2))
    return np.asarray(mask, dtype=np.uint8)
