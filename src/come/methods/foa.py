"""FOA: prompts found by evolution.

Niu et al., "Test-Time Model Adaptation with Only Forward Passes", ICML 2024.

    prompts   sit between the class token and the patches; CMA-ES draws `population` - 1 candidates for each batch, and the
              best of the batch before competes as well
    fitness   sum_i H_i + lambda * B/64 * (|std - std_source|^2 + |mean - mean_source|^2)
              over class-token features of all blocks, each behind the first norm of the next one
    answer    of the best candidate, its last feature moved by  shift = mean_source - average of means so far

Adapts prompts and a shift; no parameter of the model changes. Needs source batches for the statistics, a class token, and a
model whose logits come from one linear layer: timm's, torchvision's and transformers' ViTs, or any stack of blocks that take
tokens (B, N, d). `population` forwards per batch, in chunks; the patch embedding is computed once. H is the objective's
entropy: with "em" this is the published fitness.

Memory: that of one forward of `chunk` images, and CMA-ES's covariance on the CPU: (prompts x d)^2 numbers, 42 MB for ViT-B.
CMA-ES (the package `cma`) runs on the CPU, so each batch waits for its fitness.

Deviations from the published code: the width is the model's, not a constant; a batch of one has no standard deviation, and
that term is left out; `cma` draws from its own generator, where that code seeds NumPy's global one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from come.errors import ConfigError, InputError, ModelError, pip_install, require, require_int
from come.method import Context, Method, Step, register
from come.model.heads import Head
from come.model.inputs import Input, Inputs
from come.select import Selector, blocks, norms, nothing


class Search(Protocol):
    """A derivative-free optimizer: asked for candidates, then told their fitness (lower is better)."""

    def ask(self, batch: int) -> Tensor:
        """Candidates (n, D) for batch number `batch`."""

    def tell(self, candidates: Tensor, fitness: Tensor) -> None:
        """The fitness (n,) of candidates (n, D)."""

    def state(self) -> dict[str, Tensor]:
        """Everything that the next candidates depend on."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a state."""


