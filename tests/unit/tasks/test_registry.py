"""The names of metrics that are known before there are data are those that an evaluation then has."""

from pathlib import Path

import numpy as np
import pytest

from hvd_transformer.config import load
from hvd_transformer.tasks.metrics import classification_metrics, translation_metrics
from hvd_transformer.tasks.registry import known_metrics

OWN = """
from hvd_transformer.tasks.classification_task import ClassificationTask
from hvd_transformer.tasks.translation_task import TranslationTask

class Same(TranslationTask):
    def describe(self):
        return "mine"

class Other(ClassificationTask):
    def metrics(self, sums, count):
        return {"loss": sums[0] / count, "mcc": 1.0}

class Told(Other):
    @classmethod
    def possible_metrics(cls, config):
        return ["loss", "mcc"]

class Added(Told):
    def more_metrics(self, split, group):
        return {"auc": 1.0}
"""


def known(task: str) -> set[str] | None:
    found = known_metrics(load(overrides=[f"task={task}"]))
    return None if found is None else set(found)


def test_names_are_those_of_an_evaluation() -> None:
    assert known("language_model") == {"loss", "perplexity"}
    assert known("translation") == {"loss", "perplexity", *translation_metrics(["a b"], ["a b"])}
    assert known("classification") == {"loss", *classification_metrics(np.eye(3), 0)}


def test_a_task_that_replaces_metrics_has_none_of_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metric_names_of.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    assert known("metric_names_of:Same") == known("translation")
    assert known("metric_names_of:Other") is None
    assert known("metric_names_of:Told") == {"loss", "mcc"}
    assert known("metric_names_of:Added") is None
