"""The image lists of OpenOOD: a text file with a path and a label in each line."""

from __future__ import annotations

import os
from pathlib import Path

from come.bench.data.folders import FileSource
from come.errors import InputError, shown


class OpenOODSource(FileSource):
    """`openood:PATH:list=FILE`: the images in the folder PATH that a file of `benchmark_imglist` names, `path label` a line.

    Labels of -1 mark outliers. A list with a negative label has no classes, and serves as `--outliers`.
    """

    def _open(self, rest: str) -> None:
        super()._open(rest)
        if not self._list:
            raise InputError(f"data {self.name!r} lacks its list; write openood:PATH:list=FILE")
        self.files, labels = [], []
        for number, line in enumerate(self._lines(), 1):
            if not line.strip():
                continue
            file, _, label = line.strip().rpartition(" ")
            if not file or not label.removeprefix("-").isdecimal() or len(label) > 9:
                raise InputError(f"line {number} of {self._list} must be a path and a label, got {shown(line)}")
            self.files.append(Path(file))
            labels.append(int(label))
        if not labels:
            raise InputError(f"the list of images {self._list} is empty; each line must be a path and a label")
        if missing := [file for file in self.files if not os.path.isfile(self.root / file)]:
            raise InputError(
                f"{self._list} lists {len(labels)} images, {len(missing)} of which are not in {self.root}, such as "
                f"{str(missing[0])!r}; give the folder that these paths begin in"
            )
        self._set_labels(labels)

    def names(self) -> list[str]:
        """The paths of the list."""
        return [str(file) for file in self.files]
