"""Every recorded trajectory of the published implementations, replayed."""

from __future__ import annotations

import math

import pytest
import torch

import come
from come.method import Context
from come.methods.t3a import EMPTY
from come.select import norm_affine

LN_K = math.log(1000)
PUBLISHED = {False: "em", True: come.Opinion(eps=1e-7)}
SELECTED = {"sar_allnorm": {"select": norm_affine()}}


class Recorder:
    """The objective, remembering every entropy it gave: what a method saw, in order."""

    def __init__(self, monkeypatch):
        self.seen = []
        original = come.Objective.entropy

        def entropy(objective, logits):
            value = original(objective, logits)
            self.seen.append(value.detach().clone())
            return value

        monkeypatch.setattr(come.Objective, "entropy", entropy)


@pytest.fixture
def recorder(monkeypatch):
    """Every entropy of every sample: nothing may be left out to save work. `test_modes.py` compares with that, too."""
    monkeypatch.setattr(Context, "separate", False)
    return Recorder(monkeypatch)


def adapt(model, method, objective="come", **more):
    """As published: BatchNorm on the statistics of the batch. The guard is on all the same, and changes no answer: with
    "recover" it would stop the rates that some were recorded with.
    """
    return come.adapt(model, method, objective=objective, statistics="batch", guard=come.Guard(policy="warn"), **more)


def replay(method, case, each=lambda step: None):
    logits = []
    for t in range(case.hyper["T"]):
        step = method.step(case.batch(t))
        each(step)
        logits.append(step.logits)
    case.close("logits", torch.stack(logits))


def check_final(method, case):
    assert list(method.adapted_parameters) == case.entry["adapted_parameters"]
    for name, parameter in method.adapted_parameters.items():
        case.close(f"final.{name}", parameter)


def after_reset(method, case):
    return torch.stack([method(case.batch(6)), method(case.batch(7))])


@pytest.mark.recorded("none")
def test_base(case):
    case.close("eval_logits", adapt(case.model(), "source")(case.batch(0)))
    if "batch_stat_logits" in case:
        case.close("batch_stat_logits", adapt(case.model(), "norm")(case.batch(0)))


@pytest.mark.recorded("tent", "tent_come")
def test_tent(case, recorder):
    method = adapt(case.model(), "tent", PUBLISHED[case.hyper["come"]], lr=case.hyper["lr"], steps=case.hyper["steps"])
    replay(method, case)
    case.close("entropy", torch.stack(recorder.seen).view(case["entropy"].shape))
    check_final(method, case)
    if "after_reset_logits" in case:
        method.reset()
        case.close("after_reset_logits", after_reset(method, case))


@pytest.mark.recorded("eata", "eata_come")
def test_eata(case, recorder, source_batches):
    method = adapt(
        case.model(),
        "eata",
        PUBLISHED[case.hyper["come"]],
        lr=case.hyper["lr"],
        steps=case.hyper["steps"],
        margin=case.hyper["e_margin"] / LN_K,
        redundancy=case.hyper["d_margin"],
        beta=case.hyper["fisher_beta"] if case.hyper["fisher"] else 0.0,
        source=source_batches if case.hyper["fisher"] else None,
    )
    if case.hyper["fisher"]:
        for name, value in method._engine.model.named(method._engine.transition.fixed["fisher"]).items():
            case.close(f"fisher.{name}", value)

    # Count what was selected in every inner step, as the recording does.
    selected, peaks = [], []
    inner = method.method.adapt

    def watched(ctx, x):
        step = inner(ctx, x)
        reliable = (recorder.seen[-1] < case.hyper["e_margin"]).sum()
        selected.append(torch.stack([reliable, step.used.sum()]))
        return step

    method.method.adapt = watched
    replay(method, case, each=lambda _: peaks.append(method.state["average"].max()))
    case.close("n_selected", torch.stack(selected).view(case.hyper["T"], case.hyper["steps"], 2).sum(dim=1))
    case.close("entropy", torch.stack(recorder.seen).view(case["entropy"].shape))
    case.close("probs_ema_final", method.state["average"])
    case.close("probs_ema_max", torch.stack(peaks))
    check_final(method, case)

    if "after_reset_logits" in case:
        # Published: the average survives a reset. Ours forgets it, so the leak is put back by hand.
        leaking = method.state
        method.reset()
        method._state = method._state._replace(state=leaking)
        case.close("after_reset_logits", after_reset(method, case))
        if "fresh_logits" in case:
            method.reset()
            case.close("fresh_logits", after_reset(method, case))


