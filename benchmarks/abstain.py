"""What a promise of `calibrate` is worth: clean, under shift, with outliers, before and after adaptation.

    python benchmarks/abstain.py                                        the embedded data and model, a few minutes
    python benchmarks/abstain.py --model timm:vit_base_patch16_224 --data folder:/data/imagenet/val --device cuda \\
        --size 50000 --severities 1,3,5 --outliers folder:/data/textures

Half of the clean images, drawn at random, calibrates; the other half is the stream. For data that holds its corruptions
(ImageNet-C) --source-data gives the clean images. Prints Markdown: the risk that was promised beside the one measured, coverage
with a fixed threshold and with one that follows the stream, and how well each score ranks.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import come
from come import abstain, metrics
from come.bench import models
from come.bench.data import Source, Stream, batches, open_source
from come.bench.data.streams import OUTLIER, shuffle
from come.bench.models import Model
from come.metrics.scores import score_of

SCORES = ("softmax", "belief", "entropy", "u", "energy")
CORRUPTIONS = "gaussian_noise,defocus_blur,snow,contrast"
COME = come.Opinion()


class Run(NamedTuple):
    """What one adapter said of one stream; on the CPU."""

    logits: Tensor
    labels: Tensor
    answered: Tensor
    """By the threshold that follows the stream."""


class Data:
    """Batches of the clean half that calibrates, and of streams of the other half."""

    def __init__(self, args: argparse.Namespace, model: Model) -> None:
        self.args, self.model = args, model
        self.shifted = open_source(args.data, model.preprocess)
        self.clean = open_source(args.source_data, model.preprocess) if args.source_data else self.shifted
        self.clean.require([None], 5)
        self.outside = open_source(args.outliers, model.preprocess) if args.outliers else None
        self.first, self.second = self._halves(self.clean)

    def _halves(self, source: Source) -> tuple[list[int], list[int]]:
        order = shuffle(range(len(source)), self.args.seed)[: self.args.size or None]
        return order[: len(order) // 2], order[len(order) // 2 :]

    def _batches(self, source: Source, stream: Stream) -> Iterator[tuple[Tensor, Tensor]]:
        how = {
            "batch_size": self.args.batch_size,
            "device": torch.device(self.args.device),
            "workers": self.args.workers,
        }
        for batch in batches(source, stream, self.model.preprocess, outliers=self.outside, **how):
            yield batch.images, batch.labels

    def calibration(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._batches(self.clean, Stream.of(self.clean.name, self.first, None, 5, 0))

    def stream(self, corruption: str | None, severity: int) -> Iterator[tuple[Tensor, Tensor]]:
        if corruption is None:
            return self._batches(self.clean, Stream.of(self.clean.name, self.second, None, 5, 0))
        half = self.second if self.shifted is self.clean else self._halves(self.shifted)[1]
        return self._batches(self.shifted, Stream.of(self.shifted.name, half, corruption, severity, self.args.seed))

    def with_outliers(self, corruption: str | None, severity: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same with one outlier to `--outlier-ratio` images of a class."""
        assert self.outside is not None
        source = self.clean if corruption is None else self.shifted
        half = self.second if source is self.clean else self._halves(source)[1]
        count = min(len(self.outside), int(len(half) * self.args.outlier_ratio))
        pool = [(i, 0) for i in half] + [(i, OUTLIER) for i in shuffle(range(len(self.outside)), 1)[:count]]
        pool = [pool[i] for i in shuffle(range(len(pool)), 2)]
        stream = Stream(
            data=source.name,
            order=tuple(i for i, _ in pool),
            kinds=tuple(kind for _, kind in pool),
            shifts=((corruption, severity),),
            seed=self.args.seed,
            outliers=self.args.outliers,
        )
        return self._batches(source, stream)


