"""Logits with positions, (B, K, *P): pixels, voxels, tokens."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import come
from come import abstain_by_image
from come.images.augment import still
from come.images.geometry import flip_scale
from come.methods import CoTTA
from come.model import positions
from come.objectives import Invariant, Opinion, Softmax

K, SIZE = 5, (8, 8)
NORMS = {"group": lambda c: nn.GroupNorm(2, c), "batch": nn.BatchNorm2d, "layer": lambda c: nn.GroupNorm(1, c)}


class Segmenter(nn.Module):
    """Two convolution blocks and a linear layer for each pixel, (B, 3, H, W) -> (B, K, H, W)."""

    def __init__(self, norm="group", classes=K, make=lambda z: z):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.Sequential(
                *(nn.Conv2d(3, 8, 3, padding=1), NORMS[norm](8), nn.SiLU()),
                *(nn.Conv2d(8, 8, 3, padding=1), NORMS[norm](8), nn.SiLU()),
            )
            self.head = nn.Linear(8, classes)
            self.head.weight.data.mul_(4)
        self.make = make

    def forward(self, x):
        return self.make(self.head(self.blocks(x).movedim(1, -1)).movedim(-1, 1))


class Vector(Segmenter):
    """The same for a whole image, (B, K), or with one position, (B, K, 1, 1)."""

    def forward(self, x):
        return self.make(self.head(self.blocks(x).mean(dim=(2, 3))))


def images(count=4, batch=4, seed=0, size=SIZE):
    draw = torch.Generator().manual_seed(seed)
    return [torch.rand(batch, 3, *size, generator=draw) for _ in range(count)]


def pixels(z):
    return z[:, :, None, None]


ARGUMENTS = {
    "tent": {},
    "steady": {},
    "eata": {"source": images(2), "margin": 0.95, "redundancy": 0.9, "beta": 10.0},
    "rdumb": {"margin": 0.95, "redundancy": 0.9, "reset_every": 3},
    "sar": {"margin": 0.95},
    "cotta": {"confident": 0.0},
    "rotta": {"capacity": 8, "every": 4, "augment": still},
    "roid": {"prior_correction": False, "augment": still},
    "pl": {"threshold": 0.3},
    "adadem": {},
    "norm": {},
    "source": {},
}
VECTORS_ONLY = {name: {} for name in ("t3a", "lame", "memo", "tea", "deyo", "zerosiam", "asr", "neo", "tpt", "tda")}
VECTORS_ONLY |= {"steady:prior_correction=true": {}, "roid": {}}


def adapted(model, name, **more):
    known = ARGUMENTS.get(name, {}) | ({} if name in ("norm", "source") else {"lr": 0.01})
    return come.adapt(model, name, **(known | more))


def same(a, b):
    for mine, theirs in zip(a, b, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert torch.equal(mine.flatten(), theirs.flatten())


# ---- one position is a classifier ----


@pytest.mark.parametrize("objective", [Softmax(), Opinion(), Invariant()], ids=["em", "come", "invariant"])
@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_one_position_is_a_classifier(name, norm, objective):
    if objective != Opinion() and name in ("norm", "source", "pl"):
        pytest.skip("does not depend on the objective")
    flat = adapted(Vector(norm), name, objective=objective)
    dense = adapted(Vector(norm, make=pixels), name, objective=objective)
    for x in images(5):
        same(dense.step(x), flat.step(x))
    mine, theirs = dense.state_dict(), flat.state_dict()
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        if key != "configuration" and "fingerprint" not in key:
            assert torch.equal(value.nan_to_num(-7), theirs[key].nan_to_num(-7)), key
    assert torch.equal(dense.predict(x)[..., 0, 0], flat.predict(x))


def test_every_method_takes_positions_or_says_why_not():
    refused = {come.methods.get(name).name for name in come.methods.names() if come.methods.get(name).vectors_only}
    assert set(come.methods.names()) == set(ARGUMENTS) | refused
    assert refused - {"foa"} <= set(VECTORS_ONLY)  # foa refuses all but vision transformers


@pytest.mark.parametrize("name", VECTORS_ONLY)
def test_methods_that_need_one_answer_per_sample_refuse(name):
    with pytest.raises(
        come.ConfigError, match=r"takes logits \(B, K\) only, since .*, got positions \(8, 8\)"
    ) as refused:
        come.adapt(Segmenter(), name, **VECTORS_ONLY[name])(images(1, 8)[0])
    assert "\n" not in str(refused.value)


# ---- trajectories written out ----


def plain_entropy(z):
    log_p = z.log_softmax(dim=1)
    return -(log_p.exp() * log_p).sum(dim=1)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("batch", [1, 3])
def test_tent_by_hand(norm, batch):
    model = Segmenter(norm)
    adapter = come.adapt(model, "tent", objective="em", guard=False, lr=0.05)
    net = copy.deepcopy(model)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    affine = [p for m in net.modules() if isinstance(m, (nn.GroupNorm, nn.BatchNorm2d)) for p in m.parameters()]
    optimizer = torch.optim.SGD(affine, lr=0.05, momentum=0.9)
    for x in images(4, batch):
        logits = net(x)
        entropy = plain_entropy(logits)
        optimizer.zero_grad()
        entropy.mean().backward()
        optimizer.step()
        step = adapter.step(x)
        assert step.logits.shape == (batch, K, *SIZE)
        torch.testing.assert_close(step.logits, logits.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(step.loss, entropy.detach(), rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(adapter.adapted_parameters.values(), affine, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_cotta_by_hand(norm):
    scales, confident, alpha = (0.5, 1.0), 0.5, 0.9
    model = Segmenter(norm)
    method = CoTTA(
        objective="em", lr=0.05, confident=confident, alpha=alpha, augment=flip_scale(scales), restore=lambda *_: mask
    )
    adapter = come.adapt(model, method, guard=False)
    student = copy.deepcopy(model)
    for module in student.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    teacher, anchor = copy.deepcopy(student), copy.deepcopy(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    mask, mixed = torch.tensor(0.0), []
    for x in images(3, 2):
        with torch.no_grad():
            sure = anchor(x).softmax(dim=1).amax(dim=1)
            views = []
            for scale in scales:
                small = x if scale == 1 else F.interpolate(x, scale_factor=scale, mode="bilinear")
                for view, undo in ((small, lambda z: z), (small.flip(-1), lambda z: z.flip(-1))):
                    z = undo(teacher(view))
                    views.append(z if z.shape[-2:] == SIZE else F.interpolate(z, SIZE, mode="bilinear"))
            target = torch.where((sure < confident)[:, None], torch.stack(views).mean(dim=0), teacher(x))
            mixed.append((sure < confident).float().mean().item())
        s, t = student(x).log_softmax(dim=1), target.log_softmax(dim=1)
        loss = -0.5 * (t.exp() * s).sum(dim=1) - 0.5 * (s.exp() * t).sum(dim=1)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 1 - alpha)
        step = adapter.step(x)
        torch.testing.assert_close(step.logits, target, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(step.loss, loss.detach(), rtol=1e-4, atol=1e-5)
    assert all(0.05 < share < 0.95 for share in mixed)  # both kinds of target occur


# ---- shapes ----


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name != "rotta"])
@pytest.mark.parametrize("batch", [1, 2])
def test_what_a_step_returns_has_the_shape_of_the_logits(name, batch):
    adapter = adapted(Segmenter("batch"), name)
    for x in images(2, batch):
        step = adapter.step(x)
    assert step.logits.shape == (batch, K, *SIZE)
    assert step.valid.shape == (batch,)
    assert all(v.shape == (batch, *SIZE) for v in (step.loss, step.used) if v is not None)
    assert adapter.uncertainty(step.logits).shape == adapter.confidence(step.logits).shape == (batch, *SIZE)


def test_rotta_remembers_images_by_the_class_of_most_pixels():
    adapter = adapted(Segmenter("batch"), "rotta")
    for x in images(4, 2):
        step = adapter.step(x)
    assert step.used.shape == (2, *SIZE)
    assert step.used.flatten(1).all(dim=1).any()
    labels = adapter.state["ledger.label"]
    kept = adapter.state["images"][labels >= 0]
    with torch.no_grad():
        found = Segmenter("batch").eval()(kept).argmax(dim=1).flatten(1).mode(dim=1).values
    assert torch.equal(found, labels[labels >= 0])


def test_volumes_sequences_and_points():
    class Any1d(nn.Module):
        def __init__(self, make):
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.head, self.make = nn.LayerNorm(6), nn.Linear(6, K), make

        def forward(self, x):
            return self.make(self.head(self.norm(x)))

    x = torch.randn(2, 12, 6)
    last = come.adapt(Any1d(lambda z: z), "tent", class_dim=-1, lr=0.1)
    first = come.adapt(Any1d(lambda z: z.movedim(-1, 1)), "tent", lr=0.1)
    volume = come.adapt(Any1d(lambda z: z.movedim(-1, 1).unflatten(2, (3, 2, 2))), "tent", lr=0.1)
    for _ in range(2):
        a, b, c = last.step(x), first.step(x), volume.step(x)
    assert a.logits.shape == (2, 12, K)
    assert c.logits.shape == (2, K, 3, 2, 2)
    assert c.loss.shape == (2, 3, 2, 2)
    assert torch.equal(a.logits.movedim(-1, 1), b.logits)
    assert torch.equal(b.logits, c.logits.flatten(2))
    assert torch.equal(last.uncertainty(a.logits), first.uncertainty(b.logits))


@pytest.mark.parametrize("bad", [0, True, "last"])
def test_class_dim_that_is_refused(bad):
    with pytest.raises(come.ConfigError, match="class_dim must be a dimension of the logits"):
        come.adapt(Segmenter(), "tent", class_dim=bad)


@pytest.mark.parametrize("key", ["out", "logits"])
def test_outputs_of_libraries(key):
    made = come.adapt(Segmenter(make=lambda z: {"aux": z[:, :1], key: z}), "tent", lr=0.05)
    plain = come.adapt(Segmenter(), "tent", lr=0.05)
    for x in images(2):
        assert torch.equal(made(x), plain(x))


def test_torchvision():
    segmentation = pytest.importorskip("torchvision").models.segmentation
    model = segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)
    step = come.adapt(model).step(torch.rand(1, 3, 32, 32))
    assert step.logits.shape == (1, 4, 32, 32)


def segformer():
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=8, num_labels=4,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.SegformerForSemanticSegmentation(config)


def test_segformer_answers_at_a_quarter_of_the_size():
    adapter = come.adapt(segformer())
    step = adapter.step(pixel_values=torch.randn(1, 3, 64, 32))
    assert step.logits.shape == (1, 4, 16, 8)
    ignore = torch.zeros(1, 64, 32, dtype=torch.bool)
    with pytest.raises(
        come.InputError, match=r"\(B, 16, 8\), got \(1, 64, 32\); bring a mask of the image to the size"
    ):
        adapter.step(pixel_values=torch.randn(1, 3, 64, 32), ignore=ignore)
    adapter.step(pixel_values=torch.randn(1, 3, 64, 32), ignore=ignore[:, ::4, ::4])


def test_token_classifiers_have_their_classes_last():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, num_labels=3
    )
    model = transformers.BertForTokenClassification(config)
    tokens = {"input_ids": torch.randint(20, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.int64)}
    with pytest.raises(
        come.InputError, match=r"3 classes of this model last; say so: come.adapt\(model, ..., class_dim=-1\)"
    ):
        come.adapt(model)(**tokens)
    step = come.adapt(model, class_dim=-1).step(**tokens, ignore=tokens["attention_mask"] == 0)
    assert step.logits.shape == (2, 7, 3)
    assert step.loss.shape == (2, 7)


# ---- what is ignored, invalid, unanswered ----


@pytest.mark.parametrize("name", ["tent", "steady", "eata", "sar", "pl", "roid", "cotta"])
def test_what_is_ignored_drives_nothing(name):
    """The pixels to the right are noise without influence on the others: kernels of 1 x 1."""

    def model():
        net = Segmenter()
        for layer in (net.blocks[0], net.blocks[3]):
            centre = layer.weight.data[:, :, 1:2, 1:2].clone()
            layer.weight.data.zero_()[:, :, 1:2, 1:2] = centre
        for i in (1, 4):
            net.blocks[i] = PixelNorm(8)
        return net

    ignore = torch.zeros(2, *SIZE, dtype=torch.bool)
    ignore[..., 5:] = True
    a, b = (adapted(model(), name, select=come.select.norm_affine()) for _ in range(2))
    for x, noise in zip(images(5, 2), images(5, 2, seed=1), strict=True):
        mine, theirs = a.step(x, ignore=ignore), b.step(torch.where(ignore[:, None], noise, x), ignore=ignore)
        assert not mine.used[ignore].any()
        torch.testing.assert_close(mine.logits[..., :5], theirs.logits[..., :5], rtol=1e-4, atol=1e-5)
        assert mine.logits.isfinite().all()
    for key, value in a.adapted_parameters.items():
        torch.testing.assert_close(value, b.adapted_parameters[key], rtol=1e-4, atol=1e-5)
    keys = ("share", "entropy", "norm", "confidence")
    assert [a.health()[key] for key in keys] == pytest.approx([b.health()[key] for key in keys], rel=1e-4)


class PixelNorm(nn.Module):
    """LayerNorm over the channels of each pixel."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x):
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


