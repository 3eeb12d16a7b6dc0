"""The algorithms as their classes describe themselves: `fedllm algorithms [NAME]` and docs/reference/algorithms.md."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedllm.algorithms import Algorithm, algorithm_class, algorithm_names
from fedllm.cli.algorithm_entries import COLUMNS, Entry, HyperParameter, Scale, entry, hyper_parameters
from fedllm.reporting.text_tables import markdown_table

# For the terminal.


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def table(scale: Scale | None = None) -> Table:
    """All algorithms. With `scale` also the bytes of a round, summed over the clients."""
    columns = ["name", "aliases", *COLUMNS, *(["bytes down", "bytes up"] if scale else [])]
    made = Table(*columns, box=box.SIMPLE_HEAD, caption=_caption(scale))
    made.columns[0].no_wrap = made.columns[1].no_wrap = True
    for each in map(entry, algorithm_names()):
        cells = [each.name, "\n".join(each.aliases) or "-", *each.footprint.cells()]
        if scale:
            sent = each.footprint.traffic(scale)
            cells += [_bytes(sent.bytes_down), _bytes(sent.bytes_up)]
        made.add_row(*map(Text, cells))
    return made


def _caption(scale: Scale | None) -> str:
    sizes = f" d = {scale.dim:,}, B = {scale.num_blocks:,}, S = {scale.sampled}, T = {scale.tracked}." if scale else ""
    text = (
        "d: one number per coordinate. B: one per block. client holds: vectors in a step, as GC Table 6 counts. "
        "With default settings; all of them: fedllm algorithms NAME."
    )
    return text + sizes


def describe(name: str, scale: Scale | None = None) -> RenderableType:
    """One algorithm: equations, notes, settings, memory and traffic. Raises UserError for an unknown name."""
    each = entry(name)
    parts: list[RenderableType] = [Text(each.summary, style="bold")]
    if each.paper:
        parts.append(Text(each.paper, style="italic"))
    if each.aliases:
        parts.append(Text(f"also called {', '.join(each.aliases)}"))
    parts.append(Padding(Text(each.equations), (1, 4)))
    if each.notes:
        parts.append(Padding(Text(_flowing(each.notes)), (0, 0, 1, 0)))
    cls = algorithm_class(name)
    settings = Table("key", "symbol", "default", "meaning", title="Settings", box=box.SIMPLE_HEAD)
    for setting in (*each.own, *hyper_parameters(cls, own=False)):
        settings.add_row(*map(Text, (setting.key, setting.symbol, setting.default, _meaning(setting))))
    traffic = Table("", *COLUMNS, title="Memory and traffic", box=box.SIMPLE_HEAD)
    for label, footprint in {"default": each.footprint, **each.variants}.items():
        traffic.add_row(*map(Text, (label, *footprint.cells())))
    parts += [settings, traffic]
    if each.derivable:
        parts.append(Text(_traffic_note(each)))
    if scale:
        sent = each.footprint.traffic(scale)
        sums = f"{_bytes(sent.bytes_down)} down and {_bytes(sent.bytes_up)} up"
        parts.append(Text(f"a round sends {sums}, summed over the clients"))
    return Group(*parts)


def _flowing(text: str) -> str:
    """Paragraphs without the line breaks of a docstring."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _meaning(setting: HyperParameter) -> str:
    return f"{setting.meaning} ({setting.type})"


def _traffic_note(each: Entry) -> str:
    return f"A client that has the last x can work out {', '.join(each.derivable)} from the new one: d less down."


# For docs/reference/algorithms.md.

