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


def moments(adapter):
    return {k: v for k, v in adapter.state_dict().items() if k.startswith("moment.")}


def distance(adapter):
    """Squared distance of the adapted weights from the source."""
    source = adapter.source_parameters
    return sum((p - source[name]).square().sum().item() for name, p in adapter.adapted_parameters.items())


def on_batch(module):
    if isinstance(module, torch.nn.BatchNorm2d):
        module.train()


def test_source_is_the_model_and_norm_uses_the_batch():
    model = tiny("batch").eval()
    x = batches(1)[0]
    expected = model(x).detach()
    with come.adapt(model, "source") as adapter:
        assert torch.equal(adapter(x), expected)
    with come.adapt(model, "norm", statistics="batch") as adapter:
        assert torch.equal(adapter(x), copy.deepcopy(model).apply(on_batch)(x))
    with come.adapt(model, "norm", statistics="mixed", guard=False) as adapter:
        assert not torch.allclose(adapter(x), expected, atol=1e-3)
    with come.adapt(model, "norm", statistics="source") as adapter:
        assert torch.equal(adapter(x), expected)
    plain = tiny("layer").eval()
    with come.adapt(plain, "norm") as adapter:
        assert torch.equal(adapter(x), plain(x))


def test_tent_keeps_the_most_certain():
    step = come.adapt(tiny(), "tent", keep=0.25).step(batches(1)[0])
    assert int(step.used.sum()) == 3
    assert step.loss[step.used].max() <= step.loss[~step.used].min()
    assert int(come.adapt(tiny(), "tent", keep=0.01).step(batches(1)[0]).used.sum()) == 1


def test_tent_with_keep_is_tent_on_those_samples():
    x = batches(1)[0]
    filtered = come.adapt(tiny(), "tent", objective="em", keep=0.5, lr=0.1)
    used = filtered.step(x).used
    plain = come.adapt(tiny(), "tent", objective="em", lr=0.1)
    plain.step(x[used])
    torch.testing.assert_close(filtered.adapted_parameters, plain.adapted_parameters)


def test_tent_lowers_its_objective():
    for objective in come.objectives.names():
        adapter = come.adapt(tiny(), "tent", objective=objective, lr=0.02, steps=1)
        x = batches(1)[0]
        losses = [adapter.step(x).loss.mean().item() for _ in range(10)]
        assert losses[-1] < losses[0]


def test_episodic_forgets():
    x, y = batches(2)
    adapter = come.adapt(tiny(), "tent", lr=0.1, episodic=True)
    adapter(x)
    alone = come.adapt(tiny(), "tent", lr=0.1)
    assert torch.equal(adapter(y), alone(y))


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
    adapter = come.adapt(tiny(), "eata", objective="em", beta=0, margin=0.5, redundancy=2.0, lr=0.1)
    step = adapter.step(x)
    assert torch.equal(step.used, step.loss < 0.5 * LN_K)
    assert 0 < step.used.sum() < len(x)
    strict = come.adapt(tiny(), "eata", objective="em", beta=0, margin=2.0, redundancy=1e-9, lr=0.1)
    assert strict.step(x).used.all()  # no average yet: nothing is redundant
    assert not strict.step(x).used.any()  # now everything is


def test_eata_is_held_by_what_matters_to_the_source():
    source = batches(2, seed=9)
    free = come.adapt(tiny(), "eata", objective="em", beta=0, margin=2.0, redundancy=2.0, lr=1e-3)
    held = come.adapt(tiny(), "eata", objective="em", beta=50, margin=2.0, redundancy=2.0, lr=1e-3, source=iter(source))
    for x in batches(5):
        free(x)
        held(x)
    assert distance(held) < distance(free)


def test_eata_reads_the_source_once():
    reads = []

    def source():
        for x in batches(2, seed=9):
            reads.append(1)
            yield x

    adapter = come.adapt(tiny(), "eata", source=source(), margin=2.0)
    fisher = adapter._engine.transition.fixed["fisher"].clone()
    assert fisher.shape == adapter.state_dict()["weights"].shape
    assert fisher.any()
    adapter(batches(1)[0])
    assert adapter.state["averaged"]
    adapter.reset()
    assert not adapter.state
    assert len(reads) == 2
    assert torch.equal(adapter._engine.transition.fixed["fisher"], fisher)
    assert adapter.method.source is None  # the data is not kept


@pytest.mark.parametrize("method", ["eata", "sar"])
@pytest.mark.parametrize("objective", come.objectives.names())
def test_no_reliable_sample_moves_nothing(method, objective):
    arguments = {"beta": 0} if method == "eata" else {}
    adapter = come.adapt(tiny(), method, objective=objective, margin=1e-6, lr=0.1, **arguments)
    before = adapter.state_dict()
    step = adapter.step(batches(1)[0])
    assert not step.used.any()
    after = adapter.state_dict()
    assert [k for k in before if k.startswith(("weights", "moment.")) and not torch.equal(before[k], after[k])] == []


