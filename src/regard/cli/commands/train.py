"""`regard train`: a translator from parallel text, and a run that can be stopped and continued.

This file makes settings of options. What people see while it runs is train_run.py and
train_progress.py; the work is regard.seq2seq's.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from regard.cli import train_hosts, train_run

if TYPE_CHECKING:
    from regard.seq2seq.train.settings import Settings

GRAMMAR = 30_000  # sentences, where --grammar says no number
FREE = ("epochs", "max_steps", "patience")  # what --resume may change

# The panels of --help.
CORPUS = "What to train on"
HELD = "What to validate on"
WORDS = "The vocabulary"
SIZES = "The model"
STEPS = "The training"
HOSTS = "Several processes"


def _option(name: str, text: str, panel: str, **limits: int) -> Any:
    options: dict[str, Any] = dict(help=text, rich_help_panel=panel, show_default=False, **limits)
    return typer.Option(name, **options)


def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Where the run is kept.")],
    tsv: Annotated[
        str | None, _option("--tsv", "A file of lines: source, tab, target.", CORPUS)
    ] = None,
    source: Annotated[
        str | None, _option("--source", "A file of source sentences, one a line.", CORPUS)
    ] = None,
    target: Annotated[
        str | None, _option("--target", "The file of their translations.", CORPUS)
    ] = None,
    grammar: Annotated[
        bool, _option("--grammar", "The embedded English–French grammar.", CORPUS)
    ] = False,
    sentences: Annotated[
        int | None, _option("--sentences", "How many sentences of the grammar.", CORPUS, min=1)
    ] = None,
    hf: Annotated[
        str | None, _option("--hf", "A Hugging Face dataset, NAME or NAME:CONFIG.", CORPUS)
    ] = None,
    languages: Annotated[
        str | None, _option("--languages", "The two sides' languages: en-fr.", CORPUS)
    ] = None,
    reverse: Annotated[
        bool | None, _option("--reverse", "Translate the other way.", CORPUS)
    ] = None,
    max_words: Annotated[
        int | None, _option("--max-words", "Leave out longer sentences.", CORPUS, min=1)
    ] = None,
    valid_tsv: Annotated[
        str | None, _option("--valid-tsv", "A file like that of --tsv.", HELD)
    ] = None,
    valid_source: Annotated[
        str | None, _option("--valid-source", "A file like that of --source.", HELD)
    ] = None,
    valid_target: Annotated[
        str | None, _option("--valid-target", "A file like that of --target.", HELD)
    ] = None,
    valid_fraction: Annotated[
        float | None, _option("--valid-fraction", "Else, this part of the training pairs.", HELD)
    ] = None,
    valid_sentences: Annotated[
        int | None, _option("--valid-sentences", "So many of them; 0: all.", HELD, min=0)
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="default, demo, multi30k, tatoeba, hansards, or a JSON file."),
    ] = None,
    kind: Annotated[str | None, _option("--kind", "bpe or word.", WORDS)] = None,
    vocab: Annotated[int | None, _option("--vocab", "Entries, at most.", WORDS)] = None,
    joint: Annotated[
        bool | None, _option("--joint/--separate", "One vocabulary, or one a side.", WORDS)
    ] = None,
    case: Annotated[
        str | None, _option("--case", "keep, mark (a token of its own) or lower.", WORDS)
    ] = None,
    attention: Annotated[
        str | None,
        _option("--attention", "additive, dot, bilinear, gaussian or none.", SIZES),
    ] = None,
    cell: Annotated[str | None, _option("--cell", "gru or lstm.", SIZES)] = None,
    layers: Annotated[
        int | None, _option("--layers", "Of the encoder, and of the decoder.", SIZES)
    ] = None,
    embedding: Annotated[
        int | None, _option("--embedding", "Width of the embeddings.", SIZES)
    ] = None,
    encoder: Annotated[
        int | None, _option("--encoder", "Width of each of its two directions.", SIZES)
    ] = None,
    decoder: Annotated[
        int | None, _option("--decoder", "Width of the decoder's state.", SIZES)
    ] = None,
    tie: Annotated[
        str | None, _option("--tie", "Shared embeddings: none, target or all.", SIZES)
    ] = None,
    dropout: Annotated[
        float | None, _option("--dropout", "On embeddings, annotations and output.", SIZES)
    ] = None,
    dtype: Annotated[str | None, _option("--dtype", "auto, float32 or bfloat16.", SIZES)] = None,
    tokens: Annotated[
        int | None, _option("--tokens", "Target tokens in a batch.", STEPS, min=1)
    ] = None,
    epochs: Annotated[int | None, _option("--epochs", "At most.", STEPS)] = None,
    max_steps: Annotated[int | None, _option("--max-steps", "At most.", STEPS)] = None,
    learning_rate: Annotated[
        float | None, _option("--learning-rate", "The schedule's peak.", STEPS)
    ] = None,
    warmup: Annotated[
        int | None, _option("--warmup", "Steps until the peak.", STEPS, min=0)
    ] = None,
    schedule: Annotated[
        str | None,
        _option("--schedule", "constant, inverse_sqrt, cosine or plateau.", STEPS),
    ] = None,
    label_smoothing: Annotated[float | None, _option("--label-smoothing", "0 to 1.", STEPS)] = None,
    stop_on: Annotated[
        str | None, _option("--stop-on", "What counts: loss or bleu.", STEPS)
    ] = None,
    patience: Annotated[
        int | None, _option("--patience", "Validations without a better one; 0: any.", STEPS)
    ] = None,
    validate_every: Annotated[
        int | None, _option("--validate-every", "Steps; else, each epoch.", STEPS)
    ] = None,
    seed: Annotated[int | None, _option("--seed", "Of the parameters and dropout.", STEPS)] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in RUN_FOLDER, with its settings."),
    ] = False,
    coordinator: Annotated[
        str | None, _option("--coordinator", "HOST:PORT, where process 0 listens.", HOSTS)
    ] = None,
    processes: Annotated[
        int | None, _option("--processes", "How many there are.", HOSTS, min=1)
    ] = None,
    process_id: Annotated[
        int | None, _option("--process-id", "Which one this is, from 0.", HOSTS, min=0)
    ] = None,
    distributed: Annotated[
        bool, _option("--distributed", "JAX finds them: Kubernetes, TPU, MPI.", HOSTS)
    ] = False,
    model_axis: Annotated[
        int, _option("--model-axis", "So many devices share the parameters.", HOSTS, min=1)
    ] = 1,
) -> None:
    """Train a translator; stop it at any time, and go on with --resume.

    Under Slurm, Open MPI or torchrun, the processes that were started train it together.

    Example: regard train runs/fr --tsv fra.txt --recipe tatoeba
    """
    name, _, config = (hf or "").partition(":")
    rates = dict.fromkeys(("embedding_dropout", "annotation_dropout", "output_dropout"), dropout)
    asked: dict[str, dict[str, Any]] = {
        "data": dict(
            tsv=_whole(tsv), source=_whole(source), target=_whole(target),
            hf=name or None, hf_config=config or None,
            grammar=(sentences or GRAMMAR) if grammar else sentences,
            languages=languages and tuple(languages.split("-")), reverse=reverse,
            max_words=max_words, valid_tsv=_whole(valid_tsv), valid_source=_whole(valid_source),
            valid_target=_whole(valid_target), valid_fraction=valid_fraction,
            valid_sentences=valid_sentences,
        ),
        "tokenizer": dict(kind=kind, size=vocab, joint=joint, case=case),
        "batches": dict(tokens=tokens),
        "model": dict(
            attention=attention, cell=cell, encoder_layers=layers, decoder_layers=layers,
            embedding=embedding, encoder=encoder, decoder=decoder, tie=tie, dtype=dtype, **rates,
        ),
        "recipe": dict(
            epochs=epochs, max_steps=max_steps, learning_rate=learning_rate, warmup_steps=warmup,
            schedule=schedule, label_smoothing=label_smoothing, stop_on=stop_on,
            patience=patience, validate_every=validate_every, seed=seed,
        ),
    }  # fmt: skip
    asked = {
        part: {key: value for key, value in fields.items() if value is not None}
        for part, fields in asked.items()
    }
    from regard.seq2seq.train.settings import Settings

    launch = train_hosts.launch_of(coordinator, processes, process_id, distributed)
    with train_hosts.taking_part(launch, folder) as hosts:
        console = Console(stderr=True, highlight=False, quiet=not hosts.leads)
        if launch is not None:
            console.print(f"{hosts.processes} processes, found in {launch.found_in}", markup=False)

        def chosen() -> str:
            pick = _continued if resume else _new
            return pick(folder, recipe, asked).to_json()

        settings = Settings.from_json(hosts.first(chosen))
        result, _ = train_run.run_training(
            settings, folder, console, resume=resume, hosts=hosts, model_axis=model_axis
        )
        if hosts.leads:
            train_run.conclude(folder, result)


def _new(folder: Path, recipe: str | None, asked: dict[str, dict[str, Any]]) -> "Settings":
    """The settings of a run that begins here."""
    from regard.seq2seq.train.settings import FILE, Settings

    for name in (FILE, "config.json"):
        if (folder / name).exists():
            raise FileExistsError(
                f"there is a run in {folder} already. Fix: --resume goes on with it; another "
                "folder starts another."
            )
    settings = Settings.named(recipe or "default")
    data = asked["data"]
    if data.keys() & {"tsv", "source", "hf"} and "grammar" not in data:
        data = {"grammar": None, **data}  # the recipe's own corpus gives way
    return _changed(settings, {**asked, "data": data})


def _continued(folder: Path, recipe: str | None, asked: dict[str, dict[str, Any]]) -> "Settings":
    """The settings that a run was begun with."""
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
            "--resume goes on with the settings of the run, and takes none but "
            f"{', '.join(FREE)}. Got {names}. Fix: leave them out, or start another folder."
        )
    return _changed(Settings.load(folder / FILE), asked)


def _changed(settings: "Settings", asked: dict[str, dict[str, Any]]) -> "Settings":
    """The settings with the options applied, checked as if they had been read from a file."""
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
    changed = dataclasses.replace(settings, **parts).with_model(**asked["model"])
    return type(settings).from_json(changed.to_json(), "the options")


def _whole(path: str | None) -> str | None:
    """A path that holds from any folder: a run may be continued from another one."""
    return None if path is None else str(Path(path).absolute())
