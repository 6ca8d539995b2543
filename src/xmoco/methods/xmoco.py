"""XMoCo: momentum contrast with two banks, soft labels by optimal transport, and consistency.

``forward`` and ``after_update`` are the seven steps of the paper's algorithm 1. The parts of the
loss stand alone in ``losses/``: ``soft_labels.py``, ``consistency.py``, ``bank.py``.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from xmoco.config import Config
from xmoco.config.shared import TwoBanksConfig
from xmoco.data.views import ViewGroup
from xmoco.losses import XMoCoLoss
from xmoco.losses.bank import KeyBanks
from xmoco.losses.cross_similarity import CrossSimilarity
from xmoco.losses.metrics import label_metrics
from xmoco.losses.soft_labels import weighted_mass
from xmoco.methods.base import BankMethod, small_views, small_views_warnings
from xmoco.nn.encoder import momentum_update
from xmoco.schedules import Schedule, Value, rising, warmed_up
from xmoco.task import StepOutput, Values


class XMoCo(BankMethod):
    title = "XMoCo"

    def __init__(self, config: Config) -> None:
        settings = config.method
        assert isinstance(settings, TwoBanksConfig)
        xi, xi_end = settings.positive_mass, settings.last_positive_mass
        # Owns the banks and the label history. It comes before the encoders, as ever: in another
        # order a seed would draw other numbers for both.
        loss = XMoCoLoss(
            feature_size=config.model.feature_size,
            bank_length=settings.bank_length,
            temperature=settings.temperature,
            sharpness=settings.sharpness,
            positive_mass=min(xi, xi_end),  # whether negatives ever have a share; a step tells ξ
            iterations=settings.sinkhorn_iterations,
            history=settings.history,
            label_weight=settings.label_weight,
            consistency_weight=settings.consistency_weight,
            teacher=settings.teacher,
        )
        super().__init__(config, settings.temperature)
        self.loss, self.small_views = loss, settings.local_crops
        if settings.subject == "xmoco+":  # with what is not in the paper
            self.title = "XMoCo+"
        self.consistency_weight = warmed_up(
            settings.consistency_weight, settings.consistency_warmup_epochs
        )
        w = settings.label_weight
        self.positive_mass = rising(weighted_mass(w, xi), weighted_mass(w, xi_end))

    @property
    def banks(self) -> KeyBanks:
        return self.loss.banks

    def schedules(self) -> Mapping[str, Schedule]:
        return {
            **super().schedules(),
            "consistency_weight": self.consistency_weight,
            "positive_mass": self.positive_mass,
        }

    @staticmethod
    def view_groups(config: Config) -> tuple[ViewGroup, ...]:
        return (*BankMethod.view_groups(config), *small_views(config))

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        # 1. Two random views of every image come in: source and target.
        # 2. The encoder f makes queries of them; the momentum encoder g makes keys, no gradient.
        #    (Queries of small views are XMoCo+'s.)
        (q_s, q_t, *q_small), (k_s, k_t) = self.queries_and_keys_of(views)
        # 3. Two banks hold the last K keys of either side; slot j of both is the same image.
        # 4. P_s = softmax([q_s·k_t | q_s·B_t] / τ) and P_t = softmax([q_t·k_s | q_t·B_s] / τ).
        P_s, P_t = self.loss.similarities(q_s, q_t, k_s, k_t)
        # 5. Soft labels Y_s of P_s and Y_t of P_t, balanced over the banks by Sinkhorn.
        T_s, T_t = self.loss.teachers(P_s, P_t)  # P itself, unless keys are to be the teacher
        Y_s, Y_t = self.loss.labels(T_s, T_t, at["positive_mass"])  # ξ is the share of positives
        # 6. CE(Y_s, P_t) + CE(Y_t, P_s) + w·(CE(sg P_s, P_t) + CE(sg P_t, P_s)); w is 1.
        w = at["consistency_weight"]
        loss, terms = self.loss.cross_entropies(P_s, P_t, T_s.p, T_t.p, Y_s, Y_t, w)
        if q_small:
            small, parts = self._small_views(q_small, k_s, k_t, T_s.p, T_t.p, Y_s, Y_t, w)
            # Whoever learns from a side counts alike, as in SwAV.
            loss = (loss + len(q_small) * small) / (1 + len(q_small))
            terms["small_views"] = torch.stack([*parts.values()]).mean()
        # 7. The keys enter both banks, the oldest leave; then, in after_update, g follows f.
        if self.training:
            self.loss.remember(T_s, T_t)
        metrics = self.metrics([P_s, P_t]) if with_metrics else {}
        if with_metrics and Y_s is not None and Y_t is not None:
            metrics |= label_metrics(Y_s, Y_t)
        return StepOutput(loss, terms, metrics)

    def _small_views(
        self,
        q_small: Sequence[Tensor],
        k_s: Tensor,
        k_t: Tensor,
        p_s: Tensor,
        p_t: Tensor,
        Y_s: Tensor | None,
        Y_t: Tensor | None,
        w: Value,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Small views learn from both sides, as these do from each other: the mean over them of
        their cross entropies with what both sides tell. They are taken as one batch, as it is much
        the same to a GPU whether a matrix has 128 rows or 512."""
        q, times = torch.cat([*q_small]), len(q_small)
        k_s, k_t, p_s, p_t = (rows.repeat(times, 1) for rows in (k_s, k_t, p_s, p_t))
        Y_s, Y_t = (None if Y is None else Y.repeat(times, 1) for Y in (Y_s, Y_t))
        S_s, S_t = self.loss.similarities(q, q, k_s, k_t)
        return self.loss.cross_entropies(S_s, S_t, p_s, p_t, Y_s, Y_t, w)

    def after_update(self, at: Values) -> None:
        # Every momentum method does so; it stands here to show the end of step 7. The optimiser has
        # moved f: g ← m·g + (1−m)·f.
        momentum_update(self.momentum_encoder, self.encoder, at["key_momentum"])

    def warnings(self, images: int) -> list[str]:
        return super().warnings(images) + small_views_warnings(self.views)

    def label_maker(self) -> CrossSimilarity:
        return self.loss
