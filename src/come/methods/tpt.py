"""TPT: agreement over the most confident views, image by image.

Shu et al., "Test-Time Prompt Tuning for Zero-Shot Generalization in Vision-Language Models", NeurIPS 2022.

    V      = the 10% of the views of x with the lowest softmax entropy; x is one of the views
    m      = mean over V of the mass of f_theta(view)
    theta' = theta - one step of Adam down dH(m)/dtheta
    answer f_theta'(x), and back to theta

Deviation: the paper tunes the words of CLIP's prompt, which all classes share. Here theta is one vector for each class, the
weight of the layer that gives the logits: in a zero-shot classifier (`come.zero_shot`) its text prototypes, so the text tower
need not run. `select="norm_affine"` moves the norm layers of the image tower in its place. Needs images whose normalization is
known. For each image one forward and one backward of all its views, and one forward. BatchNorm uses its source statistics.

COME: H is the objective's entropy of the averaged mass, as in MEMO; views are ranked by the softmax entropy, whatever the
objective.
"""

from __future__ import annotations

from dataclasses import dataclass

from come.images.augment import Augment, crops
from come.method import register
from come.methods.memo import MEMO
from come.optim import OptimizerFactory, adam, sgd
from come.select import Selector, head


@register
@dataclass(kw_only=True, eq=False)
class TPT(MEMO):
    """Test-time tuning of the class vectors, with any objective.

    Args:
        normalization: (mean, std) of the inputs, per channel; None if they are images in [0, 1].
        views: views of each image, itself included, at least 2.
        keep: share of the views that is used, those with the lowest entropy, in (0, 1]; at least one.
        augment: makes views of images (V, B, C, H, W) in [0, 1] from a generator; None is `come.images.augment.crops()`.
        prior: weight of BatchNorm's source statistics, in images, at least 0; None uses them alone.
        quirks: carry the optimizer's moments from image to image.
        seed: of the views.

    Example:
        >>> import come, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 5))
        >>> come.adapt(model, TPT(views=8)).step(torch.rand(3, 3, 8, 8)).logits.shape
        torch.Size([3, 5])
    """

    name = "tpt"
    cost = "65f 64b"
    paper_lr = (5e-3, 5e-3)
    with_itself = True
    select: Selector = head()
    optimizer: str | sgd | adam | OptimizerFactory = adam()
    views: int = 64
    keep: float = 0.1
    augment: Augment | None = crops()
    prior: float | None = None
