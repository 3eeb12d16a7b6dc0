"""Figures of made runs. Expected positions are worked out by hand."""

import json
from itertools import combinations, pairwise

import matplotlib as mpl
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from made_runs import column, groups_of, make_run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image

from fedllm.reporting import curves as plots
from fedllm.reporting.client_labels import client_figure, partition_figure, without_clients
from fedllm.reporting.curves import captions, figures, undrawn
from fedllm.reporting.run_curves import plot_run, subtitle
from fedllm.reporting.style import COLOURS, apart, save, svg
from fedllm.results.reader import load_run
from fedllm.results.run_record import ClientData


def test_a_seed_that_has_ended_keeps_its_last_value():
    x, seeds = plots._together([([1, 2, 4], [0.0, 1.0, 3.0]), ([2, 3], [5.0, 7.0])])
    assert x.tolist() == [2, 3, 4]
    assert seeds.tolist() == [[1, 2, 3], [5, 7, 7]]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.floats(0.01, 0.1))
def test_names_are_moved_apart_and_keep_their_order_and_centre(heights, gap):
    heights = sorted(heights)
    moved = apart(heights, gap)
    assert all(later - earlier > 0.9 * gap for earlier, later in pairwise(moved))
    assert sum(moved) == pytest.approx(sum(heights), abs=1e-6)


@pytest.mark.slow
def test_names_of_close_lines_do_not_overlap(tmp_path):
    folders = [make_run(tmp_path / "a", algorithm="fedavg", scores=(0.5, 0.849), target=0.85)]
    for number, name in enumerate(("fadamgc", "localadam", "fedadamw", "scaffold")):
        folders.append(make_run(tmp_path / name, algorithm=name, scores=(0.5, 0.85 + number / 1000)))
    for figure in figures(groups_of(*folders)).values():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        texts = [text for text in figure.axes[0].texts if text.get_text()]
        boxes = [Text.get_window_extent(text, canvas.get_renderer()) for text in texts]  # without their leaders
        assert len(boxes) >= 5
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_a_figure_an_axis_with_the_data_set_on_it(tmp_path):
    folders = [make_run(tmp_path / name, algorithm=name) for name in ("fedavg", "scaffold")]
    folders.append(make_run(tmp_path / "waiting", scores=(None,), finished=False))
    drawn = figures(groups_of(*folders))
    assert list(drawn) == ["score_by_round", "score_by_traffic", "score_by_time", "train_loss"]
    assert [[axes.get_title("left") for axes in figure.axes] for figure in drawn.values()] == [["glue/sst2"]] * 4
    assert [len(lines_of(figure.axes[0])) for figure in drawn.values()] == [2, 2, 2, 2]


def test_where_nothing_was_evaluated_only_the_loss_is_drawn(tmp_path):
    groups = groups_of(make_run(tmp_path / "a", scores=(None,), finished=False))
    assert list(figures(groups)) == ["train_loss"]
    assert column(groups, "best") == ["-"]


@pytest.mark.parametrize("rounds", [1, 12, 300])
@pytest.mark.slow
def test_a_run_leaves_its_picture(tmp_path, rounds):
    folder = make_run(tmp_path / "a", scores=[0.9 - 0.5 / t for t in range(1, rounds + 1)])
    picture = plot_run(folder)
    assert picture == folder / "curves.png"
    with Image.open(picture) as image:
        assert image.width > 1200
        assert image.height > 800


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("partition.alpha=0.5", "Dirichlet(0.5) over classes · 100 clients · 10 per round · seed 0"),
        ("partition={scheme: by_column, column: site}", "one client per site · 10 per round · seed 0"),
        ("partition={file: partitions/x_n7.json}", "clients of x_n7.json · 10 per round · seed 0"),
    ],
)
def test_a_picture_says_how_the_data_was_shared(tmp_path, setting, said):
    folder = make_run(tmp_path / "a")
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    key, value = setting.split("=")
    section, _, name = key.partition(".")
    recipe[section] |= {name: yaml.safe_load(value)} if name else yaml.safe_load(value)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert subtitle(load_run(folder)).splitlines() == [
        said,
        "accuracy 0.8000 after 4 rounds · best 0.9000 in round 3 · target reached in round 3",
    ]


