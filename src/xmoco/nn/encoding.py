"""How encoders are run, the same for every method: a method says what is to be encoded.

On a GPU the views of an image go through an encoder stacked into one batch, with statistics of
their own, some layers run by kernels of our own (nn/blocks.py), and two encoders share the GPU, as
one alone leaves some of it idle. On a CPU two encoders run at once, each on half of the cores. Keys
are encoded in other batch-norm company than queries (nn/batchnorm.py).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from xmoco.config import ModelConfig
from xmoco.errors import UserError
from xmoco.nn.batchnorm import (
    SplitStatistics,
    keys_in_other_processes,
    keys_in_split_groups,
    running_statistics_kept,
    split_statistics,
    stack_views,
    unknown_norms,
)
from xmoco.nn.blocks import fuse_layers
from xmoco.nn.two_threads import both, has_halves, with_parallel_backward


def resolve_batch_norm(
    model: ModelConfig,
    *,
    processes: int,
    device: str,
    images_per_forward: int,
    hide_keys: bool,
    resumed: bool = False,
) -> ModelConfig:
    """``auto`` becomes what suits the method and the number of processes; what cannot work is a
    ``UserError``. ``hide_keys``: whether statistics could tell a query which key is its own. A run
    that is ``resumed`` may have had more processes to shuffle keys between.

    Where nobody asked for ``split`` by name, it takes fewer groups if the images do not make as
    many as the settings say; where they make none at all, it becomes ``plain``, with one group.
    """
    if images_per_forward < 2:
        instead = "lower accumulate"  # a batch has at least two images: only parts have fewer
        if processes > 1:
            instead = "take fewer processes, or lower accumulate where it is above 1"
        raise UserError(f"batch norm needs at least two images at once: raise batch, or {instead}.")
    choice, groups = model.batch_norm, model.batch_norm_groups
    if choice == "auto":
        if hide_keys:
            choice = "shuffled" if processes > 1 else "split"
        else:
            choice = "synchronised" if processes > 1 and device == "cuda" else "plain"
    if choice == "shuffled" and processes == 1 and resumed:
        choice = "split"
    if choice == "shuffled" and processes == 1:
        raise UserError(
            "batch_norm=shuffled swaps keys between processes, and there is one; "
            "use batch_norm=split, or more devices."
        )
    if choice == "synchronised" and device != "cuda":
        raise UserError("batch_norm=synchronised needs CUDA; use batch_norm=split or shuffled.")
    if choice == "split":
        groups = _most_groups(images_per_forward, at_most=model.batch_norm_groups)
        if model.batch_norm == "split" and groups < model.batch_norm_groups:
            raise UserError(
                f"batch_norm=split needs equal groups of at least two: {images_per_forward} images "
                f"per process do not make {model.batch_norm_groups}; change batch, "
                "batch_norm_groups, or use batch_norm=plain."
            )
        if groups == 1:
            choice = "plain"
    return model.model_copy(update={"batch_norm": choice, "batch_norm_groups": groups})


def _most_groups(images: int, at_most: int) -> int:
    """Equal ones, of at least two images each."""
    return max(n for n in range(1, min(at_most, images // 2) + 1) if images % n == 0)


def describe_batch_norm(model: ModelConfig) -> str:
    """The choice, in words, for the start of a run."""
    if model.batch_norm == "plain" and model.batch_norm_groups == 1:  # no user can ask for one
        return (
            "plain (statistics over a process's batch; keys are not hidden, as batch_norm_groups "
            "allows no equal groups of at least two images)"
        )
    return {
        "plain": "plain (statistics over a process's batch)",
        "split": f"split into {model.batch_norm_groups} groups, keys regrouped",
        "shuffled": "keys shuffled between processes",
        "synchronised": "synchronised over all processes",
    }[model.batch_norm]


def random_layers(module: nn.Module) -> list[str]:
    """Kinds of layers inside ``module`` that draw random numbers in training."""
    return [
        type(layer).__name__
        for layer in module.modules()
        if (isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0)
        or bool(getattr(layer, "drop_prob", None))  # of timm's stochastic depth
    ]


class EncoderRunner:
    """Runs a method's encoders by one batch-norm policy and in the way that suits the device."""

    def __init__(self, model: ModelConfig) -> None:
        self.batch_norm = model.batch_norm
        self.groups = model.batch_norm_groups
        self.stacked: dict[nn.Module, list[SplitStatistics]] = {}
        """Encoders prepared for stacked views, each with its norms. For how many views at present,
        only the norms know: leaving out a bad step puts them back (train/bad_steps.py)."""
        self.two_threads = False
        self.keys_stream: torch.cuda.Stream | None = None
        """On which keys are encoded beside queries."""
        self.notes: list[str] = []
        """What could not be done in the fast way, and why."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"keys_stream": None}  # a copy makes a stream of its own

    def prepare(self, encoder: nn.Module) -> None:
        """Give ``encoder`` the statistics of the policy, in place."""
        if self.batch_norm == "split":
            split_statistics(encoder, self.groups)
            if others := unknown_norms(encoder):
                self.notes.append(
                    f"batch norm is not split in {others[0]}: only plain layers of PyTorch can be"
                )
        elif self.batch_norm == "synchronised":
            nn.SyncBatchNorm.convert_sync_batchnorm(encoder)

    def optimize_for(self, device: torch.device, *encoders: nn.Module) -> None:
        """Change what the device would rather have otherwise; what is computed stays the same."""
        if device.type == "cpu":
            self.two_threads = has_halves() and self._nothing_is_drawn(encoders)
        if device.type != "cuda":
            return
        others = [name for encoder in encoders for name in unknown_norms(encoder)]
        of_views = self.batch_norm != "synchronised"  # statistics may be those of a view
        if others and of_views:
            self.notes.append(
                f"views go through the encoder one by one: {others[0]} has statistics of its own"
            )
        for encoder in encoders:
            if of_views and not others:
                stack_views(encoder, views=1)
                self.stacked[encoder] = [
                    norm for norm in encoder.modules() if isinstance(norm, SplitStatistics)
                ]
            fuse_layers(encoder)

    def _nothing_is_drawn(self, encoders: Sequence[nn.Module]) -> bool:
        """Whether no layer draws random numbers: two threads would share them out by chance."""
        layers = [name for encoder in encoders for name in random_layers(encoder)]
        if layers:
            self.notes.append(f"encoders run one after the other: {layers[0]} draws random numbers")
        return not layers

    def encode(self, encoder: nn.Module, views: Sequence[Tensor]) -> list[Tensor]:
        """Features of every view, with gradients; the views may be of several sizes."""
        return self._parallel_backward(encoder, views, self._each(encoder, views))

    @torch.no_grad()
    def encode_keys(self, encoder: nn.Module, views: Sequence[Tensor]) -> list[Tensor]:
        """The same without gradients, in batch-norm company other than that of ``encode``."""
        return self._each(encoder, views, keys=True)

    def queries_and_keys(
        self,
        encoder: nn.Module,
        momentum_encoder: nn.Module,
        views: Sequence[Tensor],
        key_views: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Features of views by f and of others, or the same, by g."""
        # Where processes talk to each other on the way, they have to do so in one order.
        if self.stacked and views[0].is_cuda and self.batch_norm != "shuffled":
            return self._on_two_streams(encoder, momentum_encoder, views, key_views)
        if not self.two_threads:
            return self.encode(encoder, views), self.encode_keys(momentum_encoder, key_views)
        queries, keys = both(
            lambda: self._each(encoder, views),
            lambda: self.encode_keys(momentum_encoder, key_views),
        )
        return self._parallel_backward(encoder, views, queries), keys

    def _on_two_streams(
        self,
        encoder: nn.Module,
        momentum_encoder: nn.Module,
        views: Sequence[Tensor],
        key_views: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        # Memory that one stream gives back is safe: before it is used again there, that stream has
        # waited for all that the other did with it.
        main, beside = torch.cuda.current_stream(), self.keys_stream or torch.cuda.Stream()
        self.keys_stream = beside
        beside.wait_stream(main)
        with torch.cuda.stream(beside):
            keys = self.encode_keys(momentum_encoder, key_views)
        queries = self.encode(encoder, views)
        main.wait_stream(beside)
        return queries, keys

    def _each(
        self, encoder: nn.Module, views: Sequence[Tensor], keys: bool = False
    ) -> list[Tensor]:
        """Those of the first one's size leave their mark on running statistics, which are for whole
        images; smaller ones do not."""
        features: list[Tensor] = []
        for shape, alike in groupby(views, key=lambda view: view.shape):
            with nullcontext() if shape == views[0].shape else running_statistics_kept(encoder):
                features += self._alike(encoder, list(alike), keys)
        return features

    def _alike(self, encoder: nn.Module, views: list[Tensor], keys: bool) -> Sequence[Tensor]:
        """Of one size."""
        if encoder not in self.stacked:
            return [self._pass(encoder, view, 1, keys) for view in views]
        self._stack(encoder, views=len(views))
        pixels = torch.cat(views) if len(views) > 1 else views[0]
        return self._pass(encoder, pixels, len(views), keys).chunk(len(views))

    def _stack(self, encoder: nn.Module, views: int) -> None:
        for norm in self.stacked[encoder]:
            if norm.views != views:  # to set an attribute of a module takes longer than to look
                norm.views = views

    def _pass(self, encoder: nn.Module, images: Tensor, views: int, keys: bool) -> Tensor:
        if keys and self.batch_norm == "split":
            return keys_in_split_groups(encoder, images, self.groups, views)
        if keys and self.batch_norm == "shuffled":
            return keys_in_other_processes(encoder, images, views)
        features: Tensor = encoder(images)
        return features

    def _parallel_backward(
        self, encoder: nn.Module, views: Sequence[Tensor], features: list[Tensor]
    ) -> list[Tensor]:
        """On a CPU the ways back of two views run at once, if they end in the encoder."""
        further = any(view.requires_grad for view in views)
        if not self.two_threads or len(views) != 2 or further or not torch.is_grad_enabled():
            return features
        first, second = features
        learned = [p for p in encoder.parameters() if p.requires_grad]
        return list(with_parallel_backward((first, second), learned))
