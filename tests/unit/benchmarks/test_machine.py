"""What the benchmarks say of the processor."""

from pathlib import Path

from benchmarks.machine import machine, processor

CPUINFO = """\
processor\t: 0
model name\t: Some CPU @ 2.00GHz
flags\t\t: fpu sse2 avx2 amx_bf16 avx512f avx512_unheard_of

processor\t: 1
model name\t: Another
flags\t\t: fpu
"""


def test_the_flags_that_matter(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    assert processor(tmp_path / "cpuinfo") == ("Some CPU @ 2.00GHz", ["avx2", "avx512f", "amx_bf16"])


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert processor(tmp_path / "none") == ("unknown", [])
    assert "cores (" in machine()