def test_a_picture_without_an_evaluation(tmp_path):
    assert plot_run(make_run(tmp_path / "a", scores=(None, None), finished=False)).is_file()


def lines_of(axes):
    """The curves of a panel by their colours, thin lines left out."""
    return {line.get_color(): line for line in axes.lines if line.get_linewidth() > 1}


def band(axes, number=0):
    """x, lowest and highest of a panel's band."""
    corners = axes.collections[number].get_paths()[0].vertices
    xs = sorted(set(corners[:, 0]))
    return [(x, *(pick(corners[corners[:, 0] == x, 1]) for pick in (min, max))) for x in xs]


def test_the_band_reaches_from_the_lowest_seed_to_the_highest(tmp_path):
    seeds = [(0.1, 0.5, 0.6), (0.3, 0.4, 0.9), (0.2, 0.9, 0.6)]
    groups = groups_of(*(make_run(tmp_path / str(i), scores=scores, seed=i) for i, scores in enumerate(seeds)))
    drawn = figures(groups)
    for name, xs in {"score_by_round": [1, 2, 3], "score_by_traffic": [1.5, 3, 4.5]}.items():  # kB
        (axes,) = drawn[name].axes
        expected = zip(xs, (0.1, 0.4, 0.6), (0.3, 0.9, 0.9), strict=True)
        assert np.array(band(axes)) == pytest.approx(np.array(list(expected)))
        assert list(lines_of(axes)[COLOURS[0]].get_ydata()) == pytest.approx([0.2, 0.6, 0.7])


def test_over_time_a_line_ends_at_the_mean_of_the_final_scores(tmp_path):
    """Rounds of 10 s and of 20 s: 10, 20, 30 and 20, 40, 60 s. The first seed keeps 0.6 from 30 s on."""
    folders = [make_run(tmp_path / str(i), scores=(0.2, 0.4, 0.6), seed=i, simulated=10.0 * (i + 1)) for i in range(2)]
    groups = groups_of(*folders)
    drawn = figures(groups)
    (axes,) = drawn["score_by_time"].axes
    assert axes.get_xlabel() == "simulated run time (s)"
    said = {name: "".join(text.get_text() for text in figure.axes[0].texts) for name, figure in drawn.items()}
    assert [name for name, text in said.items() if "has ended keeps its last value" in text] == ["score_by_time"]
    assert [name for name, text in captions(groups).items() if "keeps its last value" in text] == ["score_by_time"]
    expected = [(20, 0.2, 0.4), (30, 0.3, 0.6), (40, 0.4, 0.6), (60, 0.6, 0.6)]
    assert np.array(band(axes)) == pytest.approx(np.array(expected))
    assert list(lines_of(axes)[COLOURS[0]].get_ydata()) == pytest.approx([0.3, 0.45, 0.5, 0.6])


@pytest.mark.slow
def test_the_order_of_the_names_over_time_is_that_of_the_final_scores(tmp_path):
    """The best group has one quick seed, which ends when its scores are still low in the slow one."""
    best = [make_run(tmp_path / f"a{i}", scores=(0.1, 0.2, 0.9), seed=i, simulated=10.0 ** (i + 1)) for i in range(2)]
    other = make_run(tmp_path / "b", algorithm="fedavg", scores=(0.1, 0.6, 0.7), simulated=50.0)
    for name, figure in figures(groups_of(*best, other)).items():
        if name.startswith("score"):
            heights = {text.get_text(): text.xy[1] for text in figure.axes[0].texts if hasattr(text, "xy")}
            assert heights["fadamgc"] == pytest.approx(0.9)
            assert heights["fedavg"] == pytest.approx(0.7)


