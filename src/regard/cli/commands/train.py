"""`regard train`: a translator from parallel text, and a run that can be stopped and continued.

This file turns options into settings. What is shown while a run proceeds is train_run.py and
train_progress.py; the work is regard.seq2seq's.
"""

import dataclasses
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from regard.cli import train_hosts, train_run
from regard.cli.sentence_pairs import is_pipe

if TYPE_CHECKING:
    from regard.seq2seq.train.settings import Settings

GRAMMAR = 30_000  # sentences, where --grammar comes without --sentences
FREE = ("epochs", "max_steps", "patience")  # what --resume may change

# For each panel of --help: option, type, smallest value, the fields of the settings, explanation.
# Without a field, `command` uses the value itself.
_OPTIONS: dict[str, list[tuple[str, Any, int | None, str, str]]] = {
    "What to train on": [
        ("--tsv", Path, None, "data.tsv", "A file with lines of source, tab, target."),
        ("--source", Path, None, "data.source", "A file of source sentences, one per line."),
        ("--target", Path, None, "data.target", "The file with their translations."),
        ("--grammar", bool, None, "", "Sentences of the embedded English–French grammar."),
        ("--sentences", int, 1, "", f"Number of sentences of the grammar (default {GRAMMAR:,})."),
        ("--hf", str, None, "", "A Hugging Face dataset, NAME or NAME:CONFIG."),
        ("--languages", str, None, "", "The two languages of that dataset, such as en-fr."),
        ("--reverse", bool, None, "data.reverse", "Translate from the target to the source."),
        ("--max-words", int, 1, "data.max_words", "Leave out sentences with more words."),
    ],
    "What to validate on": [
        ("--valid-tsv", Path, None, "data.valid_tsv", "A validation file in the form of --tsv."),
        ("--valid-source", Path, None, "data.valid_source", "Source sentences to validate on."),
        ("--valid-target", Path, None, "data.valid_target", "The file with their translations."),
        ("--valid-fraction", float, None, "data.valid_fraction",
         "Without validation files: the part of the training pairs to set aside."),
        ("--valid-sentences", int, 0, "data.valid_sentences",
         "Validate on at most this many pairs (0 = all)."),
    ],
    "The vocabulary": [
        ("--kind", str, None, "tokenizer.kind", "Pieces of words or whole words: bpe or word."),
        ("--vocab", int, None, "tokenizer.size", "Largest number of entries of a vocabulary."),
        ("--joint/--separate", bool, None, "tokenizer.joint",
         "One vocabulary for both languages, or one for each."),
        ("--case", str, None, "tokenizer.case",
         "Upper case: keep, mark (by a token of its own) or lower."),
    ],
    "The model": [
        ("--architecture", str, None, "model.architecture",
         "Recurrent networks or a Transformer: recurrent or transformer."),
        ("--attention", str, None, "model.attention",
         "Score of the attention: additive, dot, bilinear or gaussian; in a Transformer also one "
         "for each head, with commas; in a recurrent decoder also none."),
        ("--heads", int, None, "model.heads", "Heads of each attention of a Transformer."),
        ("--feed-forward", int, None, "model.feed_forward",
         "Inner width of the feed-forward networks of a Transformer."),
        ("--positions", str, None, "model.positions",
         "Positions in a Transformer: sinusoidal, learned, rotary, alibi or relative."),
        ("--cell", str, None, "model.cell", "Recurrent cell: gru or lstm."),
        ("--layers", int, None, "model.encoder_layers model.decoder_layers",
         "Number of layers of the encoder and of the decoder."),
        ("--embedding", int, None, "model.embedding",
         "Width of the embeddings, and of all layers of a Transformer."),
        ("--encoder", int, None, "model.encoder",
         "Width of each direction of a recurrent encoder."),
        ("--decoder", int, None, "model.decoder", "Width of a recurrent decoder."),
        ("--tie", str, None, "model.tie", "Embeddings that share weights: none, target or all."),
        ("--dropout", float, None, "model.dropout",
         "Dropout rate of embeddings and encoder states, and of a recurrent decoder's output "
         "layer or every layer of a Transformer."),
        ("--dtype", str, None, "model.dtype",
         "Type of the matrix products: auto, float32 or bfloat16."),
    ],
    "The training": [
        ("--tokens", int, 1, "batches.tokens", "Target tokens per batch, padding included."),
        ("--epochs", int, None, "recipe.epochs", "Stop after this many passes over the pairs."),
        ("--max-steps", int, None, "recipe.max_steps", "Stop after this many steps."),
        ("--learning-rate", float, None, "recipe.learning_rate", "Highest learning rate."),
        ("--warmup", int, 0, "recipe.warmup_steps",
         "Steps in which the learning rate rises to its highest value."),
        ("--schedule", str, None, "recipe.schedule",
         "Learning rate after warm-up: constant, inverse_sqrt, cosine or plateau."),
        ("--label-smoothing", float, None, "recipe.label_smoothing",
         "Probability spread evenly over the vocabulary, from 0 to 1."),
        ("--stop-on", str, None, "recipe.stop_on",
         "The validation figure that decides: loss or bleu."),
        ("--patience", int, None, "recipe.patience",
         "Stop after this many validations without improvement (0 = never)."),
        ("--validate-every", int, None, "recipe.validate_every",
         "Steps between validations (default: one validation per epoch)."),
        ("--seed", int, None, "recipe.seed", "Seed of the initial parameters and of dropout."),
    ],
    "Several processes": [
        ("--coordinator", str, None, "", "HOST:PORT at which process 0 listens."),
        ("--processes", int, 1, "", "Number of processes."),
        ("--process-id", int, 0, "", "Number of this process, from 0."),
        ("--distributed", bool, None, "", "Let JAX find the processes: Kubernetes, TPU, MPI."),
        ("--model-axis", int, 1, "", "Number of devices that share each matrix of parameters."),
    ],
}  # fmt: skip


