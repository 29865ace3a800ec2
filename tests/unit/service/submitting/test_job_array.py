"""Options of arrays: their product, and what is refused."""

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.submitting.job_array import MAX_JOBS, expand


def test_the_product_of_all_options() -> None:
    assert expand([]) == [[]]
    assert expand(["optimizer.lr=1e-3,3e-4", "seed=1,2,3"]) == [
        [f"optimizer.lr={lr}", f"seed={seed}"] for lr in ("1e-3", "3e-4") for seed in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("data.split=[0.9,0.1],[0.8, 0.1, 0.1]", ["[0.9,0.1]", "[0.8, 0.1, 0.1]"]),
        ("data.class_weights={a: 1, b: 2},balanced", ["{a: 1, b: 2}", "balanced"]),
        ('data.class_weights={"a,]": 1},none', ['{"a,]": 1}', "none"]),
        ("data.source=it's,[x", ["it's", "[x"]),
        ("data.source=a=b , c", ["a=b", "c"]),
        ("data.source=x],y", ["x]", "y"]),
        ("training.max_steps=5", ["5"]),
    ],
)
def test_values_are_split_at_commas_outside_of_lists(option: str, values: list[str]) -> None:
    key = option.partition("=")[0]
    assert expand([option]) == [[f"{key}={value}"] for value in values]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["seed"], "--array seed: not of the form KEY=VALUE,VALUE, such as seed=1,2,3"),
        (["=1"], "--array =1: not of the form"),
        (["seed=1,,2"], "--array seed=1,,2: has an empty value"),
        (["seed="], "--array seed=: has an empty value"),
        (["seed=1,2,1"], "--array seed=1,2,1: has the same value twice"),
        (["seed=1", "seed=2"], "--array seed=2: seed is given twice"),
        (["output_dir=a,b"], "--array output_dir=a,b: each job of an array has a run directory of its own already"),
        (["seed=" + ",".join(map(str, range(MAX_JOBS + 1)))], "--array seed=0,1"),
    ],
)
def test_refused(options: list[str], line: str) -> None:
    with pytest.raises(UserError) as error:
        expand(options)
    assert str(error.value).startswith(line)


def test_the_number_of_jobs_is_limited_before_they_are_made() -> None:
    hundred = ",".join(map(str, range(100)))
    assert len(expand([f"seed={hundred}", "training.batch_size=" + ",".join(map(str, range(10)))])) == MAX_JOBS
    with pytest.raises(UserError, match="makes more than 1,000 jobs"):
        expand([f"key{number}={hundred}" for number in range(50)])
