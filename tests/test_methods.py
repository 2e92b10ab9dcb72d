"""What each method promises beyond the contract."""

from __future__ import annotations

import copy
import itertools
import math
import sys

import pytest
import torch

import come
from come.testing import CLASSES, NORMS, TinyClassifier, TinyTransformer, batches

LN_K = math.log(CLASSES)


def tiny(norm="layer"):
    return TinyClassifier(NORMS[norm])


def params(method):
    return {k: p.detach().clone() for k, p in method.parameters.items()}


def test_source_is_the_model_and_norm_uses_the_batch():
    model = tiny("batch").eval()
    x = batches(1)[0]
    expected = model(x).detach()
    with come.adapt(model, "source") as method:
        assert torch.equal(method(x), expected)
    with come.adapt(model, "norm") as method:
        assert not torch.allclose(method(x), expected, atol=1e-3)
    plain = tiny("layer").eval()
    with come.adapt(plain, "norm") as method:
        assert torch.equal(method(x), plain(x))


def test_tent_keeps_the_most_certain():
    step = come.adapt(tiny(), "tent", keep=0.25).step(batches(1)[0])
    assert int(step.used.sum()) == 3
    assert step.loss[step.used].max() <= step.loss[~step.used].min()
    assert int(come.adapt(tiny(), "tent", keep=0.01).step(batches(1)[0]).used.sum()) == 1


def test_tent_with_keep_is_tent_on_those_samples():
    x = batches(1)[0]
    filtered = come.adapt(tiny(), "tent", "em", keep=0.5, lr=0.1)
    used = filtered.step(x).used
    plain = come.adapt(tiny(), "tent", "em", lr=0.1)
    plain.step(x[used])
    for name, p in params(plain).items():
        torch.testing.assert_close(params(filtered)[name], p)


def test_tent_lowers_its_objective():
    for objective in come.objectives.names():
        method = come.adapt(tiny(), "tent", objective, lr=0.02, steps=1)
        x = batches(1)[0]
        losses = [method.step(x).loss.mean().item() for _ in range(10)]
        assert losses[-1] < losses[0]


def test_episodic_forgets():
    x, y = batches(2)
    method = come.adapt(tiny(), "tent", lr=0.1, episodic=True)
    method(x)
    alone = come.adapt(tiny(), "tent", lr=0.1)
    assert torch.equal(method(y), alone(y))


def test_steps_adapt_several_times():
    x = batches(1)[0]
    twice = come.adapt(tiny(), "tent", lr=0.1, steps=2)
    logits = twice(x)
    once = come.adapt(tiny(), "tent", lr=0.1)
    once(x)
    assert torch.equal(logits, once(x))
    assert (twice.count, once.count) == (1, 2)


def test_eata_filters():
    x = batches(1)[0]
    method = come.adapt(tiny(), "eata", "em", beta=0, margin=0.5, redundancy=2.0, lr=0.1)
    step = method.step(x)
    assert torch.equal(step.used, step.loss < 0.5 * LN_K)
    assert 0 < step.used.sum() < len(x)
    strict = come.adapt(tiny(), "eata", "em", beta=0, margin=2.0, redundancy=1e-9, lr=0.1)
    assert strict.step(x).used.all()  # no average yet: nothing is redundant
    assert not strict.step(x).used.any()  # now everything is


def test_eata_is_held_by_what_matters_to_the_source():
    source = batches(2, seed=9)
    free = come.adapt(tiny(), "eata", "em", beta=0, margin=2.0, redundancy=2.0, lr=1e-3)
    held = come.adapt(tiny(), "eata", "em", beta=50, margin=2.0, redundancy=2.0, lr=1e-3, source=iter(source))
    start = params(free)
    for x in batches(5):
        free(x)
        held(x)
    distance = lambda m: sum((params(m)[k] - start[k]).square().sum() for k in start)  # noqa: E731
    assert distance(held) < distance(free)


