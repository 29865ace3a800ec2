"""M2M100's tokenizer, a SentencePiece model beside a vocabulary; Marian's and NLLB's are in tests of whole runs."""

import json
import pickle
from pathlib import Path

import pytest

from hvd_transformer.data.pair_tokenizer import PairTokenizer
from hvd_transformer.errors import UserError

sentencepiece = pytest.importorskip("sentencepiece")
transformers = pytest.importorskip("transformers")

TEXT = "the red dog and the blue cat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("m2m100")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 20), model_prefix=str(root / "own"), vocab_size=40, hard_vocab_limit=False,
        minloglevel=2,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(root / "own.model"))
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *(pieces.id_to_piece(n) for n in range(3, pieces.get_piece_size()))]
    (root / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    transformers.M2M100Tokenizer(str(root / "vocab.json"), str(root / "own.model")).save_pretrained(root / "folder")
    (root / "folder" / "config.json").write_text('{"model_type": "m2m_100"}')
    return root / "folder"


def test_its_numbers_are_those_of_transformers(folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder, src_lang="fr", tgt_lang="de")
    wanted = {"source": theirs(TEXT)["input_ids"], "target": theirs(text_target=TEXT)["input_ids"]}
    assert wanted["source"] != wanted["target"]
    for role, ids in wanted.items():
        ours = pickle.loads(pickle.dumps(PairTokenizer.read(folder, role, ("fr", "de"))))
        found, empty = ours.encode_lines([TEXT, " "])
        assert (found.tolist(), empty.tolist()) == (ids, [])
        assert ours.forced_begin == wanted["target"][0] < ours.vocab_size
        assert ours.pad == theirs.pad_token_id
        assert ours.shorten(found, 5).tolist() == [*ids[:4], ids[-1]]
    assert ours.decode_line([2, *wanted["target"], 1, 1]) == TEXT


def test_an_unknown_language_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"data\.target_language=deu_Latn: no language of model\.pretrained="):
        PairTokenizer.read(folder, "source", ("fr", "deu_Latn"))
