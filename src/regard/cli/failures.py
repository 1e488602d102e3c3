"""Errors about files and models as one line on stderr and exit code 1."""

import contextlib
from collections.abc import Iterator

import typer

# The packages of the extra `translate`, by the name they are imported by.
_PACKAGES = ("flax", "optax", "orbax", "sacrebleu", "safetensors", "tokenizers")


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Prints errors that the user can fix as one line; a bug of regard keeps its traceback.

    A broken pipe (`| head`) is handled in cli/__init__.py.

    Example:
        >>> import typer
        >>> try:
        ...     with one_line_errors():
        ...         open("/no/such/file")
        ... except typer.Exit as exit:
        ...     exit.exit_code
        1
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in _PACKAGES:
            raise
        message = f'{package} is not installed. Fix: pip install "regard[translate]"'
    except OSError as error:
        places = [str(name) for name in (error.filename, error.filename2) if name]
        message = f"{error.strerror}: {' → '.join(places)}" if error.strerror else str(error)
    except (ValueError, ImportError) as error:
        message = str(error)
    else:
        return
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(1)