_INTRO = """\
<!-- Generated from fedllm/algorithms: change the classes, then run `make docs`. -->

# Algorithms

Use one by its name or an alias, in a recipe (`algorithm: {name: fadamgc, lr: 1.0e-4}`) or in Python
(`load_algorithm("fadamgc", lr=1e-4)`). A paper's spelling is the same name: `FAdamGC-B` is `fadamgc_b`, `Local Adam` is
`localadam`. For your own, see [your own algorithm](../guides/your_own_algorithm.md).

## Notation

There are N clients. S of them are sampled in a round, and T of those are tracked (`federation.tracked_per_round`, by
default S). K is the number of local steps, k = 1..K, and t = 0, 1, ... the round. x is the global model: all trainable
parameters as one vector of d numbers. x_i is client i's copy, d_i = x_i - x its update after the local steps, D the
mean of d_i over the sampled clients. g is the stochastic gradient at x_i, eta the local learning rate of the step,
eta_g the server's learning rate, lambda the weight decay, (b1, b2) are `betas`. Products, squares, roots and maxima
are elementwise, and 0/0 is a step of 0. `K eta` is the sum of the learning rates in use, so the formulas stay exact
under every schedule; in a server formula it is the mean of the clients' sums.

## Choices

*choice* marks where a paper says nothing or contradicts itself, or where we depart from what it prints, with the
reason. Each algorithm's section has its own. These concern all of them:

- *choice*: the papers' clients all take K steps. A client here may take fewer: its formulas have its own number of
  steps and its own sum of rates, so that a tracking vector stays the mean of what it tracks.
- *choice*: eta_g multiplies D, the mean update, in every algorithm, so that eta_g = 1 is plain averaging. A rate that a
  paper multiplies with a mean gradient instead is eta_g K eta.
- *choice*: D gives every client the same weight, as the formulas of these papers do, except in FedAvg (`weights`).
- Weight decay is decoupled, and 0 where the paper has none. `clip_norm` and `warmup_rounds` are additions, off by
  default.
- *choice*: the default of eta is 0.1 where the local steps are SGD's, and 1e-3 where they are Adam's, because a paper's
  rates are tuned to its tasks.
- *choice*: under LoRA, x holds the matrices A and B and the task's head. Clients average A and B each for itself, not
  their product. The head is trained and averaged like the rest, because it is part of the model that is evaluated.
- *choice*: dropout of attention probabilities is off in training, also where the model's config asks for it. Its masks
  would depend on how clients are stacked and padded. All other dropout is on, at the rates of `model.dropout` and
  `lora.dropout`.
- *choice*: which coordinates share one number of v in LoRA's matrices, biases and fused layers:
  [blocks](../guides/blocks.md#what-is-a-block).
"""

_TRAFFIC = """\
d is a vector with one number per coordinate, B (marked "(B)") one with one number per block (see `blocks`). "down" is
what each of the S sampled clients receives, with x. "up" is what it sends, with d_i; T/S is the fraction of sampled
clients that are tracked. Vectors that only the server needs are not sent. FAdamGC, FA-NT and SCAFFOLD send 3 + T/S
model-sized vectors per sampled client: the tracked vector goes down to all S clients, because all of them need it to
correct their gradients, and up from the T tracked ones. The FAdamGC paper counts the same (Table 7 over Table 2: 3.5 at
T = S/2). If a client that has the last x can compute a vector from the new x, the algorithm's section says so, and down
is one d less for that client.

"client holds" is the count of the FAdamGC paper's Table 6: vectors of d numbers that a client holds while it trains,
without the frozen weights. They are x_i, the gradient, each local moment, and each vector that the client receives or
stores besides, counted once for each name: y and y_i are one, their difference. This gives the table's six numbers:
FedAdam and FedAMS 2, FedAvg-M 3, SCAFFOLD-M and LocalAdam 4, FAdamGC 5. The table leaves out the running maximum vhat
and the running sum of the gradients; so does this count. What our clients really hold is `client_memory` in
`result.json` and "client MB" in a report.
"""


def markdown() -> str:
    """The text of docs/reference/algorithms.md."""
    entries = [entry(name) for name in algorithm_names()]
    rows = [[f"[{e.name}](#{e.name})", ", ".join(e.aliases) or "-", *e.footprint.cells()] for e in entries]
    overview = _table(["name", "aliases", *COLUMNS], rows)
    common = _settings_table(hyper_parameters(Algorithm, own=True))
    sections = [
        _INTRO,
        "## Memory and traffic\n",
        overview,
        _TRAFFIC,
        "## Settings of every algorithm\n",
        common,
        *map(_section, entries),
    ]
    return "\n".join(sections).rstrip() + "\n"


def _section(each: Entry) -> str:
    lines = [f"## {each.name}\n", f"{each.summary}\n", f"Source: {each.paper}.\n"]
    if each.aliases:
        lines.append(f"Aliases: {', '.join(f'`{alias}`' for alias in each.aliases)}.\n")
    lines.append(f"```text\n{each.equations}\n```\n")
    if each.notes:
        lines.append(f"{each.notes}\n")
    if each.own:
        lines.append(_settings_table(iter(each.own)))
    labelled = {"default": each.footprint, **{f"`{setting}`": other for setting, other in each.variants.items()}}
    rows = [[label, *footprint.cells()] for label, footprint in labelled.items()]
    lines.append(_table(["", *COLUMNS], rows))
    if each.derivable:
        lines.append(f"{_traffic_note(each)}\n")
    return "\n".join(lines)


def _settings_table(settings: Iterator[HyperParameter]) -> str:
    rows = [[f"`{s.key}`", s.symbol or "-", s.default, _meaning(s)] for s in settings]
    return _table(["key", "symbol", "default", "meaning"], rows)


def _table(headings: list[str], rows: list[list[str]]) -> str:
    """A table whose cells are Markdown already."""
    return markdown_table(headings, rows, words=headings, escape=lambda cell: cell.replace("|", r"\|"))
