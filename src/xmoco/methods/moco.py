"""MoCo: a query picks its key out of a bank of past ones, in one direction (versions 1 and 2)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from xmoco.methods.base import DirectedMethod, named
from xmoco.task import StepOutput, Values


class MoCo(DirectedMethod):
    title = "MoCo"

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        queries, keys = self.contrasted(views)
        contrasts = self.contrasts(queries, keys, self.temperature)
        losses = [P.infonce() for P in contrasts]
        if self.training:
            self.banks.enqueue(*keys)
        terms = named("contrast", losses) if len(losses) > 1 else {}
        metrics = self.metrics(contrasts) if with_metrics else {}
        return StepOutput(torch.stack(losses).sum(), terms, metrics)
