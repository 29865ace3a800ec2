"""The keys of the section `optimizer`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hvd_transformer.config.sections.key import OptionalPositive, Section, fixed, none_word

Beta = Annotated[float, Field(ge=0, lt=1)]
OptionalDecay = Annotated[Annotated[float, Field(gt=0, lt=1)] | None, BeforeValidator(none_word)]


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    name: Literal["sgd", "adam", "adamw", "muon"] = fixed(
        "adamw",
        "optimizer; muon orthogonalises the updates of the hidden layers' matrices; adamw updates the other weights",
    )
    lr: float = fixed(1e-3, "peak learning rate for one data-parallel replica", gt=0)
    lr_scaling: Literal["linear", "sqrt", "none"] = fixed(
        "linear",
        "scaling of the learning rate with the number of replicas dp: lr x dp, lr x sqrt(dp), or lr; with "
        "training.global_batch_size, global_batch_size / batch_size replaces dp; a run that resumes with "
        "another batch_size keeps its learning rate",
    )
    weight_decay: float = fixed(0.01, "weight decay; not applied to biases, norms and embeddings", ge=0)
    momentum: float = fixed(0.0, "momentum, for sgd", ge=0, lt=1)
    betas: tuple[Beta, Beta] = fixed(
        (0.9, 0.95),
        "decay rates of adam and adamw, and of muon's adamw",
        allowed="a list of two numbers from 0 to less than 1, such as [0.9, 0.95]",
    )
    eps: float = fixed(1e-8, "epsilon of adam and adamw, and of muon's adamw", gt=0)
    clip_norm: OptionalPositive = fixed(1.0, "gradient clipping: maximum norm of the whole gradient; none: no clipping")
    ema: OptionalDecay = fixed(
        None,
        "decay of an exponential moving average of the weights, such as 0.999, which is evaluated and saved for use "
        "while training continues with the raw weights; none: no average",
    )
    schedule: Literal["constant", "step", "cosine", "linear", "wsd", "noam"] = fixed(
        "cosine",
        "learning rate after warm-up; constant; step: x gamma every step_epochs epochs; cosine: decays to lr x gamma "
        "at the end; "
        "linear: decays to zero at the end; wsd (warm-up, stable, decay): constant, then decays to zero over the last "
        "decay_fraction of the steps; noam: proportional to the inverse square root of the step",
    )
    warmup_steps: int = fixed(0, "number of steps of linear warm-up from zero", ge=0)
    decay_fraction: float = fixed(0.2, "fraction of the steps over which the wsd schedule decays", gt=0, le=1)
    gamma: float = fixed(0.1, "factor of the step and cosine schedules", ge=0, le=1)
    step_epochs: int = fixed(1, "epochs between two decays of the step schedule", ge=1)
