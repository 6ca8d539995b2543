"""The stem's kernels against torch's convolution and pooling.

Kernels run on CUDA where there is some. Elsewhere Triton's interpreter runs them on the CPU: see
test_interpreted_kernels.py.
"""

import copy
import importlib
import os
import re
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
import torchvision.models
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from xmoco.nn import blocks
from xmoco.nn.blocks import FusedMaxPool, FusedStem, fuse_layers

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if CUDA else "cpu"
NAN, INF = float("nan"), float("inf")

with_kernels = pytest.mark.gpu


@pytest.fixture(scope="module")
def stem() -> ModuleType:
    return importlib.import_module("xmoco.nn.fused_stem")


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # it would blur the comparison


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def pooled_by_torch(x: Tensor) -> Tensor:
    return F.max_pool2d(x, kernel_size=3, stride=2, padding=1)


def with_gradient(pool: object, x: Tensor) -> tuple[Tensor, Tensor]:
    assert callable(pool)
    x = x.clone().requires_grad_()
    pooled = pool(x)
    # Whole numbers, whose sums are exact in any order.
    weights = torch.arange(pooled.numel(), device=DEVICE).view(pooled.shape) % 7
    pooled.backward(weights.to(pooled.dtype))
    assert x.grad is not None
    return pooled.detach(), x.grad


@with_kernels
@settings(max_examples=20 if INTERPRETED else 60, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, most) for most in (3, 70, 9, 9))),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    channels_last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_pooling_is_torchs(
    shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool, seed: int, stem: ModuleType
) -> None:
    x = normal(*shape, seed=seed).round().to(dtype)  # so that many values are equal
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    ours, torchs = with_gradient(stem.max_pool, x), with_gradient(pooled_by_torch, x.contiguous())
    assert_close(ours[0], torchs[0], rtol=0, atol=0)
    assert_close(ours[1], torchs[1], rtol=0, atol=0)
    assert ours[0].is_contiguous(memory_format=torch.channels_last)


@with_kernels
@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_pooling_of_numbers_that_are_none(odd: float, stem: ModuleType) -> None:
    x = normal(2, 4, 6, 7)
    x[0, :, 2:5, 1:6] = odd
    x[1] = odd
    ours, torchs = with_gradient(stem.max_pool, x), with_gradient(pooled_by_torch, x)
    assert_close(ours[0], torchs[0], rtol=0, atol=0, equal_nan=True)
    if odd == odd:  # of several NaN torch chooses the last, by a rule of its own
        assert_close(ours[1], torchs[1], rtol=0, atol=0)


@with_kernels
@pytest.mark.parametrize("size", [(8, 8), (12, 16), (64, 2)])
@pytest.mark.parametrize("channels_last", [True, False])
def test_the_convolution_is_torchs(
    size: tuple[int, int], channels_last: bool, stem: ModuleType, exact: None
) -> None:
    images, weight = normal(3, 3, *size), normal(5, 3, 7, 7, seed=1)
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    ours, torchs = (weight.clone().requires_grad_() for _ in range(2))
    result = stem.stem_convolution(images, ours, torch.float32)
    expected = F.conv2d(images.double(), torchs.double(), stride=2, padding=3)
    assert_close(result, expected.float(), rtol=1e-4, atol=1e-4)
    gradient = normal(*expected.shape, seed=2)
    result.backward(gradient)
    expected.backward(gradient.double())
    assert_close(ours.grad, torchs.grad, rtol=1e-4, atol=1e-4)


@with_kernels
def test_the_convolution_computes_in_the_type_asked_for(stem: ModuleType) -> None:
    images, weight = normal(2, 3, 16, 16), normal(8, 3, 7, 7, seed=1)
    result = stem.stem_convolution(images, weight, torch.bfloat16)
    expected = F.conv2d(images, weight, stride=2, padding=3)
    assert result.dtype == torch.bfloat16
    # Results spread by 12. The interpreter cuts digits off instead of rounding them.
    assert_close(result.float(), expected, rtol=0, atol=0.5)