def test_captions_say_on_which_samples_the_scores_were_measured(tmp_path):
    whole = groups_of(make_run(tmp_path / "a"))
    cut = groups_of(make_run(tmp_path / "b", "data.max_validation=300"))
    assert captions(whole)["score_by_round"] == "Scores on the whole validation split."
    expected = "Scores on at most 300 samples of the validation split (data.max_validation)."
    assert captions(cut)["score_by_round"] == expected
    assert captions(cut)["score_by_time"].startswith(f"{expected} A round takes")
    assert "validation" not in captions(cut)["train_loss"]


def test_client_drift_and_the_spread_of_v(tmp_path):
    """Norms a hundredfold apart are drawn on a logarithmic axis; SGD has no v; an older run has neither."""
    drift = {"update_cosine": [0.5, 0.4, 0.3, 0.2], "v_spread": [1, 2, None, 4]}
    folders = [
        make_run(tmp_path / "old", algorithm="localadam"),
        *(make_run(tmp_path / f"a{i}", seed=i, update_norm=[1 + i] * 4, **drift) for i in range(2)),
        make_run(tmp_path / "sgd", algorithm="fedavg", update_norm=[0.01] * 4, update_cosine=[0.9] * 4),
    ]
    groups = groups_of(*folders)
    drawn = figures(groups)
    cosine, norm = drawn["client_drift"].axes
    assert (cosine.get_ylabel(), norm.get_ylabel()) == ("cosine to the mean update", "norm of a client's update")
    assert (cosine.get_yscale(), norm.get_yscale()) == ("linear", "log")
    assert list(lines_of(norm)[COLOURS[1]].get_ydata()) == [1.5] * 4
    assert band(norm) == [(x, 1, 2) for x in (1, 2, 3, 4)]
    assert list(lines_of(cosine)) == [COLOURS[1], COLOURS[2]]  # the colours that they have in the other figures
    assert list(lines_of(drawn["score_by_round"].axes[0]))[:3] == list(COLOURS[:3])
    (spread,) = drawn["v_spread"].axes
    assert [list(lines_of(spread)[COLOURS[1]].get_data()[i]) for i in (0, 1)] == [[1, 2, 4], [1, 2, 4]]
    older = "(not in metrics.jsonl, as in runs of older versions of fedllm)"
    assert undrawn(groups) == [
        f"Client drift: drawn without localadam {older}",
        f"Spread of v between clients: drawn without localadam {older}",
        "Spread of v between clients: drawn without fedavg (no second moment v in the clients)",
    ]


def test_what_no_group_has_is_not_drawn_and_said(tmp_path):
    groups = groups_of(make_run(tmp_path / "a", scores=(None,), finished=False, update_norm=[1], update_cosine=[None]))
    drawn = figures(groups)
    assert list(drawn) == ["train_loss", "client_drift"]
    assert [(axes.get_title("left"), axes.get_ylabel()) for axes in drawn["client_drift"].axes] == [
        ("glue/sst2", "norm of a client's update")
    ]
    assert undrawn(groups) == [
        "Score: not drawn (not evaluated yet)",
        "Client drift: not drawn (no value in any round)",
        "Spread of v between clients: not drawn (no second moment v in the clients)",
    ]
    assert client_figure(groups) is None
    (line,) = without_clients(groups)
    assert line.startswith("Clients' labels: not drawn (no partition.json in the run folder")


# Clients


def bars(axes):
    """The bars of a panel by colour: [N, (left, right, bottom, top)]."""
    found = {}
    for patch in axes.patches:
        corners = patch.get_path().vertices.reshape(-1, 6, 2)[:, :5]  # five corners and the end of each bar
        low, high = corners.min(axis=1), corners.max(axis=1)
        colour = mpl.colors.to_hex(patch.get_facecolor()).upper()
        found[colour] = np.stack([low[:, 0], high[:, 0], low[:, 1], high[:, 1]], axis=1)
    return found