@register
@dataclass(kw_only=True, eq=False)
class FOA(Method):
    """Forward-only adaptation, with any objective.

    Args:
        source: batches of unlabelled source data, read once and not kept; the paper uses 32 images.
        prompts: how many, at least 1; or the first ones themselves, (P, d).
        population: candidates for each batch, the best so far included, at least 3.
        discrepancy: lambda, the weight of the distance to the source statistics, >= 0.
        keep: how much of the average behind the shift is kept at each step, in [0, 1].
        chunk: largest number of images that go through the model at once.
        head: the linear layer that gives the logits, or its name; None finds it.
        search: (dimensions, population, seed) -> `Search`; None is CMA-ES.
        seed: of the first prompts and the search.

    Example:
        >>> import come
        >>> from come.testing import TinyTransformer
        >>> method = FOA(source=[torch.randn(16, 3, 8, 8)], prompts=2, population=4)
        >>> come.adapt(TinyTransformer(nn.BatchNorm2d), method)(torch.randn(8, 3, 8, 8)).shape
        torch.Size([8, 5])
    """

    name = "foa"
    vectors_only = "its statistics are of the class token"
    unexported = "it adapts prompts and a shift of the features, not weights of the model"
    needs = "source, a ViT"
    waits = "CMA-ES runs on the CPU"
    cost = "28f"
    descends = False
    undivided = "it puts prompts into the model for the whole batch, and its search is not of tensors"
    batch_statistics = False
    on_host = ("search.",)
    select: Selector = nothing()
    source: Iterable[Input] | None = None
    prompts: int | Tensor = 3
    population: int = 28
    discrepancy: float = 0.4
    keep: float = 0.9
    chunk: int = 256
    head: str | nn.Module | None = None
    search: Callable[[int, int, int], Search] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.prompts, Tensor):
            shape = tuple(self.prompts.shape)
            require(self.prompts.ndim == 2 and len(self.prompts) >= 1, "prompts", shape, "of shape (P, d)")
        else:
            require_int("prompts", self.prompts, 1)
        require_int("population", self.population, 3)
        require(self.discrepancy >= 0, "discrepancy", self.discrepancy, ">= 0")
        require(0 <= self.keep <= 1, "keep", self.keep, "in [0, 1]")
        require_int("chunk", self.chunk, 1)

    def setup(self, ctx: Context) -> dict[str, Any]:
        """The places where tokens enter and features leave, and the statistics of the source."""
        if self.source is None:
            raise ConfigError(
                "foa needs source batches for its statistics: pass source=, an iterable of batches with 32 or more "
                "unlabelled source images in all"
            )
        if self.search is None:
            _packages()  # if they are missing, say so before the source data is read
        ctx.fixed["head"] = Head(ctx.model.model, self.head)
        tokens, found = None, []
        with torch.no_grad():
            for batch in self.source:
                x = ctx.model.read((batch,))
                tokens = tokens or _Tokens.found(ctx, x)
                seen = _Seen()
                ctx.forward(x, hooks=tokens.hooks(seen, None, None))
                found.append(seen.class_tokens())
        if tokens is None or sum(map(len, found)) < 2:
            raise ConfigError(
                "source must hold at least 2 images for a standard deviation, better 32 or more, got "
                f"{sum(map(len, found))} (an exhausted iterator?)"
            )
        if isinstance(self.prompts, Tensor):
            width = self.prompts.shape[1]
            require(width == tokens.width, "the width of prompts", width, f"the model's, {tokens.width}")
        features = torch.cat(found)
        return {
            "head": ctx.fixed["head"],
            "tokens": tokens,
            "source_mean": features.mean(dim=0),
            "source_std": features.std(dim=0),
            "live": {},
        }

    def initial_state(self, ctx: Context, x: Inputs) -> dict[str, Tensor]:
        """The first prompts, no shift, and a new search."""
        width = ctx.fixed["tokens"].width
        if isinstance(self.prompts, Tensor):
            best = self.prompts.detach().clone().to(ctx.device)
        else:
            draw = torch.Generator().manual_seed(self.seed)
            best = (torch.rand(self.prompts, width, generator=draw) * 2 - 1).to(ctx.device) * (6 / width) ** 0.5 / 2
        search = (self.search or CMAES)(best.numel(), self.population, self.seed)
        return {
            "best": best,
            "history": ctx.fixed["source_mean"][-width:].clone(),  # no shift
            "shifted": torch.zeros((), dtype=torch.bool, device=ctx.device),
            **{f"search.{name}": value for name, value in search.state().items()},
        }

    def predict(self, ctx: Context, x: Inputs) -> Tensor:
        """The answer with the best prompts so far."""
        _, features, _ = self._evaluate(ctx, x, ctx.state["best"][None])
        return self._answer(ctx, features[0])

    @torch.no_grad()
    def adapt(self, ctx: Context, x: Inputs) -> Step:
        """Evaluate the population, answer with its best candidate, and tell the search."""
        search = self._search(ctx)
        best = ctx.state["best"]
        drawn = search.ask(ctx.count)
        candidates = torch.cat([torch.unflatten(drawn.to(best), 1, best.shape), best[None]])
        logits, features, statistics = self._evaluate(ctx, x, candidates)
        entropy = self.objective.entropy(logits)
        doubt = torch.where(ctx.valid, entropy, 0).sum(dim=1)
        fitness = doubt + self.discrepancy * x.size / 64 * self._distance(ctx, statistics)
        fitness = fitness.nan_to_num(math.inf, math.inf, math.inf).clamp_max(torch.finfo(fitness.dtype).max)
        chosen = int(fitness.argmin())
        answer = self._answer(ctx, features[chosen])

        mean = statistics.mean(dim=1).mean(dim=0)[-ctx.fixed["tokens"].width :]
        old = torch.where(ctx.state["shifted"], ctx.state["history"].to(mean), mean)
        ctx.state["history"] = torch.lerp(mean, old, self.keep)
        ctx.state["shifted"] = torch.ones_like(ctx.state["shifted"])
        ctx.state["best"] = candidates[chosen].clone()
        # The search recognizes its own candidates by their exact values, so they are not rounded.
        told = torch.cat([drawn.double().cpu(), best.double().flatten()[None].cpu()])
        search.tell(told, fitness.double().cpu())
        now = search.state()
        ctx.state |= {f"search.{name}": value for name, value in now.items()}
        ctx.fixed["live"]["search"] = (search, now)
        return Step(answer, entropy[chosen], ctx.valid)

    def _answer(self, ctx: Context, features: Tensor) -> Tensor:
        """Logits of features (B, d) after the shift."""
        width = ctx.fixed["tokens"].width
        shift = ctx.fixed["source_mean"][-width:] - ctx.state["history"]
        linear: nn.Linear = ctx.fixed["head"].linear
        answer: Tensor = linear(features + torch.where(ctx.state["shifted"], shift, 0).to(features))
        return answer

    def _distance(self, ctx: Context, statistics: Tensor) -> Tensor:
        """Squared distance of each candidate's statistics (C, B, D) to the source's, (C,)."""
        total: Tensor = (statistics.mean(dim=1) - ctx.fixed["source_mean"].to(statistics)).square().sum(dim=1)
        if statistics.shape[1] > 1:
            total = total + (statistics.std(dim=1) - ctx.fixed["source_std"].to(statistics)).square().sum(dim=1)
        return total

    def _evaluate(self, ctx: Context, x: Inputs, candidates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (C, B, K), features before the head (C, B, d) and class tokens of all blocks (C, B, L d)."""
        at_once = max(1, self.chunk // x.size)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        tokens: Tensor | None = None
        for some in torch.split(candidates, at_once):
            # The first call embeds the patches of the whole batch. Later ones hand the model one image, whose tokens are
            # replaced on their way into the first block by those of the batch.
            inputs = x if tokens is None else x.take(slice(0, 1))
            seen = _Seen()
            hooks = ctx.fixed["tokens"].hooks(seen, some, tokens)
            features, logits = ctx.features(inputs, hooks=hooks, size=len(some) * x.size)
            tokens = seen.tokens
            parts.append((logits, features, seen.class_tokens()))
        logits, features, statistics = (
            torch.unflatten(torch.cat(part), 0, (len(candidates), x.size)) for part in zip(*parts, strict=True)
        )
        return logits, features, statistics

    def _search(self, ctx: Context) -> Search:
        """The search of the state: the last batch's object, unless a reset, a load or a refused update came between."""
        mine = {name.removeprefix("search."): v for name, v in ctx.state.items() if name.startswith("search.")}
        live = ctx.fixed["live"].pop("search", None)
        if live is not None and all(mine.get(name) is value for name, value in live[1].items()):
            found: Search = live[0]
            return found
        search = (self.search or CMAES)(ctx.state["best"].numel(), self.population, self.seed)
        search.restore(mine)
        return search


class _Seen:
    """The tensors that passed while a model ran."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.taps: list[Tensor] = []

    def class_tokens(self) -> Tensor:
        """(N, L d): the class tokens of all blocks side by side."""
        return torch.cat([tap[:, 0] if tap.ndim == 3 else tap for tap in self.taps], dim=1)


class _Tokens:
    """The first block of a ViT, where tokens enter, and the norm layers after each block."""

    def __init__(self, first: nn.Module, width: int, taps: list[nn.Module]) -> None:
        self.first, self.width, self.taps = first, width, taps

    @classmethod
    def found(cls, ctx: Context, x: Inputs) -> _Tokens:
        """Find them while the model runs on `x`."""
        model = ctx.model.model
        kind, names = type(model).__name__, blocks(model)
        refusal = f"foa puts prompts among the tokens of a vision transformer, but {kind} "
        if not names:
            raise ModelError(refusal + "has no stack of blocks; use another method ('come list methods')")
        first = model.get_submodule(names[0])
        order: list[str] = []
        shapes: list[torch.Size] = []

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            shapes.append(_hidden(args, kwargs)[0].shape)

        def noting(name: str, layer: nn.Module) -> Callable[[], Any]:
            return lambda: layer.register_forward_hook(lambda *_: order.append(name))

        layers = norms(model)
        hooks = [noting(name, layer) for name, layer in layers.items()]
        ctx.model.call(x, ctx.weights, hooks=[lambda: first.register_forward_pre_hook(enter, with_kwargs=True), *hooks])
        if len(shapes) != 1 or len(shapes[0]) != 3:
            got = f"takes {tuple(shapes[0])}" if shapes else "is never run"
            raise ModelError(
                refusal
                + f"has none: its first block {got}, not tokens (B, N, d); use another method ('come list methods')"
            )
        class_token = getattr(model, "num_prefix_tokens", None)
        if class_token is None:
            class_token = any(p.ndim == 3 and p.shape[:2] == (1, 1) for p in model.parameters())
        if not class_token:
            raise ModelError(refusal + "has no class token, whose features foa compares; use another method")
        first_norms = (next((n for n in order if n.startswith(f"{name}.")), None) for name in names[1:])
        taps = [layers[name] for name in first_norms if name is not None]
        last = max((i for i, n in enumerate(order) if any(n.startswith(f"{b}.") for b in names)), default=-1)
        if len(taps) != len(names) - 1 or last + 1 >= len(order):
            raise ModelError(refusal + "does not have a norm in each block and one behind the last; use another method")
        return cls(first, shapes[0][-1], [*taps, layers[order[last + 1]]])

    def hooks(self, seen: _Seen, prompts: Tensor | None, tokens: Tensor | None) -> list[Callable[[], Any]]:
        """Hooks for a forward in which the first block gets each of `prompts` (C, P, d) with the batch, (C B, N + P, d).

        The batch's tokens are `tokens`, or those that arrive; afterwards they and the outputs of the taps are in `seen`.
        """

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            coming, put = _hidden(args, kwargs)
            seen.tokens = coming if tokens is None else tokens
            if prompts is None:
                return None
            base = seen.tokens.expand(len(prompts), *seen.tokens.shape)
            middle = prompts.to(base)[:, None].expand(-1, base.shape[1], -1, -1)
            return put(torch.cat([base[:, :, :1], middle, base[:, :, 1:]], dim=2).flatten(0, 1))

        def tapping(tap: nn.Module) -> Callable[[], Any]:
            return lambda: tap.register_forward_hook(lambda _, __, out: seen.taps.append(out))

        return [
            lambda: self.first.register_forward_pre_hook(enter, with_kwargs=True),
            *(tapping(tap) for tap in self.taps),
        ]


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """The tokens among the arguments of a block, and a function that replaces them."""
    if args and isinstance(args[0], Tensor):
        return args[0], lambda new: ((new, *args[1:]), kwargs)
    named = next((key for key, value in kwargs.items() if isinstance(value, Tensor) and value.ndim >= 3), None)
    if named is not None:
        return kwargs[named], lambda new: (args, {**kwargs, named: new})
    raise InputError("the first block of the model takes no tensor; foa cannot find its tokens")


def _packages() -> tuple[Any, Any]:
    try:
        import cma
        import numpy
    except ImportError as error:
        raise ConfigError(
            f"foa searches with the package cma, which is missing; install it with: {pip_install('foa')}"
        ) from error
    return cma, numpy


class CMAES:
    """CMA-ES of the package `cma`, with its own random numbers and a state made of tensors.

    Args:
        dimensions: D.
        population: candidates told at each step; one of them comes from outside, so population - 1 are drawn.
        seed: of the draws.

    Example:
        >>> search = CMAES(4, 6, 0)
        >>> candidates = search.ask(0)
        >>> candidates.shape
        torch.Size([5, 4])
        >>> search.tell(candidates, candidates.square().sum(dim=1))
    """

    def __init__(self, dimensions: int, population: int, seed: int) -> None:
        cma, np = _packages()
        self._seed, self._numpy = seed, np
        self._random = np.random.default_rng([seed % 2**64, 0])
        options = {
            "popsize": population - 1,
            "seed": float("nan"),  # do not touch NumPy's global generator
            "randn": self._draw,
            "maxiter": float("inf"),
            "CMA_mirrors": 0,  # `cma` would mirror candidates in populations below 6, with memory that is not in numbers
            "verbose": -9,
        }
        self._es = cma.CMAEvolutionStrategy(np.zeros(dimensions), 1.0, options)

    def _draw(self, *shape: int) -> Any:
        return self._random.standard_normal(shape)

    def ask(self, batch: int) -> Tensor:
        """Candidates (population - 1, D), which depend on the seed, the number of the batch and what was told."""
        self._random = self._numpy.random.default_rng([self._seed % 2**64, batch])
        return torch.from_numpy(self._numpy.stack(self._es.ask()))

    def tell(self, candidates: Tensor, fitness: Tensor) -> None:
        """Update the strategy; candidates may come from outside."""
        self._es.tell(list(candidates.double().numpy()), fitness.double().tolist())

    def _parts(self) -> dict[str, Any]:
        es = self._es
        return {"es": es, "sampler": es.sm, "step_size": es.adapt_sigma, "scaling": es.sigma_vec}

    def state(self) -> dict[str, Tensor]:
        """Every finite number and array of the strategy; infinite ones are limits, which a new one has too."""
        np = self._numpy
        found: dict[str, Tensor] = {}
        for part, thing in self._parts().items():
            for name, value in vars(thing).items():
                if (
                    isinstance(value, (bool, int, float, np.number, np.ndarray))
                    and np.asarray(value).dtype.kind in "bif"
                    and np.isfinite(value).all()
                ):
                    found[f"{part}.{name}"] = torch.from_numpy(np.array(value))
        directions = self._es.pop_injection_directions
        found["directions"] = torch.from_numpy(np.array(directions).reshape(len(directions), self._es.N))
        return found

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from `state()`."""
        self._es.ask()  # some of its attributes are made on first use
        for key, value in state.items():
            part, _, name = key.partition(".")
            if part in self._parts():
                array = value.numpy().copy()
                setattr(self._parts()[part], name, array if array.ndim else array.item())
        self._es.pop_injection_directions = list(state["directions"].numpy().copy())
