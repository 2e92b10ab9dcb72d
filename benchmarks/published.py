"""Test-time adaptation as it is usually written, to be measured against: plain loops, in the style of the published code.

Each class takes a model, which it changes, and is called with a batch in place of the model: `backward`, `step` and `zero_grad`
of a torch optimizer, boolean indexing of the selected samples, loops over parameters, views and candidates, in float32.
`FastTent` is what a careful user would write by hand today. Augmentations are ours, on the device, where published code often
makes views on the CPU: that makes these baselines faster, not slower. `tests/test_speed_benchmark.py` holds Tent, EATA and SAR
to the numbers of `come.adapt`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from come.images.augment import augmix, jitter

Loss = Callable[[Tensor], Tensor]
"""Logits (B, K) -> entropies (B,)."""
NORMS = (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)


def entropy(logits: Tensor) -> Tensor:
    """EM: entropy of the softmax."""
    return -(logits.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1)


def opinion(logits: Tensor) -> Tensor:
    """COME: the K beliefs and the uncertainty, with the norm of the logits held, (B, K) -> (B, K + 1)."""
    norm = logits.norm(dim=1, keepdim=True)
    evidence = (logits / norm * norm.detach()).exp()
    classes = logits.shape[1]
    strength = evidence.sum(dim=1, keepdim=True) + classes
    return torch.cat([evidence / strength, classes / strength], dim=1)


def opinion_entropy(logits: Tensor) -> Tensor:
    """COME: entropy of the opinion."""
    masses = opinion(logits)
    return -(masses * masses.log()).sum(dim=1)


def norm_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Weights and biases of the norm layers."""
    layers = [module for module in model.modules() if isinstance(module, NORMS)]
    return [p for layer in layers for p in layer.parameters()]


def configure(model: nn.Module, parameters: Iterable[nn.Parameter] | None = None) -> list[nn.Parameter]:
    """Training mode, BatchNorm on the batch, gradients for `parameters` only (by default those of the norm layers)."""
    chosen = norm_parameters(model) if parameters is None else list(parameters)
    model.train()
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = None
    for parameter in chosen:
        parameter.requires_grad_(True)
    return chosen


class Tent:
    """Tent: one step down the mean entropy."""

    def __init__(self, model: nn.Module, lr: float, loss: Loss = opinion_entropy) -> None:
        self.model, self.loss = model, loss
        self.optimizer = torch.optim.SGD(configure(model), lr=lr, momentum=0.9)

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.model(x)
        self.loss(logits).mean(0).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return logits


