"""Zero-shot classifiers, what adapts in them, TDA, TPT, and the episodic protocol."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import come
from come import objectives, select, testing
from come.bench import Plan, models, run
from come.bench.clip import class_lists
from come.bench.models import restricted
from come.episodic import Episodic
from come.images.augment import crops
from come.methods.t3a import EMPTY, lowest
from come.zero_shot import Prototypes, ZeroShot, prototypes

VISION = {"image_size": 8, "patch_size": 4, "width": 16, "layers": 2, "head_width": 8}
TEXT = {"context_length": 16, "width": 16, "heads": 2, "layers": 1}
CLASSES = ["cat", "dog", "owl", "fox"]


def tower():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 6))


def classifier(scale=20.0, bias=0.0):
    return ZeroShot(tower(), torch.randn(5, 6, generator=torch.Generator().manual_seed(1)), scale, bias).eval()


def images(count=12, seed=0):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


# ---- the classifier ----


def test_logits_are_scaled_cosines_and_a_bias():
    model, x = classifier(30.0, -2.0), images()
    expected = 30 * F.cosine_similarity(model.visual(x)[:, None], model.head.weight[None], dim=2) - 2
    assert torch.allclose(model(x), expected, atol=1e-4)
    assert torch.allclose(model.head.weight.norm(dim=1), torch.ones(5))
    assert classifier().head.bias is None


def test_prototypes_average_unit_embeddings():
    vectors = {"a cat": [3.0, 0.0], "one cat": [0.0, 0.1], "a dog": [0.0, 2.0], "one dog": [0.0, 5.0]}
    found = prototypes(
        lambda said: torch.tensor([vectors[s] for s in said]), ["cat", "dog"], ["a {}", lambda n: f"one {n}"]
    )
    assert torch.allclose(found, torch.tensor([[math.sqrt(0.5), math.sqrt(0.5)], [0.0, 1.0]]))


def test_what_is_wrong_is_named():
    for wrong, message in {
        "scale": r"scale must be a positive number: exp\(logit_scale\) of the weights, got 0",
        "texts": r"texts must be a vector for each of 2 or more classes, \(K, d\), got \(1, 6\)",
    }.items():
        given = {"visual": tower(), "texts": torch.eye(6)[:2], "scale": 1.0} | {
            "scale": {"scale": 0},
            "texts": {"texts": torch.eye(6)[:1]},
        }[wrong]
        with pytest.raises(come.ComeError, match=message):
            ZeroShot(**given)
    with pytest.raises(come.ConfigError, match="classes must be 2 or more names, got 'cat'"):
        prototypes(lambda said: torch.ones(1, 2), "cat")
    with pytest.raises(
        come.ConfigError, match=r"templates must be sentences with \{\} in place of the name, got \['a'\]"
    ):
        prototypes(lambda said: torch.ones(1, 2), CLASSES, ["a"])

    class Tokens(nn.Module):
        def forward(self, x):
            return {"tokens": x}

    with pytest.raises(come.InputError, match="a tower must return embeddings"):
        ZeroShot(Tokens(), torch.eye(6), 1.0)(images())


@pytest.mark.parametrize("method", ["tent", "steady", "eata", "t3a", "lame", "tda", "zerosiam"])
def test_methods_run_on_it(method):
    more = {"source": [images(seed=9).sigmoid()]} if method == "eata" else {}
    adapter = come.adapt(classifier(), method, objective="invariant", **more)
    for seed in range(3):
        assert adapter(images(seed=seed).sigmoid()).isfinite().all()


@pytest.mark.parametrize("method", ["tent", "t3a", "steady"])
def test_an_export_predicts(method):
    more = {} if method == "t3a" else {"select": "head"}
    adapter = come.adapt(classifier(), method, **more)
    adapter(images())
    assert torch.allclose(adapter.export()(images(seed=2)), adapter.predict(images(seed=2)), atol=1e-5)


def test_the_constant_of_siglip_changes_nothing_for_the_invariant_objective():
    """And all for the published one."""
    found = {}
    for objective in ("invariant", "come"):
        for bias in (1e-6, -12.0):
            adapter = come.adapt(classifier(bias=bias), "tent", objective=objective, lr=1e-2)
            for seed in range(3):
                adapter(images(seed=seed))
            found[objective, bias] = torch.cat([v.flatten() for v in adapter.adapted_parameters.values()])
    assert torch.allclose(found["invariant", 1e-6], found["invariant", -12.0], atol=1e-5)
    assert not torch.allclose(found["come", 1e-6], found["come", -12.0], atol=1e-4)


def test_come_is_em_at_the_constant_of_clip_and_the_invariant_objective_is_not():
    z = 3 * torch.randn(32, 1000, generator=torch.Generator().manual_seed(0)) + 20  # 100 x cosines around 0.2
    z.requires_grad_()
    grads = {n: torch.autograd.grad(objectives.get(n).entropy(z).sum(), z)[0] for n in ("em", "come", "invariant")}
    cosine = {n: F.cosine_similarity(grads["em"], grads[n]).mean().item() for n in ("come", "invariant")}
    assert objectives.get("come").uncertainty(z).max() < 1e-6
    assert cosine["come"] > 0.999
    assert cosine["invariant"] < 0.95


def test_half_of_the_classes_keeps_the_layer():
    model = models.Model("zs", classifier(), models.Preprocess(size=8, resize=8), 5)
    small = restricted(model, (4, 1))
    assert isinstance(small.module.head, Prototypes)
    assert torch.allclose(small.module(images()), model.module(images())[:, [4, 1]], atol=1e-5)


# ---- what adapts ----


def test_selectors_by_name():
    model = classifier()
    assert list(come.adapt(model, "tent").adapted_parameters) == ["visual.1.weight", "visual.1.bias"]
    assert list(come.adapt(model, "tent", select="head").adapted_parameters) == ["head.weight"]
    assert list(select.head("visual.4")(model)) == ["visual.4.weight"]
    assert list(select.head()(nn.Linear(2, 3))) == ["weight"]
    with pytest.raises(come.ConfigError, match="no selector 'haed'; did you mean 'head'"):
        come.adapt(model, "tent", select="haed")
    with pytest.raises(come.ModelError, match="has no linear layer"):
        come.adapt(nn.Sequential(nn.Flatten(), nn.LayerNorm(192)), "tent", select="head")


@pytest.mark.parametrize("method", ["tent", "steady"])
def test_prototypes_that_adapt_stay_directions(method):
    model = classifier()
    adapter = come.adapt(model, method, objective="invariant", select="head", guard=False, lr=1e-2)
    for seed in range(5):
        logits = adapter(images(seed=seed))
    assert not torch.allclose(adapter.adapted_parameters["head.weight"], model.head.weight, atol=1e-4)
    assert logits.abs().max() <= 20 + 1e-3


def test_a_fleet_refuses_prototypes():
    with pytest.raises(
        come.ConfigError, match=r"'head.weight' cannot differ by stream: .*, or use one adapter for each"
    ):
        come.Fleet(classifier(), "tent", streams=2, select="head")


# ---- TDA ----


class Reference:
    """The paper's algorithm for one sample after the other: lists of features, sorted by entropy."""

    def __init__(self, method):
        self.m, self.sure, self.doubtful = method, {}, {}

    def __call__(self, v, z):
        p = z.softmax(0)
        entropy, c = float(-(p * p.log()).sum()), int(p.argmax())
        self.enter(self.sure, c, (entropy, v), self.m.positive)
        if self.m.low < entropy / math.log(len(z)) < self.m.high:
            self.enter(self.doubtful, c, (entropy, v, (p > self.m.floor).float()), self.m.negative)
        for c, entries in self.sure.items():
            z = z + self.m.alpha * sum(math.exp(-self.m.beta * (1 - float(v @ e[1]))) for e in entries) * F.one_hot(
                torch.tensor(c), len(z)
            )
        for entries in self.doubtful.values():
            for _, w, against in entries:
                z = z - self.m.negative_alpha * math.exp(-self.m.negative_beta * (1 - float(v @ w))) * against
        return z

    @staticmethod
    def enter(cache, c, entry, size):
        cache[c] = sorted([*cache.get(c, []), entry], key=lambda e: e[0])[:size]


