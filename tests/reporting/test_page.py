"""The page of a report: whole, by itself, in a real browser, and whatever runs and metrics are called."""

import os
import re
import shutil
import subprocess
import warnings
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from made_runs import groups_of, make_run

from fedllm.reporting.groups import group_runs
from fedllm.reporting.inline_svg import VARIABLES
from fedllm.reporting.page import Section, page
from fedllm.reporting.report import report
from fedllm.reporting.summary import summarise
from fedllm.results.reader import read_runs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = """</title></style><script>document.title = "owned"</script><img src=x onerror="document.title='owned'">"""
VOID = ("meta", "img", "link")
MEASURES = {"update_cosine": [0.5, 0.4, 0.3, 0.2], "update_norm": [4, 3, 2, 1], "v_spread": [1, 2, 3, 4]}
COUNTS = [(3, 1), (0, 2), (7, 0)]


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text in each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def count(self) -> Counter[str]:
        return Counter(tag for tag, _ in self.found)


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    """The page of two algorithms, one of two seeds and one unfinished, a run of an older version, and a foreign folder;
    with names that try to become markup."""
    runs = tmp_path_factory.mktemp("runs")
    folders = [make_run(runs / f"a{i}", seed=i, counts=COUNTS, classes=("<b>x", HOSTILE), **MEASURES) for i in (0, 1)]
    folders.append(make_run(runs / "sgd", algorithm="fedavg", finished=False, metric=HOSTILE, target=None))
    folders.append(make_run(runs / HOSTILE.replace("/", "|"), algorithm="localadam", counts=COUNTS))
    folders.append(make_run(runs / "label", algorithm="localadam", seed=1))
    recipe = yaml.safe_load((folders[-1] / "recipe.yaml").read_text())
    recipe["data"]["label"] = recipe["data"]["name"] = HOSTILE
    (folders[-1] / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    folders.append(runs / f"foreign {HOSTILE}".replace("/", "|"))
    folders[-1].mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a figure without room for its names warns
        report(folders, runs / "out", formats=["html"])
    return runs / "out" / "report.html"


@pytest.mark.slow
def test_the_page_has_tables_figures_settings_and_what_was_left_out(full):
    elements = Elements(full.read_text())
    assert not elements.open
    titles = [text.strip() for text in elements.texts["h2"]]
    parts = [f"{task}: {part}" for task in ("glue/sst2", HOSTILE) for part in ("Scores and costs", "Figures")]
    assert titles == [*parts, "Runs", "Settings", "Left out"]
    assert {
        "Score over rounds", "Score over bytes", "Score over simulated time", "Training loss", "Client drift",
        "Spread of v between clients", "Clients' labels",
    } < {*elements.texts["h3"]}  # fmt: skip
    assert elements.count()["svg"] == elements.count()["figure"] == 7 + 4
    cells = elements.texts["td"]
    assert "0.8000 ± 0.0000" in cells
    assert "50.0 ± 0.0" in cells  # client memory
    said = "".join(elements.texts["li"])
    assert "not a run folder: it has no recipe.yaml" in said
    assert "Spread of v between clients: drawn without" in said


def test_settings_are_those_shared_and_those_of_each_group(tmp_path):
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", algorithm="fedavg", finished=False)]
    text = page([Section(summarise(groups := groups_of(*folders)), groups, {})], [], [])
    settings = text[text.index('id="settings"') :]
    shared, first, second = settings.split("<dl>")[1:]
    assert "<b>rank</b> 16</span>" in shared
    assert "<b>name</b> fadamgc</span>" in first
    assert "<b>name</b> fedavg</span>" in second
    assert "rank" not in first + second
    assert "<b>betas</b>" in first
    assert "betas" not in second
    assert "Nothing: every folder was read" in text


@pytest.mark.slow
def test_nothing_is_asked_of_the_world_and_nothing_runs(full):
    text = full.read_text()
    elements = Elements(text)
    assert not {"script", "img", "link", "iframe", "object", "embed", "image"} & {*elements.count()}
    for tag, attributes in elements.found:
        assert not [name for name in attributes if name.startswith("on")], tag
        links = [value for name, value in attributes.items() if name in ("href", "src", "xlink:href")]
        assert all(link and link.startswith("#") for link in links)
    assert not re.search(r"@import|url\((?!#)", text)
    assert "default-src 'none'" in text


def test_every_id_is_there_once_and_every_reference_leads_to_one(full):
    text = full.read_text()
    ids = [attributes["id"] for _, attributes in Elements(text).found if "id" in attributes]
    assert len(ids) == len({*ids})
    assert {*re.findall(r"url\(#([^)]+)\)", text), *re.findall(r'href="#([^"]+)"', text)} <= {*ids}


def test_names_stay_text(full):
    elements = Elements(full.read_text())
    assert "owned" in "".join(elements.texts["td"])
    assert "owned" in "".join(elements.texts["li"])
    assert any("owned" in text for text in elements.texts["span"])
    assert elements.count()["title"] == 1
    assert elements.count()["b"] == len(elements.texts["b"])
    assert "<b>x" not in full.read_text()


def test_figures_take_the_colours_of_the_page(full):
    text = full.read_text()
    inline = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    for name, (light, _) in VARIABLES.items():
        assert f"{light.lower()};" not in inline
        assert f"--{name}:" in text
    assert {*re.findall(r"var\(--(\w+)\)", inline)} >= {"ink", "faint", "grid", "paper", "line0", "line1"}


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: the page was not opened in a browser")
@pytest.mark.slow
def test_a_browser_shows_what_was_written(full, tmp_path):
    """The browser finds the elements that were written and no others, runs nothing, and complains about nothing."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--enable-logging=stderr")
    page = full.as_uri()
    shown = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", page], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    written, dom = Elements(full.read_text()), Elements(shown.stdout)
    assert dom.count() == written.count()
    assert dom.texts["title"] == written.texts["title"]
    assert dom.texts["td"] == written.texts["td"]
    assert "CONSOLE" not in shown.stderr


def test_a_page_of_one_run_without_an_evaluation(tmp_path):
    folder = make_run(tmp_path / "a", scores=(None,), finished=False)
    groups = group_runs(read_runs([folder])[0])
    assert "not evaluated yet" in page([Section(summarise(groups), groups, {})], [], [])