class FastTent(Tent):
    """Tent by hand with what torch offers: a compiled model, bf16 autocast, a fused optimizer, channels last if asked."""

    def __init__(self, model: nn.Module, lr: float, loss: Loss = opinion_entropy, channels_last: bool = False) -> None:
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        super().__init__(model.to(memory_format=self.format), lr, loss)
        self.optimizer = torch.optim.SGD(self.optimizer.param_groups[0]["params"], lr=lr, momentum=0.9, fused=True)
        self.compiled = torch.compile(model)

    def __call__(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            logits = self.compiled(x.contiguous(memory_format=self.format)).float()
        self.loss(logits).mean(0).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return logits


class EATA:
    """EATA: reliable samples that are not redundant, and a Fisher term."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        source: Iterable[Tensor],
        margin: float,
        redundancy: float = 0.05,
        beta: float = 2000.0,
        loss: Loss = opinion_entropy,
    ) -> None:
        self.model, self.loss, self.margin, self.redundancy, self.beta = model, loss, margin, redundancy, beta
        parameters = configure(model)
        self.optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        self.average: Tensor | None = None
        self.share = 0.0
        self.fishers = self._fisher(source)

    def _fisher(self, source: Iterable[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        total = {name: torch.zeros_like(p) for name, p in named}
        batches = 0
        for x in source:
            logits = self.model(x)
            F.cross_entropy(logits, logits.argmax(dim=1)).backward()
            for name, p in named:
                total[name] += p.grad.detach() ** 2
            self.optimizer.zero_grad()
            batches += 1
        return {name: (total[name] / batches, p.detach().clone()) for name, p in named}

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.model(x)
        entropies = self.loss(logits)
        margin = self.margin * math.log(logits.shape[1])
        reliable = torch.where(entropies < margin)[0]
        entropies = entropies[reliable]
        probabilities = logits[reliable].softmax(dim=1).detach()
        new = torch.arange(len(reliable), device=x.device)
        if self.average is not None:
            similarity = F.cosine_similarity(self.average[None], probabilities, dim=1)
            new = torch.where(similarity.abs() < self.redundancy)[0]
        entropies, probabilities = entropies[new], probabilities[new]
        loss = (entropies * (1 / (entropies.detach() - margin).exp())).mean(0)
        for name, p in self.model.named_parameters():
            if name in self.fishers:
                fisher, before = self.fishers[name]
                loss = loss + self.beta * (fisher * (p - before) ** 2).sum()
        used = len(x[reliable][new])
        if used:
            mean = probabilities.mean(0)
            self.average = mean if self.average is None else 0.9 * self.average + 0.1 * mean
            loss.backward()
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.share = used / len(x)
        return logits


class SAM:
    """Sharpness-aware minimization around SGD, parameter by parameter."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, rho: float = 0.05) -> None:
        self.parameters, self.rho = parameters, rho
        self.base = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        self.before: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def climb(self) -> None:
        """To the sharpest point nearby."""
        norm = torch.stack([p.grad.norm() for p in self.parameters if p.grad is not None]).norm()
        scale = self.rho / (norm + 1e-12)
        for p in self.parameters:
            if p.grad is not None:
                self.before[p] = p.detach().clone()
                p.add_(p.grad * scale)
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        """A step from where the climb began, along the gradient found up there."""
        for p, before in self.before.items():
            p.copy_(before)
        self.base.step()
        self.base.zero_grad()


class SAR:
    """SAR: reliable samples, two passes, recovery."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        parameters: Iterable[nn.Parameter],
        margin: float,
        recover_below: float = 0.2,
        loss: Loss = opinion_entropy,
    ) -> None:
        self.model, self.loss, self.margin, self.recover_below = model, loss, margin, recover_below
        self.optimizer = SAM(configure(model, parameters), lr)
        self.first = deepcopy(model.state_dict())
        self.average: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.model(x)
        entropies = self.loss(logits)
        margin = self.margin * math.log(logits.shape[1])
        reliable = torch.where(entropies < margin)[0]
        entropies[reliable].mean(0).backward()
        self.optimizer.climb()
        again = self.loss(self.model(x))[reliable]
        loss = again[torch.where(again < margin)[0]].mean(0)
        value = loss.item()
        if not math.isnan(value):
            self.average = value if self.average is None else 0.9 * self.average + 0.1 * value
        loss.backward()
        self.optimizer.descend()
        if self.average is not None and self.average < self.recover_below:
            self.model.load_state_dict(self.first)
            self.average = None
        return logits


class CoTTA:
    """CoTTA with all its views in every batch: a student, its teacher and the source as three models."""

    def __init__(
        self, model: nn.Module, lr: float, views: int = 32, alpha: float = 0.999, restore: float = 0.01
    ) -> None:
        self.source, self.teacher = deepcopy(model).eval(), deepcopy(model)
        self.model, self.views, self.alpha, self.restore = model, views, alpha, restore
        self.source.requires_grad_(False)
        self.teacher.requires_grad_(False)
        chosen = [p for name, p in model.named_parameters() if name.rpartition(".")[2] in ("weight", "bias")]
        self.optimizer = torch.optim.SGD(configure(model, chosen), lr=lr, momentum=0.9)
        self.first = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        self.augment = jitter()

    def __call__(self, x: Tensor) -> Tensor:
        student = self.model(x)
        draw = torch.Generator(x.device).manual_seed(0)
        with torch.no_grad():
            target = self.teacher(x)
            if self.source(x).softmax(dim=1).amax(dim=1).mean() < 1:
                target = torch.stack([self.teacher(self.augment(x, draw)) for _ in range(self.views)]).mean(0)
        ours, theirs = opinion(student), opinion(target)
        loss = -0.5 * (theirs * ours.log()).sum(dim=1) - 0.5 * (ours * theirs.log()).sum(dim=1)
        loss.mean(0).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for mine, teachers in zip(self.model.parameters(), self.teacher.parameters(), strict=True):
                teachers.copy_(self.alpha * teachers + (1 - self.alpha) * mine)
            for name, p in self.model.named_parameters():
                if name in self.first:
                    mask = (torch.rand(p.shape, device=p.device) < self.restore).float()
                    p.copy_(self.first[name] * mask + p * (1 - mask))
        return target


class MEMO:
    """MEMO: image by image, a step on its views, the answer, and back."""

    def __init__(self, model: nn.Module, lr: float, views: int = 32) -> None:
        self.model, self.lr, self.views, self.augment = model.eval(), lr, views, augmix()
        self.first = deepcopy(model.state_dict())

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([self._one(image[None], i) for i, image in enumerate(x)])

    def _one(self, image: Tensor, seed: int) -> Tensor:
        self.model.load_state_dict(self.first)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr)
        draw = torch.Generator(image.device).manual_seed(seed)
        views = self.augment(image.expand(self.views, *image.shape[1:]), draw)
        masses = opinion(self.model(views)).mean(0)
        (-(masses * masses.log()).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            return self.model(image)


class TEA:
    """TEA: dreams from a replay buffer on the CPU, then one step on the difference of energies."""

    def __init__(self, model: nn.Module, lr: float, like: Tensor, buffer: int, dreams: int = 20) -> None:
        self.model, self.dreams = model, dreams
        self.optimizer = torch.optim.SGD(configure(model), lr=lr, momentum=0.9)
        self.buffer = torch.rand(buffer, *like.shape[1:])

    def __call__(self, x: Tensor) -> Tensor:
        places = torch.randint(len(self.buffer), (len(x),))
        fresh = (torch.rand(len(x)) < 0.05).float()[:, None, None, None]
        dream = (fresh * torch.rand(x.shape) + (1 - fresh) * self.buffer[places]).to(x.device).requires_grad_()
        for _ in range(self.dreams):
            (slope,) = torch.autograd.grad(self.model(dream).logsumexp(dim=1).sum(), dream)
            dream.data += 0.1 * slope + 0.01 * torch.randn_like(dream)
        dream = dream.detach()
        self.buffer[places] = dream.cpu()
        energies = [-self.model(images).logsumexp(dim=1).mean() for images in (x, dream)]
        (energies[0] - energies[1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            return self.model(x)


class FOA:
    """FOA on a ViT of timm: prompts by CMA-ES, candidates one after another."""

    def __init__(
        self, model: nn.Module, source: Tensor, prompts: int = 3, population: int = 28, loss: Loss = opinion_entropy
    ) -> None:
        import cma

        self.model, self.loss, self.population = model.eval().requires_grad_(False), loss, population
        self.shape = (prompts, model.embed_dim)
        self.best = (torch.rand(self.shape, device=source.device) * 2 - 1) * (6 / model.embed_dim) ** 0.5 / 2
        options = {"popsize": population - 1, "seed": 1, "maxiter": math.inf, "verbose": -9}
        self.search = cma.CMAEvolutionStrategy([0.0] * self.best.numel(), 1.0, options)
        with torch.no_grad():
            features = self._features(source, None)
        self.mean, self.std = features.mean(0), features.std(0)
        self.history: Tensor | None = None

    def _features(self, x: Tensor, prompts: Tensor | None) -> Tensor:
        """Class tokens of all blocks, each behind the first norm of the next one, (B, L d)."""
        model = self.model
        tokens = model._pos_embed(model.patch_embed(x))
        if prompts is not None:
            tokens = torch.cat([tokens[:, :1], prompts.expand(len(x), -1, -1), tokens[:, 1:]], dim=1)
        following = [*(block.norm1 for block in model.blocks[1:]), model.norm]
        found = []
        for block, norm in zip(model.blocks, following, strict=True):
            tokens = block(tokens)
            found.append(norm(tokens[:, 0]))
        return torch.cat(found, dim=1)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        drawn = [*self.search.ask(), self.best.flatten().double().cpu().numpy()]
        values, means, lowest = [], [], math.inf
        width = self.shape[1]
        for one in drawn:
            prompts = torch.as_tensor(one, dtype=x.dtype, device=x.device).view(self.shape)
            features = self._features(x, prompts)
            logits = self.model.head(features[:, -width:])
            distance = (features.std(0) - self.std).square().sum() + (features.mean(0) - self.mean).square().sum()
            value = (self.loss(logits).sum() + 0.4 * len(x) / 64 * distance).item()
            means.append(features[:, -width:].mean(0))
            values.append(value)
            if value < lowest:
                lowest, self.best, answer = value, prompts, features[:, -width:]
        mean = torch.stack(means).mean(0)
        self.history = mean if self.history is None else 0.9 * self.history + 0.1 * mean
        self.search.tell(drawn, values)
        return self.model.head(answer + self.mean[-width:] - self.history)


def torch_ttt(model: nn.Module, lr: float, **parameters: object) -> nn.Module:
    """Tent of the package torch-ttt (EM, Adam); it adapts in evaluation mode, and answers by a forward after its steps."""
    from torch_ttt.engine.tent_engine import TentEngine

    return TentEngine(model, {"lr": lr, **parameters}).eval()