@pytest.mark.parametrize("batch", [1, 5])
def test_tda_is_the_papers_algorithm(batch):
    model, method = classifier(6.0), come.methods.TDA(low=0.05, high=0.9, negative_alpha=0.5)
    adapter, reference = come.adapt(model, method, guard=False), Reference(method)
    x = images(60)
    with torch.no_grad():
        v, z = F.normalize(model.visual(x), dim=1), model(x)
    found = torch.cat([adapter(part) for part in x.split(batch)])
    expected = torch.stack([reference(*one) for one in zip(v, z, strict=True)])
    if batch == 1:
        assert torch.allclose(found, expected, atol=1e-3)
        assert not torch.allclose(found, z, atol=0.1)
    for cache, name in ((reference.sure, "sure"), (reference.doubtful, "doubtful")):
        entropy = adapter.state[f"{name}_entropy"]
        known = torch.tensor([e[0] for c in sorted(cache) for e in cache[c]])
        assert torch.allclose(entropy[entropy < EMPTY], known, atol=1e-4)


def test_a_fleet_refuses_what_looks_at_features():
    with pytest.raises(come.ConfigError, match=r"looks into the model by hooks, .* use one adapter for each stream"):
        come.Fleet(classifier(), "tda", streams=2)(images(2), [0, 1])


