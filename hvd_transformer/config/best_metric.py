"""Which values of `training.best_metric` are better."""

_LOWER_IS_BETTER = {"loss", "perplexity"}


def metric_sign(name: str) -> int:
    """What a metric is multiplied by so that lower is better; `name` may have a leading minus: lower is better."""
    plain = name.removeprefix("-")
    lower_is_better = name != plain or plain in _LOWER_IS_BETTER or plain.endswith("_loss")
    return 1 if lower_is_better else -1
