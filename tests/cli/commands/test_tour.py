"""The tour: every stop runs, fits 80 columns, and what it shows is what it claims."""

import io
import re

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import regard
from regard.cli.app import app
from regard.cli.commands import tour
from regard.show import shades

pytestmark = pytest.mark.sampled(3)


def shown(stop, *args, color_system=None) -> str:
    """What a stop of the tour prints on a terminal of 80 columns."""
    out = io.StringIO()
    terminal = color_system is not None
    console = Console(
        file=out, width=80, highlight=False, color_system=color_system, force_terminal=terminal
    )
    stop(console, *args)
    return out.getvalue()


@pytest.mark.parametrize("color_system", [None, "standard", "truecolor"])
@pytest.mark.parametrize(
    ("stop", "args"),
    [
        (tour.weight_regimes, ()),
        (tour.four_scores, ()),
        (tour.masked_batch, ()),
        (tour.long_sequence, (300,)),
    ],
)
def test_every_stop_fits_the_terminal(stop, args, color_system):
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(stop, *args, color_system=color_system))
    assert max(map(len, text.replace("\r", "\n").splitlines())) <= 80
    assert "…" not in text, "something was cut off"


def test_the_regimes_answer_as_they_should():
    lines = shown(tour.weight_regimes).splitlines()
    (answers,) = [re.findall(r"([\d.]+) °C", line) for line in lines if " answer " in line]
    (sums,) = [line.split()[1:] for line in lines if line.split()[:1] == ["sum"]]
    softmax, sparsemax, kernel, cone, hard, uniform = map(float, answers)
    for average in (softmax, sparsemax, kernel):
        assert 9 < average < 19  # between March and June
    assert cone > max(tour.DEGREES)  # a sum, not an average
    assert hard == tour.DEGREES[tour.MONTHS.index("Apr")]
    assert uniform == pytest.approx(np.mean(tour.DEGREES), abs=0.05)
    assert [float(total) == 1 for total in sums] == [True, True, True, False, True, True]


def test_the_empty_sentence_gives_zeros_and_nan_reaches_nothing():
    text = shown(tour.masked_batch)
    assert re.search(r"^ +0 +(NaN +· +){5}0\.0 +0\.00, +0\.00$", text, re.MULTILINE)
    assert "are finite: yes" in text
    assert re.search(r"gradient at the\s+padding: 0\.", text)


def test_the_long_stop_reports_a_small_error():
    text = shown(tour.long_sequence, 300)
    (error,) = re.findall(r"largest relative error +(\S+)", text)
    assert float(error) < 1e-2


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_the_long_stop_may_be_short(tokens):
    assert "largest relative error" in shown(tour.long_sequence, tokens)


def test_version_and_help():
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).output == f"regard {regard.__version__}\n"
    for words in ([], ["--help"], ["tour", "--help"]):
        assert "Usage" in runner.invoke(app, words).output
    assert runner.invoke(app, ["tour", "--tokens", "0"]).exit_code == 2


@pytest.mark.parametrize(
    ("weight", "expected"),
    [(0.0, "·"), (0.001, ".00"), (0.31, ".31"), (0.994, ".99"), (0.996, "1.0"), (2.5, "2.5")],
)
def test_numbers_take_three_characters(weight, expected):
    assert shades.number(weight) == expected


@pytest.mark.parametrize(
    ("weight", "expected"),
    [(0, "    "), (1, "████"), (0.5, "██  "), (0.25 + 1 / 32, "█▏  "), (7, "████"), (-1, "    ")],
)
def test_bars_measure_eighths(weight, expected):
    assert shades.bar(weight, 4).plain == expected


def test_heatmaps_tell_zero_from_small():
    drawn = shades.heatmap([[0.0, 0.001], [0.2, 0.4]], in_color=False).plain
    assert drawn == "·   \n▒▒██"
    assert shades.heatmap([[0.0]], in_color=False).plain == "· "
    ends = [shades.color(weight) for weight in (-1, 0, 1, 2)]
    assert ends == [(250, 200, 170), (68, 1, 84), (253, 231, 37), (253, 231, 37)]