def test_quirks_divide_by_the_binary_logarithm():
    model = classifier(6.0)
    kept = {}
    for quirks in (False, True):
        adapter = come.adapt(model, "tda", quirks=quirks, guard=False)
        adapter(images(60))
        entropy = adapter.state["doubtful_entropy"]
        kept[quirks] = entropy[entropy < EMPTY] / (math.log2(5) if quirks else math.log(5))
    for shares in kept.values():
        assert len(shares)
        assert (shares > 0.2).all()
        assert (shares < 0.5).all()


def test_the_lowest_keep_their_order():
    old = torch.tensor([[0.2, 0.6], [0.3, EMPTY]])
    kept, least = lowest(old, torch.tensor([0, 1, 1, 0]), torch.tensor([0.4, 0.1, 0.5, EMPTY]))
    assert kept.tolist() == [0, 4, 5, 2]
    assert least.flatten().tolist() == pytest.approx([0.2, 0.4, 0.1, 0.3])


@pytest.mark.parametrize("wrong", [{"positive": 0}, {"alpha": -1.0}, {"low": 0.6}, {"floor": 1.0}])
def test_wrong_arguments_of_tda(wrong):
    with pytest.raises(come.ConfigError, match=f"{next(iter(wrong))} must be"):
        come.adapt(classifier(), "tda", **wrong)


# ---- TPT, and the episodic protocol ----


def test_tpt_takes_one_step_on_its_surest_views():
    """Against the same in plain torch."""
    model, x = classifier(), images(2).sigmoid()

    def mirrored(views, generator):
        return views.flip(-1) * torch.linspace(0.2, 1, len(views)).view(-1, 1, 1, 1, 1)

    how = {"views": 5, "keep": 0.4, "augment": mirrored, "objective": "em", "guard": False}
    found = come.adapt(model, "tpt", **how)(x)
    for i in range(2):
        views = torch.cat([x[i][None], mirrored(x[i].expand(4, 1, 3, 8, 8), None)[:, 0]])
        weight = model.head.weight.detach().clone().requires_grad_()
        features = 20 * F.normalize(model.visual(views).detach(), dim=1)
        p = (features @ F.normalize(weight, dim=1).T).softmax(1)
        surest = p[(-(p * p.log()).sum(1)).argsort()[:2]].mean(0)
        (-(surest * surest.log()).sum()).backward()
        moved = weight.detach() - 5e-3 * weight.grad / (weight.grad.abs() + 1e-8)  # the first step of Adam
        assert torch.allclose(found[i], features[0] @ F.normalize(moved, dim=1).T, atol=2e-3)
    assert not torch.allclose(found, model(x), atol=1e-2)