def test_eata_reads_the_source_once():
    reads = []

    def source():
        for x in batches(2, seed=9):
            reads.append(1)
            yield x

    method = come.adapt(tiny(), "eata", source=source(), margin=2.0)
    fisher = {k: v.clone() for k, v in method.state.items() if k.startswith("fisher.")}
    assert len(fisher) == len(method.parameters)
    method(batches(1)[0])
    method.reset()
    assert len(reads) == 2
    assert all(torch.equal(method.state[k], v) for k, v in fisher.items())
    assert not method.state["averaged"]


@pytest.mark.parametrize("method", ["eata", "sar"])
@pytest.mark.parametrize("objective", come.objectives.names())
def test_no_reliable_sample_moves_nothing(method, objective):
    arguments = {"beta": 0} if method == "eata" else {}
    adapter = come.adapt(tiny(), method, objective, margin=1e-6, lr=0.1, **arguments)
    before = adapter.state_dict()
    step = adapter.step(batches(1)[0])
    assert not step.used.any()
    after = adapter.state_dict()
    assert [
        k for k in before if k.startswith(("parameter", "optimizer")) and not torch.equal(before[k], after[k])
    ] == []


def test_sar_leaves_the_last_blocks_alone():
    assert {k.split(".")[1] for k in come.adapt(tiny(), "sar").parameters} == {"0", "1", "2"}


def test_sar_recovers():
    method = come.adapt(tiny(), "sar", "em", margin=2.0, recover_below=100.0, lr=0.1)
    start = params(method)
    method(batches(1)[0])
    assert int(method.state["recoveries"]) == 1
    assert method.state["average"].isnan()
    assert all(torch.equal(params(method)[k], v) for k, v in start.items())
    momentum = [v for k, v in method.state_dict().items() if k.startswith("optimizer.")]
    assert momentum
    assert all(not v.any() for v in momentum)


def test_sar_with_quirks_keeps_average_and_momentum_at_recovery():
    method = come.adapt(tiny(), "sar", "em", margin=2.0, recover_below=100.0, lr=0.1, quirks=True)
    method(batches(1)[0])
    assert int(method.state["recoveries"]) == 1
    assert method.state["average"].isfinite()
    assert any(v.any() for k, v in method.state_dict().items() if k.startswith("optimizer."))


def test_sar_never_recovers_at_zero():
    method = come.adapt(tiny(), "sar", "em", margin=2.0, recover_below=0.0, lr=0.1)
    for x in batches(5):
        method(x)
    assert int(method.state["recoveries"]) == 0


def test_sar_goes_back_when_its_second_forward_fails():
    model = tiny()
    method = come.adapt(model, "sar", "em", margin=2.0, lr=0.1)
    start = params(method)
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")

    model.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        method(batches(1)[0])
    assert all(torch.equal(params(method)[k], v) for k, v in start.items())


def test_come_holds_the_norm_where_em_grows_it():
    """The point of the paper in small: on one batch, again and again, EM inflates the logits, COME does not."""
    growth = {}
    for objective in ("em", "come"):
        method = come.adapt(tiny(), "tent", objective, lr=0.05)
        x = batches(1)[0]
        norms = [method(x).norm(dim=1).mean().item() for _ in range(30)]
        growth[objective] = norms[-1] / norms[0]
    assert growth["come"] < growth["em"]


def test_your_own_method_registers_by_name():
    class Mine(come.methods.Tent):
        name = "mine"

    come.methods.register(Mine)
    try:
        assert isinstance(come.adapt(tiny(), "mine"), Mine)
        with pytest.raises(come.ConfigError, match="'mine' is taken"):
            come.methods.register(type("Other", (come.methods.Tent,), {"name": "mine"}))
    finally:
        come.methods._registry.remove("mine")
    with pytest.raises(come.ConfigError, match="not a subclass"):
        come.methods.register(torch.nn.Linear)


# ---- the others of the paper, and beyond it ----

