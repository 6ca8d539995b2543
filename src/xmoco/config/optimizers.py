"""Settings of optimisers, a class for each."""

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from xmoco.config.section import Range, Section


class OptimizerConfig(Section):
    """Settings of every optimiser."""

    staying: ClassVar[tuple[str, ...]] = ()
    """Settings that another kind of optimiser does not take over."""

    learning_rate: float = Field(
        0.0675, gt=0, description="Rate per 256 images; scaled by batch / 256 and printed."
    )
    cosine_offset: float = Field(
        0.1, ge=0, le=1, description="Share of the rate left at the end of the cosine schedule."
    )
    warmup_epochs: float = Field(0.0, ge=0, description="Epochs of linear warm-up.")
    weight_decay: float = Field(1e-4, ge=0, description="Weight decay.")
    decay_norms_and_biases: bool = Field(
        True, description="Whether weight decay applies to norms and biases too."
    )


class SGDConfig(OptimizerConfig):
    name: Literal["sgd"] = Field("sgd", description="Gradient descent with momentum.")
    sgd_momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of SGD.")
    nesterov: bool = Field(False, description="Nesterov's form of the momentum.")

    @field_validator("nesterov")
    @classmethod
    def _has_momentum(cls, nesterov: bool, settings: ValidationInfo) -> bool:
        if nesterov and settings.data.get("sgd_momentum") == 0:
            raise ValueError("is a form of the momentum, so it needs sgd_momentum above 0")
        return nesterov


class LARSConfig(OptimizerConfig):
    name: Literal["lars"] = Field(
        "lars", description="SGD with layer-wise adaptive learning rates, for large batches."
    )
    sgd_momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of SGD.")
    trust: float = Field(
        0.001,
        gt=0,
        description="Trust coefficient: at learning rate 1 a layer moves by this fraction of its "
        "weights' norm.",
    )
    clip: bool = Field(
        False,
        description="Whether a layer's adaptive rate takes the place of the learning rate where it "
        "is lower, as in LARC; otherwise it multiplies the learning rate.",
    )
    decay_norms_and_biases: bool = Field(
        True,
        description="Whether weight decay and the adaptive rate apply to norms and biases too; "
        "otherwise they are updated as by SGD.",
    )


class AdamWConfig(OptimizerConfig):
    # Adam's steps do not shrink with the gradient: a rate for SGD is a hundred times too large for
    # it. These are usual for transformers; neither was tuned here.
    staying: ClassVar[tuple[str, ...]] = ("learning_rate", "weight_decay")

    name: Literal["adamw"] = Field("adamw", description="Adam with decoupled weight decay.")
    learning_rate: float = Field(
        5e-4,
        gt=0,
        description="Rate per 256 images; scaled by batch / 256 and printed. Those of sgd and lars "
        "are not taken over.",
    )
    weight_decay: float = Field(
        0.05, ge=0, description="Weight decay. That of sgd or lars is not taken over."
    )
    betas: Range = Field((0.9, 0.999), description="Decay of the first and second moments.")

    @field_validator("betas")
    @classmethod
    def _are_shares(cls, betas: Range) -> Range:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("must be two numbers from 0 up to 1")
        return betas


OptimConfig = SGDConfig | LARSConfig | AdamWConfig
