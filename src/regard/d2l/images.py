"""The book's small pictures of clothes, from local files, or drawn here in the same shape."""

import functools
import gzip
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from regard.d2l.plots import pyplot
from regard.d2l.training import ArrayLoader, DataModule

__all__ = ["FashionMNIST", "show_images"]

SYNTHETIC = {"train": 4096, "t10k": 512}  # pictures drawn where there are no files

# Rectangles of a 28 × 28 picture that make a silhouette: top, bottom, left, right, brightness.
SILHOUETTES: dict[str, tuple[tuple[int, int, int, int, int], ...]] = {
    "t-shirt": ((4, 24, 9, 19, 200), (4, 10, 4, 24, 200)),
    "trouser": ((3, 8, 9, 19, 220), (8, 26, 9, 13, 220), (8, 26, 15, 19, 220)),
    "pullover": ((4, 24, 8, 20, 170), (4, 22, 3, 7, 170), (4, 22, 21, 25, 170)),
    "dress": ((3, 12, 11, 17, 190), (12, 19, 9, 19, 190), (19, 26, 7, 21, 190)),
    "coat": ((3, 26, 7, 13, 140), (3, 26, 15, 21, 140), (4, 21, 3, 6, 140), (4, 21, 22, 25, 140)),
    "sandal": ((19, 22, 3, 25, 150), (12, 14, 8, 20, 150), (14, 19, 8, 10, 150)),
    "shirt": ((4, 25, 9, 19, 110), (4, 12, 4, 24, 110), (4, 8, 12, 16, 240)),
    "sneaker": ((15, 20, 3, 25, 180), (12, 15, 3, 14, 180), (20, 22, 3, 25, 250)),
    "bag": ((12, 25, 4, 24, 200), (6, 12, 9, 11, 200), (6, 12, 17, 19, 200), (5, 7, 9, 19, 200)),
    "ankle boot": ((4, 22, 14, 23, 160), (15, 22, 4, 23, 160), (22, 24, 4, 23, 230)),
}
LABELS = tuple(SILHOUETTES)


class FashionMNIST(DataModule):
    """Pictures of ten kinds of clothes, 28 × 28, and their labels.

    Read from the four files of Fashion-MNIST (`train-images-idx3-ubyte`, …, plain or .gz), looked
    for in root, root/FashionMNIST/raw and root/fashion-mnist. Where they are not there, 4,096
    pictures for training and 512 for validation are drawn: silhouettes of ten kinds of clothes,
    shifted, of varying brightness, with noise; and a line on stderr says so.

    Example:
        >>> from regard import d2l
        >>> data = d2l.FashionMNIST(batch_size=64, resize=(32, 32))
        >>> X, y = next(iter(data.train_dataloader()))
        >>> X.shape, float(X.min()) >= 0, float(X.max()) <= 1, data.text_labels([9, 0])
        ((64, 32, 32, 1), True, True, ['ankle boot', 't-shirt'])

    Args:
        batch_size: pictures of a batch.
        resize: height and width of the pictures of a batch; the proportions are kept, and what is
            left over is black.
        root: the folder that may hold the files.

    Attributes:
        train, val: (pictures, uint8 (n, 28, 28); labels, int32 (n,)).

    Raises:
        ValueError: a file is not what its name says.
    """

    def __init__(
        self,
        batch_size: int = 64,
        resize: tuple[int, int] = (28, 28),
        root: str = "../data",
    ) -> None:
        self.save_hyperparameters()
        folders = [Path(root), Path(root, "FashionMNIST", "raw"), Path(root, "fashion-mnist")]
        files = next(filter(None, map(_files_in, folders)), None)
        if files is None:
            print(
                f"FashionMNIST: its four files are not in {root}, so these are "
                f"{sum(SYNTHETIC.values()):,} pictures drawn in its shape.",
                file=sys.stderr,
            )
            self.train, self.val = (
                _drawn(count, seed) for seed, count in enumerate(SYNTHETIC.values())
            )
        else:
            self.train, self.val = ((_read(files[p][0]), _read(files[p][1])) for p in SYNTHETIC)

    def text_labels(self, indices: Iterable[Any]) -> list[str]:
        """The names of the kinds."""
        return [LABELS[int(i)] for i in indices]

    def get_dataloader(self, train: bool) -> ArrayLoader:
        arrays = self.train if train else self.val
        resized = functools.partial(_resized, size=tuple(self.resize))
        return ArrayLoader(arrays, self.batch_size, train, lambda X, y: (resized(X), y))

    def visualize(
        self, batch: Any, nrows: int = 1, ncols: int = 8, labels: Sequence[str] = ()
    ) -> None:
        """Draws the first pictures of a batch, with their labels."""
        X, y = batch
        show_images(X[..., 0], nrows, ncols, titles=labels or self.text_labels(y))


