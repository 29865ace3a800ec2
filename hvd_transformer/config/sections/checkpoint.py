"""The keys of the section `checkpoint`."""

from hvd_transformer.config.sections.key import OptionalCount, OptionalPositive, Section, changeable


class CheckpointConfig(Section):
    """When checkpoints are saved, which ones are kept, and where a run resumes."""

    every_steps: OptionalCount = changeable(
        200, "steps between two checkpoints; none: only by every_seconds and at the end"
    )
    every_epochs: OptionalCount = changeable(None, "epochs between two checkpoints, in addition to every_steps")
    every_seconds: OptionalPositive = changeable(None, "seconds between two checkpoints, in addition to every_steps")
    keep_last: int = changeable(3, "number of newest checkpoints to keep", ge=1)
    keep_best: bool = changeable(True, "keep the best checkpoint by training.best_metric, and test it at the end")
    resume: str = changeable(
        "auto",
        "auto: resume from the newest complete checkpoint in output_dir; never: refuse an output_dir that has one; "
        "or the checkpoint (or run directory) of another run to start from, whose best evaluation does not count here",
    )
