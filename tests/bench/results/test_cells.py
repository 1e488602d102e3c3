"""What is made of a survey's numbers: ratios, the worst by name, a picture."""

import pytest

from regard.bench.cases.survey import survey
from regard.bench.results.cells import cells, means, summary, worst
from regard.bench.results.pictures import save_pictures
from regard.bench.results.record import make_record
from regard.bench.run.measure import AGAIN, NOT_REACHED, Row, Settings
from regard.bench.run.timing import Timing


@pytest.fixture
def record():
    """Four cells: twice as fast, half as fast, half as fast within the noise, without a peer."""
    of_two_families = [c for c in survey("cpu") if c.group.startswith(("self-", "encoder-"))]
    cases = sorted(of_two_families, key=lambda case: case.group, reverse=True)[:4]
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
    assert cell.case["name"] == record["cases"][1]["name"]
    text = summary(record)
    assert "3 cells" in text
    assert "1 that no peer computed" in text
    assert cell.words in text


def test_a_cell_that_a_peer_did_not_reach_is_left_out(record):
    for row in record["rows"]:
        if row["case"] == record["cases"][0]["name"] and row["who"] == "torch":
            row["absent"] = NOT_REACHED
    assert [cell.case for cell in cells(record)] == record["cases"][1:3]
    assert "1 not reached by all" in summary(record)


def test_the_picture_has_a_name_of_its_own(record, tmp_path):
    pytest.importorskip("matplotlib")
    [path] = save_pictures(record, tmp_path)
    assert path.name.endswith("-survey.png")
    assert path.stat().st_size > 10_000