def test_sar_leaves_the_last_blocks_alone():
    assert {k.split(".")[1] for k in come.adapt(tiny(), "sar").adapted_parameters} == {"0", "1", "2"}


def test_sar_recovers():
    adapter = come.adapt(tiny(), "sar", objective="em", margin=2.0, recover_below=100.0, lr=0.1)
    adapter(batches(1)[0])
    assert int(adapter.state["recoveries"]) == 1
    assert not adapter.state["averaged"]
    assert distance(adapter) == 0
    assert moments(adapter)
    assert not any(v.any() for v in moments(adapter).values())


def test_sar_with_quirks_keeps_average_and_momentum_at_recovery():
    adapter = come.adapt(tiny(), "sar", objective="em", margin=2.0, recover_below=100.0, lr=0.1, quirks=True)
    adapter(batches(1)[0])
    assert int(adapter.state["recoveries"]) == 1
    assert adapter.state["averaged"]
    assert any(v.any() for v in moments(adapter).values())


def test_sar_never_recovers_at_zero():
    adapter = come.adapt(tiny(), "sar", objective="em", margin=2.0, recover_below=0.0, lr=0.1)
    for x in batches(5):
        adapter(x)
    assert int(adapter.state["recoveries"]) == 0


def test_come_holds_the_norm_where_em_grows_it():
    """The point of the paper in small: on one batch, again and again, EM inflates the logits, COME does not."""
    growth = {}
    for objective in ("em", "come"):
        adapter = come.adapt(tiny(), "tent", objective=objective, lr=0.05, guard=False)
        x = batches(1)[0]
        norms = [adapter(x).norm(dim=1).mean().item() for _ in range(30)]
        growth[objective] = norms[-1] / norms[0]
    assert growth["come"] < growth["em"]


def test_your_own_method_registers_by_name():
    class Mine(come.methods.Tent):
        name = "mine"

    come.methods.register(Mine)
    try:
        assert isinstance(come.adapt(tiny(), "mine").method, Mine)
        with pytest.raises(come.ConfigError, match="'mine' is taken"):
            come.methods.register(type("Other", (come.methods.Tent,), {"name": "mine"}))
    finally:
        come.methods._registry.remove("mine")
    with pytest.raises(come.ConfigError, match=r"takes a subclass of come\.Method, got the class Linear"):
        come.methods.register(torch.nn.Linear)
    with pytest.raises(come.ConfigError, match="Nameless has no name; give the class an attribute name"):
        come.methods.register(type("Nameless", (come.Method,), {}))


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
    adapter = come.adapt(tiny(), "t3a", supports=2)
    for x in batches(4):
        adapter(x)
        assert (adapter.state["entropy"].diff(dim=1).nan_to_num() >= 0).all()
    assert adapter.state["support"].shape == (CLASSES, 2, 32)  # however long the stream is


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
    adapter = come.adapt(tiny(), "tea", normalization=IMAGES, dreams=2, buffer=30, buffer_device="cpu")
    x = batches(1)[0]
    adapter(x)
    first = adapter.state["buffer"].clone()
    images = first * 0.07 + 0.45
    assert -0.01 <= images.min() < 0.1
    assert 0.9 < images.max() <= 1.01
    adapter(x)
    changed = (adapter.state["buffer"] != first).flatten(1).any(dim=1)
    assert int(changed.sum()) == 12
    assert "buffer" in adapter.method.on_host
    assert "buffer" not in come.methods.TEA(buffer_device="model").on_host


def test_tea_lowers_the_energy_of_the_data_against_its_dreams():
    adapter = come.adapt(tiny(), "tea", normalization=IMAGES, dreams=2, buffer=30, lr=0.05)
    x = batches(1)[0]
    energies = [adapter.step(x).loss.mean().item() for _ in range(8)]
    assert energies[-1] < energies[0]


