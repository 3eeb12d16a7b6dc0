"""The flat vector cut in blocks: sizes, names, block means and their expansion. Knows nothing of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """`count` blocks of one kind side by side, each `width` coordinates wide.

    A block covers `members` units (heads, rows, ...) from unit `first` on: one, unless neighbours were merged.
    """

    label: str
    count: int
    width: int
    first: int = 0
    members: int = 1

    def names(self, owner: str) -> Iterator[str]:
        """The names of the blocks in order, for example 'layer.0.query.lora_B head 3'."""
        prefix = f"{owner} " if owner else ""
        for start in range(self.first, self.first + self.count * self.members, self.members):
            if not self.label:
                yield owner
            elif self.members == 1:
                yield f"{prefix}{self.label} {start}"
            else:
                yield f"{prefix}{self.label}s {start}-{start + self.members - 1}"


@dataclass(frozen=True)
class Tile:
    """A stretch of the flat vector, usually one tensor: its `runs`, from left to right, `repeats` times over.

    Row-major [out, in] storage has contiguous blocks: repeats = 1. In a transposed weight [in, out] the blocks are
    columns, so every block takes part in each of the repeats = in passes.
    """

    name: str
    role: str
    runs: tuple[Run, ...]
    repeats: int = 1

    @property
    def span(self) -> int:
        """Coordinates of one pass over the runs."""
        return sum(run.count * run.width for run in self.runs)

    @property
    def dim(self) -> int:
        return self.repeats * self.span

    @property
    def num_blocks(self) -> int:
        return sum(run.count for run in self.runs)

    def merged(self, minimum: int) -> Tile:
        """Neighbouring blocks joined until each has at least `minimum` coordinates; what is left over joins the last.

        Runs are kept apart (a query head is not joined with value rows) unless one is too small as a whole: then the
        tensor is one block.
        """
        if any(self.repeats * run.count * run.width < minimum for run in self.runs):
            return whole(self.name, self.role, self.dim)
        return replace(self, runs=tuple(part for run in self.runs for part in self._merged_run(run, minimum)))

    def _merged_run(self, run: Run, minimum: int) -> Iterator[Run]:
        members = -(-minimum // (self.repeats * run.width))
        groups, left = divmod(run.count, members)
        alike = groups if left == 0 else groups - 1
        if alike:
            yield Run(run.label, alike, members * run.width, run.first, members)
        if left:
            yield Run(run.label, 1, (members + left) * run.width, run.first + alike * members, members + left)


def whole(name: str, role: str, dim: int) -> Tile:
    """One block of `dim` coordinates."""
    return Tile(name, role, (Run("", 1, dim),))


@dataclass(frozen=True, repr=False)
class BlockPartition:
    """A partition of the d coordinates of a flat vector in B blocks, each sharing one second-moment number.

    Made by `partition(model)`, or without a model by `elementwise(dim)` and `single(dim)`. FedAdamW paper, Appendix D.

    slices: parameter name -> its slice of the flat vector (empty without a model).
    device: where `sizes` lives; `means` and `expand` work on whatever device their argument is on.
    """

    tiles: tuple[Tile, ...]
    slices: Mapping[str, slice] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def elementwise(cls, dim: int) -> BlockPartition:
        """One block per coordinate: `means` and `expand` are the identity."""
        return cls((Tile("", "elementwise", (Run("coordinate", dim, 1),)),))

    @classmethod
    def single(cls, dim: int) -> BlockPartition:
        """One block for everything."""
        return cls((whole("all coordinates", "all", dim),))

    def __repr__(self) -> str:
        return f"BlockPartition({self.dim:,} coordinates in {self.num_blocks:,} blocks)"

    def to(self, device: torch.device | str) -> BlockPartition:
        """The same partition with `sizes` on `device`."""
        return replace(self, device=torch.device(device))

    @cached_property
    def dim(self) -> int:
        """d, the coordinates of the flat vector."""
        return sum(tile.dim for tile in self.tiles)

    @cached_property
    def num_blocks(self) -> int:
        """B."""
        return sum(tile.num_blocks for tile in self.tiles)

    @cached_property
    def sizes(self) -> Tensor:
        """[B] int64: the coordinates of each block; they sum to d."""
        counts = [run.count for tile in self.tiles for run in tile.runs]
        widths = [tile.repeats * run.width for tile in self.tiles for run in tile.runs]
        return torch.tensor(widths).repeat_interleave(torch.tensor(counts)).to(self.device)

    @cached_property
    def names(self) -> list[str]:
        """[B] readable names, for example 'encoder.layer.0.attention.self.query.lora_B head 3'."""
        return [name for tile in self.tiles for run in tile.runs for name in run.names(tile.name)]

    def means(self, v: Tensor) -> Tensor:
        """[..., d] -> [..., B]: the plain mean of each block. No gradient; elementwise returns v itself, not a copy."""
        flat = self._checked(v, self.dim, "means")
        if self.num_blocks == self.dim:
            return flat
        return torch.cat([_block_means(blocks) for blocks, _ in self._views(flat)], dim=-1)

    def expand(self, b: Tensor) -> Tensor:
        """[..., B] -> [..., d]: each block's number at its coordinates. No gradient; elementwise returns b itself."""
        numbers = self._checked(b, self.num_blocks, "expand")
        if self.num_blocks == self.dim:
            return numbers
        flat = numbers.new_empty(*numbers.shape[:-1], self.dim)
        for blocks, span in self._views(flat):
            blocks.copy_(numbers[..., None, span, None])
        return flat

    def table(self) -> str:
        """Plain text, by role: tensors, coordinates, blocks and bytes saved.

        Saved is what one client's block means take less than its whole second moment, both in float32.
        """
        tensors, coordinates, blocks = Counter[str](), Counter[str](), Counter[str]()
        for tile in self.tiles:
            tensors[tile.role] += 1
            coordinates[tile.role] += tile.dim
            blocks[tile.role] += tile.num_blocks
        rows = [(role, tensors[role], coordinates[role], blocks[role]) for role in tensors]
        rows.append(("total", len(self.tiles), self.dim, self.num_blocks))
        cells = [("role", "tensors", "coordinates", "blocks", "bytes saved")]
        cells += [(role, f"{t:,}", f"{c:,}", f"{b:,}", f"{4 * (c - b):,}") for role, t, c, b in rows]
        wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join([r[0].ljust(wide[0]), *map(str.rjust, r[1:], wide[1:])]) for r in cells]
        rule = "-" * len(lines[0])
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])

    def _views(self, flat: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """The runs as views [..., repeats, count, width] of flat [..., d], each with its span of block numbers.

        Views, not an index map: nothing of size d is stored or gathered, and each reduction is an ordinary,
        deterministic sum over the trailing dimension.
        """
        batch = flat.shape[:-1]
        start = block = 0
        for tile in self.tiles:
            passes = flat[..., start : start + tile.dim].view(*batch, tile.repeats, tile.span)
            start += tile.dim
            left = 0
            for run in tile.runs:
                right = left + run.count * run.width
                blocks = passes[..., left:right].view(*batch, tile.repeats, run.count, run.width)
                yield blocks, slice(block, block + run.count)
                left, block = right, block + run.count

    def _checked(self, vector: Tensor, length: int, method: str) -> Tensor:
        if vector.ndim == 0 or vector.shape[-1] != length:
            raise ValueError(
                f"BlockPartition.{method}: the last dimension must be {length}, found shape {tuple(vector.shape)} "
                f"({self.dim} coordinates in {self.num_blocks} blocks)"
            )
        return vector.detach()


def _block_means(blocks: Tensor) -> Tensor:
    """[..., repeats, count, width] -> [..., count]: the mean within each pass, then over the passes.

    One sum over both dimensions would round ten times worse in float32.
    """
    within = blocks.mean(-1)
    return within.mean(-2) if within.shape[-2] > 1 else within.squeeze(-2)