def _name(flag: str) -> str:
    return flag.partition("/")[0].removeprefix("--").replace("-", "_")


def _signature() -> inspect.Signature:
    """The parameters of `command`, as Typer reads them."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    folder = typer.Argument(metavar="RUN_FOLDER", help="The folder in which the run is kept.")
    recipe = "Named settings: default, demo, multi30k, tatoeba, hansards, or a JSON file."
    resume = "Continue the run in RUN_FOLDER, with its settings."
    found = [
        ("folder", Path, inspect.Parameter.empty, folder),
        ("recipe", str | None, None, typer.Option("--recipe", help=recipe)),
        ("resume", bool, False, typer.Option("--resume", help=resume)),
    ]
    for panel, options in _OPTIONS.items():
        for flag, kind, least, _, text in options:
            option = typer.Option(
                flag, min=least, help=text, rich_help_panel=panel, show_default=False
            )
            found.append((_name(flag), kind | None, None, option))
    return inspect.Signature(
        [
            inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, info])
            for name, kind, default, info in found
        ]
    )


def command(folder: Path, recipe: str | None, resume: bool, **options: Any) -> None:
    """Train a translator; stop it at any time, and continue with --resume.

    An option that is not given has the value of the recipe; without --recipe, sizes fit the corpus.

    Under Slurm, Open MPI or torchrun, all processes that were started train one model together.

    Example: regard train runs/fr --tsv fra.txt --recipe tatoeba
    """
    with train_run.plain_errors(folder):
        _train(folder, recipe, resume, options)


command.__signature__ = _signature()  # type: ignore[attr-defined]


def _train(folder: Path, recipe: str | None, resume: bool, options: dict[str, Any]) -> None:
    from regard.seq2seq.train.settings import Settings

    asked = _asked(options)
    coordinator, processes, process = (
        options[name] for name in ("coordinator", "processes", "process_id")
    )
    distributed = bool(options["distributed"])
    launch = train_hosts.launch_of(coordinator, processes, process, distributed)
    with train_hosts.taking_part(launch, folder) as hosts:
        console = Console(stderr=True, highlight=False, quiet=not hosts.leads)
        if launch is not None:
            console.print(f"{hosts.processes} processes, found in {launch.found_in}", markup=False)

        def chosen() -> str:
            pick = _continued if resume else _new
            return pick(folder, recipe, asked).to_json()

        settings = Settings.from_json(hosts.first(chosen))
        axis = options["model_axis"] or 1
        result, _ = train_run.run_training(
            settings, folder, console, resume=resume, hosts=hosts, model_axis=axis
        )
        if hosts.leads:
            train_run.conclude(folder, result)


def _asked(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields of the settings that options set, by part."""
    asked: dict[str, dict[str, Any]] = {
        part: {} for part in ("data", "tokenizer", "batches", "model", "recipe")
    }

    def sets(fields: str, value: Any) -> None:
        for field in fields.split():
            part, key = field.split(".")
            asked[part][key] = value

    for flag, kind, _, fields, _ in (row for rows in _OPTIONS.values() for row in rows):
        value = options[_name(flag)]
        if value is not None:
            sets(fields, _lasting(value) if kind is Path else value)
    name, _, config = (options["hf"] or "").partition(":")
    sentences = options["sentences"] or (GRAMMAR if options["grammar"] else None)
    languages = options["languages"] and tuple(options["languages"].split("-"))
    for key, value in dict(
        hf=name, hf_config=config, grammar=sentences, languages=languages
    ).items():
        if value:
            sets(f"data.{key}", value)
    return asked