@with_kernels
def test_a_network_learns_the_same_with_it(monkeypatch: pytest.MonkeyPatch, exact: None) -> None:
    monkeypatch.setattr(blocks, "fusible", lambda x, _=None: x.shape[1] in (3, 64))  # the stem
    gradients = []
    for fused in (False, True):
        torch.manual_seed(0)
        network = torchvision.models.resnet18(num_classes=5).to(DEVICE)
        if fused:
            fuse_layers(network)
            assert isinstance(network.conv1, FusedStem)
            assert isinstance(network.maxpool, FusedMaxPool)
        network(normal(4, 3, 32, 32)).square().sum().backward()
        gradients.append({name: p.grad for name, p in network.named_parameters()})
    for name, expected in gradients[0].items():
        # Roundings decide between values that are nearly equal, and norms of four images grow them.
        difference = (gradients[1][name] - expected).norm() / expected.norm()
        assert difference < 0.02, name


@with_kernels
def test_odd_sides_and_gradients_for_images_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, exact: None
) -> None:
    monkeypatch.setattr(blocks, "fusible", lambda *_: True)
    layer = nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False).to(DEVICE)
    plain = nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False).to(DEVICE)
    plain.load_state_dict(layer.state_dict())
    layer.__class__ = FusedStem
    odd = normal(2, 3, 9, 8)
    assert_close(layer(odd), plain(odd))
    images = normal(2, 3, 8, 8).requires_grad_()
    layer(images).sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0


def test_only_the_large_stem_is_changed() -> None:
    large = torchvision.models.resnet18()
    fuse_layers(large)
    assert (type(large.conv1), type(large.maxpool)) == (FusedStem, FusedMaxPool)
    assert type(large.layer2[0].conv1) is nn.Conv2d
    small = torchvision.models.resnet18()
    small.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    small.add_module("maxpool", nn.Identity())
    fuse_layers(small)
    assert (type(small.conv1), type(small.maxpool)) == (nn.Conv2d, nn.Identity)
    other = torchvision.models.resnet18()
    other.conv1 = nn.Conv2d(4, 64, 7, stride=2, padding=3, bias=False)
    other.maxpool = nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)
    fuse_layers(other)
    assert (type(other.conv1), type(other.maxpool)) == (nn.Conv2d, nn.MaxPool2d)


def test_stems_are_found_in_detectors_too_and_nothing_else_is_taken_for_one() -> None:
    detector = torchvision.models.detection.fasterrcnn_resnet50_fpn(
        weights=None, weights_backbone=None
    )
    fuse_layers(detector)
    assert type(detector.backbone.body["conv1"]) is FusedStem
    assert type(detector.backbone.body["maxpool"]) is FusedMaxPool
    assert sum(isinstance(module, FusedStem) for module in detector.modules()) == 1
    others = nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=2, padding=3),  # has a bias
        nn.Conv2d(1, 8, 7, stride=2, padding=3, bias=False),
        nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False, padding_mode="reflect"),
        nn.MaxPool2d(3, stride=2, padding=1, return_indices=True),
        nn.MaxPool2d(2),
    )
    kinds = [type(module) for module in others]
    fuse_layers(others)
    assert [type(module) for module in others] == kinds


@pytest.mark.parametrize(
    "images", [torch.zeros(2, 1, 8, 8), torch.zeros(3, 8, 8), torch.zeros(2, 3, 8, 8).bfloat16()]
)
def test_what_torch_refuses_or_takes_otherwise_is_left_to_torch(
    images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "fusible", lambda *_: True)  # as if on a GPU
    plain = nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False)
    fused = copy.deepcopy(plain)
    fused.__class__ = FusedStem
    try:
        expected = plain(images)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error)[:40])):
            fused(images)
    else:
        assert_close(fused(images), expected)


@with_kernels
def test_under_autocast_it_computes_in_autocasts_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "fusible", lambda *_: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.bfloat16)
    layer = nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False).to(DEVICE)
    images = normal(2, 3, 16, 16)
    expected = F.conv2d(images, layer.weight, stride=2, padding=3)
    layer.__class__ = FusedStem
    result = layer(images)
    assert result.dtype == torch.bfloat16
    assert_close(result.float(), expected, rtol=0, atol=0.05)  # results spread by 0.6
    result.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_without_kernels_it_is_torchs() -> None:
    if CUDA or INTERPRETED:
        pytest.skip("kernels run here")
    layer, pool = nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False), nn.MaxPool2d(3, 2, 1)
    images = normal(2, 3, 8, 8)
    expected = pool(layer(images))
    layer.__class__, pool.__class__ = FusedStem, FusedMaxPool
    assert torch.equal(pool(layer(images)), expected)
