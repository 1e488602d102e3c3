"""Options that several commands of the translator share, said once."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="Folder of a model or of a training run; without it, the English-French model that "
        "comes with regard.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="File to write to, whole or not at all; without it, stdout."),
]
Source = Annotated[Path | None, typer.Option("--source", help="File of source sentences.")]
Target = Annotated[Path | None, typer.Option("--target", help="File of their translations.")]
Tsv = Annotated[
    Path | None, typer.Option("--tsv", help="File of pairs, a tab between source and target.")
]
Beam = Annotated[int, typer.Option("--beam", min=1, help="Hypotheses kept alive; 1 is greedy.")]
LengthPenalty = Annotated[
    float,
    typer.Option(
        "--length-penalty", min=0.0, help="0 favors short translations, 1 the best average word."
    ),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Keep no compiled programs for the next time.")
]
