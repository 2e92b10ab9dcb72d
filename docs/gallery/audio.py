"""A classifier of sounds by their spectrogram: notes that a network was trained on, played through a bad telephone.

Finding: a spectrogram is an image with one channel, so what works on images works here. The telephone lowers the volume and
adds a hum, which BatchNorm's source statistics do not know; the guard finds that those of the stream serve better.
"""

import torch
from torch import nn

import come

torch.manual_seed(0)
NOTES, window, time = 6, torch.hann_window(128), torch.arange(1024) / 4000


def sounds(count, telephone=False):
    """Log-spectrograms (B, 1, 65, 17) and labels."""
    labels = torch.randint(NOTES, (count,))
    pitch = 220 * 2 ** (labels / NOTES + 0.05 * torch.randn(count))
    wave = sum((2 * torch.pi * k * pitch[:, None] * time).sin() / k for k in (1, 2, 3))
    wave = wave + 0.3 * torch.randn(wave.shape)
    if telephone:
        wave = 0.1 * wave + 0.5 * (2 * torch.pi * 50 * time).sin() + 0.05 * torch.randn(wave.shape)
    return torch.stft(wave, 128, 64, window=window, return_complex=True).abs().add(1e-3).log()[:, None], labels


blocks = [nn.Sequential(nn.Conv2d(c, 16, 5, 2), nn.BatchNorm2d(16), nn.ReLU()) for c in (1, 16)]
model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d((14, 1)), nn.Flatten(), nn.Linear(224, NOTES))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for x, y in (sounds(64) for _ in range(50)):
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step(), optimizer.zero_grad()

stream, both = [sounds(64, telephone=True) for _ in range(15)], (come.adapt(model, "source"), come.adapt(model))
right = [sum(int((c(x).argmax(1) == y).sum()) for x, y in stream) / 960 for c in both]
print(f"source {right[0]:.1%}, adapted {right[1]:.1%}")
assert right[1] > right[0] + 0.05
