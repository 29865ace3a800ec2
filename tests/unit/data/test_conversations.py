"""Conversations in JSON lines: what is wrong is told with file, line and message."""

import gzip
import json
from pathlib import Path

import pytest
from chats import conversations, write_conversations

from hvd_transformer.config import load
from hvd_transformer.data.conversations import ConversationFiles
from hvd_transformer.errors import UserError

FILES = ConversationFiles(load(overrides=["data.messages_column=chat"]).data)
USER = {"role": "user", "content": "a"}
BROKEN = [
    ('{"chat": [', "not valid JSON: "),
    ("7", 'must be an object, such as {"chat": …}'),
    ('{"text": "x"}', "has no such column; it has text"),
    ('{"chat": "x"}', "chat must be a list of messages, each with role and content"),
    ('{"chat": []}', "chat is empty"),
    ('{"chat": ["x"]}', "message 1 must be an object with role and content"),
    (json.dumps({"chat": [USER, {"content": "b"}]}), "message 2: has no role"),
    (json.dumps({"chat": [USER, {"role": "assistant"}]}), "message 2: has no content"),
    (json.dumps({"chat": [{"role": "user", "content": ["a"]}]}), "message 1: content must be a text"),
    (json.dumps({"chat": [{"role": "bot", "content": "a"}]}), "message 1: unknown role 'bot'; the roles are system, "),
    (r'{"chat": [{"role": "user", "content": "\ud800"}]}', "chat contains an unpaired surrogate (invalid Unicode)"),
]


@pytest.mark.parametrize(("line", "message"), BROKEN)
def test_a_broken_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"chat": [USER]}) + "\n\n" + line + "\n")
    with pytest.raises(UserError) as caught:
        list(FILES.reader((path,))())
    assert f"{path}, line 3" in str(caught.value) and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_messages_are_kept_as_they_are(tmp_path: Path) -> None:
    chats = [*conversations(5), [{**USER, "name": "Zoë"}]]
    plain = write_conversations(tmp_path / "train.jsonl", chats, "chat")
    packed = tmp_path / "valid.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    source = FILES.open(tmp_path, seed=1)
    for split in ("train", "valid"):
        assert [json.loads(example.texts[0]) for example in source.splits[split]()] == chats


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "chats.csv"
    path.write_text("chat\n")
    with pytest.raises(UserError, match=r"chats.csv: conversations must be JSON lines; it must end in .jsonl"):
        FILES.open(path, seed=1)
