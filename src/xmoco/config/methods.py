"""Settings of methods, a class for each; what several share is in ``shared.py``."""

from typing import Literal

from pydantic import Field

from xmoco.config.section import Probability
from xmoco.config.shared import (
    BankIdeasConfig,
    ConsistencyConfig,
    DirectedConfig,
    IdeasConfig,
    MethodSettings,
    MoCoConfig,
    MomentumEncoderConfig,
    NeighbourConfig,
    PrototypesConfig,
    TwoBanksConfig,
)


class XMoCoConfig(TwoBanksConfig):
    name: Literal["xmoco"] = Field("xmoco", description="Extended momentum contrast.")
    label_weight: Probability = Field(
        1.0,
        description="Share of the soft labels, the rest being one-hot: 1 is the paper's, 0 leaves "
        "the InfoNCE of MoCo v2+.",
    )
    consistency_weight: float = Field(
        1.0, ge=0, description="Weight of the cross-similarity consistency terms; 0: none."
    )
    positive_mass_end: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Value of ξ at the end of training, approached along a half cosine; null: "
        "constant, as in the paper.",
    )

    @property
    def last_positive_mass(self) -> float:
        return self.positive_mass_end or self.positive_mass

    @property
    def subject(self) -> str:
        """XMoCo+ with what is not in the paper, lest its figures be taken for the paper's."""
        changes = self.label_weight > 0 and self.last_positive_mass != self.positive_mass
        return f"{self.name}+" if self.extras or changes else self.name

    @property
    def added(self) -> tuple[str, ...]:
        return ()  # the two ideas are its own


class MoCoV2PlusConfig(TwoBanksConfig):
    name: Literal["mocov2plus"] = Field(
        "mocov2plus", description="MoCo v2 with symmetric InfoNCE and two banks."
    )


class MoCoOneWayConfig(BankIdeasConfig, DirectedConfig, MoCoConfig):
    name: Literal["moco"] = Field(
        "moco", description="A query identifies its key among past ones: MoCo, versions 1 and 2."
    )


class ReSSLConfig(DirectedConfig):
    name: Literal["ressl"] = Field(
        "ressl", description="A query is as similar to past keys as its own key is; no positive."
    )
    temperature: float = Field(0.1, gt=0, description="τ of the queries' similarities.")
    key_temperature: float = Field(
        0.04, gt=0, description="τ of the keys' similarities, which queries are to have."
    )
    weak_keys: bool = Field(
        True, description="Keys are of views made by `weak_views`, as in ReSSL's paper."
    )


class SCEConfig(ConsistencyConfig, DirectedConfig):
    name: Literal["sce"] = Field(
        "sce", description="One-hot labels mixed with the similarities of the key to past keys."
    )
    temperature: float = Field(0.1, gt=0, description="τ of the queries' similarities.")
    key_temperature: float = Field(
        0.05, gt=0, description="τ of the keys' similarities, which are part of the labels."
    )
    positive_share: Probability = Field(
        0.5, description="Share of a label given to the positive; 1: InfoNCE."
    )
    weak_keys: bool = Field(
        True, description="Keys are of views made by `weak_views`, as in SCE's paper."
    )

    @property
    def extras(self) -> tuple[str, ...]:
        """Published for ImageNet are a symmetric loss and a predictor."""
        return tuple(e for e in super().extras if e not in ("symmetric loss", "predictor"))


class CO2Config(BankIdeasConfig, DirectedConfig, MoCoConfig):
    name: Literal["co2"] = Field(
        "co2", description="InfoNCE, and a query agrees with its key on all negatives."
    )
    agreement_weight: float = Field(
        0.3, ge=0, description="α: weight of the divergence of a query and its key; 0: none."
    )
    agreement_warmup_epochs: float = Field(
        0.0, ge=0, description="Epochs over which that weight rises linearly from 0."
    )
    agreement_temperature: float = Field(
        0.05, gt=0, description="τ of the similarities to the negatives that are to agree."
    )


class AlignUniformConfig(DirectedConfig):
    name: Literal["alignuniform"] = Field(
        "alignuniform",
        description="Queries lie near their keys, and far from each other and from past keys.",
    )
    symmetric: bool = Field(
        True,
        description="Whether both views of an image make queries and keys, each compared with the "
        "other's, as in the table of XMoCo's paper; otherwise one view makes queries "
        "and the other keys.",
    )
    align_weight: float = Field(
        3.0, ge=0, description="Weight of the squared distance of queries and their keys."
    )
    uniform_weight: float = Field(
        1.0, ge=0, description="Weight of how unevenly queries spread among the others."
    )
    uniform_sharpness: float = Field(
        3.0, gt=0, description="t: nearness is exp(−t · squared distance)."
    )


