"""The plots of an experiment: which files are written, and that each is an image."""

from pathlib import Path

import pytest

import sim
from sim.measures.rows import Row
from tests.sim.tiny import tiny

PNG = b"\x89PNG\r\n\x1a\n"


def test_only_measured_quantities_have_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    churned = {"seconds": 60, "churn.profile": "kad", "churn.speedup": 600}
    result = sim.run(tiny(tmp_path, nodes=8, **churned), seed=3)
    drawn = result.write(tmp_path / "out")
    assert result.summary["membership"]["known_to_all_crashes"] > 0
    assert drawn == ["population.png", "views.png", "detection.png", "dht.png", "traffic.png"]
    for name in drawn:
        assert (tmp_path / "out" / name).read_bytes().startswith(PNG)


def test_a_plot_of_an_earlier_run_is_removed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from sim.report.plots import PICTURES, draw_all

    result = sim.run(tiny(tmp_path, seconds=10), seed=3)
    (tmp_path / "training.png").write_bytes(PNG)
    draw_all(tmp_path, result)
    assert not (tmp_path / "training.png").exists()
    assert PICTURES["training.png"](result) is None


def test_a_training_run_is_plotted_with_its_plans(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from dataclasses import replace

    from sim.report.plots import training

    result = sim.run(tiny(tmp_path, seconds=10), seed=3)
    rows = [Row(1.0, "plan_height", "ab", 0)]
    rows += [
        row
        for t in range(1, 9)
        for row in (Row(t, "step_committed", "ab", t), Row(t, "step_loss", "ab", 3 - t / 4))
    ]
    page = training(replace(result, metrics=tuple(rows)))
    assert page is not None
    loss, steps = page.panels
    assert list(loss.get_lines()[0].get_ydata()) == [3 - t / 4 for t in range(1, 9)]
    assert max(steps.get_lines()[0].get_ydata()) == 9
    assert [text.get_text() for text in loss.texts][-1] == "plan 0"