def sar(case, quirks):
    come_objective = case.hyper["variant"] == "sar_come"
    return adapt(
        case.model(),
        "sar",
        PUBLISHED[come_objective],
        lr=case.hyper["lr"],
        steps=case.hyper["steps"],
        margin=case.hyper["margin_e0"] / LN_K,
        rho=case.hyper["rho"],
        quirks=quirks,
        **SELECTED.get(case.hyper["variant"], {}),
    )


@pytest.mark.recorded("sar", "sar_come")
def test_sar(case, recorder):
    method = sar(case, quirks=True)
    counts, averages, recoveries = [], [], []
    inner = method.method.adapt

    def watched(ctx, x):
        step = inner(ctx, x)
        counts.append(torch.stack([(recorder.seen[-2] < case.hyper["margin_e0"]).sum(), step.used.sum()]))
        return step

    def each(_):
        averages.append(torch.where(method.state["averaged"], method.state["average"], torch.nan))
        recoveries.append(method.state["recoveries"].clone())

    method.method.adapt = watched
    replay(method, case, each)
    case.close("n_selected", torch.stack(counts).view(case["n_selected"].shape))
    case.close("ema", torch.stack(averages))
    case.close("reset_flag", torch.stack(recoveries).diff(prepend=torch.zeros(1, dtype=torch.int64)))
    case.close("entropy", torch.stack(recorder.seen).view(case["entropy"].shape))
    check_final(method, case)

    if "after_reset_leaky_logits" in case:
        # Published: momentum survives a reset. Ours forgets it, so the leak is put back by hand.
        leaking = {k: v for k, v in method.state_dict().items() if k.startswith("moment.")}
        method.reset()
        method.load_state_dict({**method.state_dict(), **leaking})
        case.close("after_reset_leaky_logits", after_reset(method, case))
        method.reset()
        case.close("fresh_logits", after_reset(method, case))


@pytest.mark.recorded("sar", "sar_come")
def test_sar_without_quirks_agrees_until_they_matter(case):
    """The default agrees up to the step after the first recovery, or the first batch without a reliable sample."""
    method = sar(case, quirks=False)
    empty = (case["n_selected"].sum(dim=1)[:, 1] == 0) if case["n_selected"].ndim == 3 else torch.zeros(0)
    matters = [t for t in range(case.hyper["T"]) if empty[t] or case["reset_flag"][t]]
    last = min([matters[0] + 1 if case["reset_flag"][matters[0]] else matters[0]] if matters else [case.hyper["T"]])
    for t in range(min(last + 1, case.hyper["T"])):
        error = (method(case.batch(t)) - case["logits"][t]).abs().max().item()
        assert error <= case.entry["tolerance"]["logits"]["atol"], f"step {t}: {error}"


@pytest.mark.recorded("losses")
def test_loss_table(case):
    z = case["logits"].clone().requires_grad_()
    opinion, softmax = PUBLISHED[True], come.Softmax()
    entropy = opinion.entropy(z)
    case.close("opinion_entropy", entropy.detach())
    case.close("opinion_entropy_grad", torch.autograd.grad(entropy.sum(), z)[0])
    entropy = softmax.entropy(z)
    case.close("softmax_entropy", entropy.detach())
    case.close("softmax_entropy_grad", torch.autograd.grad(entropy.sum(), z)[0][::4])
    exact = come.Opinion()
    case.close("u", exact.uncertainty(case["logits"]))
    case.close("score_dirichlet", -exact.confidence(case["logits"]))
    case.close("score_msp", -softmax.confidence(case["logits"]))


