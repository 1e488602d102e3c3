"""`regard tour`: attention on the terminal, in four parts and under a minute.

Each part computes something small with the public API and draws it; in order, they are a short
tutorial. The drawing of weights is show/shades.py.
"""

import math
import time
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import regard
from regard.show import shades

TOKENS = 16_384
WIDTH = 80

# Mean temperature of each month in °C, rounded: about those of Paris.
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
DEGREES = (5, 6, 9, 12, 16, 19, 21, 21, 17, 13, 9, 6)

SENTENCES = ("we look at the sky", "birds can fly", "hello", "")


def command(
    tokens: Annotated[
        int,
        typer.Option(
            min=1,
            max=1 << 20,
            help="Length of the long sequence in the last part: queries, and keys.",
        ),
    ] = TOKENS,
) -> None:
    """Show attention on the terminal: weight regimes, scores, masks, a long sequence."""
    console = Console(width=min(WIDTH, Console().width), highlight=False)
    console.print()
    console.rule(f"[bold]regard {regard.__version__}[/] · attention you can look at")
    weight_regimes(console)
    four_scores(console)
    masked_batch(console)
    long_sequence(console, tokens)
    console.print("\n[dim]Next:[/] README.md, [bold]help(regard.attend)[/], [bold]make test[/]")


def weight_regimes(console: Console) -> None:
    """One query over a database with names, under each weight regime."""
    heading(
        console,
        "1  One query, six weight regimes",
        """A database: its keys are the months, placed on the circle of the year, and its values
        their temperatures. The query is a day: how warm is the 20th of April? One Gaussian score
        says how near each month is; six regimes turn them into weights (· is exactly 0).""",
    )
    query = on_the_year([3 + 20 / 30])  # [T, Hq] = [1, 2]: 20 days into the fourth month
    key = on_the_year([month + 0.5 for month in range(12)])  # [S, Hk] = [12, 2]: mid-months
    value = jnp.array(DEGREES, jnp.float32)[:, None]  # [S, V] = [12, 1]

    def epanechnikov(score):
        return jnp.maximum(0, 1 + score)

    regimes = {
        "Softmax": regard.Softmax(),
        "Sparsemax": regard.Sparsemax(),
        "Kernel": regard.Kernel(epanechnikov),
        "Cone": regard.Cone(epanechnikov),
        "Hard": regard.Hard(),
        "Uniform": regard.Uniform(),
    }
    table = plain_table(show_footer=True, footer_style="")
    table.add_column("", footer="\nsum\nanswer")
    table.add_column("°C", justify="right", style="dim")
    columns = []
    for name, normalize in regimes.items():
        out, weights = regard.attend(
            query, key, value, score=regard.Gaussian(0.6), normalize=normalize, return_weights=True
        )
        columns.append(np.asarray(weights)[0])  # [S]
        footer = Text(f"\n{float(weights.sum()):.2f}\n").append(
            f"{float(out[0, 0]):.1f} °C", "bold"
        )
        table.add_column(name, footer=footer, no_wrap=True)
    for row, (month, degrees) in enumerate(zip(MONTHS, DEGREES, strict=True)):
        cells = [shades.bar(w[row], 5).append(f" {shades.number(w[row])}", "dim") for w in columns]
        table.add_row(month, str(degrees), *cells)
    indented(console, table, below=1)
    indented(
        console,
        "Softmax, Sparsemax and Kernel average; Cone only sums, so its weights need not add up to "
        "1; Hard looks up the nearest month; Uniform is the mean of the year.",
    )