IMAGES = ((0.45,), (0.07,))  # as if batches() were normalized images


def test_pl_trains_on_confident_samples_only():
    x = batches(1)[0]
    step = come.adapt(tiny(), "pl", threshold=0.9, lr=0.1).step(x)
    p = step.logits.softmax(dim=1).amax(dim=1)
    assert torch.equal(step.used, p > 0.9)
    assert step.used.any()
    assert not step.used.all()


def test_t3a_keep_all_is_t3a_with_more_room_than_it_needs():
    data = batches(4)
    everything, roomy = (come.adapt(tiny(), "t3a", supports=m) for m in (None, 60))
    for x in data:
        torch.testing.assert_close(everything(x), roomy(x))


def test_t3a_forgets_the_most_uncertain():
    method = come.adapt(tiny(), "t3a", supports=2)
    for x in batches(4):
        method(x)
        assert (method.state["entropy"].diff(dim=1).nan_to_num() >= 0).all()
    assert method.state["support"].shape == (CLASSES, 2, 8)  # however long the stream is


@pytest.mark.parametrize("affinity", ["knn", "rbf", "linear"])
def test_lame_returns_log_probabilities(affinity):
    log_p = come.adapt(tiny(), "lame", affinity=affinity)(batches(1)[0])
    torch.testing.assert_close(log_p.logsumexp(dim=1), torch.zeros(12))
    torch.testing.assert_close(log_p.log_softmax(dim=1), log_p)  # so a second softmax changes nothing


def test_lame_makes_neighbours_agree():
    x = batches(1)[0]
    twins = torch.cat([x, x + 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))])
    model = tiny()
    prediction = come.adapt(model, "lame", k=1)(twins).argmax(dim=1)
    assert (prediction[:12] == prediction[12:]).all()


def test_tea_dreams_stay_in_the_buffer_and_the_buffer_where_it_was_put():
    method = come.adapt(tiny(), "tea", normalization=IMAGES, dreams=2, buffer=30, buffer_device="cpu")
    x = batches(1)[0]
    method(x)
    first = method.state["buffer"].clone()
    images = first * 0.07 + 0.45
    assert -0.01 <= images.min() < 0.1
    assert 0.9 < images.max() <= 1.01
    method(x)
    changed = (method.state["buffer"] != first).flatten(1).any(dim=1)
    assert int(changed.sum()) == 12
    assert method.placed("buffer", first).device.type == "cpu"


def test_tea_lowers_the_energy_of_the_data_against_its_dreams():
    method = come.adapt(tiny(), "tea", normalization=IMAGES, dreams=2, buffer=30, lr=0.05)
    x = batches(1)[0]
    energies = [method.step(x).loss.mean().item() for _ in range(8)]
    assert energies[-1] < energies[0]


def test_foa_improves_its_fitness_and_changes_no_weight():
    model = TinyTransformer(NORMS["layer"])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    told = []

    class Search(come.methods.foa.CMAES):
        def tell(self, candidates, fitness):
            told.append(fitness.min().item())
            super().tell(candidates, fitness)

    method = come.adapt(model, "foa", source=batches(2, seed=9), prompts=2, population=8, search=Search)
    x = batches(1)[0]
    for _ in range(25):
        method(x)
    assert all(b <= a + 1e-5 for a, b in itertools.pairwise(told))  # the best one competes again
    assert told[-1] < 0.7 * told[0]
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_foa_computes_the_patch_embedding_once_and_chunks_do_not_matter():
    answers, seen = [], []
    for chunk in (12, 48, 1000):
        model = TinyTransformer(NORMS["layer"])
        method = come.adapt(model, "foa", source=batches(2, seed=9), prompts=2, population=8, chunk=chunk)
        sizes = []
        model.embedding.register_forward_hook(lambda _, inputs, out, sizes=sizes: sizes.append(len(inputs[0])))
        answers.append(method(batches(1)[0]))
        seen.append(sizes)
    torch.testing.assert_close(answers[0], answers[1])
    torch.testing.assert_close(answers[0], answers[2])
    assert seen == [[12] + [1] * 7, [12, 1], [12]]


