"""The launchers' choice of threads, which is host code: every row and column is covered, by a kernel that exists."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from onnxfuse import plugins

HERE = Path(__file__).parent
MAX_THREADS = 512
KERNELS = {8: {1, 2, 3, 4}, 4: {1, 2, 3, 4, 6, 8}, 1: {2, 8, 32}}
WIDTHS = (
    1,
    2,
    7,
    8,
    31,
    32,
    33,
    64,
    100,
    256,
    257,
    384,
    512,
    768,
    1000,
    1024,
    1025,
    2048,
    4095,
    4096,
    4097,
    5120,
    8192,
    11008,
    16383,
    16384,
)
ROWS = (1, 2, 3, 32, 128, 1055, 1056, 1057, 4096, 100_000, 2**31 - 1)


@dataclass(frozen=True)
class Asked:
    rows: int
    width: int
    vector: int
    sms: int = 132
    wanted: int = 0


@dataclass(frozen=True)
class Rows:
    threads: int
    per_thread: int
    rows_per_block: int
    blocks: int


@dataclass(frozen=True)
class Columns:
    threads_x: int
    threads_y: int
    rows_each: int
    blocks_x: int
    blocks_y: int


Geometry = Callable[[list[Asked]], list[tuple[Rows, Columns]]]


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> Geometry:
    program = tmp_path_factory.mktemp("geometry") / "geometry"
    subprocess.run(
        ["g++", "-std=c++17", "-Wall", "-Werror", "-fsanitize=undefined", HERE / "geometry_check.cpp", "-o", program], check=True
    )

    def ask(questions: list[Asked]) -> list[tuple[Rows, Columns]]:
        said = "\n".join(f"{q.rows} {q.width} {q.vector} {q.sms} {q.wanted}" for q in questions)
        lines = subprocess.run([program], input=said, check=True, capture_output=True, text=True).stdout.splitlines()
        pairs = [[list(map(int, half.split())) for half in line.split("|")] for line in lines]
        return [(Rows(*rows), Columns(*columns)) for rows, columns in pairs]

    return ask


QUESTIONS = [
    Asked(rows, width, vector, sms)
    for rows, width, vector, sms in itertools.product(ROWS, WIDTHS, (8, 4, 1), (10, 132))
    if width % vector == 0
]


def test_rows_are_covered_by_kernels_that_exist(geometry: Geometry) -> None:
    for asked, (rows, _) in zip(QUESTIONS, geometry(QUESTIONS), strict=True):
        vectors = asked.width // asked.vector
        assert rows.threads % 32 == 0, asked
        assert 32 <= rows.threads * rows.rows_per_block <= MAX_THREADS, asked
        assert rows.threads * rows.per_thread >= vectors, asked
        assert rows.per_thread in KERNELS[asked.vector], asked
        assert rows.rows_per_block == 1 or rows.threads == 32, asked
        assert rows.per_thread != 32 or rows.threads == MAX_THREADS, asked
        assert (rows.blocks - 1) * rows.rows_per_block < asked.rows <= rows.blocks * rows.rows_per_block, asked


def test_columns_are_covered(geometry: Geometry) -> None:
    for asked, (_, columns) in zip(QUESTIONS, geometry(QUESTIONS), strict=True):
        vectors = asked.width // asked.vector
        assert 1 <= columns.threads_x * columns.threads_y <= 256, asked
        assert columns.threads_x * columns.blocks_x >= vectors, asked
        assert (columns.blocks_x - 1) * columns.threads_x < vectors, asked
        assert 1 <= columns.blocks_y <= 65535, asked
        at_once = columns.threads_y * columns.rows_each
        assert columns.blocks_y == 65535 or (columns.blocks_y - 1) * at_once < asked.rows <= columns.blocks_y * at_once, asked


def test_columns_of_few_rows_take_a_row_a_thread_and_many_take_short_blocks(geometry: Geometry) -> None:
    few, many = (columns for _, columns in geometry([Asked(128, 3072, 8), Asked(10_922, 3072, 8)]))
    assert few == Columns(threads_x=192, threads_y=1, rows_each=1, blocks_x=2, blocks_y=128)
    assert many == Columns(threads_x=192, threads_y=1, rows_each=2, blocks_x=2, blocks_y=5461)


def test_few_rows_take_many_threads_and_many_rows_take_warps(geometry: Geometry) -> None:
    few, one, many, wide = geometry([Asked(128, 768, 8), Asked(32, 384, 8), Asked(100_000, 768, 8), Asked(100_000, 8192, 8)])
    assert few[0] == Rows(threads=96, per_thread=1, rows_per_block=1, blocks=128)
    assert one[0] == Rows(threads=64, per_thread=1, rows_per_block=1, blocks=32)
    assert many[0] == Rows(threads=32, per_thread=3, rows_per_block=8, blocks=12_500)
    assert wide[0] == Rows(threads=512, per_thread=2, rows_per_block=1, blocks=100_000)


@pytest.mark.parametrize(("wanted", "valid"), [(32, True), (64, True), (96, True), (512, True), (33, False), (1024, False), (-32, False)])
def test_threads_can_be_asked_for(wanted: int, valid: bool, geometry: Geometry) -> None:
    ((rows, _),) = geometry([Asked(128, 768, 8, wanted=wanted)])
    assert (rows.threads == wanted) is valid
    assert (rows.threads == 0) is not valid


def test_too_few_threads_for_the_row_are_refused(geometry: Geometry) -> None:
    (too_few, enough, single) = geometry([Asked(9, 16384, 8, wanted=256), Asked(9, 16384, 8, wanted=512), Asked(9, 16383, 1, wanted=256)])
    assert too_few[0].threads == 0
    assert enough[0].threads == 512
    assert single[0].threads == 0


def test_more_rows_than_a_grid_has_blocks_are_refused(geometry: Geometry) -> None:
    ((rows, columns),) = geometry([Asked(2**40, 16384, 8)])
    assert rows.threads == 0
    assert columns.threads_x > 0  # these threads take several rows


def test_width_limit_is_the_kernels(geometry: Geometry) -> None:
    results = geometry([Asked(9, plugins.MAX_WIDTH, vector) for vector in (8, 4, 1)])
    assert all(rows.threads == MAX_THREADS for rows, _ in results)