def test_crops_are_parts_of_the_image():
    x = torch.linspace(0, 1, 32).expand(64, 3, 32, 32)  # brighter to the right
    views = crops(share=(0.1, 0.5), flip=0.0)(x, torch.Generator().manual_seed(0))
    assert views.shape == x.shape
    assert (views.amax(dim=(1, 2, 3)) - views.amin(dim=(1, 2, 3)) < 0.95).all()
    assert torch.equal(crops(share=(1, 1), flip=0.0)(x, torch.Generator()), x)
    with pytest.raises(come.ConfigError, match="share must be a pair of shares"):
        crops(share=(0.5, 0.1))


@pytest.mark.parametrize("method", ["tent", "steady", "tda", "eata", "norm", "memo", "tpt"])
def test_alone_no_image_knows_of_another(method):
    model, x = classifier(), images(4).sigmoid()
    more = {"source": [x]} if method == "eata" else {"views": 4} if method in ("memo", "tpt") else {}
    adapter = come.adapt(model, method, **more)
    together = Episodic(adapter, views=6).step(x)
    assert together.logits.shape == (4, 5)
    assert together.valid.shape == (4,)
    if method not in ("memo", "tpt"):  # whose views follow from the number of the batch
        first = Episodic(adapter, views=6)(x[:1])
        assert torch.equal(first, together.logits[:1])
    again = Episodic(adapter, views=6)
    again(x[:2])
    if method not in ("memo", "tpt"):
        assert torch.equal(again(x[2:]), together.logits[2:])


def test_alone_answers_after_the_step_on_the_views():
    model, x = classifier(), images(1).sigmoid()
    found = Episodic(come.adapt(model, "tent", lr=0.1, guard=False), views=6, seed=3)(x)
    assert not torch.allclose(found, model(x), atol=1e-3)
    still = Episodic(come.adapt(model, "source"), views=6)(x)
    assert torch.allclose(still, model(x), atol=1e-5)
    with pytest.raises(come.ConfigError, match="views must be an integer >= 2: a single view is the image itself"):
        Episodic(come.adapt(model, "tent"), views=1)


def test_the_tiny_contract_models_have_class_vectors():
    assert list(select.head()(testing.TinyClassifier(nn.BatchNorm2d))) == ["head.weight"]


def test_lists_of_class_names():
    from come.bench.clip import _lists

    found = _lists()
    assert class_lists() == ["imagenet", *found]
    sizes = {"cifar10": 10, "dtd": 47, "eurosat": 10, "food101": 101, "pets": 37}
    assert {name: len(names) for name, names in found.items()} == sizes
    assert all(len(set(names)) == len(names) for names in found.values())


# ---- in the benchmark ----


def test_the_setting_answers_each_image_by_itself(tmp_path):
    given = {"data": "fashion:12", "corruptions": ("fog",), "objectives": ("em",), "model": "fashion-resnet-gn"}
    methods = ("source", "tent:lr=0.05", "lame")
    records = run(Plan(setting="episodic", views=4, methods=methods, **given), tmp_path / "alone")
    found = {record.cell.method: record for record in records}
    assert set(found) == {"source", "tent:lr=0.05"}  # one image has no neighbours
    (source,) = run(Plan(methods=("source",), **given), tmp_path / "standard")
    assert found["source"].result.metrics["fog"] == pytest.approx(source.result.metrics["fog"], nan_ok=True)
    assert found["tent:lr=0.05"].result.metrics["fog"]["nll"] != source.result.metrics["fog"]["nll"]
    assert found["source"].cell.views == 4
    with pytest.raises(
        come.ConfigError, match="views has no effect in the standard setting; leave it out, or choose --setting"
    ):
        Plan(views=4)
    with pytest.raises(come.ConfigError, match="batch-size has no effect in the episodic setting"):
        Plan(setting="episodic", batch_size=8)


def test_a_selection_by_name_on_the_command_line():
    (cell,) = Plan(methods=("tent:select=head",), objectives=("invariant",), corruptions=("fog",)).cells(10)
    assert cell.hyper == {"select": "head"}
    with pytest.raises(come.ConfigError, match="no selector 'heads'"):
        Plan(methods=("tent:select=heads",))