@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers"])
def test_foa_on_the_vits_of_the_libraries(library):
    if library == "timm":
        from timm.models.vision_transformer import VisionTransformer

        model = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=4, num_heads=2, num_classes=7)
    elif library == "torchvision":
        from torchvision.models import VisionTransformer

        model = VisionTransformer(16, 8, 4, 2, 16, 32, num_classes=7)
    else:
        from transformers import ViTConfig, ViTForImageClassification

        model = ViTForImageClassification(
            ViTConfig(
                hidden_size=16,
                num_hidden_layers=4,
                num_attention_heads=2,
                intermediate_size=32,
                image_size=16,
                patch_size=8,
                num_labels=7,
            )
        )
    generator = torch.Generator().manual_seed(0)
    x, *source = (torch.randn(6, 3, 16, 16, generator=generator) for _ in range(3))
    method = come.adapt(model, "foa", source=source, prompts=2, population=5, chunk=12)
    assert method(x).shape == (6, 7)
    assert method.state["source_mean"].shape == (4 * 16,)
    for name in ("t3a", "lame"):
        with come.adapt(copy.deepcopy(model), name) as other:
            assert other(x).shape == (6, 7)


def test_cotta_views_only_where_the_source_is_unsure():
    views = []

    def augment(images, generator):
        views.append(tuple(images.shape[:2]))
        return images

    x = batches(1)[0]
    come.adapt(tiny(), "cotta", normalization=IMAGES, views=5, augment=augment, confident=0.0)(x)
    assert not views
    come.adapt(tiny(), "cotta", normalization=IMAGES, views=5, augment=augment, confident=1.0, chunk=24)(x)
    assert views == [(2, 12), (2, 12), (1, 12)]


@pytest.mark.parametrize("norm", NORMS)
def test_cotta_chunks_do_not_matter(norm):
    def answer(chunk):
        def augment(images, generator):  # one view after the other, whatever the chunk
            return torch.stack([images[0] * 0.9 ** next(number) for _ in range(len(images))])

        number = iter(range(100))
        method = come.adapt(
            tiny(norm), "cotta", normalization=IMAGES, views=6, augment=augment, confident=1.0, chunk=chunk
        )
        return method(batches(1)[0])

    torch.testing.assert_close(answer(12), answer(1000))


def test_cotta_restores_a_share_of_the_student():
    method = come.adapt(tiny(), "cotta", views=0, restore=0.25, lr=0.5)
    method(batches(1)[0])
    back = [(p == method.source_values[name]).float().mean().item() for name, p in method.parameters.items()]
    sizes = [p.numel() for p in method.parameters.values()]
    share = sum(b * n for b, n in zip(back, sizes, strict=True)) / sum(sizes)
    assert 0.2 < share < 0.32


@pytest.mark.parametrize("norm", NORMS)
def test_memo_takes_each_image_by_itself(norm):
    x = batches(1)[0]
    together = come.adapt(tiny(norm), "memo", normalization=IMAGES, views=3, augment=lambda v, g: v)(x)
    method = come.adapt(tiny(norm), "memo", normalization=IMAGES, views=3, augment=lambda v, g: v)
    alone = torch.cat([method(image[None]) for image in x])
    torch.testing.assert_close(together, alone)


def test_deyo_uses_what_depends_on_shape():
    x = batches(1)[0]
    step = come.adapt(tiny(), "deyo", limit=2.0, drop=0.0, shuffle=lambda images, g: images).step(x)
    assert not step.used.any()  # nothing was destroyed, so no probability dropped
    step = come.adapt(tiny(), "deyo", limit=2.0, drop=-1.0).step(x)
    assert step.used.all()


