"""A partition of a flat vector into blocks: sizes, names, block means and their expansion. Independent of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """`count` adjacent blocks of one kind, each `width` coordinates wide.

    Each block covers `members` units (heads, rows, ...): 1, or more if neighbouring blocks were merged. The first block
    starts at unit `first`.
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
    """A contiguous part of the flat vector, usually one tensor: the sequence of `runs`, repeated `repeats` times.

    Row-major [out, in] storage has contiguous blocks: repeats = 1. In a transposed weight [in, out] the blocks are
    columns. Each of its rows then has coordinates of every block: repeats = in.
    """

    name: str
    role: str
    runs: tuple[Run, ...]
    repeats: int = 1

    @property
    def span(self) -> int:
        """Number of coordinates of one repeat."""
        return sum(run.count * run.width for run in self.runs)

    @property
    def dim(self) -> int:
        return self.repeats * self.span

    @property
    def num_blocks(self) -> int:
        return sum(run.count for run in self.runs)

    def merged(self, minimum: int) -> Tile:
        """Merges neighbouring blocks until each has at least `minimum` coordinates; a remainder joins the last block.

        Blocks of different runs are not merged (a query head not with value rows). If a whole run has fewer than
        `minimum` coordinates, the tensor becomes one block.
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
    """A partition of the d coordinates of a flat vector into B blocks; each block has one second moment.

    Made by `partition(model)`, or without a model by `elementwise(dim)` and `single(dim)`. FedAdamW paper, Appendix D.

    slices: parameter name -> its slice of the flat vector (empty without a model).
    device: of `sizes`; `means` and `expand` compute on the device of their argument.
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
        """d, the number of coordinates of the flat vector."""
        return sum(tile.dim for tile in self.tiles)

    @cached_property
    def num_blocks(self) -> int:
        """B, the number of blocks."""
        return sum(tile.num_blocks for tile in self.tiles)

    @cached_property
    def sizes(self) -> Tensor:
        """[B] int64: the number of coordinates of each block; they sum to d."""
        counts = [run.count for tile in self.tiles for run in tile.runs]
        widths = [tile.repeats * run.width for tile in self.tiles for run in tile.runs]
        return torch.tensor(widths).repeat_interleave(torch.tensor(counts)).to(self.device)

    @cached_property
    def names(self) -> list[str]:
        """[B] readable names, for example 'encoder.layer.0.attention.self.query.lora_B head 3'."""
        return [name for tile in self.tiles for run in tile.runs for name in run.names(tile.name)]

    def select(self, chosen: Tensor) -> tuple[BlockPartition, Tensor]:
        """The partition of the chosen coordinates [n], in rising order, and the numbers [b] of their blocks.

        `slices` is left out. Raises ValueError where a tensor is chosen in part."""
        if self.num_blocks == self.dim:
            return replace(self.elementwise(len(chosen)), device=self.device), chosen
        marks = torch.zeros(self.dim, dtype=torch.bool)
        marks[chosen.cpu()] = True
        tiles, numbers, start, block = [], [], 0, 0
        for tile in self.tiles:
            count = int(marks[start : start + tile.dim].sum())
            if count not in (0, tile.dim):
                raise ValueError(f"{tile.name}: found {count:,} of {tile.dim:,} coordinates, expected all or none")
            if count:
                tiles.append(tile)
                numbers.append(torch.arange(block, block + tile.num_blocks))
            start, block = start + tile.dim, block + tile.num_blocks
        return BlockPartition(tuple(tiles), device=self.device), torch.cat(numbers).to(chosen.device)

    def means(self, v: Tensor) -> Tensor:
        """[..., d] -> [..., B]: the mean of each block. No gradient. `elementwise` returns v itself, not a copy."""
        flat = self._checked(v, self.dim, "means")
        if self.num_blocks == self.dim:
            return flat
        return torch.cat([_block_means(blocks) for blocks, _ in self._views(flat)], dim=-1)

    def expand(self, b: Tensor) -> Tensor:
        """[..., B] -> [..., d]: each block's number at its coordinates. No gradient. `elementwise` returns b."""
        numbers = self._checked(b, self.num_blocks, "expand")
        if self.num_blocks == self.dim:
            return numbers
        flat = numbers.new_empty(*numbers.shape[:-1], self.dim)
        for blocks, span in self._views(flat):
            blocks.copy_(numbers[..., None, span, None])
        return flat

    def table(self) -> str:
        """A plain-text table, one row per role: tensors, coordinates, blocks and bytes saved.

        Bytes saved: size of one client's whole second moment minus size of its block means, both in float32.
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
        """Yields each run as a view [..., repeats, count, width] of flat [..., d], with the slice of its block numbers.

        Views need no index map, so nothing of size d is stored or gathered. Each reduction is a deterministic sum over
        the last dimension.
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
    """[..., repeats, count, width] -> [..., count]: the mean over `width`, then over `repeats`.

    The rounding error of one sum over both dimensions is ten times larger in float32.
    """
    within = blocks.mean(-1)
    return within.mean(-2) if within.shape[-2] > 1 else within.squeeze(-2)