def test_an_ignored_batch_moves_nothing():
    adapter = come.adapt(Segmenter(), "tent", lr=0.5)
    before = adapter.adapted_parameters
    step = adapter.step(images()[0], ignore=torch.ones(4, *SIZE, dtype=torch.bool))
    assert not step.used.any()
    assert step.valid.all()
    assert all(torch.equal(value, before[key]) for key, value in adapter.adapted_parameters.items())


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        (torch.zeros(4, *SIZE), "ignore must be a bool tensor"),
        (torch.zeros(3, *SIZE, dtype=torch.bool), "must have the same length, got x: 4, ignore: 3"),
        (torch.zeros(4, 8, dtype=torch.bool), r"ignore must have the shape of the logits .* \(B, 8, 8\), got \(4, 8\)"),
    ],
)
def test_masks_that_are_refused(ignore, message):
    with pytest.raises(come.InputError, match=message):
        come.adapt(Segmenter(), "tent").step(images()[0], ignore=ignore)


def test_a_model_with_an_argument_of_that_name_gets_it():
    class Own(Segmenter):
        def forward(self, x, ignore=1.0):
            return super().forward(x) * ignore

    x = images()[0]
    assert torch.equal(come.adapt(Own(), "source")(x, ignore=2.0), 2 * come.adapt(Segmenter(), "source")(x))