def test_few_classes_are_bars_of_their_shares(tmp_path):
    counts = [(3, 1, 0), (0, 2, 2), (0, 0, 7)]
    figure = client_figure(groups_of(make_run(tmp_path / "a", counts=counts, classes="xyz")))
    sizes, classes = figure.axes
    assert sizes.get_title("left") == "glue/sst2 · Dirichlet(0.1) over classes · 100 clients"
    (size_bars,) = bars(sizes).values()
    assert size_bars[:, 2:].tolist() == [[0, 4], [0, 4], [0, 7]]
    expected = [[(0, 0.75), (0, 0), (0, 0)], [(0.75, 1), (0, 0.5), (0, 0)], [(1, 1), (0.5, 1), (0, 1)]]
    assert [found[:, 2:].tolist() for found in bars(classes).values()] == [[list(pair) for pair in e] for e in expected]
    assert list(bars(classes)) == list(COLOURS[:3])
    assert [text.get_text() for text in classes.get_legend().get_texts()] == ["z", "y", "x"]


def test_many_classes_are_bubbles_by_their_shares(tmp_path):
    counts = [[8, 2, *[0] * 18], [0] * 19 + [4]]
    figure = client_figure(groups_of(make_run(tmp_path / "a", counts=counts, classes=[f"c{i}" for i in range(20)])))
    _, classes = figure.axes
    (bubbles,) = classes.collections
    assert bubbles.get_offsets().tolist() == [[0, 0], [0, 1], [1, 19]]
    assert (bubbles.get_sizes() / bubbles.get_sizes()[2]).tolist() == pytest.approx([0.8, 0.2, 1])
    assert [text.get_text() for text in classes.get_yticklabels()] == [f"c{i}" for i in range(20)]


@pytest.mark.parametrize("classes", [2, 7, 8, 20, 24])
def test_a_hundred_clients_are_legible(tmp_path, classes):
    rng = np.random.default_rng(0)
    counts = np.stack([rng.multinomial(rng.integers(1, 5000), rng.dirichlet([0.1] * classes)) for _ in range(100)])
    names = [f"a class named {i}" for i in range(classes)]
    figure = client_figure(groups_of(make_run(tmp_path / "a", counts=counts.tolist(), classes=names)))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for axes in figure.axes:
        ticks = [axes.get_xticklabels(), axes.get_yticklabels(), axes.get_legend().get_texts() if axes.legend_ else []]
        for texts in ticks:
            boxes = [text.get_window_extent(canvas.get_renderer()) for text in texts if text.get_text()]
            assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert figure.axes[1].get_window_extent().width * 72 / figure.dpi / 100 > 3  # points a client
    assert figure.axes[0].get_yscale() == "log"


def test_a_partition_is_drawn_once_and_told_from_others(tmp_path):
    one, two = [(3, 1), (0, 2)], [(3, 1), (1, 2)]
    folders = [make_run(tmp_path / f"a{i}", seed=i, counts=one) for i in range(2)]
    folders.append(make_run(tmp_path / "b", algorithm="fedavg", counts=one))
    folders.append(make_run(tmp_path / "c", "partition.seed=1", counts=two))
    folders.append(make_run(tmp_path / "d", "partition.alpha=10", counts=two[::-1]))
    figure = client_figure(groups_of(*folders))
    title = "glue/sst2 · Dirichlet(0.1) over classes · 100 clients"
    assert [axes.get_title("left") for axes in figure.axes[::2]] == [
        title, f"{title} · partition seed 1", title.replace("0.1", "10")
    ]  # fmt: skip


@pytest.mark.filterwarnings("error")
def test_letters_that_the_font_lacks_warn_nobody(tmp_path):
    folder = make_run(tmp_path / "a", counts=[(3, 1), (0, 2)], classes=("\N{CJK UNIFIED IDEOGRAPH-6F22}", "\N{CAT}"))
    figure = client_figure(groups_of(folder))
    save(figure, tmp_path / "labels.png")
    svg(figure)


