"""docs/guides/sites/own_program.md does what it says: its files are taken out of it and run, each site in a thread."""

from __future__ import annotations

import copy
import csv
import importlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import assert_close
from conftest import write_rows
from jobs import batches as job_batches
from jobs import job
from peft import LoraConfig, get_peft_model
from repository import REPO
from safetensors.torch import load_file
from tiny_models import save_tiny
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fedllm import run_recipe
from fedllm.client import Broadcast, Client, Upload, model_info
from fedllm.federation.sampling import sample
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.server import Server

PAGE = (REPO / "docs" / "guides" / "sites" / "own_program.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
ROWS = [30, 12, 20]  # of the sites: 4, 2 and 3 steps a round


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT without dropout."""
    folder = tmp_path_factory.mktemp("sites")
    save_tiny(folder / "bert", "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return folder / "bert"


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's files and each site's data, as the current one. Models are built one at a time:
    transformers' from_pretrained is not made for threads."""
    for name, code in FILES.items():
        code = code.replace("path/or/hub-id/of/the/base", str(made))
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    for number, count in enumerate(ROWS):
        write_rows(tmp_path / f"{number}.csv", count, seed=number)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("POST", str(tmp_path / "post"))
    build, lock = importlib.import_module("federation").build, threading.Lock()

    def one_at_a_time() -> Any:
        with lock:
            return build()

    monkeypatch.setattr("federation.build", one_at_a_time)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name, None)


def in_one_process() -> tuple[Tensor, Any]:
    """x after the same rounds, over the same batches, and the model."""
    federation, hospital = importlib.import_module("federation"), importlib.import_module("hospital")
    algorithm, model, info = federation.build()
    server = Server(algorithm, ParameterSpace.of(model).gather(model), info)
    sites = [Client(copy.deepcopy(model), algorithm, info) for _ in ROWS]
    tokenizer = AutoTokenizer.from_pretrained(federation.BASE)
    for t in range(federation.ROUNDS):
        for number, site in enumerate(sites):
            with open(f"{number}.csv", newline="") as file:
                rows = list(csv.DictReader(file))
            assert server.add(site.fit(server.broadcast(), hospital.batches(rows, tokenizer, t)), client=number) is None
        server.aggregate()
    return server.x, model


def assert_adapter(x: Tensor, model: Any, folder: Path) -> None:
    """That an adapter holds x, head included."""
    space = ParameterSpace.of(model)
    found = load_file(folder / "adapter_model.safetensors")
    assert {name for name in found if "classifier" in name}
    assert len(found) == len(space.names)
    for name, value in space.views(x[None]).items():
        plain = name.replace(".modules_to_save.default", "").replace(".default", "")
        torch.testing.assert_close(found[plain], value[0], rtol=0, atol=1e-5)