class JCLConfig(BankIdeasConfig, DirectedConfig, MoCoConfig):
    name: Literal["jcl"] = Field(
        "jcl", description="InfoNCE with infinitely many keys of an image, modelled by a Gaussian."
    )
    symmetric: bool = Field(
        False, description="Whether two views of an image make queries, for the same keys."
    )
    weak_keys: bool = Field(
        False, description="Keys are of views made by `weak_views`; not in JCL's paper."
    )
    key_views: int = Field(
        5, ge=2, le=32, description="Views of an image whose keys make its Gaussian."
    )
    spread_weight: float = Field(
        2.0,
        ge=0,
        description="λ: how much the Gaussian's spread counts at the end of training; it rises "
        "linearly from 0.",
    )


class SimCLRConfig(IdeasConfig):
    name: Literal["simclr"] = Field(
        "simclr", description="Contrast with all other views of the batch; one encoder."
    )
    temperature: float = Field(0.5, gt=0, description="τ: divides similarities before the softmax.")


class BYOLConfig(MomentumEncoderConfig):
    name: Literal["byol"] = Field(
        "byol", description="A predictor regresses the momentum encoder's features; no negatives."
    )
    key_momentum: float = Field(
        0.99, ge=0, le=1, description="m: g ← m·g + (1−m)·f after every step."
    )
    key_momentum_end: float | None = Field(
        1.0,
        ge=0,
        le=1,
        description="Value of m at the end of training, approached along a half cosine; null: "
        "constant.",
    )
    predictor_hidden: int = Field(4096, ge=1, description="Width of the predictor's hidden layer.")


class SwAVConfig(PrototypesConfig):
    name: Literal["swav"] = Field(
        "swav",
        description="Cluster assignments of a view over learned prototypes are predicted from the "
        "others.",
    )


class UOTAConfig(PrototypesConfig):
    name: Literal["uota"] = Field(
        "uota", description="SwAV in which views that are unlike their image's others count less."
    )
    outlier_temperature: float = Field(
        350.0, gt=0, description="Divides the squared distance of a view from its image's others."
    )
    outliers_from: Probability = Field(
        0.5, description="Views count unequally from this share of training on."
    )
    outliers_rate: float = Field(
        2.0, gt=0, description="The learning rate is multiplied by this from there on."
    )


class SimSiamConfig(MethodSettings):
    name: Literal["simsiam"] = Field(
        "simsiam", description="A predictor regresses the encoder's own features of the other view."
    )
    predictor_hidden: int = Field(512, ge=1, description="Width of the predictor's hidden layer.")


class BarlowTwinsConfig(MethodSettings):
    name: Literal["barlowtwins"] = Field(
        "barlowtwins",
        description="Each feature correlates with itself in the other view, and with no other "
        "feature.",
    )
    redundancy_weight: float = Field(
        0.0051, ge=0, description="λ: weight of the correlations of different features."
    )
    loss_scale: float = Field(
        0.024,
        gt=0,
        description="Multiplies the loss, which sums over features; under LARS it only affects "
        "norms and biases.",
    )


class VICRegConfig(MethodSettings):
    name: Literal["vicreg"] = Field(
        "vicreg",
        description="Views agree, every feature varies, and different features are uncorrelated.",
    )
    invariance_weight: float = Field(
        25.0, ge=0, description="Weight of the views' squared difference."
    )
    variance_weight: float = Field(
        25.0, ge=0, description="Weight of what standard deviations lack of 1."
    )
    covariance_weight: float = Field(
        1.0, ge=0, description="Weight of the covariances of different features."
    )


class MSFConfig(NeighbourConfig):
    name: Literal["msf"] = Field(
        "msf", description="A predictor regresses a key and its nearest neighbours: mean shift."
    )


class MNNConfig(NeighbourConfig):
    name: Literal["mnn"] = Field(
        "mnn", description="A predictor regresses a key, and mixtures of it with its neighbours."
    )


class SupervisedConfig(MethodSettings):
    name: Literal["supervised"] = Field(
        "supervised", description="A linear classifier trained on labels, for reference."
    )


class InstDiscConfig(IdeasConfig):
    name: Literal["instdisc"] = Field(
        "instdisc",
        description="Each image is a class of its own, compared with a memory slot for every "
        "image.",
    )
    temperature: float = Field(
        0.07, gt=0, description="τ: divides similarities before the softmax."
    )
    slot_momentum: float = Field(
        0.5, ge=0, lt=1, description="Share of its past that an image's slot keeps when it is seen."
    )


MethodConfig = (
    XMoCoConfig
    | MoCoV2PlusConfig
    | SimCLRConfig
    | BYOLConfig
    | SwAVConfig
    | ReSSLConfig
    | SCEConfig
    | CO2Config
    | AlignUniformConfig
    | JCLConfig
    | UOTAConfig
    | SimSiamConfig
    | BarlowTwinsConfig
    | VICRegConfig
    | MSFConfig
    | MNNConfig
    | SupervisedConfig
    | InstDiscConfig
    | MoCoOneWayConfig
)