def test_deyo_shuffles_patches_and_keeps_pixels():
    method = come.adapt(tiny(), "deyo")
    x = batches(1)[0]
    mixed = method.shuffle(x, torch.Generator().manual_seed(0))
    assert not torch.equal(mixed, x)
    torch.testing.assert_close(mixed.flatten(2).sort(dim=2).values, x.flatten(2).sort(dim=2).values)
    odd = torch.rand(2, 3, 9, 11)
    assert method.shuffle(odd, torch.Generator().manual_seed(0)).shape == odd.shape


def test_rotta_memory_is_bounded_and_balanced():
    method = come.adapt(tiny("batch"), "rotta", normalization=IMAGES, capacity=10, every=12)
    running = [layer.running_mean.clone() for layer in method.batch_norms]
    for x in batches(6):
        method(x)
        labels = method.state["ledger.label"]
        assert labels.shape == (10,)
        counts = torch.bincount(labels[labels >= 0], minlength=CLASSES)
        assert counts.max() <= 10 - (counts > 0).sum() + 1
    assert int(method.state["ledger.seen"]) == 72
    assert not torch.equal(method.state["student_mean.0"], running[0])  # robust statistics moved
    assert all(
        torch.equal(a.running_mean, b) for a, b in zip(method.batch_norms, running, strict=True)
    )  # the model's not


def test_rotta_answers_with_the_teacher():
    method = come.adapt(tiny(), "rotta", normalization=IMAGES, capacity=12, every=12, nu=0.0, lr=0.1)
    x = batches(1)[0]
    with torch.no_grad():
        expected = tiny().eval()(x)
    for _ in range(3):
        torch.testing.assert_close(method(x), expected)
    assert any(not torch.equal(p, method.source_values[name]) for name, p in method.parameters.items())


def test_roid_never_goes_far():
    x = batches(1)[0]

    def distance(momentum):
        method = come.adapt(tiny(), "roid", consistency=False, momentum=momentum, lr=0.1)
        for _ in range(5):
            method(x)
        return sum((p - method.source_values[n]).square().sum().item() for n, p in method.parameters.items())

    assert distance(0.0) == 0
    assert distance(0.5) < distance(1.0)


@pytest.mark.parametrize("method", ["tent", "sar", "rdumb"])
def test_periodic_reset_is_a_reset(method):
    data = batches(6)
    periodic = come.adapt(tiny(), method, lr=0.1, reset_every=3)
    logits = [periodic(x) for x in data]
    fresh = come.adapt(tiny(), method, lr=0.1)
    again = [fresh(x) for x in data[3:]]
    for a, b in zip(logits[3:], again, strict=True):
        assert torch.equal(a, b)


def test_rdumb_is_eta_and_resets_by_itself():
    assert come.adapt(tiny(), "rdumb").reset_every == 1000
    known = come.methods.get("rdumb").hyperparameters()
    assert {"margin", "redundancy", "reset_every"} <= set(known)
    assert not {"source", "beta"} & set(known)


# ---- bad input ----


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("memo", {"views": 1}, "views is 1"),
        ("t3a", {"supports": 0}, "supports is 0"),
        ("lame", {"k": 0}, "k is 0"),
        ("lame", {"affinity": "cosine"}, "knn, rbf, linear"),
        ("pl", {"threshold": 1.0}, "threshold is 1.0"),
        ("tea", {"dreams": 0}, "dreams is 0"),
        ("tea", {"buffer_device": "gpu"}, "'model' or 'cpu'"),
        ("foa", {}, "pass source="),
        ("cotta", {"views": -1}, "views is -1"),
        ("cotta", {"restore": 2.0}, "restore is 2.0"),
        ("cotta", {"normalization": ((0.5,), (0.0,))}, "give \\(mean, std\\)"),
        ("rotta", {"capacity": 0}, "capacity is 0"),
        ("roid", {"temperature": 0}, "temperature is 0"),
        ("deyo", {"patches": 1}, "patches is 1"),
        ("tent", {"reset_every": 0}, "reset_every is 0"),
        ("t3a", {"head": "nothing"}, "no module of that name"),
    ],
)
def test_arguments_out_of_range_are_named(method, arguments, words):
    with pytest.raises(come.ConfigError, match=words):
        come.adapt(tiny(), method, **arguments)