def test_both_halves_in_one_process(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module("one_process")
    assert module.server.round == module.info.total == 5
    assert module.x.norm() > 0
    assert capsys.readouterr().out == ""


class DiedError(Exception):
    """A process that ends in the middle."""


def failing(put: Callable[[str, bytes], None], names: list[str]) -> Callable[[str, bytes], None]:
    """`put` that dies before it writes each of these names for the first time."""

    def faulty(name: str, data: bytes) -> None:
        if name in names:
            names.remove(name)
            raise DiedError
        put(name, data)

    return faulty


def until_done(main: Callable[..., None], *arguments: Any) -> None:
    """A process that is started again whenever it dies."""
    while True:
        try:
            return main(*arguments)
        except DiedError:
            continue


@pytest.mark.parametrize("dying", [[], ["from-1-2", "to-1-3", "from-0-4"]], ids=["well", "restarted"])
@pytest.mark.slow
def test_the_example(place: Path, monkeypatch: pytest.MonkeyPatch, dying: list[str]) -> None:
    """Three sites and the server, left alone or dying on the way, give what one process gives; plain PEFT loads it."""
    torch.manual_seed(0)
    expected, model = in_one_process()
    hospital, server = importlib.import_module("hospital"), importlib.import_module("server")
    for module in (hospital, server):
        monkeypatch.setattr(module, "put", failing(module.put, dying))
    torch.manual_seed(0)
    with ThreadPoolExecutor(4) as pool:
        served = pool.submit(until_done, server.main, "server.safetensors", "adapter", 60.0)
        while not (place / "server.safetensors").exists() and not served.done():
            time.sleep(0.02)  # it draws its x first, from the seed above
        sites = [
            pool.submit(until_done, hospital.main, number, f"{number}.csv", f"{number}.safetensors", 60.0)
            for number in range(3)
        ]
        for future in (served, *sites):
            future.result(timeout=120)
    assert not dying
    assert_adapter(expected, model, place / "adapter")
    importlib.import_module("use")


def test_the_trainer(place: Path) -> None:
    algorithm, model, info = importlib.import_module("federation").build()
    server = Server(algorithm, ParameterSpace.of(model).gather(model), info)
    tokenizer = AutoTokenizer.from_pretrained(importlib.import_module("federation").BASE)
    with open("0.csv", newline="") as file:
        rows = [{**tokenizer(row["text"]), "labels": int(row["label"])} for row in csv.DictReader(file)]
    fit = importlib.import_module("trainer").fit

    def collator(items: list[dict[str, Any]]) -> Any:
        return tokenizer.pad(items, return_tensors="pt")

    client = Client(model, algorithm, info)
    sent = fit(client, server.broadcast(0), rows, collator, steps=3, batch_size=8)
    assert sent.steps == 3
    assert sent.rate_sum == pytest.approx(3 * algorithm.lr)
    assert server.add(sent.to_bytes(), client=0) is None


@pytest.mark.parametrize("name", ["fadamgc", "fedadamw", "scaffold"])
@pytest.mark.slow
def test_sites_of_plain_transformers_are_the_run_of_a_recipe(tiny: Path, tmp_path: Path, name: str) -> None:
    """The same clients, batches and start, without dropout: the adapters of the two, by PEFT's names."""
    overrides = (f"algorithm={{name: {name}, lr: 1.0e-2}}", "lora.dropout=0", "model.dropout=0", "run.threads=1")
    run = run_recipe(tiny / "recipe.yaml", [*overrides, "run.precision=float32"], tmp_path / "run")
    built = job(tiny, *overrides)
    base = AutoModelForSequenceClassification.from_pretrained(tiny / "bert", num_labels=2)
    model = get_peft_model(
        base, LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value"])
    ).eval()
    numbers = {"rounds": 4, "num_clients": 8, "sampled": 5, "tracked": 3, "local_steps": built.info.local_steps}
    info = model_info(built.algorithm, model, **numbers)
    server = Server(built.algorithm, built.problem.initial(), info)
    sites = [Client(copy.deepcopy(model), built.algorithm, info) for _ in range(8)]
    for t in range(4):
        clients, tracked = sample(0, t, 8, 5, 3)
        for number in clients:
            asked = Broadcast.from_bytes(server.broadcast(number).to_bytes())
            sent = sites[number].fit(asked, job_batches(built, number, t), tracked=number in tracked)
            assert server.add(sent.to_bytes(), client=number) is None
        server.aggregate()
    ParameterSpace.of(model).scatter(model, server.x)
    model.save_pretrained(tmp_path / "sites" / "adapter")
    assert_close(tmp_path / "sites", run.folder)


# Flower, or a stand-in with the few of its classes that the page uses.


class Message(SimpleNamespace):
    """A message to a node, or its reply."""

    def __init__(self, content: Any, reply_to: Any = None, **metadata: Any) -> None:
        node = reply_to.metadata.dst_node_id if reply_to else None
        super().__init__(content=content, metadata=SimpleNamespace(src_node_id=node, **metadata))

    def has_error(self) -> bool:
        return self.content is None


class App:
    """A ClientApp or ServerApp: its functions by the name of their decorator."""

    def __getattr__(self, kind: str) -> Any:
        def decorator() -> Any:
            return lambda function: setattr(self, f"on_{kind}", function) or function

        return decorator


class Grid:
    """Three nodes; the last one does not answer in round 2, and fails in round 3."""

    def __init__(self, app: App) -> None:
        self.app, self.trained = app, 0

    def get_node_ids(self) -> list[int]:
        return [11, 22, 33]

    def send_and_receive(self, messages: list[Message], timeout: float) -> Iterator[Message]:
        for message in messages:
            number = message.metadata.dst_node_id // 11 - 1
            context = SimpleNamespace(node_config={"partition-id": number})
            if message.metadata.message_type == "query":
                yield self.app.on_query(message, context)
                continue
            self.trained += 1
            reply = self.app.on_train(message, context)
            if self.trained == 9:
                reply.content, reply.error = None, SimpleNamespace(reason="out of memory")
            if self.trained != 6:
                yield reply


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, members in {
        "flwr": {},
        "flwr.app": {"ConfigRecord": dict, "RecordDict": dict, "Message": Message},
        "flwr.clientapp": {"ClientApp": App},
        "flwr.serverapp": {"ServerApp": App},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.slow
def test_the_flower_app(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A new client for every message, and two uploads lost on the way."""
    stand_in(monkeypatch)
    module = importlib.import_module("flower_app")
    grid = Grid(module.site)
    module.app.on_main(grid, None)
    assert grid.trained == 15
    assert capsys.readouterr().out == "node 33: out of memory\n"
    _, model, _ = importlib.import_module("federation").build()
    assert_adapter(load_file(place / "server.safetensors")["x"], model, place / "adapter")


def test_the_line_that_bounds_an_upload(place: Path) -> None:
    (line,) = re.findall(r"`(Upload\.from_bytes\(data\).*?)`", PAGE)
    upload = Upload({"d": torch.full((1, 4), 3.0)}, round=0, steps=1, rate_sum=0.1, samples=1, tracked=True)
    assert eval(line, {"Upload": Upload, "data": upload.to_bytes()}) == 6


def test_every_file_of_the_page_is_run_here() -> None:
    assert list(FILES) == ["one_process", "federation", "post", "hospital", "server", "use", "trainer", "flower_app"]
    assert len(re.findall("```python", PAGE)) == len(FILES)
