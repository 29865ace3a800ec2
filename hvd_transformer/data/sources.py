"""What `data.source` names where samples are pairs or labelled texts: a path, or a published data set."""

from pathlib import Path

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.errors import UserError


def source_path(config: DataConfig) -> Path:
    """The file or folder. Raises `UserError` where there is none."""
    path = Path(config.source).expanduser()
    if path.exists():
        return path.resolve()
    raise UserError(f"data.source={config.source}: no such file or folder")
