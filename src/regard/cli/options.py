"""Options that several commands of the translator share."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder of a model or of a training run.",
        show_default="the English-French model that comes with regard",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="File to write the result to; it appears only when it is complete.",
        show_default="stdout",
    ),
]
Source = Annotated[
    Path | None,
    typer.Option(help="File with one source sentence per line."),
]
Target = Annotated[
    Path | None,
    typer.Option(help="File with the translation of each line of --source."),
]
Tsv = Annotated[
    Path | None,
    typer.Option(help="File of sentence pairs, with a tab between source and target; - for stdin."),
]
Beam = Annotated[
    int,
    typer.Option(
        min=1, max=256, help="How many partial translations the search keeps; 1 is greedy search."
    ),
]
LengthPenalty = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=10.0,
        help="How strongly the search corrects its preference for short translations: 0 not at "
        "all, 1 compares about the average per word.",
    ),
]
NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache",
        help="Do not keep compiled programs on disk; the next command compiles them again.",
    ),
]