def run(classifier: come.Adapter, stream: Iterator[tuple[Tensor, Tensor]]) -> Run:
    """A stream from the beginning."""
    classifier.reset()
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for x, y in stream:
        step = classifier.step(x)
        assert step.abstain is not None
        found.append((step.logits.float().cpu(), y.cpu(), ~step.abstain.cpu()))
    return Run(*(torch.cat(column) for column in zip(*found, strict=True)))


def joined(runs: list[Run]) -> Run:
    return Run(*(torch.cat(column) for column in zip(*runs, strict=True)))


def wrong(run: Run, answered: Tensor) -> float:
    """The share of the answered samples that is wrong."""
    mistaken = run.logits.argmax(dim=1) != run.labels
    return mistaken[answered].double().mean().item() if answered.any() else 0.0


def rows(run: Run) -> dict[str, Tensor]:
    """What the metrics take."""
    found = {column: score_of(column, COME, run.logits) for column in metrics.SCORES}
    found |= {"uncertainty": -found["u"], "entropy": -found["entropy"]}  # as a run has them
    return found | {"label": run.labels, "prediction": run.logits.argmax(dim=1)}


def repeated(
    score: Tensor, mistaken: Tensor, wanted: abstain.Wanted, draws: int = 200
) -> tuple[float, float, float, int] | None:
    """Over random splits, a quarter to calibrate: measured risk, share of splits above the promise, coverage; how many."""
    assert wanted.risk is not None
    found = []
    for seed in range(draws):
        order = torch.randperm(len(score), generator=torch.Generator().manual_seed(seed))
        first, rest = order[: len(order) // 4], order[len(order) // 4 :]
        try:
            passed = score[rest] >= wanted.promise(score[first], mistaken[first]).threshold
        except come.InputError:
            continue
        found.append((mistaken[rest][passed].double().mean().item(), passed.double().mean().item()))
    if not found:
        return None
    above = sum(risk > wanted.risk for risk, _ in found) / len(found)
    risk, coverage = (sum(column) / len(found) for column in zip(*found, strict=True))
    return risk, above, coverage, len(found)


def table(title: str, head: list[str], body: list[list[str]]) -> None:
    """As Markdown."""
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|---{'|---:' * (len(head) - 1)}|")
    for line in body:
        print(f"| {' | '.join(line)} |")


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="fashion-resnet-bn")
    parser.add_argument("--checkpoint")
    parser.add_argument("--normalization", default="model")
    parser.add_argument("--data", default="fashion")
    parser.add_argument("--source-data", help="clean images, for data that holds its corruptions")
    parser.add_argument("--size", type=int, default=0, help="use so many images, half to calibrate; 0: all")
    parser.add_argument("--method", default="tent")
    parser.add_argument("--objectives", default="em,come")
    parser.add_argument("--corruptions", default=CORRUPTIONS)
    parser.add_argument("--severities", default="1,3,5")
    parser.add_argument("--outliers", default="fashion-outliers:near", help="'' for none")
    parser.add_argument("--outlier-ratio", type=float, default=0.25, help="outliers for each image of a class")
    parser.add_argument("--risks", default="0.02,0.05")
    parser.add_argument("--coverage", type=float, default=0.9)
    parser.add_argument("--delta", type=float, default=0.1)
    parser.add_argument("--score", default="confidence")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable()
    model = models.load(args.model, checkpoint=args.checkpoint, normalization=args.normalization)
    module, data = model.module.to(args.device), Data(args, model)
    severities = [int(text) for text in args.severities.split(",")]
    corruptions, risks = args.corruptions.split(","), [float(text) for text in args.risks.split(",")]

    def of(severity: int, mixed: bool) -> list[Iterator[tuple[Tensor, Tensor]]]:
        make = data.with_outliers if mixed else data.stream
        return [make(corruption, severity) for corruption in corruptions]

    ways = {"source": come.adapt(module, "source", objective="come")}
    for objective in args.objectives.split(","):
        ways[f"{args.method} + {objective}"] = come.adapt(module, args.method, objective=objective)
    promises: dict[str, list[abstain.Promise | None]] = {}
    found: dict[str, dict[str, Run]] = {}
    first: Any = None
    for way, classifier in ways.items():
        wanted = [abstain.Wanted(risk=risk, delta=args.delta, score=args.score) for risk in risks]
        calibration = abstain.scored(data.calibration(), classifier.answer, classifier.method.objective, wanted[0])
        first = first or (wanted, *calibration)
        promises[way] = []
        for one in wanted:  # what `calibrate` does, with one pass over the data for all risks
            try:
                promises[way].append(one.promise(*calibration))
            except come.InputError as error:
                print(f"{way}: {error}")
                promises[way].append(None)
        unlabelled = (x for x, _ in data.calibration())
        promises[way].append(classifier.calibrate(unlabelled, coverage=args.coverage, score=args.score, follow=True))
        streams = {"clean": [data.stream(None, 5)]}
        streams |= {f"severity {severity}": of(severity, False) for severity in severities}
        if args.outliers:
            streams["clean, outliers"] = [data.with_outliers(None, 5)]
            streams |= {f"severity {severity}, outliers": of(severity, True) for severity in severities[-1:]}
        for name, parts in streams.items():
            found.setdefault(name, {})[way] = joined([run(classifier, part) for part in parts])

    sizes = f"{len(data.first)} images calibrate, {len(data.second)} are the stream"
    print(f"{args.model}, {args.data}: {sizes}; {args.corruptions}; threshold on {args.score}")
    wanted, score, mistaken = first  # of the source
    clean, objective = found["clean"]["source"], ways["source"].method.objective
    score = torch.cat([score.cpu(), score_of(args.score, objective, clean.logits)])
    mistaken = torch.cat([mistaken.cpu(), clean.logits.argmax(dim=1) != clean.labels])
    body = []
    for one in wanted:
        again = repeated(score, mistaken, one)
        if again is not None:
            *shares, draws = again
            body.append([percent(one.risk or 0), *map(percent, shares), str(draws)])
    head = ["promised", "measured", "splits above the promise", "answered", "splits with a promise"]
    quarter = len(score) // 4
    table(f"Clean, source, random splits: {quarter} images calibrate, {len(score) - quarter} measure (%)", head, body)
    for i, risk in enumerate(risks):
        body = []
        for name, runs in found.items():
            line = [name]
            for way, one in runs.items():
                promise, objective = promises[way][i], ways[way].method.objective
                known = None if promise is None else ~abstain.abstains(promise, objective, one.logits, None)
                share = 0.0 if known is None else known.double().mean().item()
                line.append("" if known is None else f"{percent(wrong(one, known))} ({percent(share)})")
            body.append(line)
        table(f"Risk, promised {percent(risk)}: % wrong among the answered (% answered)", ["", *ways], body)
    body = []
    for name, runs in found.items():
        line = [name]
        for way, one in runs.items():
            promise, objective = promises[way][-1], ways[way].method.objective
            assert promise is not None
            fixed = ~abstain.abstains(promise, objective, one.logits, None)
            for known in (fixed, one.answered):
                line.append(f"{percent(known.double().mean().item())} ({percent(wrong(one, known))})")
        body.append(line)
    head = [f"{way}, {kind}" for way in ways for kind in ("fixed", "following")]
    table(f"Coverage, promised {percent(args.coverage)}: % answered (% of them wrong)", ["", *head], body)
    for name, runs in found.items():
        body = []
        for way, one in runs.items():
            for score in SCORES:
                numbers = metrics.selective(rows(one), score=score)
                body.append([f"{way}, {score}", *(percent(value) for value in numbers.values())])
        table(f"{name}: by score", ["", "AURC↓", "Acc@50↑", "Acc@80↑", "Acc@90↑"], body)


if __name__ == "__main__":
    main()
