"""What is made of a survey's numbers: ratios, the worst by name, a picture."""

import pytest

from regard.bench.cases.survey import survey
from regard.bench.results.cells import cells, means, summary, worst
from regard.bench.results.pictures import save_pictures
from regard.bench.results.record import make_record
from regard.bench.run.measure import AGAIN, Row, Settings
from regard.bench.run.timing import Timing


@pytest.fixture
def record():
    """Four cells: twice as fast, half as fast, half as fast within the noise, without a peer."""
    cases = survey("cpu")[:3] + survey("cpu")[10:11]
    rows = []
    for case, ours, again, peer in zip(
        cases, (1.0, 2.0, 2.0, 1.0), (1.0, 2.0, 0.9, 1.0), (2.0, 1.0, 1.0, None), strict=True
    ):
        rows += [
            Row(case.name, "regard", case.group, Timing((9.0, ours))),
            Row(case.name, AGAIN, case.group, Timing((again, 9.0))),
            Row(case.name, "torch", case.group, absent="not timed: relative error 1"),
        ]
        if peer is not None:
            rows.append(Row(case.name, "jax.nn", case.group, Timing((peer, 7.0))))
    cpu = {"platform": "cpu", "name": "ACME One", "cores": 2}
    return make_record(cases, rows, Settings(), device=cpu, targets=(), survey=True)


def test_a_cell_is_its_best_peer_over_regard(record):
    found = cells(record)
    assert [cell.best for cell in found] == ["jax.nn"] * 3
    assert [cell.ratio for cell in found] == pytest.approx([2.0, 0.5, 1 / 0.9])
    assert means(found) == {"self-attention": pytest.approx((2 * 0.5 / 0.9) ** (1 / 3))}


def test_the_worst_are_those_that_noise_does_not_explain(record):
    [cell] = worst(cells(record))
    assert cell.case["name"] == survey("cpu")[1].name
    text = summary(record)
    assert "3 cells" in text
    assert "1 that no peer computed" in text
    assert cell.words in text


def test_the_picture_has_a_name_of_its_own(record, tmp_path):
    pytest.importorskip("matplotlib")
    [path] = save_pictures(record, tmp_path)
    assert path.name.endswith("-survey.png")
    assert path.stat().st_size > 10_000