@pytest.mark.recorded("losses")
def test_where_the_published_loss_overflows_ours_is_finite(case):
    z = case["overflow_logits"].clone().requires_grad_()
    assert case["overflow_opinion_entropy"].isnan().any()
    entropy = come.Opinion().entropy(z)
    assert entropy.isfinite().all()
    assert torch.autograd.grad(entropy.sum(), z)[0].isfinite().all()


# ---- the other methods ----


IMAGES = (
    (0.5,),
    (1 / 32,),
)  # the recorded inputs, in [-12, 10], as if they were normalized images; exact up to rounding


def as_inputs(images):
    return (images - 0.5) * 32


def as_images(inputs):
    return inputs / 32 + 0.5


def recorded_views(images, generator):
    """The four views of CoTTA's recording, (4, B, C, H, W) -> the same shape; they act on the model's input."""
    x = as_inputs(images)
    return as_images(torch.stack([x[0], x[1].flip(-1), x[2].roll((2, -3), dims=(-2, -1)), 0.5 * x[3]]))


def recorded_restoration(case, parameters):
    """The recorded positions as masks; they count through all adapted parameters, one after the other."""
    sizes = [p.numel() for p in parameters.values()]

    def restore(name, parameter, batch):
        everywhere = torch.zeros(sum(sizes), dtype=torch.bool)
        if f"restore_index_{batch}" in case:
            everywhere[case[f"restore_index_{batch}"].long()] = True
        return everywhere.split(sizes)[list(parameters).index(name)].view_as(parameter)

    return restore


def table(values, source):
    """Sum, norm, norm of the change, sum of the change, in float64."""
    rows = []
    for name, value in values.items():
        now, before = value.detach().double(), source[name].double()
        rows.append(torch.stack([now.sum(), now.norm(), (now - before).norm(), (now - before).sum()]))
    return torch.stack(rows).float()


@pytest.mark.recorded("cotta")
def test_cotta(case, monkeypatch):
    model = case.model()
    parameters = {name: dict(model.named_parameters())[name] for name in case.entry["adapted_parameters"]}
    method = adapt(
        model,
        "cotta",
        "em",
        lr=case.hyper["lr"],
        alpha=case.hyper["alpha_teacher"],
        confident=case.hyper["anchor_threshold"],
        views=4,
        augment=recorded_views,
        restore=recorded_restoration(case, parameters),
        normalization=IMAGES,
    )
    students, confidences = [], []
    inner = Context.forward

    def forward(ctx, x, weights=None, **how):
        logits = inner(ctx, x, weights, **how)
        if weights is None:
            students.append(logits.detach())
        elif weights is method._engine.transition.source and how.get("statistics", "own") == "own":
            confidences.append(logits.softmax(dim=1).amax(dim=1).mean())
        return logits

    monkeypatch.setattr(Context, "forward", forward)
    replay(method, case)
    case.close("anchor_conf", torch.stack(confidences))
    if "student_logits" in case:
        case.close("student_logits", torch.stack(students))
    student = method.adapted_parameters
    assert list(student) == case.entry["adapted_parameters"]
    teacher = method._engine.model.named(method.state["teacher"])
    case.close("student_table", table(student, method.source_parameters))
    case.close("teacher_table", table(teacher, method.source_parameters))
    for kind, values in (("final_student", student), ("final_teacher", teacher)):
        for key in (key for key in case.tensors if key.startswith(f"{kind}.")):
            case.close(key, values[key.partition(".")[2]].detach())


