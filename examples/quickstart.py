"""Train a small classifier, let the world shift, and adapt to it while predicting.

A stand-in for your own model and stream that needs nothing but torch and takes a few seconds: eight classes of noisy
waveforms, then the same waveforms from a sensor with drift, gain and noise that the classifier has never seen.
"""

import math

import torch
from torch import nn

import come

CLASSES, LENGTH = 8, 64


def waveforms(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Sine waves whose frequency is the class, (count, 1, LENGTH), and their labels."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    phase = 2 * math.pi * torch.rand(count, 1, generator=generator)
    t = torch.linspace(0, 1, LENGTH)
    waves = torch.sin(2 * math.pi * (labels[:, None] + 1) * t + phase)
    return (waves + 1.5 * torch.randn(waves.shape, generator=generator))[:, None], labels


def shifted(waves: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same waveforms from a worse sensor: lower gain, a slow drift, more noise."""
    drift = 0.5 * torch.linspace(-1, 1, LENGTH)
    return 0.5 * waves + drift + 0.3 * torch.randn(waves.shape, generator=generator)


def block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv1d(inputs, outputs, 7, padding=3), nn.BatchNorm1d(outputs), nn.ReLU(), nn.MaxPool1d(2))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is too small to share
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(block(1, 32), block(32, 32), block(32, 32), nn.Flatten(), nn.Linear(32 * 8, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        x, y = waveforms(128, generator)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    stream = [waveforms(64, generator) for _ in range(40)]
    stream = [(shifted(x, generator), y) for x, y in stream]
    source_data = [waveforms(64, generator)[0] for _ in range(10)]

    clean = [waveforms(64, generator) for _ in range(10)]  # labelled, and not trained on

    # A large step, because the stream is short: forty batches must show what takes thousands in the world.
    runs = {
        "source": {},
        "norm": {},
        "tent": {"lr": 0.02},
        "eata": {"lr": 0.02, "source": source_data},
        "sar": {"lr": 0.02},
    }
    labels = torch.cat([y for _, y in stream])
    print("on the shifted stream   accuracy   answered   right of these")
    for method, arguments in runs.items():
        for objective in ("em", "come") if "lr" in arguments else ("em",):
            with come.adapt(model, method, objective=objective, **arguments) as classifier:
                classifier.calibrate(clean, risk=0.05)  # at most 5% of the answers are wrong, on data like `clean`
                steps = [classifier.step(x) for x, _ in stream]
            right = torch.cat([step.logits.argmax(dim=1) for step in steps]) == labels
            answered = ~torch.cat([step.abstain for step in steps])
            accuracy, coverage, selective = (value.float().mean() for value in (right, answered, right[answered]))
            name = f"{method} + {objective}" if "lr" in arguments else method
            print(f"  {name:<20} {100 * accuracy:9.1f}% {100 * coverage:9.1f}% {100 * selective:15.1f}%")
    print("The promise was made on data without the shift: under it more than 5% of the answers are wrong.")


if __name__ == "__main__":
    main()