def test_an_invalid_image_is_one_sample():
    adapter, x = come.adapt(Segmenter("batch"), "tent", statistics="batch", lr=0.01), images()[0]
    x[2, 0, 0, 0] = torch.nan
    step = adapter.step(x)
    assert step.valid.tolist() == [True, True, False, True]
    assert (step.logits[2] == -1e4).all()
    assert not step.used[2].any()
    assert step.logits.isfinite().all()
    for more in images(3, seed=1):
        adapter(more)
    assert adapter.health()["invalid_samples"] == 1


def test_one_unanswered_pixel_makes_an_unanswered_image():
    class Hole(Segmenter):
        def forward(self, x):
            hole = torch.zeros(len(x), 1, *SIZE)
            hole[1, :, 0, 0] = torch.nan
            return super().forward(x) + hole

    adapter, x = come.adapt(Hole(), "tent", lr=0.5), images()[0]
    before = adapter.adapted_parameters
    step = adapter.step(x)
    assert step.valid.tolist() == [True, False, True, True]
    assert (step.logits[1] == -1e4).all()
    assert all(torch.equal(value, before[key]) for key, value in adapter.adapted_parameters.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    adapter = come.adapt(Segmenter().to(dtype), "tent", lr=0.01)
    for x in images(2):
        step = adapter.step(x.to(dtype))
    assert step.logits.dtype == dtype
    assert step.loss.dtype == torch.float32
    assert step.used.all()


# ---- the guard and dominance ----


class Mostly(Segmenter):
    """Background nearly everywhere, and it is right."""

    def forward(self, x):
        z = super().forward(x)
        return torch.cat([z[:, :1] + 6 * (x[:, :1] < 0.8), z[:, 1:]], dim=1)


def test_a_background_is_no_collapse():
    adapter = come.adapt(Mostly(), "tent", lr=1e-4, guard=come.Guard(samples=16))
    for x in images(80, 2):
        step = adapter.step(x)
    share = (step.logits.argmax(dim=1) == 0).float().mean()
    assert share > 0.7
    health = adapter.health()
    assert health["collapse"] == health["suspicious"] == 0
    assert health["healthy"] >= 1
    assert health["agreement"] > 0.9


def test_a_collapse_onto_the_background_is_found():
    adapter = come.adapt(Segmenter(), "tent", objective="em", lr=0.3, guard=come.Guard(samples=32))
    for x in images(120, 2):
        adapter(x)
    assert adapter.health()["collapse"] >= 1, adapter.health()


def test_steady_learns_under_a_background_and_stays_beside_its_source():
    adapter = come.adapt(Mostly(), lr=1e-3)
    for x in images(60, 2):
        step = adapter.step(x)
    source = Mostly().eval()
    moved = max((v - adapter.source_parameters[k]).abs().max() for k, v in adapter.adapted_parameters.items())
    assert moved > 1e-4  # 1/K of the classes would have switched it off
    with torch.no_grad():
        before, after = (
            z.argmax(dim=1).flatten().bincount(minlength=K) / z[:, 0].numel() for z in (source(x), step.logits)
        )
    assert (before - after).abs().sum() < 0.2


# ---- abstaining ----


def drawn_images(count, generator, places=60):
    """Scores and errors of images of which some are hard all over: positions are far from independent."""
    hard = torch.rand(count, 1, generator=generator)
    score = torch.rand(count, places, generator=generator)
    wrong = torch.rand(count, places, generator=generator) < hard.square() * (1 - score)
    return score, wrong


def true_risk(threshold, of):
    answered = of[0] >= threshold
    return (answered & of[1]).float().mean() / answered.float().mean()


def test_the_promise_of_a_risk_holds_for_images():
    draw = torch.Generator().manual_seed(0)
    everything = drawn_images(20_000, draw)
    risk, delta, broken, answered = 0.1, 0.2, 0, []
    for trial in range(60):
        score, wrong = drawn_images(400, draw)
        found = torch.stack([score, torch.full_like(score, 1 / score.shape[1]), wrong.float()], dim=1)
        threshold = abstain_by_image.risk_threshold(found, risk, delta, seed=trial)
        broken += bool(true_risk(threshold, everything) > risk)
        answered.append((everything[0] >= threshold).float().mean())
    assert broken <= 60 * delta
    assert torch.stack(answered).mean() > 0.3  # with the risk known 0.6 of all positions could be answered


def test_the_promise_of_a_coverage_holds_for_images_and_is_used():
    draw = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(300):
        base = torch.randn(21, 1, generator=draw)  # what pixels of one image have in common
        score = base + 0.1 * torch.randn(21, 2000, generator=draw)
        found = abstain_by_image.sampled(score[:20], score[:20] > -99, None, draw)
        threshold = abstain_by_image.coverage_threshold(found, 0.8)
        shares.append((score[20] >= threshold).float().mean())
    mean = torch.stack(shares).mean()
    assert 0.8 - 2 * 0.4 / math.sqrt(300) < mean < 0.9


def test_calibrating_on_images():
    adapter, draw = come.adapt(Segmenter(), "tent", lr=1e-4), torch.Generator().manual_seed(0)
    with torch.no_grad():
        data = [(x, Segmenter()(x).argmax(dim=1)) for x in images(40, 2)]
    promise = adapter.calibrate(((x, y) for x, y in data), risk=0.1)
    assert promise.positions
    assert promise.samples == 80
    assert "of the answered positions are wrong" in str(promise)
    assert "80 images" in str(promise)
    step = adapter.step(data[0][0])
    assert step.abstain.shape == (2, *SIZE)
    assert torch.equal(adapter.abstains(adapter.predict(data[1][0])), adapter.answer(data[1][0]).abstain)

    wrong = [(x, (y + (torch.rand(y.shape, generator=draw) < 0.5)) % K) for x, y in data]
    with pytest.raises(come.InputError, match=r"no threshold has a risk of .* that 80 labelled images can show"):
        adapter.calibrate(wrong, risk=0.1)
    border = torch.zeros(2, *SIZE, dtype=torch.bool)
    border[:, 2:6, 2:6] = True
    marked = [(x, torch.where(border, y, 255)) for x, y in data]
    with pytest.raises(come.InputError, match="labels must be from 0 to 4"):
        adapter.calibrate(marked, risk=0.1)
    assert adapter.calibrate(marked, risk=0.1, ignore_index=255).samples == 80
    promise = adapter.calibrate(data, coverage=0.9)
    assert adapter.calibrate([x for x, _ in data], coverage=0.9) == promise
    with pytest.raises(come.InputError, match=r"a label for each position of the logits, \(2, 8, 8\), got \(2, 4, 4\)"):
        adapter.calibrate([(x, y[:, ::2, ::2]) for x, y in data], risk=0.1)


def test_a_threshold_follows_by_image():
    adapter = come.adapt(Segmenter(), "source")
    data = images(30, 2)
    adapter.calibrate(data, coverage=0.8, follow=True)
    ignore, shares = torch.zeros(2, *SIZE, dtype=torch.bool), []
    ignore[:, :2] = True
    for x in images(150, 2, seed=3):
        step = adapter.step(x * 0.3, ignore=ignore)
        shares.append((~step.abstain)[~ignore].float().mean())
    assert abs(torch.stack(shares).mean() - 0.8) < 0.05


def test_one_position_is_calibrated_as_a_classifier():
    data = [(x, torch.arange(4) % K) for x in images(20)]
    with torch.no_grad():
        data = [(x, Vector().eval()(x).argmax(dim=1)) for x, _ in data]
    flat, dense = come.adapt(Vector(), "source"), come.adapt(Vector(make=pixels), "source")
    for how in ({"coverage": 0.8}, {"risk": 0.1}):
        assert dense.calibrate([(x, y[:, None, None]) for x, y in data], **how) == flat.calibrate(data, **how)


def test_ignored_labels_of_a_classifier_do_not_count():
    data = [(x, torch.tensor([0, 1, 255, 255])) for x in images(40)]
    promise = come.adapt(Vector(), "source").calibrate(data, risk=0.9, ignore_index=255)
    assert promise.samples == 80


# ---- states, streams, exports, compiled, memory ----


@pytest.mark.parametrize("name", ["tent", "steady", "eata", "cotta", "rotta"])
def test_saved_and_resumed(name, tmp_path):
    data = images(8, 2)
    through, first, second = (adapted(Segmenter("batch"), name) for _ in range(3))
    expected = [through(x) for x in data]
    for x in data[:4]:
        first(x)
    first.save(tmp_path / "state.safetensors")
    second.load(tmp_path / "state.safetensors")
    for x, answer in zip(data[4:], expected[4:], strict=True):
        assert torch.equal(second(x), answer)


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("name", ["tent", "steady", "eata", "sar", "roid"])
def test_streams_of_a_fleet_are_adapters(name, norm):
    arguments = ARGUMENTS[name] | {"lr": 0.01}
    fleet = come.Fleet(Segmenter(norm), name, streams=["a", "b"], **arguments)
    alone = {stream: adapted(Segmenter(norm), name) for stream in "ab"}
    for fleet_or_one in (fleet, *alone.values()):
        fleet_or_one.calibrate(images(10, 2), coverage=0.9)
    for x in images(4, 4):
        out = fleet.step(x, ["a", "b", "a", "b"])
        for stream, rows in (("a", [0, 2]), ("b", [1, 3])):
            mine = alone[stream].step(x[rows])
            torch.testing.assert_close(out.logits[rows], mine.logits, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(out.loss[rows], mine.loss, rtol=1e-4, atol=1e-5)
            assert torch.equal(out.valid[rows], mine.valid)
    assert out.abstain.shape == (4, *SIZE)
    assert fleet.uncertainty(out.logits).shape == fleet.confidence(out.logits, ["a", "b", "a", "b"]).shape == (4, *SIZE)


def test_a_fleet_ignores_by_stream():
    ignore = torch.zeros(4, *SIZE, dtype=torch.bool)
    ignore[1, :4] = True
    fleet = come.Fleet(Segmenter(), "tent", streams=["a", "b"], lr=0.05)
    alone = [come.adapt(Segmenter(), "tent", lr=0.05) for _ in range(2)]
    for x in images(3, 4):
        out = fleet.step({"x": x, "ignore": ignore}, ["a", "b", "a", "b"])
        for one, rows in zip(alone, ([0, 2], [1, 3]), strict=True):
            mine = one.step(x[rows], ignore=ignore[rows])
            torch.testing.assert_close(out.logits[rows], mine.logits, rtol=1e-4, atol=1e-5)
            assert torch.equal(out.used[rows], mine.used)


def test_exported(tmp_path):
    adapter = come.adapt(Segmenter("batch"), "tent", statistics="batch", lr=0.01)
    for x in images(3):
        adapter(x)
    torch.testing.assert_close(adapter.export()(x), adapter.predict(x), rtol=1e-4, atol=1e-5)
    adapter.export(tmp_path / "model.pt2", x)
    alone = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(alone(x), adapter.predict(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_mixed_statistics_are_half_of_one_image():
    """From the first batch on, whose positions nobody has seen before."""
    (x,) = images(1, 1)
    model = Segmenter("batch").eval()
    mixed = come.adapt(model, "norm", guard=False, statistics="mixed")(x)
    first, layer = model.blocks[0](x), model.blocks[1]
    mean = (layer.running_mean + first.mean(dim=(0, 2, 3))) / 2
    var = (layer.running_var + first.var(dim=(0, 2, 3), correction=0)) / 2
    z = F.batch_norm(first, mean, var, layer.weight, layer.bias, eps=layer.eps)
    second, layer = model.blocks[3](F.silu(z)), model.blocks[4]
    mean = (layer.running_mean + second.mean(dim=(0, 2, 3))) / 2
    var = (layer.running_var + second.var(dim=(0, 2, 3), correction=0)) / 2
    z = F.silu(F.batch_norm(second, mean, var, layer.weight, layer.bias, eps=layer.eps))
    torch.testing.assert_close(mixed, model.head(z.movedim(1, -1)).movedim(-1, 1).detach(), rtol=1e-4, atol=1e-4)


def test_compiled(compiler):
    plain, fast = come.adapt(Segmenter(), "tent", lr=0.05), come.adapt(Segmenter(), "tent", lr=0.05, compile=True)
    for x in images(3):
        torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["tent", "steady", "eata", "sar", "cotta", "roid", "pl"])
def test_parts_give_the_same(name, monkeypatch):
    data, whole = images(4, 2), adapted(Segmenter("batch"), name, lr=0.001)
    expected = [whole.step(x) for x in data]
    monkeypatch.setattr(positions, "FEW_ROWS", 16)
    monkeypatch.setattr(positions, "PART", 37 * K)
    cut = adapted(Segmenter("batch"), name, lr=0.001)
    for x, step in zip(data, expected, strict=True):
        mine = cut.step(x)
        torch.testing.assert_close(mine.logits, step.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine.loss, step.loss, rtol=1e-4, atol=1e-4)
        assert torch.equal(mine.used, step.used)


def test_streams_in_parts(monkeypatch):
    monkeypatch.setattr(positions, "FEW_ROWS", 16)
    monkeypatch.setattr(positions, "PART", 37 * K)
    test_streams_of_a_fleet_are_adapters("steady", "group")


def test_the_gradient_of_parts():
    z = torch.randn(40_000, 30, dtype=torch.float64)
    for objective in (Softmax(), Opinion(), Invariant()):
        whole, cut = z.clone().requires_grad_(), z.clone().requires_grad_()
        positions.by_rows(objective.entropy, cut).square().sum().backward()
        (-(m := objective.log_mass(whole)).exp() * m).sum(dim=-1).square().sum().backward()
        torch.testing.assert_close(cut.grad, whole.grad)


def test_a_service_refuses():
    service = pytest.importorskip("come.serve").Service(Segmenter(), "tent", shape=(3, *SIZE))
    with service, pytest.raises(come.ComeError, match=r"use come.Fleet for logits with positions"):
        service.predict("north", images()[0])