@pytest.mark.recorded("t3a")
def test_t3a(case):
    method = adapt(case.model(), "t3a", supports=case.hyper["filter_K"])
    counts = []
    replay(method, case, each=lambda _: counts.append(method.state["entropy"].lt(EMPTY).sum()))
    case.close("n_supports", torch.stack(counts))
    entropy = method.state["entropy"]
    case.close("final_labels", entropy.lt(EMPTY).nonzero()[:, 0])
    case.close("final_support_entropy", entropy[entropy < EMPTY])
    if "after_reset_logits" in case:
        method.reset()
        case.close("after_reset_logits", after_reset(method, case))


@pytest.mark.recorded("lame")
def test_lame(case, monkeypatch):
    method = adapt(
        case.model(),
        "lame",
        affinity=case.hyper["affinity"].lower(),
        k=case.hyper["knn"],
        symmetric=case.hyper["force_symmetry"],
    )
    seen = []
    inner = Context.features

    def features(ctx, x, **how):
        found = inner(ctx, x, **how)
        seen.append(found[0])
        return found

    monkeypatch.setattr(Context, "features", features)
    probability = torch.stack([method(case.batch(t)).softmax(dim=1) for t in range(case.hyper["T"])])
    case.close("features", torch.stack(seen))
    case.close("probs", probability)


class RecordedSearch:
    """Asked, it gives the recorded candidates."""

    def __init__(self, case):
        self.case, self.fitness = case, []

    def ask(self, batch):
        return self.case["candidates"][batch].double()

    def tell(self, candidates, fitness):
        self.fitness.append(fitness)

    def state(self):
        return {}

    def restore(self, state):
        pass


@pytest.mark.recorded("foa")
def test_foa(case, source_batches):
    search = RecordedSearch(case)
    method = adapt(
        case.model(),
        "foa",
        "em",
        source=source_batches,
        prompts=case["initial_prompts"][0],
        population=case.hyper["n_candidates"] + 1,
        discrepancy=case.hyper["fitness_lambda"],
        search=lambda dimensions, population, seed: search,
        chunk=16,
    )
    case.close("source_mean", method._engine.transition.fixed["source_mean"])
    case.close("source_std", method._engine.transition.fixed["source_std"])
    width = case["shift_vector"].shape[1]
    history, best = [], []
    shifts = [torch.zeros(width)]

    def each(_):
        history.append(method.state["history"])
        shifts.append(method._engine.transition.fixed["source_mean"][-width:] - history[-1])
        best.append(method.state["best"][None])

    replay(method, case, each)
    case.close("fitness", torch.stack(search.fitness).float())
    case.close("hist_stat", torch.stack(history))
    case.close("shift_vector", torch.stack(shifts[:-1]))
    case.close("best_prompts", torch.stack(best))


@pytest.mark.recorded("tea")
def test_tea(case, monkeypatch):
    from come.methods import tea

    energies = []
    original = tea.energy

    def energy(logits):
        energies.append(-original(logits).detach())
        return original(logits)

    monkeypatch.setattr(tea, "energy", energy)
    sgd = case.hyper["optimizer"] == "sgd"
    method = adapt(
        case.model(),
        "tea",
        lr=case.hyper["lr"],
        optimizer="sgd" if sgd else "adam",
        dreams=case.hyper["sgld_steps"],
        step_size=case.hyper["sgld_lr"],
        noise=case.hyper["sgld_std"],
        start=lambda batch, k, like: case["fake_init"][batch],
        draw=lambda batch, k, like: case["noise"][batch, k].float(),
        normalization=IMAGES,
    )
    before, inner = [], Context.forward

    def forward(ctx, x, weights=None, **how):
        logits = inner(ctx, x, weights, **how)
        if "statistics" not in how:  # not the guard's question to the source
            before.append((x.image("test"), logits.detach()))
        return logits

    monkeypatch.setattr(Context, "forward", forward)
    replay(method, case)
    steps = case.hyper["sgld_steps"]
    calls = [before[i : i + steps + 3] for i in range(0, len(before), steps + 3)]
    seen = [energies[i : i + steps + 2] for i in range(0, len(energies), steps + 2)]
    case.close("pre_logits", torch.stack([call[steps][1] for call in calls]))
    case.close("fake_final", torch.stack([call[steps + 1][0] for call in calls]))
    case.close("energy_real", torch.stack([energy[steps] for energy in seen]))
    case.close("energy_fake", torch.stack([energy[steps + 1] for energy in seen]))
    check_final(method, case)