@pytest.mark.parametrize("method", ["tea", "memo", "cotta", "rotta", "roid"])
def test_images_outside_the_normalization_are_refused(method, build):
    adapter = build(tiny(), method, normalization=None)
    before = adapter.state_dict()
    with pytest.raises(come.InputError, match=r"needs images in \[0, 1\].*ranges from .* pass normalization="):
        adapter(batches(1)[0])
    after = adapter.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert set(after) == set(before)


@pytest.mark.parametrize("method", ["tea", "memo", "cotta", "rotta", "roid", "deyo"])
def test_inputs_that_are_no_images_are_refused(method):
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8),
        torch.nn.LayerNorm(8),
        torch.nn.Linear(8, 8),
        torch.nn.LayerNorm(8),
        torch.nn.Linear(8, 3),
    )
    adapter = come.adapt(model, method)
    with pytest.raises(come.InputError, match=r"works on images, .* but the batch holds \(6, 4\)"):
        adapter(torch.rand(6, 4))


def test_cotta_without_views_takes_any_input():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    assert come.adapt(model, "cotta", views=0)(torch.randn(6, 4)).shape == (6, 3)


@pytest.mark.parametrize(("affinity", "least"), [("knn", 6), ("rbf", 5)])
def test_lame_refuses_batches_that_are_too_small(affinity, least):
    method = come.adapt(tiny(), "lame", affinity=affinity, k=5)
    with pytest.raises(come.InputError, match=f"a batch of {least - 1} is too small .* at least {least} samples"):
        method(batches(1, size=least - 1)[0])
    assert method(batches(1, size=least)[0]).shape == (least, CLASSES)


def test_foa_refuses_models_without_tokens():
    with pytest.raises(come.ModelError, match=r"first block takes \(12, 3, 8, 8\), not tokens"):
        come.adapt(tiny(), "foa", source=batches(1))
    with pytest.raises(come.ModelError, match="no stack of blocks"):
        come.adapt(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3)), "foa", source=batches(1))
    model = TinyTransformer(NORMS["layer"])
    model.class_token = torch.nn.Parameter(torch.randn(1, 2, 8))  # two tokens, none of them the class token's shape
    model.position = torch.nn.Parameter(torch.randn(1, 18, 8))
    with pytest.raises(come.ModelError, match="has no class token"):
        come.adapt(model, "foa", source=batches(1))
    with pytest.raises(come.ConfigError, match="at least 2 for a standard"):
        come.adapt(TinyTransformer(NORMS["layer"]), "foa", source=[])


def test_foa_without_cma_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cma", None)
    with pytest.raises(come.ConfigError, match=r"pip install 'come-tta\[foa\]'"):
        come.adapt(TinyTransformer(NORMS["layer"]), "foa", source=batches(1))


def test_features_need_a_head():
    with pytest.raises(come.ModelError, match="no linear layer"):
        come.adapt(torch.nn.Sequential(torch.nn.Conv2d(3, 5, 8), torch.nn.Flatten()), "t3a")

    class Doubled(TinyClassifier):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(come.ModelError, match="'head' of Doubled does not give its logits"):
        come.adapt(Doubled(NORMS["layer"]), "t3a")(batches(1)[0])


@pytest.mark.parametrize("method", ["tea", "rotta"])
def test_images_of_another_size_are_refused_where_a_buffer_holds_one(method, build):
    adapter = build(tiny(), method)
    adapter(batches(1)[0])
    with pytest.raises(come.InputError, match=r"images are \(3, 6, 6\), those before were \(3, 8, 8\)"):
        adapter(batches(1)[0][:, :, :6, :6])
    adapter.reset()
    adapter(batches(1)[0][:, :, :6, :6])