def on_the_year(months: list[float]) -> jax.Array:
    """Points on the circle of the year, 0 being its first day and 12 its last."""
    angle = jnp.array(months, jnp.float32) * (2 * math.pi / 12)
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def four_scores(console: Console) -> None:
    """The same batch of two examples under each score, the weights as heatmaps."""
    heading(
        console,
        "2  The same batch, four scores",
        """Eight points on a ring, and eight on a coil that winds outward; each point attends to all
        points of its own example. A row is a query, a column a key; brighter is more weight.""",
    )
    angle = jnp.arange(8, dtype=jnp.float32) * (2 * math.pi / 8)
    ring = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)  # [T, 2]
    coil = ring * jnp.linspace(0.4, 1.6, 8, dtype=jnp.float32)[:, None]
    points = 1.5 * jnp.stack([ring, coil])  # [B, T, 2]

    query_rng, key_rng, vector_rng = jax.random.split(jax.random.key(7), 3)
    random_network = regard.Additive(
        jax.random.normal(query_rng, (2, 16), jnp.float32),
        jax.random.normal(key_rng, (2, 16), jnp.float32),
        jax.random.normal(vector_rng, (16,), jnp.float32),
    )
    quarter_turn = jnp.array([[0, 1], [-1, 0]], jnp.float32)
    scores = {
        "Dot": (regard.Dot(), "same direction,\nlong keys first"),
        "Gaussian": (regard.Gaussian(0.7), "near keys,\nlong or short"),
        "Bilinear": (regard.Bilinear(2 * quarter_turn), "after a matrix:\na quarter turn"),
        "Additive": (random_network, "a small network\n(here random)"),
    }
    table = plain_table(gap=2)
    table.add_column("")
    panels = []
    for name, (score, _) in scores.items():
        table.add_column(name, no_wrap=True)
        panels.append(np.asarray(regard.weights(points, points, score=score)))  # [B, T, S]
    for example, label in enumerate(("ring", "coil")):
        drawn = [shades.heatmap(panel[example], in_color=in_color(console)) for panel in panels]
        table.add_row(label, *drawn)
        table.add_row()
    table.add_row("", *[Text(caption, "dim") for _, caption in scores.values()])
    indented(console, table)


def masked_batch(console: Console) -> None:
    """A batch of sentences of several lengths, one of them empty, with NaN in the padding."""
    heading(
        console,
        "3  A masked batch",
        """Four sentences, padded to five words; valid_lens says how many are real. The padding is
        filled with NaN on purpose, and the last sentence has no words at all.""",
    )
    words = [sentence.split() for sentence in SENTENCES]
    batch, longest = len(words), max(map(len, words))
    valid_lens = jnp.array([len(sentence) for sentence in words])  # [B]
    padding = (jnp.arange(longest)[None, :] >= valid_lens[:, None])[..., None]  # [B, S, 1]

    query_rng, key_rng, value_rng = jax.random.split(jax.random.key(1), 3)
    query = jax.random.normal(query_rng, (batch, 1, 8), jnp.float32)
    key = jax.random.normal(key_rng, (batch, longest, 8), jnp.float32)
    value = jax.random.normal(value_rng, (batch, longest, 2), jnp.float32)
    key, value = jnp.where(padding, jnp.nan, key), jnp.where(padding, jnp.nan, value)

    def look(key, value):
        return regard.attend(query, key, value, valid_lens=valid_lens, return_weights=True)

    (out, weights), pull_back = jax.vjp(look, key, value)
    gradients = pull_back((jnp.ones_like(out), jnp.zeros_like(weights)))

    table = plain_table()
    table.add_column("length", justify="center")
    for _ in range(longest):
        table.add_column("", no_wrap=True)
    table.add_column("sum", justify="right")
    table.add_column("output", justify="right")
    for example, sentence in enumerate(words):
        cells = []
        for position, weight in enumerate(np.asarray(weights)[example, 0]):
            word = sentence[position] if position < len(sentence) else "NaN"
            lit = shades.style(weight) if in_color(console) else ""
            cells.append(Text(f"{word:<6}{shades.number(weight):>3}", lit if weight else "dim"))
        total = f"{float(weights[example].sum()):.1f}"
        answer = ", ".join(f"{number:5.2f}" for number in np.asarray(out)[example, 0])
        table.add_row(str(len(sentence)), *cells, total, answer)
    indented(console, table, below=1)

    finite = all(bool(jnp.isfinite(array).all()) for array in (out, weights, *gradients))
    leaked = max(float(jnp.where(padding, jnp.abs(array), 0).max()) for array in gradients)
    indented(
        console,
        f"Output, weights and gradients are finite: [bold]{'yes' if finite else 'NO'}[/]. The "
        f"largest gradient at the padding: [bold]{leaked:g}[/]. An empty sentence gives zeros.",
    )


