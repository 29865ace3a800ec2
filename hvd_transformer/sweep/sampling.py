"""The values of each trial: all combinations, random ones, or those that Optuna suggests."""

import math
import random
from collections.abc import Mapping, Sequence
from itertools import chain, islice, product
from math import prod
from typing import Any

from hvd_transformer.errors import UserError, missing_extra
from hvd_transformer.sweep.definition import MAX_TRIALS, Range, Sweep

Values = dict[str, Any]


def all_values(sweep: Sweep) -> list[Values]:
    """The values of every trial of a grid or of random search. Raises `UserError` for more than `MAX_TRIALS`."""
    if sweep.method == "random":
        return [_random(sweep, number) for number in range(sweep.trials or 0)]
    lists = [values for values in sweep.parameters.values() if not isinstance(values, Range)]
    if (number := prod(map(len, lists))) > MAX_TRIALS:
        raise UserError(f"parameters: {number:,} combinations; must be at most {MAX_TRIALS:,}; use method: random")
    return [dict(zip(sweep.parameters, values, strict=True)) for values in product(*lists)]


def _random(sweep: Sweep, number: int) -> Values:
    """Values of one trial: more trials leave those before as they are."""
    generator = random.Random(f"{sweep.seed} {number}")
    return {key: _drawn(generator, values) for key, values in sweep.parameters.items()}


def _drawn(generator: random.Random, values: Range | list[Any]) -> Any:
    if not isinstance(values, Range):
        return generator.choice(values)
    if values.scale == "linear":
        uniform = generator.randint if values.whole else generator.uniform
        return uniform(values.min, values.max)  # type: ignore[arg-type]
    # A whole number stands for the half below it and the half above it.
    reach = 0.5 if values.whole else 0.0
    number = math.exp(generator.uniform(math.log(values.min - reach), math.log(values.max + reach)))
    return min(max(round(number), values.min), values.max) if values.whole else number


def check_optuna() -> None:
    """Raise `UserError` if Optuna is not there."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise missing_extra("method=optuna", "optuna", "sweep") from None


def suggested(sweep: Sweep, done: Sequence[tuple[Values, float | None]]) -> Values:
    """Values that Optuna (TPE) tries after these trials; a result of None is a failed trial. Deterministic."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {key: _distribution(values) for key, values in sweep.parameters.items()}
    sampler = optuna.samplers.TPESampler(seed=(sweep.seed + len(done)) % 2**32)
    study = optuna.create_study(direction="minimize", sampler=sampler)
    for values, result in done:
        state = optuna.trial.TrialState.FAIL if result is None else optuna.trial.TrialState.COMPLETE
        inner = {key: _index(sweep, key, value) for key, value in values.items()}
        value = None if result is None else sweep.sign * result
        study.add_trial(optuna.trial.create_trial(params=inner, distributions=space, value=value, state=state))
    found: Mapping[str, Any] = study.ask(fixed_distributions=space).params
    return {key: _value(sweep, key, value) for key, value in found.items()}


def _distribution(values: Range | list[Any]) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Range):  # by place: Optuna takes no lists as choices
        return CategoricalDistribution(list(range(len(values))))
    log = values.scale == "log"
    if values.whole:
        return IntDistribution(int(values.min), int(values.max), log=log)
    return FloatDistribution(float(values.min), float(values.max), log=log)


def _index(sweep: Sweep, key: str, value: Any) -> Any:
    values = sweep.parameters[key]
    return value if isinstance(values, Range) else values.index(value)


def _value(sweep: Sweep, key: str, value: Any) -> Any:
    values = sweep.parameters[key]
    return value if isinstance(values, Range) else values[value]


def corners(sweep: Sweep) -> list[Values]:
    """What to check early where values are not known yet: each value of a list, and the limits of each range with a
    value between them, with the others at their first; then their combinations, as far as `MAX_TRIALS`."""
    values = {key: _examples(values) for key, values in sweep.parameters.items()}
    firsts = {key: examples[0] for key, examples in values.items()}
    single = (firsts | {key: value} for key, examples in values.items() for value in examples)
    combined = (dict(zip(values, chosen, strict=True)) for chosen in product(*values.values()))
    return list(islice(chain(single, combined), MAX_TRIALS))


def _examples(values: Range | list[Any]) -> list[Any]:
    if not isinstance(values, Range):
        return values
    return [values.min, values.max, _drawn(random.Random(0), values)]  # that one is whole only if all are