def _lasting(path: Path) -> str:
    """The path in a form that holds whenever and wherever the run is continued.

    Raises:
        ValueError: it is a pipe.
    """
    if is_pipe(path):
        raise ValueError(
            "a run reads its files again when it is continued, which a pipe does not allow. Got "
            f"{path}. Fix: a file; one compressed by gzip is read as it is."
        )
    return str(path.absolute())


def _new(folder: Path, recipe: str | None, asked: dict[str, dict[str, Any]]) -> "Settings":
    """The settings of a new run."""
    from regard.seq2seq.train.settings import FILE, Settings

    for name in (FILE, "config.json"):
        if (folder / name).exists():
            raise FileExistsError(
                f"{folder} already has a run. Fix: --resume continues it; use another folder to "
                "start a new one."
            )
    settings = Settings.named(recipe or "default", asked["model"].get("architecture"))
    data = asked["data"]
    if data.keys() & {"tsv", "source", "hf"} and "grammar" not in data:
        data = {"grammar": None, **data}  # instead of the recipe's own corpus
    return _changed(settings, {**asked, "data": data})


def _continued(folder: Path, recipe: str | None, asked: dict[str, dict[str, Any]]) -> "Settings":
    """The settings that the folder's run was started with."""
    from regard.seq2seq.train.settings import FILE, Settings

    if not (folder / FILE).exists():
        raise FileNotFoundError(
            f"--resume needs a folder with a run, which has a {FILE}. {folder} has none. "
            "Fix: the folder's name, or leave out --resume to start a run."
        )
    given = [key for fields in asked.values() for key in fields if key not in FREE]
    if recipe or given:
        names = ", ".join((["recipe"] if recipe else []) + given)
        raise ValueError(
            "--resume continues with the settings of the run, and accepts only "
            f"{', '.join(FREE)}. Got {names}. Fix: leave them out, or start another folder."
        )
    return _changed(Settings.load(folder / FILE), asked)


def _changed(settings: "Settings", asked: dict[str, dict[str, Any]]) -> "Settings":
    """The settings with the options applied, checked as if they had been read from a file."""
    from regard.seq2seq.model.architectures import architecture_named
    from regard.seq2seq.train.corpus_size import WIDTHS

    parts: dict[str, Any] = {
        part: dataclasses.replace(getattr(settings, part), **fields)
        for part, fields in asked.items()
        if part != "model"
    }
    given = {f"{part}.{key}" for part, fields in asked.items() for key in fields}
    if given & set(WIDTHS):  # the widths go together
        given |= set(WIDTHS)
    if "data.valid_fraction" in given:
        parts["data"] = dataclasses.replace(parts["data"], valid_at_least=0)
    parts["scaled"] = tuple(name for name in settings.scaled if name not in given)
    model = dict(asked["model"])
    if "dropout" in model:
        rate, kind = model.pop("dropout"), settings.model.get("architecture", "recurrent")
        names = architecture_named(kind).config.DROPOUT
        model = {f"{name}_dropout": rate for name in names} | model
    changed = dataclasses.replace(settings, **parts).with_model(**model)
    return type(settings).from_json(changed.to_json(), "the options")
