"""The embedded photographs: what is in the package, and how it is opened."""

from __future__ import annotations

import pytest
import torch

import come
from come.bench.data import FashionOutlierSource, FashionSource, open_source
from come.bench.data.embedded import BORDER, KNOWN, clean_source


def test_test_images_have_eight_classes_in_equal_numbers_and_no_order():
    source = FashionSource()
    labels = source.labels()
    assert (len(source), source.num_classes) == (3200, len(KNOWN))
    assert labels.bincount().tolist() == [400] * 8
    assert (labels[:800].bincount(minlength=8) > 60).all()


def test_an_image_is_a_photograph_within_a_black_border():
    images, labels, indices, bad = FashionSource().load([7, 3, 7])
    assert images.shape == (3, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert images[0].equal(images[2])
    assert (images[:, 0] == images[:, 2]).all()
    inside = images[:, :, BORDER:-BORDER, BORDER:-BORDER]
    assert inside.sum() == images.sum()
    assert (inside.float().std(dim=(1, 2, 3)) > 20).all()
    assert indices.tolist() == [7, 3, 7]
    assert labels[0] == labels[2]
    assert bad == 0


def test_a_size_takes_the_first_images():
    few, all_ = open_source("fashion:100"), open_source("fashion")
    assert len(few) == 100
    assert few.load(range(100)).images.equal(all_.load(range(100)).images)
    assert few.labels().equal(all_.labels()[:100])


def test_source_images_are_others_than_test_images():
    images, labels = clean_source()
    assert labels.bincount().tolist() == [64] * 8
    assert FashionSource().source_images(100).equal(images[:100])
    assert len(FashionSource().source_images(2000)) == 512
    both = torch.cat([images, FashionSource().load(range(3200)).images]).flatten(1)
    assert len(both.unique(dim=0)) == len(both)


def test_outliers_are_of_the_classes_held_out():
    near, far, both = (open_source(f"fashion-outliers{kind}") for kind in (":near", ":far", ""))
    assert [len(source) for source in (near, far, both)] == [400, 400, 800]
    assert set(both.load(range(800)).labels.tolist()) == {-1}
    assert both.num_classes == 0
    shirts, bags = (source.load(range(400)).images.float().mean(dim=(0, 1)) for source in (near, far))
    tests = FashionSource()
    coats = tests.load((tests.labels() == KNOWN.index("coat")).nonzero().flatten().tolist())
    coat = coats.images.float().mean(dim=(0, 1))
    assert (shirts - coat).norm() < (bags - coat).norm()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("fashion:3201", "fashion:3201 asks for 3201 images; the embedded data has 3200"),
        ("fashion:0", "size must be an integer >= 1, got 0"),
        ("fashion:x", "asks for 'x' images; write a number"),
        ("fashion-outliers:fra", "no kind of fashion outliers 'fra'; did you mean 'far'?"),
    ],
)
def test_wrong_specifications(spec, words):
    with pytest.raises(come.ComeError, match=words):
        open_source(spec)


def test_outliers_have_no_size():
    assert len(FashionOutlierSource(kind="near")) == 400