def test_a_regression_has_sizes_only(tmp_path):
    folder = make_run(tmp_path / "a", counts=[(3, 1), (0, 2)])
    (folder / "partition.json").write_text('{"sizes": [4, 2], "classes": [], "counts": null}')
    (sizes,) = client_figure(groups_of(folder)).axes
    (found,) = bars(sizes).values()
    assert found[:, 3].tolist() == [4, 2]
    assert sizes.get_xlabel() == "client"


def test_a_partition_before_a_run_is_drawn_like_one_of_a_run(tmp_path):
    counts = [[3, 1], [0, 2]]
    of_run = client_figure(groups_of(make_run(tmp_path / "a", counts=counts, classes=("x", "y"))))
    section = {"scheme": "dirichlet_classes", "alpha": 0.1, "clients": 100}
    before = partition_figure(ClientData([4, 2], ["x", "y"], counts), "glue/sst2", section)
    assert svg(before) == svg(of_run)


def test_few_natural_clients_are_named(tmp_path):
    section = {"scheme": "by_column", "column": "site"}
    figure = partition_figure(ClientData([4, 2], ["x", "y"], [[3, 1], [0, 2]]), "mine", section, ["rome", "oslo"])
    assert [text.get_text() for text in figure.axes[1].get_xticklabels()] == ["rome", "oslo"]
    assert [text.get_text() for text in figure.axes[1].get_legend().get_texts()] == ["y", "x"]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"scheme": "quantity", "alpha": 0.5, "clients": 7}, "sizes by Dirichlet(0.5) · 7 clients"),
        ({"scheme": "dirichlet_clusters", "alpha": 1, "clusters": 4, "clients": 7}, "Dirichlet(1) over 4 clusters · 7"),
        ({"scheme": "by_column", "column": "site", "max_size": 9}, "one client per site, at most 9 samples"),
        ({"scheme": "by_column", "column": "client"}, "mine · natural clients"),
    ],
)
def test_every_scheme_has_its_words(section, words):
    (sizes,) = partition_figure(ClientData([4, 2], [], []), "mine", section).axes
    assert words in sizes.get_title("left")


def test_values_of_a_column_stand_in_for_classes(tmp_path):
    folder = make_run(tmp_path / "a", counts=[(3, 1), (0, 2)], classes=("git", "tar"))
    found = json.loads((folder / "partition.json").read_text())
    (folder / "partition.json").write_text(json.dumps(found | {"column": "tool"}))
    sizes, classes = client_figure(groups_of(folder)).axes
    assert sizes.get_title("left") == "glue/sst2 · Dirichlet(0.1) over tool · 100 clients"
    assert classes.get_legend().get_title().get_text() == "tool"
    many = [[8, 2, *[0] * 23], [0] * 24 + [4]]
    folder = make_run(tmp_path / "b", counts=many, classes=[f"c{i}" for i in range(25)])
    found = json.loads((folder / "partition.json").read_text())
    (folder / "partition.json").write_text(json.dumps(found | {"column": "tool"}))
    assert client_figure(groups_of(folder)).axes[1].get_ylabel() == "tool"


def test_the_gap_of_lora_is_drawn_where_it_was_measured(tmp_path):
    with_gap = make_run(tmp_path / "a", scores=(0.5, 0.6), lora_gap=[0.4, 0.2])
    groups = groups_of(with_gap, make_run(tmp_path / "b", scores=(0.5, 0.6), algorithm="fedavg"))
    drawn = figures(groups)["lora_gap"]
    assert [axes.get_ylabel() for axes in drawn.axes] == ["error of averaging / move"]
    assert any(line.startswith("LoRA: averaging A and B apart: drawn without fedavg") for line in undrawn(groups))
