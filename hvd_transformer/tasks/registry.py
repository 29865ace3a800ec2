"""Finds the class of a task: built in, for fine-tuning, or user-defined."""

from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError
from hvd_transformer.plugin import load_plugin
from hvd_transformer.tasks.task import Task

_CLASSES = {
    "language_model": "hvd_transformer.tasks.language_model_task:LanguageModelTask",
    "translation": "hvd_transformer.tasks.translation_task:TranslationTask",
    "classification": "hvd_transformer.tasks.classification_task:ClassificationTask",
}
_PRETRAINED = {
    "language_model": "hvd_transformer.tasks.pretrained_tasks:PretrainedLanguageModelTask",
    "classification": "hvd_transformer.tasks.pretrained_tasks:PretrainedClassificationTask",
    "translation": "hvd_transformer.tasks.pretrained_translation_task:PretrainedTranslationTask",
}

_OWN_BLOCKS = "hvd_transformer.tasks.own_blocks_task:OwnBlocksTask"
# The same two for conversations.
_CHAT = "hvd_transformer.tasks.pretrained_tasks:PretrainedChatTask"
_OWN_BLOCKS_CHAT = "hvd_transformer.tasks.own_blocks_task:OwnBlocksChatTask"


_METRICS = ("metrics", "more_metrics", "metric_names")


def known_metrics(config: Config) -> list[str] | None:
    """The names that the metrics of a split may have, whatever the data are; None: only the data say them.

    Raises `UserError` as `task_class`.
    """
    found = task_class(config)
    told_by = _definer(found, "possible_metrics")
    is_newest = all(issubclass(told_by, _definer(found, name)) for name in _METRICS)
    return found.possible_metrics(config) if is_newest else None


def _definer(found: type, name: str) -> type:
    """The class that a member comes from."""
    return next(base for base in found.__mro__ if name in vars(base))


def task_class(config: Config) -> type[Task]:
    """The class that `task` names. Raises `UserError` if there is none or it is incomplete."""
    origin = f"task={config.task}"
    path = (_CLASSES if config.model.pretrained is None else _PRETRAINED).get(config.task, config.task)
    if config.task == "language_model" and config.data.messages_column is not None:
        path = _OWN_BLOCKS_CHAT if config.model.in_own_blocks else _CHAT
    elif config.model.pretrained is not None and config.model.in_own_blocks:
        path = _OWN_BLOCKS
    found = load_plugin(path, origin, "Class")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UserError(f"{origin}: must be a subclass of hvd_transformer.tasks.task.Task")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise UserError(f"{origin}: lacks {', '.join(missing)}")
    return found