def memo(case, inputs, **changes):
    sgd = case.hyper["optimizer"] == "sgd"
    arguments = {
        "lr": case.hyper["lr"],
        "optimizer": come.optim.sgd(momentum=0) if sgd else come.optim.adam(weight_decay=case.hyper["weight_decay"]),
        "views": case.hyper["views"],
        "augment": lambda images, generator: as_images(inputs["memo_views"].transpose(0, 1)),
        "prior": None if case.hyper["prior_strength"] < 0 else case.hyper["prior_strength"],
        "normalization": IMAGES,
    }
    return adapt(case.model(), "memo", "em", **(arguments | changes)), inputs["x"][0][: case.hyper["images"]]


@pytest.mark.recorded("memo")
def test_memo(case, inputs, monkeypatch):
    method, images = memo(case, inputs, quirks=True)
    views, norms = [], []
    forward, along = Context.forward, Context.descend_along

    def watched(ctx, x, weights=None, **how):
        out = forward(ctx, x, weights, **how)
        if weights is not method._engine.transition.source:  # that is the guard's question
            views.append(out)
        return out

    def descend_along(ctx, gradient, go=None):
        norms.append(gradient.double().norm().float())
        along(ctx, gradient, go)

    monkeypatch.setattr(Context, "forward", watched)
    monkeypatch.setattr(Context, "descend_along", descend_along)
    step = method.step(images)
    case.close("view_logits", torch.stack([v.detach() for v in views[::2]]))
    case.close("loss", step.loss)
    case.close("grad_norm", torch.stack(norms))
    case.close("logits", step.logits)
    monkeypatch.undo()
    still, images = memo(case, inputs, lr=1e-30)
    case.close("pre_logits", still(images))


@pytest.mark.recorded("memo")
def test_memo_forgets_moments_by_default(case, inputs):
    """Every image is as the first one: with SGD that is the recording, with AdamW its first image."""
    method, images = memo(case, inputs)
    same = (method(images) - case["logits"]).abs().amax(dim=1) <= case.entry["tolerance"]["logits"]["atol"]
    sgd = case.hyper["optimizer"] == "sgd"
    assert same.tolist() == [True, sgd, sgd]


@pytest.mark.recorded("pl")
def test_pl(case):
    method = adapt(
        case.model(),
        "pl",
        lr=case.hyper["lr"] * case.hyper["alpha"],
        optimizer="adam",
        select=come.select.everything(),
        threshold=case.hyper["threshold"],
    )
    counts = []
    replay(method, case, each=lambda step: counts.append(step.used.sum()))
    case.close("n_selected", torch.stack(counts))
    assert list(method.adapted_parameters) == case.entry["adapted_parameters"]
    for key in (key for key in case.tensors if key.startswith("final.")):
        case.close(key, method.adapted_parameters[key.removeprefix("final.")])
    if "after_reset_logits" in case:
        method.reset()
        case.close("after_reset_logits", after_reset(method, case))