def test_classes_and_templates_by_name_or_file(tmp_path, monkeypatch):
    open_clip = pytest.importorskip("open_clip")

    about = {"embed_dim": 8, "vision_cfg": VISION, "text_cfg": TEXT}
    (tmp_path / "small-clip.json").write_text(json.dumps(about))
    open_clip.add_model_config(tmp_path / "small-clip.json")
    torch.manual_seed(0)
    save_file({k: v.contiguous() for k, v in open_clip.CLIP(**about).state_dict().items()}, tmp_path / "w.safetensors")
    (tmp_path / "sentences.txt").write_text("a photo of a {}.\n\na drawing of a {}.\n")

    def load(*more):
        return models.load(":".join(["open_clip:small-clip", *more]), checkpoint=tmp_path / "w.safetensors").module

    plain, both = load("classes=cifar10"), load("classes=cifar10", f"templates={tmp_path}/sentences.txt")
    assert plain(images(2)).shape == both(images(2)).shape == (2, 10)
    assert not torch.allclose(plain.head.weight, both.head.weight)
    assert plain.scale == pytest.approx(1 / 0.07, rel=1e-4)
    monkeypatch.setattr(open_clip, "IMAGENET_CLASSNAMES", CLASSES)
    monkeypatch.setattr(open_clip, "OPENAI_IMAGENET_TEMPLATES", [lambda name: f"art of a {name}."])
    assert load("classes=imagenet", "templates=openai")(images(2)).shape == (2, 4)
    with pytest.raises(come.ConfigError, match=r"cannot read the templates of open_clip:.*: .*No such file"):
        load("classes=cifar10", "templates=lost.txt")


def test_a_siglip_of_open_clip_keeps_its_bias():
    open_clip = pytest.importorskip("open_clip")

    from come.integrations.open_clip import zero_shot

    torch.manual_seed(0)
    model = open_clip.CLIP(embed_dim=8, vision_cfg=VISION, text_cfg=TEXT, init_logit_bias=-10.0).eval()
    read, x = open_clip.SimpleTokenizer(context_length=16), images(3)
    found = zero_shot(model, read, CLASSES)
    with torch.no_grad():
        texts = model.encode_text(read([f"a photo of a {name}." for name in CLASSES]), normalize=True)
        expected = model.logit_scale.exp() * model.encode_image(x, normalize=True) @ texts.T + model.logit_bias
    assert torch.allclose(found(x), expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["Clip", "Siglip"])
def test_the_towers_of_transformers(kind):
    transformers = pytest.importorskip("transformers")

    from come.integrations.transformers import zero_shot

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    text = small | {
        "vocab_size": 40,
        "max_position_embeddings": 8,
        "eos_token_id": 39,
        "bos_token_id": 38,
        "pad_token_id": 37,
    }
    vision = small | {"image_size": 8, "patch_size": 4}
    if kind == "Clip":
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
        model = transformers.CLIPModel(config).eval()
    else:
        config = transformers.SiglipConfig(text_config=text | {"projection_size": 16}, vision_config=vision)
        model = transformers.SiglipModel(config).eval()

    def read(text, padding, truncation, return_tensors):
        ids = [[38, *(ord(letter) % 37 for letter in one[-7:-2]), 39, 37] for one in text]
        return {"input_ids": torch.tensor(ids)}

    found, x = zero_shot(model, read, CLASSES), images(3)
    ids = read([f"a photo of a {name}." for name in CLASSES], "", True, "pt")
    with torch.no_grad():
        expected = model(pixel_values=x, **ids).logits_per_image
    assert torch.allclose(found(x), expected, atol=1e-4)
    adapter = come.adapt(found, objective="invariant")
    assert adapter(x).shape == (3, 4)
    assert not any("text" in name for name in adapter.adapted_parameters)
    with pytest.raises(come.ModelError, match="Linear has no vision_model; load a CLIPModel or SiglipModel"):
        zero_shot(nn.Linear(2, 2), read, CLASSES)
