"""Reading a file in pieces, against reading it whole."""

import io
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_transformer.cli.options import window
from hvd_transformer.data.text_files import Piece, TextSpan, boundary, line_boundary, read_lines, read_pieces
from hvd_transformer.data.tokenizers import WordTokenizer
from hvd_transformer.errors import UserError

TEXTS = st.text(st.sampled_from("ab  \n\n\t.<br />é\u00a0\u2028日😀"), max_size=300)


def pieces(path, data, size):
    path.write_bytes(data)
    return list(read_pieces(TextSpan(path, 0, len(data)), size))


@settings(deadline=None, max_examples=200)
@given(text=TEXTS, size=st.integers(8, 40))
def test_pieces_are_the_text_in_bounded_parts_of_whole_characters(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("text") / "text"
    found = pieces(path, text.encode(), size)
    assert "".join(piece.text() for piece in found) == text
    assert all(0 < len(piece.data) <= size for piece in found)
    assert [piece.start for piece in found] == [
        sum(len(before.data) for before in found[:n]) for n in range(len(found))
    ]


def test_a_piece_ends_at_a_line_end_where_it_can(tmp_path):
    data = b"one two three\nfour five\nsix seven\n\n  eight\nnine ten eleven\n" * 50
    found = pieces(tmp_path / "text", data, 100)
    assert len(found) > 10
    assert all(piece.data.startswith(b"\n") for piece in found[1:])


def test_no_piece_ends_within_a_line_break_of_basic_english(tmp_path):
    text = 'one <br /> two <b"R" /> three ' * 50
    for size in range(40, 60):
        for piece in pieces(tmp_path / "text", text.encode(), size):
            assert set(WordTokenizer.count(piece.text())) <= {"one", "two", "three"}


@pytest.mark.parametrize("between", ["\r\n", "\t", "\r"])
def test_no_piece_ends_within_a_word_of_a_list(tmp_path, between):
    words = [f"word{number}" for number in range(100)]
    for size in range(40, 60):
        found = pieces(tmp_path / "list", (between.join(words) + between).encode(), size)
        assert [word for piece in found for word in piece.text().split()] == words


@pytest.mark.parametrize("column", [None, "text"])
def test_a_byte_order_mark_is_no_text(tmp_path, column):
    path = tmp_path / "text"
    data = "\ufeffone two\nthree \ufeff four\n".encode()
    path.write_bytes(data)
    for end in (None, len(data)):
        found = list(read_pieces(TextSpan(path, 0, end, column), 16))
        assert b"".join(piece.data for piece in found) == data[3:]
        assert found[0].start == 3 and found[-1].end == len(data)
    assert b"".join(piece.data for piece in read_pieces(TextSpan(path, 3, len(data), column))) == data[3:]
    path.write_bytes(data[:3])
    assert list(read_pieces(TextSpan(path, 0, 3, column))) == []


def test_lines_of_standard_input_are_those_of_a_file(tmp_path, monkeypatch):
    path = tmp_path / "text"
    for data in (b"\xef\xbb\xbfa\rb\r\n\nc\x00\x1cd\xe2\x80\xa8e", b""):
        path.write_bytes(data)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert list(read_lines(None)) == list(read_lines(path))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\n\xff\n")))
    with pytest.raises(UserError, match="^standard input, line 2: not valid UTF-8: invalid start byte$"):
        list(read_lines(None))


def test_only_the_span_is_read(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"0123456789" * 10)
    assert b"".join(piece.data for piece in read_pieces(TextSpan(path, 5, 42), 8)) == (b"0123456789" * 10)[5:42]


@settings(deadline=None, max_examples=200)
@given(
    before=st.text("a\n é😀", max_size=60),
    wrong=st.sampled_from([b"\xff", b"\x80", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xc0\x80", b"\xed\xa0\x80"]),
    after=st.text("a\n é", max_size=60),
    size=st.integers(8, 40),
)
def test_invalid_utf8_is_named_by_file_and_offset(tmp_path_factory, before, wrong, after, size):
    path = tmp_path_factory.mktemp("text") / "text"
    data = before.encode() + wrong + after.encode()
    with pytest.raises(UnicodeDecodeError) as expected:
        data.decode()
    with pytest.raises(UserError, match=rf"^{path}: not valid UTF-8 at byte {expected.value.start} "):
        for piece in pieces(path, data, size):
            piece.text()


def test_offset_counts_from_the_start_of_the_file(tmp_path):
    with pytest.raises(UserError, match="at byte 1007 "):
        Piece(tmp_path / "text", 1000, b"1234567\xff").text()


@given(
    data=st.lists(st.sampled_from([b"\n", b"a", b"bcd"]), max_size=30).map(lambda parts: b"".join(parts) + b"\n"),
    target=st.integers(0, 60),
)
def test_the_cut_is_the_first_line_boundary_from_there(tmp_path_factory, data, target):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(data)
    target = min(target, len(data))
    ends = {0, len(data)} | {n + 1 for n, byte in enumerate(data) if byte == 0x0A}
    assert boundary(path, target) == min(end for end in ends if end >= target)


def test_a_text_of_one_line_is_cut_behind_a_space_or_a_character(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"one two three")
    assert boundary(path, 5) == len(b"one two ")
    path.write_text("\u4e00\u4e8c\u4e09", encoding="utf-8")  # three bytes each
    assert [boundary(path, target) for target in (3, 4, 5, 6)] == [3, 6, 6, 6]


@settings(deadline=None, max_examples=100)
@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=20), size=st.integers(1, 80))
def test_json_lines_are_cut_between_documents(tmp_path_factory, texts, size):
    """Also those that are longer than a piece."""
    path = tmp_path_factory.mktemp("documents") / "a.jsonl"
    lines = [json.dumps({"text": text}) + "\n" for text in ("before", *texts)]
    path.write_text("".join(lines), encoding="utf-8")
    start = line_boundary(path, 1)
    assert start == len(lines[0])
    found = list(read_pieces(TextSpan(path, start, path.stat().st_size, "text"), size))
    assert b"".join(piece.data for piece in found) == path.read_bytes()[start:]
    assert all(piece.data.endswith(b"\n") for piece in found)
    assert [text for piece in found for text in piece.texts()] == texts
    assert all(len(piece.data) < size + max(map(len, lines)) for piece in found)


def test_a_line_of_any_length_is_read_in_linear_time(tmp_path):
    """Piece by piece, what is there would be copied 65,536 times."""
    path, began = tmp_path / "a.jsonl", time.process_time()
    line = json.dumps({"text": "a" * 2**22}).encode() + b"\n"
    path.write_bytes(line * 2)
    found = list(read_pieces(TextSpan(path, 0, 2 * len(line), "text"), 64))
    assert b"".join(piece.data for piece in found) == line * 2
    assert time.process_time() - began < 2


def test_standard_input_may_be_closed(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert window(None) == {}
    with pytest.raises(UserError, match="^standard input: cannot be read: closed$"):
        list(read_lines(None))