def long_sequence(console: Console, tokens: int = TOKENS) -> None:
    """Additive attention over a long sequence: its time, and its memory beside the textbook's."""
    hidden = 64
    how = (
        "tanh(x + y) = 1 - 2 / (1 + e²ˣ e²ʸ) needs exponentials of x and y only, not of pairs"
        if jax.default_backend() == "cpu"
        else "tanh(x + y) is a function of x, one of y and a short sum of products, and so the "
        "score is a dot product"
    )
    heading(
        console,
        f"4  Additive attention over {tokens:,} tokens",
        f"""As textbooks write it, wᵀ tanh(W q + U k) makes {tokens:,} × {tokens:,} × {hidden}
        numbers before it sums them. Here scores are computed by blocks, and without a tanh:
        {how}.""",
    )
    query_rng, key_rng, value_rng, *score_rngs = jax.random.split(jax.random.key(0), 6)
    query = jax.random.normal(query_rng, (1, tokens, hidden), jnp.float32)
    key = jax.random.normal(key_rng, (1, tokens, hidden), jnp.float32)
    value = jax.random.normal(value_rng, (1, tokens, hidden), jnp.float32)
    query_kernel, key_kernel, vector = (
        jax.random.normal(rng, shape, jnp.float32) / math.sqrt(hidden)
        for rng, shape in zip(score_rngs, [(hidden, hidden)] * 2 + [(hidden,)], strict=True)
    )

    @jax.jit
    def attend(query, key, value, score):
        return regard.attend(query, key, value, score=score)

    score = regard.Additive(query_kernel, key_kernel, vector)
    with spinner(console) as progress:
        task = progress.add_task("compiling the attention of this sequence")
        start = time.perf_counter()
        compiled = attend.lower(query, key, value, score).compile()
        compiled_in = time.perf_counter() - start

        progress.update(task, description=f"each of {tokens:,} tokens attends to {tokens:,}")
        start = time.perf_counter()
        out = jax.block_until_ready(compiled(query, key, value, score))
        seconds = time.perf_counter() - start

        progress.update(task, description="comparing some queries with the definition")
        few = jnp.arange(0, tokens, -(-tokens // 16))
        expected = regard.attend(
            query[:, few], key, value, score=score, implementation="reference"
        )  # [1, few, V]
        error = float(jnp.abs(out[:, few] - expected).max() / jnp.abs(expected).max())

    textbook = tokens * tokens * hidden * 4
    table = plain_table(gap=2, show_header=False)
    table.add_column("")
    table.add_column("", justify="right", style="bold")
    table.add_column("", style="dim")
    table.add_row("the textbook's tensor", size(textbook), "in float32, for one example")
    memory = compiled.memory_analysis()
    if memory is not None:  # not every backend reports it
        ours = memory.temp_size_in_bytes
        table.add_row("regard's working memory", size(ours), f"{textbook / ours:,.0f} times less")
    speed = tokens * tokens / seconds / 1e6
    table.add_row("time", f"{seconds:.1f} s", f"{speed:,.0f} million scores a second")
    table.add_row("to compile, once", f"{compiled_in:.1f} s", "")
    table.add_row(
        "largest relative error",
        f"{error:.0e}",
        f"on {few.size} queries, against tanh itself",
    )
    indented(console, table)


def heading(console: Console, title: str, text: str) -> None:
    """The title of a part, and what it shows."""
    console.print(f"\n[bold cyan]{title}[/]")
    indented(console, " ".join(text.split()), below=1)


def indented(console: Console, what: RenderableType, below: int = 0) -> None:
    console.print(Padding(what, (0, 0, below, 3), expand=False))


def plain_table(gap: int = 1, **options) -> Table:
    return Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, **options)


def in_color(console: Console) -> bool:
    return console.color_system is not None


def spinner(console: Console) -> Progress:
    """A line with the current step and its duration; it disappears at the end."""
    return Progress(
        TextColumn("  "),
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def size(count: float) -> str:
    """A number of bytes in the largest fitting unit: 64.0 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} GiB"