def show_images(
    imgs: Any,
    num_rows: int,
    num_cols: int,
    titles: Sequence[str] | None = None,
    scale: float = 1.5,
) -> Any:
    """Draws pictures in rows and columns, and returns the axes.

    Example:
        >>> from regard import d2l
        >>> len(d2l.show_images(d2l.rand(4, 28, 28), 2, 2, titles="abcd"))
        4
    """
    size = (num_cols * scale, num_rows * scale)
    _, axes = pyplot().subplots(num_rows, num_cols, figsize=size, squeeze=False)
    axes = axes.flatten()
    for i, (ax, img) in enumerate(zip(axes, imgs, strict=False)):
        ax.imshow(np.asarray(img))
        ax.set_axis_off()
        if titles is not None:
            ax.set_title(titles[i])
    return axes


@functools.partial(jax.jit, static_argnames="size")
def _resized(X: Array, size: tuple[int, int]) -> Array:
    """uint8 (n, height, width) as float32 (n, *size, 1) from 0 to 1."""
    X = X.astype(jnp.float32)[..., None] / 255
    scale = min(size[0] / X.shape[1], size[1] / X.shape[2])
    height, width = (round(side * scale) for side in X.shape[1:3])
    if (height, width) != X.shape[1:3]:
        X = jax.image.resize(X, (len(X), height, width, 1), "bilinear")
    over = [side - inner for side, inner in zip(size, (height, width), strict=True)]
    return jnp.pad(X, [(0, 0), *((n // 2, n - n // 2) for n in over), (0, 0)])


def _drawn(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures and labels like the files', the same in every run."""
    random = np.random.default_rng(seed)
    labels = (np.arange(count) % len(LABELS)).astype(np.int32)
    pictures = np.zeros((count, 28, 28), np.float32)
    for picture, label in zip(pictures, labels, strict=True):
        for top, bottom, left, right, brightness in SILHOUETTES[LABELS[label]]:
            picture[top:bottom, left:right] = brightness
        picture *= random.uniform(0.7, 1.0)
        picture[:] = np.roll(picture, random.integers(-2, 3, 2), (0, 1))
    pictures += random.normal(0, 12, pictures.shape)
    order = random.permutation(count)
    return pictures.clip(0, 255).astype(np.uint8)[order], labels[order]


def _files_in(folder: Path) -> dict[str, tuple[Path, Path]] | None:
    """The pictures and labels of both parts, plain or gzip, if all four are there."""
    found = {}
    for part in SYNTHETIC:
        names = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
        paths = [
            next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
            for name in names
        ]
        if None in paths:
            return None
        found[part] = paths[0], paths[1]
    return found  # type: ignore[return-value]


def _read(path: Path) -> np.ndarray:
    """An IDX file of bytes: two zeros, type 8, the rank, each length as 4 bytes, the data."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is damaged: {error}. Fix: fetch it again.") from None
    rank = 3 if "idx3" in path.name else 1
    shape = np.frombuffer(raw[4 : 4 + 4 * rank], ">u4")
    if raw[:4] != bytes((0, 0, 8, rank)) or len(raw) != 4 + 4 * rank + shape.prod():
        raise ValueError(
            f"{path} is not an IDX file of bytes of rank {rank}: it has {len(raw):,} bytes and "
            f"begins with {raw[:4].hex(' ')}. Fix: fetch it again."
        )
    array = np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)
    return array if rank == 3 else array.astype(np.int32)
