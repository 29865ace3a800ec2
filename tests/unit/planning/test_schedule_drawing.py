"""The drawings show every operation at its place, at every width that has room for them."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from hvd_transformer.parallel.pipeline_schedule import forward_only, make_schedule
from hvd_transformer.planning.schedule_drawing import COLOURS, Timeline, draw_png, draw_text, simulate


def example(num_stages: int = 3, count: int = 4, backward: float = 1.0) -> Timeline:
    return simulate(make_schedule("1f1b", num_stages, count), [1.0] * num_stages, [backward] * num_stages)


def test_brackets_are_backwards() -> None:
    assert draw_text(example(), 48).splitlines() == [
        "stage 0   0  1  2 ......[0] 3 [1]...[2]...[3]",
        "stage 1  ... 0  1 ...[0] 2 [1] 3 [2]...[3]...",
        "stage 2  ...... 0 [0] 1 [1] 2 [2] 3 [3]......",
        "0 forward of micro-batch 0, [0] its backward, . idle (33%)",
    ]


def test_letters_are_backwards_where_it_is_narrow() -> None:
    assert draw_text(example(), 21).splitlines() == [
        "stage 0  012..a3b.c.d",
        "stage 1  .01.a2b3c.d.",
        "stage 2  ..0a1b2c3d..",
        "0 forward of micro-batch 0, a its backward, . idle (33%)",
    ]


def test_the_halves_of_a_backward_have_brackets_and_letters_of_their_own() -> None:
    timeline = simulate(make_schedule("zero_bubble", 2, 3), [1.0] * 2, [2.0] * 2)
    assert draw_text(timeline, 9 + 30).splitlines() == [
        "stage 0   0  1 ...[0](0) 2 [1](1)[2](2)",
        "stage 1  ... 0 [0] 1 [1](0) 2 [2](1)(2)",
        "0 forward of micro-batch 0, [0] its backward, (0) its weight gradients, . idle (10%)",
    ]
    assert [line[9:] for line in draw_text(timeline, 9 + 10).splitlines()[:2]] == ["01.aA2bBcC", ".0a1bA2cBC"]


def test_two_digits_are_whole_where_they_have_room_and_modulo_10_elsewhere() -> None:
    timeline = example(1, 12, backward=2)
    wide, tight, narrow = (draw_text(timeline, width).splitlines() for width in (9 + 36 * 3, 9 + 36 * 2, 9 + 36))
    assert wide[0].endswith(" 9 [ 9  ]10 [ 10 ]11 [ 11 ]")
    assert tight[0].endswith("9 [9 ]0 [0 ]1 [1 ]")
    assert narrow[0].endswith("8ii9jj0aa1bb")
    assert [drawing[1].endswith(", numbers modulo 10") for drawing in (wide, tight, narrow)] == [False, True, True]


@pytest.mark.parametrize("width", [12, 30, 47, 80, 133, 200])
@pytest.mark.parametrize(("num_stages", "count"), [(1, 1), (2, 64), (12, 3)])
def test_every_line_is_as_long_as_the_others_and_not_wider_than_asked(width: int, num_stages: int, count: int) -> None:
    for timeline in (
        example(num_stages, count, backward=1.9),
        simulate(
            forward_only(num_stages, count), [0.3 + 0.1 * stage for stage in range(num_stages)], [0.0] * num_stages
        ),
    ):
        *lines, _ = draw_text(timeline, width).splitlines()
        assert len(lines) == num_stages
        assert len({len(line) for line in lines}) == 1
        assert (width - 10) / 2 <= len(lines[0]) <= width  # cells of whole characters leave less than half unused


def test_an_operation_without_time_takes_no_room() -> None:
    assert draw_text(simulate(make_schedule("gpipe", 1, 2), [1.0], [0.0]), 15).splitlines()[0] == "stage 0  000111"


def test_the_picture_has_as_much_of_each_colour_as_the_work_takes(tmp_path: Path) -> None:
    draw_png({"gpipe": example(4, 8, backward=2), "1f1b": example(4, 8, backward=2)}, tmp_path / "made.png")
    pixels = imread(tmp_path / "made.png")[..., :3]
    area = {
        kind: int((np.abs(pixels - np.array(to_rgb(colour))).max(axis=-1) < 0.01).sum())
        for kind, colour in COLOURS.items()
    }
    assert area["forward"] > 0.05 * pixels.shape[0] * pixels.shape[1]
    # Numbers, edges and the legend cost a little of the factor of 2.
    assert 1.8 < area["backward"] / area["forward"] < 2.4


def test_numbers_that_nobody_could_read_are_left_out(tmp_path: Path) -> None:
    """On the first panel's right half, where the only text would be numbers."""

    def black(count: int) -> bool:
        draw_png({"one": example(1, count)}, tmp_path / "made.png")
        pixels = imread(tmp_path / "made.png")[..., :3]
        height, width = pixels.shape[:2]
        row = pixels[int(height * 0.35) : int(height * 0.6), width // 2 : int(width * 0.95)]
        return bool((row.max(axis=-1) < 0.2).any())

    assert black(4)
    assert not black(200)