@pytest.mark.recorded("deyo")
def test_deyo(case, recorder):
    grid = case.hyper["patch_len"]

    def shuffle(images, generator):
        """The recorded order of patches, which counts the samples that passed the first filter only."""
        b, c, h, w = images.shape
        patches = images.view(b, c, grid, h // grid, grid, w // grid).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        passed = (recorder.seen[-1] < case.hyper["deyo_margin"]).nonzero()[:, 0]
        order = torch.arange(grid * grid).repeat(b, 1)
        order[passed] = case["perm_index"][method.count][: len(passed)].long()
        mixed = torch.stack([patches[i, order[i]] for i in range(b)]).unflatten(1, (grid, grid))
        return mixed.permute(0, 3, 1, 4, 2, 5).reshape(b, c, h, w)

    method = adapt(
        case.model(),
        "deyo",
        "em",
        lr=case.hyper["lr"],
        limit=case.hyper["deyo_margin"] / LN_K,
        margin=case.hyper["margin_e0"] / LN_K,
        drop=case.hyper["plpd_threshold"],
        shuffle=shuffle,
    )
    counts = []

    def each(step):
        counts.append(torch.stack([(step.loss < case.hyper["deyo_margin"]).sum(), step.used.sum()]))

    replay(method, case, each)
    case.close("n_selected", torch.stack(counts))
    check_final(method, case)


@pytest.mark.recorded("zerosiam")
def test_zerosiam(case, monkeypatch):
    seen, original = [], come.methods.ZeroSiam._loss

    def loss(method, ctx, features, predictor, target):
        found = original(method, ctx, features, predictor, target)
        if features.requires_grad:  # the other one is for the predictor
            seen.append(found.detach())
        return found

    monkeypatch.setattr(come.methods.ZeroSiam, "_loss", loss)
    hyper = case.hyper
    relative = hyper["predictor_lr"] / hyper["lr"]
    method = adapt(case.model(), "zerosiam", "em", lr=hyper["lr"], predictor=relative, steps=hyper["steps"])
    replay(method, case)
    both, tolerance = case["entropy"] + case["divergence"], case.entry["tolerance"]
    allowed = tolerance["entropy"]["atol"] + tolerance["divergence"]["atol"]
    found = torch.stack(seen[hyper["steps"] - 1 :: hyper["steps"]])
    torch.testing.assert_close(found, both, rtol=0, atol=allowed)
    case.close("final_predictor", method.state["predictor"])
    check_final(method, case)


@pytest.mark.recorded("neo")
def test_neo(case):
    """Centred in logits here and in features there: the recorded mean of the features must give the same shift."""
    h, model = case.hyper, case.model()
    method = adapt(model, "neo", prior=0, rate=h.get("alpha"))
    weight = model.get_classifier().weight.detach().double()
    logits, features, shifts, seen = [], [], [], []
    for t in range(h["T"]):
        x = case.batch(t)[: h.get("batch_sizes", [8] * h["T"])[t]]
        logits.append(method(x))
        features.append(model.eval().forward_head(model.forward_features(x), pre_logits=True).detach())
        shifts.append(method.state["shift"].double())
        seen.append(method.state["seen"].long())
    join = torch.cat if "batch_sizes" in h else torch.stack
    case.close("logits", join(logits))
    case.close("features", join(features))
    case.close("center", torch.linalg.lstsq(weight, torch.stack(shifts).T).solution.T)  # W center is the shift
    if "sample_count" in case:
        case.close("sample_count", torch.stack(seen))
    if "frozen_logits" in case:
        case.close("frozen_logits", method.predict(case.batch(7)))
    method.reset()
    case.close("after_reset_logits" if "after_reset_logits" in case else "fresh_logits", after_reset(method, case))


@pytest.mark.recorded("asr")
def test_asr(case, recorder):
    h = case.hyper
    method = adapt(
        case.model(),
        "asr",
        "em",
        lr=h["lr"],
        optimizer=come.optim.sgd(momentum=h["momentum"], nesterov=h["nesterov"]),
        margin=h["e_margin"] / LN_K,
        redundancy=h["d_margin"],
        start=h["a0"],
        follow=h["m0"],
        anchoring=h["p0"],
        keep=h["r0"],
        slope=h["r1"],
        pull=math.inf,  # as published
    )
    found = {name: [] for name in ("penalty", "selected", "spread", "level", "flips", "reset", "peak", "since", "kept")}
    scopes, entropies = [], []
    source = method.source_parameters

    def penalty():
        state = method.state
        if not (state and state["anchored"]):
            return torch.zeros(1)
        weights = method._state.weights
        return (state["penalty"] * (state["fisher"] * (weights - state["anchor"]).square()).sum())[None]

    logits = []
    for t in range(h["T"]):
        before = method.state
        level = float(before["level"]) if before else math.log(1000 * h["a0"])
        resets = int(before["resets"]) if before else 0
        found["penalty"].append(penalty())
        recorder.seen.clear()
        step = method.step(case.batch(t))
        state = method.state
        entropies.append(recorder.seen[0])
        logits.append(step.logits)
        reliable = (recorder.seen[0] < h["e_margin"]).sum()
        found["selected"].append(torch.stack([reliable, step.used.sum()]))
        spread = come.Softmax().entropy(step.logits.mean(dim=0))[None]
        found["spread"].append(spread)
        found["level"].append(state["level"])
        found["flips"].append((8 * (state["penalty"] / h["p0"]).sqrt()).round().long())
        reset = int(state["resets"]) > resets
        found["reset"].append(torch.tensor(int(reset)))
        found["peak"].append(torch.where(state["averaged"], state["average"].max(), torch.nan))
        found["since"].append(state["steps"])
        scope = max(h["r0"] - h["r1"] * (level - float(spread)), 0) if reset else math.nan
        scopes.append(torch.tensor(scope))
        back = [torch.equal(value, source[name]) for name, value in method.adapted_parameters.items()]
        found["kept"].append(torch.tensor(back.index(True) if reset else -1))
        if reset:
            assert all(back[back.index(True) :])
            assert not any(value.any() for value in method._state.moments.values())
    stacked = {name: torch.stack(values) for name, values in found.items()}
    case.close("logits", torch.stack(logits))
    case.close("entropy", torch.stack(entropies).view(case["entropy"].shape))
    for name, ours in (
        ("penalty", "penalty"),
        ("n_selected", "selected"),
        ("mean_entropy", "spread"),
        ("cum_entropy", "level"),
        ("n_flip", "flips"),
        ("reset_flag", "reset"),
        ("probs_ema_max", "peak"),
        ("since_reset", "since"),
        ("n_kept", "kept"),
    ):
        case.close(name, stacked[ours])
    case.close("scope", torch.stack(scopes))
    check_final(method, case)
    for kind, ours in (("anchor_fisher", "fisher"), ("anchor_mean", "anchor")):
        for name, value in method._engine.model.named(method.state[ours]).items():
            case.close(f"{kind}.{name}", value)


@pytest.mark.recorded("adadem")
def test_adadem(case, monkeypatch):
    from come.methods import adadem

    h, losses, labels = case.hyper, [], []
    original, rows = adadem.reward, adadem.remembered

    def reward(mass, held, **how):
        losses.append(original(mass, held, **how).detach())
        return original(mass, held, **how)

    def remembered(average, p, label, valid, rate):
        labels.append(label)
        return rows(average, p, label, valid, rate)

    monkeypatch.setattr(adadem, "reward", reward)
    monkeypatch.setattr(adadem, "remembered", remembered)
    method = adapt(
        case.model(),
        "adadem",
        "em",
        variant={"adadem": "adadem", "adadem-mec": "mec"}[h["mode"]],
        rate=h["pi"],
        lr=h["lr"],
        optimizer=come.optim.sgd(momentum=h["momentum"], nesterov=h["nesterov"]),
        steps=h["steps"],
    )
    replay(method, case)
    each = torch.stack(losses).view(case["sample_loss"].shape)
    case.close("sample_loss", each)
    case.close("loss", each.mean(dim=-1))
    case.close("pseudo_label", torch.stack(labels).view(case["pseudo_label"].shape))
    average = method.state["average"]
    case.close("average_index", (average != average.new_tensor(1 / 1000)).any(dim=1).nonzero()[:, 0])
    case.close("average_rows", average[case["average_index"].long()])
    check_final(method, case)
    if "after_reset_logits" in case:
        method.reset()
        case.close("after_reset_logits", after_reset(method, case))
