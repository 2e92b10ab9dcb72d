"""Export to ONNX: adapt for a while, then ship the adapted model without `come`, and without torch.

Finding: ONNX Runtime gives the answers of `predict`, for any size of batch. Needs `pip install -e ".[export]"` and
`pip install onnxruntime`.
"""

import tempfile
from pathlib import Path

import onnxruntime
import torch

import come

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3)).eval()
classifier = come.adapt(model, "tent", lr=0.05, statistics="source")  # an answer depends on its own sample alone
for _ in range(5):
    classifier(torch.randn(32, 4) + 1)

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "adapted.onnx"
    classifier.export(file, torch.randn(2, 4))
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
for size in 1, 7:
    x = torch.randn(size, 4) + 1
    (logits,) = session.run(None, {"input": x.numpy()})
    assert torch.allclose(torch.from_numpy(logits), classifier.predict(x), atol=1e-5)
    assert not torch.allclose(torch.from_numpy(logits), model(x), atol=1e-3)  # it has adapted
print("ONNX Runtime agrees with predict()")
