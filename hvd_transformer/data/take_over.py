"""What a preparation has done before it failed at a wrong file, for that of the same source after the file is mended.

Other files are another preparation, with a folder of its own. Tokens depend only on the tokenizer and the text of their
span, so those of the spans before the wrong one are the same.
"""

import shutil
from typing import Any

from hvd_transformer.data.build_once import PROGRESS, unclaimed
from hvd_transformer.data.progress import Mark, Progress
from hvd_transformer.errors import UserError


def take_over(progress: Progress) -> None:
    """Move the token files of failed preparations of earlier states of these files here, up to the first span that is
    another one or whose file has changed. What is left of those preparations is removed."""
    for kept in sorted(progress.folder.parent.glob(f".*.tmp/{PROGRESS}")):
        try:
            with unclaimed(kept.parent) as is_free:
                found = Progress.read(kept.parent) if is_free else None
                if found is not None and found.failed and _is_earlier(found, progress):
                    _move(found, progress)
                    shutil.rmtree(kept.parent)
        except (OSError, UserError):
            continue  # of somebody else, or on a disk that fails: then all is prepared here


def _is_earlier(found: Progress, progress: Progress) -> bool:
    """Whether it was of the same source, whose files have changed: it cannot resume by itself."""
    before, now = _states(found), _states(progress)
    same_source = found.settings["source"] == progress.settings["source"]  # which may be a relative path
    return same_source and before != now and bool(before.keys() & now.keys())


def _move(found: Progress, progress: Progress) -> None:
    own, other = found.tokenizer, progress.tokenizer
    if own.digest != other.digest or own.document_end != other.document_end:
        return
    if found.settings["format"] != progress.settings["format"]:
        return
    for split, marks in found.marks.items():
        usable = [mark for mark in marks if _is_unchanged(split, mark, found, progress)]
        if usable and split not in progress.marks:
            (found.folder / f"{split}.bin").replace(progress.folder / f"{split}.bin")
            progress.marks[split] = usable
    progress.write_places()


def _is_unchanged(split: str, mark: Mark, found: Progress, progress: Progress) -> bool:
    """Whether the spans up to the mark are those of now."""
    number, position = mark.place
    read = found.spans[split][: number + (position > 0)]
    before, now = _states(found), _states(progress)
    return read == progress.spans.get(split, ())[: len(read)] and all(
        path in before and before[path] == now.get(path) for path in (str(span.path) for span in read)
    )


def _states(progress: Progress) -> dict[str, list[Any]]:
    """Size and time of the last change of each file, from the identity of the corpus."""
    corpus = progress.settings["corpus"]
    return {path: state[:2] for path, *state in corpus.get("shards") or corpus.get("files", {}).values()}