def test_foa_improves_its_fitness_and_changes_no_weight():
    model = TinyTransformer(NORMS["layer"])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    told = []

    class Search(come.methods.foa.CMAES):
        def tell(self, candidates, fitness):
            told.append(fitness.min().item())
            super().tell(candidates, fitness)

    adapter = come.adapt(model, "foa", source=batches(2, seed=9), prompts=2, population=8, search=Search)
    x = batches(1)[0]
    for _ in range(25):
        adapter(x)
    assert all(b <= a + 1e-5 for a, b in itertools.pairwise(told))  # the best one competes again
    assert told[-1] < 0.7 * told[0]
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_foa_computes_the_patch_embedding_once_and_chunks_do_not_matter():
    answers, seen = [], []
    for chunk in (12, 48, 1000):
        model = TinyTransformer(NORMS["layer"])
        adapter = come.adapt(model, "foa", source=batches(2, seed=9), prompts=2, population=8, chunk=chunk, guard=False)
        sizes = []
        model.embedding.register_forward_hook(lambda _, inputs, out, sizes=sizes: sizes.append(len(inputs[0])))
        answers.append(adapter(batches(1)[0]))
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
        transformers = pytest.importorskip("transformers")
        model = transformers.ViTForImageClassification(
            transformers.ViTConfig(
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
    adapter = come.adapt(model, "foa", source=source, prompts=2, population=5, chunk=12)
    assert adapter(x).shape == (6, 7)
    assert adapter._engine.transition.fixed["source_mean"].shape == (4 * 16,)
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


@pytest.mark.parametrize(
    ("norm", "statistics"),
    [
        *((norm, "batch") for norm in NORMS),
        ("batch", "source"),
        ("batch", "mixed"),
    ],
)
def test_cotta_chunks_do_not_matter(norm, statistics):
    def answer(chunk):
        def augment(images, generator):  # one view after the other, whatever the chunk
            return torch.stack([images[0] * 0.9 ** next(number) for _ in range(len(images))])

        number = iter(range(100))
        adapter = come.adapt(
            tiny(norm),
            "cotta",
            normalization=IMAGES,
            statistics=statistics,
            views=6,
            augment=augment,
            confident=1.0,
            chunk=chunk,
        )
        return adapter(batches(1)[0])

    torch.testing.assert_close(answer(12), answer(1000))


def test_cotta_restores_a_share_of_the_student():
    adapter = come.adapt(tiny(), "cotta", views=0, restore=0.25, lr=0.5)
    adapter(batches(1)[0])
    source = adapter.source_parameters
    back = torch.cat([(p == source[name]).flatten() for name, p in adapter.adapted_parameters.items()])
    assert 0.2 < back.float().mean() < 0.32


@pytest.mark.parametrize("norm", NORMS)
def test_memo_takes_each_image_by_itself(norm):
    x = batches(1)[0]
    together = come.adapt(tiny(norm), "memo", normalization=IMAGES, views=3, augment=lambda v, g: v)(x)
    adapter = come.adapt(tiny(norm), "memo", normalization=IMAGES, views=3, augment=lambda v, g: v)
    alone = torch.cat([adapter(image[None]) for image in x])
    torch.testing.assert_close(together, alone)


def test_deyo_uses_what_depends_on_shape():
    x = batches(1)[0]
    step = come.adapt(tiny(), "deyo", limit=2.0, drop=0.0, shuffle=lambda images, g: images).step(x)
    assert not step.used.any()  # nothing was destroyed, so no probability dropped
    step = come.adapt(tiny(), "deyo", limit=2.0, drop=-1.0).step(x)
    assert step.used.all()


def test_deyo_shuffles_patches_and_keeps_pixels():
    method = come.methods.DeYO()
    x = batches(1)[0]
    mixed = method._shuffled(x, torch.Generator().manual_seed(0))
    assert not torch.equal(mixed, x)
    torch.testing.assert_close(mixed.flatten(2).sort(dim=2).values, x.flatten(2).sort(dim=2).values)
    odd = torch.rand(2, 3, 9, 11)
    assert method._shuffled(odd, torch.Generator().manual_seed(0)).shape == odd.shape


def test_rotta_memory_is_bounded_and_balanced():
    model = tiny("batch")
    adapter = come.adapt(model, "rotta", normalization=IMAGES, capacity=10, every=12)
    for x in batches(6):
        adapter(x)
        labels = adapter.state["ledger.label"]
        assert labels.shape == (10,)
        counts = torch.bincount(labels[labels >= 0], minlength=CLASSES)
        assert counts.max() <= 10 - (counts > 0).sum() + 1
    assert int(adapter.state["ledger.seen"]) == 72
    assert not torch.equal(adapter.state["student_mean.0"], model.blocks[0][1].running_mean)  # robust statistics moved


def test_rotta_answers_with_the_teacher():
    adapter = come.adapt(tiny(), "rotta", normalization=IMAGES, capacity=12, every=12, nu=0.0, lr=0.1)
    x = batches(1)[0]
    with torch.no_grad():
        expected = tiny().eval()(x)
    for _ in range(3):
        torch.testing.assert_close(adapter(x), expected)
    assert distance(adapter) > 0


def test_roid_never_goes_far():
    x = batches(1)[0]

    def after(momentum):
        adapter = come.adapt(tiny(), "roid", consistency=False, momentum=momentum, lr=0.1)
        for _ in range(5):
            adapter(x)
        return distance(adapter)

    assert after(0.0) == 0
    assert after(0.5) < after(1.0)


@pytest.mark.parametrize("method", ["tent", "sar", "rdumb"])
def test_periodic_reset_is_a_reset(method):
    data = batches(6)
    periodic = come.adapt(tiny(), method, lr=0.02, reset_every=3)
    logits = [periodic(x) for x in data]
    fresh = come.adapt(tiny(), method, lr=0.02)
    again = [fresh(x) for x in data[3:]]
    for a, b in zip(logits[3:], again, strict=True):
        assert torch.equal(a, b)


def test_rdumb_is_eta_and_resets_by_itself():
    known = come.methods.get("rdumb").hyperparameters()
    assert (known["beta"], known["reset_every"]) == (0, 1000)
    rdumb, eta = come.adapt(tiny(), "rdumb", lr=0.1), come.adapt(tiny(), "eata", beta=0, lr=0.1)  # no source data
    for x in batches():
        assert torch.equal(rdumb(x), eta(x))


# ---- bad input ----


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("memo", {"views": 1}, "views must be an integer >= 2 .*, got 1"),
        ("t3a", {"supports": 0}, "supports must be an integer >= 1, or None to keep all, got 0"),
        ("lame", {"k": 0}, "k must be an integer >= 1, got 0"),
        ("lame", {"affinity": "cosine"}, "affinity must be one of knn, rbf, linear, got 'cosine'"),
        ("pl", {"threshold": 1.0}, r"threshold must be a probability in \[0, 1\), got 1\.0"),
        ("tea", {"dreams": 0}, "dreams must be an integer >= 1, got 0"),
        ("tea", {"buffer_device": "gpu"}, "buffer_device must be 'model' or 'cpu', got 'gpu'"),
        ("foa", {}, "pass source="),
        ("cotta", {"views": -1}, "views must be an integer >= 0, got -1"),
        ("cotta", {"restore": 2.0}, r"restore must be a share in \[0, 1\], .*, got 2\.0"),
        ("cotta", {"normalization": ((0.5,), (0.0,))}, "normalization must be \\(mean, std\\)"),
        ("rotta", {"capacity": 0}, "capacity must be an integer >= 1, got 0"),
        ("roid", {"temperature": 0}, "temperature must be positive, got 0"),
        ("deyo", {"patches": 1}, "patches must be an integer >= 2, got 1"),
        ("tent", {"reset_every": 0}, "reset_every must be an integer >= 1, or None, got 0"),
        ("t3a", {"head": "nothing"}, "head must name a module of TinyClassifier, got 'nothing'"),
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
    torch.testing.assert_close(adapter.state_dict(), before, rtol=0, atol=0, equal_nan=True)


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
    with pytest.raises(come.InputError, match=r"needs images, .*, got \(6, 4\); for other data"):
        adapter(torch.rand(6, 4))


def test_cotta_without_views_takes_any_input():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    assert come.adapt(model, "cotta", views=0)(torch.randn(6, 4)).shape == (6, 3)


@pytest.mark.parametrize(("affinity", "least"), [("knn", 6), ("rbf", 5)])
def test_lame_refuses_batches_that_are_too_small(affinity, least):
    adapter = come.adapt(tiny(), "lame", affinity=affinity, k=5)
    with pytest.raises(come.InputError, match=f"needs a batch of at least {least} samples, got {least - 1};"):
        adapter(batches(1, size=least - 1)[0])
    assert adapter(batches(1, size=least)[0]).shape == (least, CLASSES)


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
    with pytest.raises(come.ConfigError, match="at least 2 images for a standard"):
        come.adapt(TinyTransformer(NORMS["layer"]), "foa", source=[])


def test_foa_draws_by_the_sign_of_its_seed_too():
    from come.methods.foa import CMAES

    drawn = [CMAES(4, 6, seed).ask(0) for seed in (1, -1)]
    assert not torch.equal(*drawn)


def test_foa_without_cma_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cma", None)
    with pytest.raises(come.ConfigError, match=r'pip install -e "\.\[foa\]"'):
        come.adapt(TinyTransformer(NORMS["layer"]), "foa", source=batches(1))(batches(1)[0])


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
    with pytest.raises(come.InputError, match=r"those before, \(3, 8, 8\), .* got \(3, 6, 6\)"):
        adapter(batches(1)[0][:, :, :6, :6])
    adapter.reset()
    adapter(batches(1)[0][:, :, :6, :6])
