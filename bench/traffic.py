"""Who sends how much to whom in alltoallv_perf: a pattern made from a size, or a matrix read from a file.

Pure functions of ranks and bytes, and the four NCCL_TESTS_ALLTOALLV_* variables that choose between them. As
in nccl-tests every amount is rounded down to 16 bytes, so that it divides into elements of every type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.options import Options, UsageError

__all__ = ["GENERATED", "Traffic", "traffic_from"]

_PREFIX = "NCCL_TESTS_ALLTOALLV_"


@dataclass(frozen=True)
class Traffic:
    """`matrix[i][j]`: bytes from rank i to rank j; without one, amounts that grow with the distance of ranks.

    `spread` blends those: 1 is in proportion to the distance (nothing to oneself), 0 the same for all.
    """

    matrix: tuple[tuple[int, ...], ...] | None = None
    spread: float = 1.0
    summary: bool = False
    scale: float = 1.0

    def between(self, source: int, target: int, ranks: int, total: int) -> int:
        """Bytes from rank to rank, of the `total` that each rank sends (a matrix has its own)."""
        if self.matrix:
            return self.matrix[source][target]
        if ranks == 1:
            return _whole(total)
        distance = (target - source) % ranks
        even, far = total / ranks, distance * total / (ranks * (ranks - 1) // 2)
        return _whole((1.0 - self.spread) * even + self.spread * far)

    def sent(self, rank: int, ranks: int, total: int) -> list[int]:
        """Bytes that the rank sends to each rank."""
        return [self.between(rank, peer, ranks, total) for peer in range(ranks)]

    def received(self, rank: int, ranks: int, total: int) -> list[int]:
        """Bytes that the rank receives from each rank."""
        return [self.between(peer, rank, ranks, total) for peer in range(ranks)]

    def largest(self, ranks: int, total: int) -> tuple[int, int]:
        """The most bytes that one rank sends, and that one rank receives."""
        return (
            max(sum(self.sent(rank, ranks, total)) for rank in range(ranks)),
            max(sum(self.received(rank, ranks, total)) for rank in range(ranks)),
        )

    def summary_lines(self, ranks: int, total: int, seconds: float) -> list[str]:
        """What NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY prints for a measurement: the bandwidth of each rank."""
        if self.matrix:
            mode = f"mode=matrix nranks={ranks} matrix_dim={len(self.matrix)} scale={self.scale:.3f}"
        else:
            mode = f"mode=generated nranks={ranks} total_bytes={total} spread={self.spread:.3f}"
        lines = [f"# {_PREFIX}PRINT_SUMMARY: {mode} time_usec={1e6 * seconds:.2f}"]
        for rank in range(ranks):
            sent, received = sum(self.sent(rank, ranks, total)), sum(self.received(rank, ranks, total))
            bandwidth = max(sent, received) / 1e9 / seconds
            lines.append(
                f"#   rank={rank} send_bytes={sent} recv_bytes={received} "
                f"alg_bw={bandwidth:.2f} bus_bw={bandwidth * (ranks - 1) / ranks:.2f}"
            )
        return lines


GENERATED = Traffic()


def traffic_from(environment: Mapping[str, str], options: Options, ranks: int) -> Traffic:
    """The pattern that the variables ask for. UsageError for what they cannot mean, or sizes cannot hold."""
    file = environment.get(f"{_PREFIX}MATRIX_FILE")
    summary = bool(_number(environment, "PRINT_SUMMARY", 0.0, math.inf))
    scale = _number(environment, "MATRIX_SCALE", 1.0, math.inf)
    spread = _number(environment, "SPREAD", 1.0, 1.0)
    if not file:
        return Traffic(spread=spread, summary=summary)
    matrix = _read_matrix(file, scale)
    if len(matrix) < ranks:
        raise UsageError(
            f"{_PREFIX}MATRIX_FILE={file} is {len(matrix)} x {len(matrix)}, for {ranks} ranks; "
            f"give at least {ranks} rows and columns, or start fewer ranks"
        )
    if options.min_bytes != options.max_bytes:
        raise UsageError(
            f"{_PREFIX}MATRIX_FILE has the sizes, so there is no sweep from -b {options.min_bytes} to "
            f"-e {options.max_bytes}; give both the same value"
        )
    traffic = Traffic(matrix, summary=summary, scale=scale)
    needed = max(traffic.largest(ranks, 0))
    if options.max_bytes < needed:
        raise UsageError(
            f"-e {options.max_bytes} is too small: a rank sends or receives {needed} bytes by "
            f"{_PREFIX}MATRIX_FILE={file}; give -b {needed} -e {needed} or more"
        )
    return traffic


def _number(environment: Mapping[str, str], name: str, default: float, most: float) -> float:
    text = environment.get(_PREFIX + name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most or math.isinf(value):
        limits = "of at least 0" if most == math.inf else f"from 0 to {most:g}"
        raise UsageError(f"{_PREFIX}{name}={text!r} is not a number {limits}")
    return value


def _read_matrix(file: str, scale: float) -> tuple[tuple[int, ...], ...]:
    """Rows of numbers separated by white space or commas, times `scale`, each rounded down to 16 bytes."""
    name = f"{_PREFIX}MATRIX_FILE={file}"
    try:
        lines = [_words(line) for line in Path(file).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name} cannot be read: {error}") from None
    rows = []
    for row, words in enumerate(filter(None, lines)):
        values = []
        for column, word in enumerate(words):
            try:
                value = float(word) * scale
            except ValueError:
                value = math.nan
            if not 0 <= value < 2**63:
                raise UsageError(
                    f"{name}: row {row}, column {column}: {word!r} is not a number of bytes of at least 0; "
                    "separate the numbers by white space or commas"
                )
            values.append(_whole(value))
        rows.append(tuple(values))
    if not rows or any(len(row) != len(rows) for row in rows):
        shape = " + ".join(str(len(row)) for row in rows) or "no"
        raise UsageError(f"{name}: a square matrix is needed, and it has {len(rows)} rows of {shape} values")
    return tuple(rows)


def _words(line: str) -> list[str]:
    """Between commas there is one value each, so that an empty one is found; a comma may end the line."""
    if not line.strip():
        return []
    parts = [part.split() for part in line.strip().removesuffix(",").split(",")]
    return [word for part in parts for word in (part or [""])]


def _whole(nbytes: float) -> int:
    return int(nbytes) & ~15
