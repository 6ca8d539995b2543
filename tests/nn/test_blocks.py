"""Fusing norms with what follows changes neither a network's results nor its state."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision.models
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from xmoco.config import ModelConfig
from xmoco.nn import blocks
from xmoco.nn.backbones import ScaledResNet, feature_size
from xmoco.nn.batchnorm import SplitBatchNorm1d, SplitBatchNorm2d, split_statistics, stack_views
from xmoco.nn.blocks import (
    FusedBasicBlock,
    FusedBatchNorm1d,
    FusedBatchNorm2d,
    FusedBottleneck,
    fuse_layers,
    fusible,
)
from xmoco.nn.encoder import Encoder, build_encoder, momentum_copy


def tiny(stem: str) -> Encoder:
    torch.manual_seed(0)
    model = ModelConfig.model_validate(
        {"backbone": "tiny", "stem": stem, "head_hidden": 32, "feature_size": 8}
    )
    return build_encoder(model)


def small_bottlenecks() -> ResNet:
    torch.manual_seed(0)
    return ScaledResNet(Bottleneck, [2, 1, 1, 1], width=4, num_classes=5)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "tiny": lambda: tiny("imagenet"),
    "tiny with a small stem": lambda: tiny("cifar"),
    "bottlenecks": small_bottlenecks,
    "torchvision's": lambda: ScaledResNet(BasicBlock, [2, 2, 2, 2], width=8, num_classes=5),
}


def learn(network: nn.Module) -> dict[str, Tensor]:
    """Outputs, gradients and running statistics of one batch; outputs of evaluation."""
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()
    learnt = {"output": network.train()(images)}
    learnt["output"].square().sum().backward()
    for name, value in network.named_parameters():
        assert value.grad is not None
        learnt[name] = value.grad
    learnt |= dict(network.named_buffers())
    return learnt | {"evaluated": network.eval()(images)}


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_computes_what_it_did(name: str, views: int) -> None:
    plain = split_statistics(NETWORKS[name](), groups=2).double()
    stack_views(plain, views)
    fused = copy.deepcopy(plain)
    fuse_layers(fused)
    assert_close(learn(fused), learn(plain))


@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_is_left_unfused_and_the_state_keeps_its_names(name: str) -> None:
    network = split_statistics(NETWORKS[name](), groups=2)
    parameters, state = list(network.parameters()), list(network.state_dict())
    fuse_layers(network)
    assert [id(value) for value in network.parameters()] == [id(value) for value in parameters]
    assert list(network.state_dict()) == state
    kinds = {type(module) for module in network.modules()}
    assert not kinds & {SplitBatchNorm1d, SplitBatchNorm2d, BasicBlock, Bottleneck}
    # Blocks keep the ReLU they no longer call; nothing else does.
    relus = {name for name, module in network.named_modules() if isinstance(module, nn.ReLU)}
    assert all(".layer" in f".{name}" for name in relus)


def test_which_norms_end_in_a_relu() -> None:
    encoder = split_statistics(tiny("cifar"), groups=2)
    fuse_layers(encoder)
    assert isinstance(encoder, Encoder)
    block, (_, shortcut) = encoder.backbone.layer2[0], encoder.backbone.layer2[0].downsample
    assert isinstance(block, FusedBasicBlock)
    assert (block.bn1.relu, block.bn2.relu, shortcut.relu) == (True, True, False)
    assert encoder.backbone.bn1.relu
    assert all(norm.relu for norm in encoder.head if isinstance(norm, FusedBatchNorm1d))
    bottlenecks = split_statistics(small_bottlenecks(), groups=2)
    fuse_layers(bottlenecks)
    assert isinstance(bottlenecks, ResNet)
    block = bottlenecks.layer1[0]
    assert isinstance(block, FusedBottleneck)
    assert all(norm.relu for norm in (block.bn1, block.bn2, block.bn3))
    assert feature_size(bottlenecks) == 128


def test_a_copy_is_fused_too_and_lives_its_own_life() -> None:
    encoder = split_statistics(tiny("cifar"), groups=2)
    fuse_layers(encoder)
    follower = momentum_copy(encoder)
    images = torch.randn(4, 3, 16, 16)
    assert torch.equal(follower(images), encoder(images))
    assert [type(module) for module in follower.modules()] == [
        type(module) for module in encoder.modules()
    ]
    before = copy.deepcopy(encoder.state_dict())
    follower(images)
    assert_close(encoder.state_dict(), before, rtol=0, atol=0)


def test_weights_go_to_and_fro(tmp_path: Path) -> None:
    """A checkpoint of a fused network loads into torchvision's and back, with its results."""
    fused = split_statistics(torchvision.models.resnet18(num_classes=4), groups=2)
    fuse_layers(fused)
    fused(torch.randn(4, 3, 32, 32))  # moves the running statistics
    torch.save(fused.state_dict(), tmp_path / "weights.pt")
    ordinary = torchvision.models.resnet18(num_classes=4)
    ordinary.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert_close(ordinary.eval()(images), fused.eval()(images))
    fused.load_state_dict(ordinary.state_dict())


def test_twice_is_once() -> None:
    network = split_statistics(tiny("cifar"), groups=2).double()
    fuse_layers(network)
    again = copy.deepcopy(network)
    fuse_layers(again)
    assert_close(learn(again), learn(network))


@pytest.mark.parametrize(
    "convert", [lambda network: network, nn.SyncBatchNorm.convert_sync_batchnorm]
)
def test_other_norms_are_let_alone(convert: Callable[[nn.Module], nn.Module]) -> None:
    network = convert(nn.Sequential(tiny("cifar"), nn.BatchNorm1d(8), nn.ReLU()))
    before = [type(module) for module in network.modules()]
    fuse_layers(network)
    assert [type(module) for module in network.modules()] == before


def test_autocast_runs_as_before() -> None:
    plain = split_statistics(tiny("cifar"), groups=2)
    fused = copy.deepcopy(plain)
    fuse_layers(fused)
    images = torch.randn(8, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fused(images), plain(images))


def test_a_wrong_batch_is_refused_by_the_fused_path_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "fusible", lambda *_: True)
    layer = nn.Sequential(nn.BatchNorm2d(3))
    fuse_layers(split_statistics(layer, groups=4))
    assert isinstance(layer[0], FusedBatchNorm2d)
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"1 × 4 equal groups .* \(6, 3, 2, 2\)"):
        layer(torch.randn(6, 3, 2, 2))


def test_what_the_fused_operation_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda(torch.Tensor):
        @property
        def is_cuda(self) -> bool:
            return True

    def on_cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype).as_subclass(OnCuda)

    x = on_cuda(4, 3, 2, 2)
    monkeypatch.setattr(blocks, "HAS_TRITON", True)
    assert fusible(x, None)
    assert fusible(x, x)
    assert fusible(on_cuda(4, 3, dtype=torch.float32), None)
    assert not fusible(torch.zeros(4, 3), None)
    assert not fusible(on_cuda(4, 3, dtype=torch.float64), None)
    assert not fusible(on_cuda(4, 3, 2), None)
    assert not fusible(x, on_cuda(4, 3, 2, 2, dtype=torch.float32))
    assert not fusible(x, on_cuda(4, 3, 1, 1))
    monkeypatch.setattr(blocks, "HAS_TRITON", False)
    assert not fusible(x, None)
