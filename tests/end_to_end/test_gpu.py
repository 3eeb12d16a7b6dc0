"""What a real GPU is needed for. FEDLLM_TEST_DEVICE=cpu runs what can be run without one, to try the tests."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from adapters import same_bits
from repository import REPO
from tiny_models import WORDS, save_tiny, save_tokenizer
from torch import Tensor
from transformers.models.auto import CONFIG_MAPPING

from fedllm import load_algorithm, load_recipe, run_recipe
from fedllm.client import Client, model_info
from fedllm.experiment.build import Job, assemble
from fedllm.experiment.machine import find_machine
from fedllm.federation.local_training import train_together
from fedllm.federation.rounds import Plan, RoundReport, run_round, start
from fedllm.federation.sampling import sample
from fedllm.server import Server

DEVICE = os.environ.get("FEDLLM_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")
no_stand_in = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU, and nothing stands in for it")

# Norms relative to the way that x has gone after some rounds: another grouping or another device, in float32. Adam's
# steps enlarge rounding where a gradient is next to nothing, over twelve layers more than over two.
TOLERANCE, TOLERANCE_BASE = 1e-3, 1e-2
BASES = {  # the architectures, whose weights are drawn
    "gpt2": {"bos_token_id": 0, "eos_token_id": 2},
    "roberta": {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1},
}


def job(tiny: Path, *overrides: str, device: str = DEVICE) -> Job:
    return assemble(load_recipe(tiny / "recipe.yaml", [f"run.device={device}", "run.precision=float32", *overrides]))


def trained(built: Job, cohort: int = 5, rounds: int = 3) -> tuple[Tensor, list[RoundReport]]:
    """x after some rounds, and their reports."""
    federation = start(built.setup, stacked_clients=cohort)
    reports = []
    for t in range(rounds):
        chosen = sample(0, t, built.info.num_clients, built.info.sampled, built.info.tracked)
        reports.append(run_round(built.setup, federation, *chosen, Plan(cohort)))
    return federation.x, reports


def apart(built: Job, x: Tensor, other: Tensor) -> float:
    """How far apart, relative to the way that x has gone."""
    moved = float((x - built.problem.initial()).norm())
    assert moved > 1e-3
    return float((x - other.to(x.device)).norm()) / moved


def losses(reports: list[RoundReport]) -> list[float]:
    return [report.train_loss or 0.0 for report in reports]


def base(folder: Path, family: str, **changes: int) -> str:
    """The override that names an architecture with random weights."""
    save_tokenizer(folder, pad=family == "roberta")
    CONFIG_MAPPING[family](**{**BASES[family], **changes}).save_pretrained(folder)
    return f"model={{name: {folder}, pretrained: false}}"


@pytest.mark.parametrize("name", ["fedavg", "localadamw", "fadamgc", "fedadamw"])
def test_cohorts_of_one_two_and_all_agree(tiny: Path, name: str) -> None:
    """Dropout on: its bits do not depend on who trains together."""
    built = job(tiny, f"algorithm={{name: {name}, lr: 1.0e-2}}")
    one, two, five = (trained(built, cohort)[0] for cohort in (1, 2, 5))
    assert five.device.type == DEVICE
    assert apart(built, five, one) < TOLERANCE
    assert apart(built, five, two) < TOLERANCE


@pytest.mark.parametrize("family", list(BASES))
def test_cohorts_agree_on_whole_architectures(tiny: Path, tmp_path: Path, family: str) -> None:
    """GPT-2 124M and RoBERTa-base with their own dropout, packed rows; the same once more gives the same bits."""
    settings = ["local={steps: 2, batch_size: 2}", "algorithm={name: fadamgc, lr: 1.0e-3}"]
    built = job(tiny, base(tmp_path, family), *settings)
    assert built.problem.packed
    (one, _), (five, _), (again, _) = (trained(built, cohort, rounds=1) for cohort in (1, 5, 5))
    assert apart(built, five, one) < TOLERANCE_BASE
    assert torch.equal(five, again)


@pytest.mark.parametrize("name", ["fedavg", "fadamgc", "fedadamw"])
def test_a_gpu_and_a_cpu_agree(tiny: Path, name: str) -> None:
    algorithm = f"algorithm={{name: {name}, lr: 1.0e-2}}"
    here, there = job(tiny, algorithm), job(tiny, algorithm, device="cpu")
    (x, reports), (other, others) = trained(here), trained(there)
    assert apart(here, x, other) < TOLERANCE
    assert losses(reports) == pytest.approx(losses(others), rel=1e-3)
    scores, plain = (each.problem.outputs(found, each.validation) for each, found in ((here, x), (there, other)))
    torch.testing.assert_close(scores, plain, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_same_seed_gives_the_same_bits(tiny: Path, precision: str) -> None:
    first, again = (trained(job(tiny, f"run.precision={precision}"))[0] for _ in range(2))
    assert torch.equal(first, again)


def test_bfloat16_learns_beside_float32_and_x_stays_float32(tiny: Path) -> None:
    exact, low = job(tiny), job(tiny, "run.precision=bfloat16")
    (reference, _), (x, _) = trained(exact), trained(low)
    assert x.dtype == torch.float32
    assert 0 < apart(exact, reference, x) < 0.2
    found = losses(trained(job(tiny, "run.precision=bfloat16", "algorithm.lr=0.03"), rounds=6)[1])
    assert found[-1] < 0.8 * found[0]


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "llama"])
def test_packed_rows_give_the_gradients_of_padded_ones(tiny: Path, tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path, family)
    packed, padded = (job(tiny, f"model.name={tmp_path}", f"run.slices={slices}") for slices in ("auto", "1"))
    assert (packed.problem.packed, padded.problem.packed) == (True, False)
    X = packed.problem.initial() + torch.linspace(0.02, 0.06, 3, device=DEVICE)[:, None]
    (loss, ours), (expected, theirs) = (each.problem.loss_and_gradient(X, [0, 3, 5], 1, 0) for each in (packed, padded))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert float((ours - theirs).norm()) < 1e-4 * float(theirs.norm())


@pytest.fixture
def _sync_mode_put_back() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@no_stand_in
@pytest.mark.usefixtures("_sync_mode_put_back")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["fedavg", "fadamgc", "fedadamw"])
def test_the_local_loop_never_waits_for_the_gpu(tiny: Path, name: str, precision: str) -> None:
    """From the end of the first step to the end of the cohort. Before it, once a cohort, steps, rates and the clients'
    vectors come from the host; after it, the uploads are looked at."""
    built = job(tiny, f"algorithm={{name: {name}, lr: 1.0e-2}}", f"run.precision={precision}", "local={steps: 4}")
    federation = start(built.setup)

    def strict(active: int) -> None:
        torch.cuda.set_sync_debug_mode("error")

    found = train_together(built.setup, federation, [0, 1], [4, 3], {0}, strict)
    with pytest.raises(RuntimeError, match="synchroniz"):
        found.local["x"].sum().item()


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_a_quantised_base_trains_in_cohorts(tiny: Path, quantize: str) -> None:
    """8-bit layers round their inputs to 8 bits, where a difference in rounding shows."""
    pytest.importorskip("bitsandbytes")
    built = job(tiny, f"model.quantize={quantize}", "algorithm.lr=0.03")
    _, reports = trained(built, rounds=6)
    assert losses(reports)[-1] < 0.8 * losses(reports)[0]
    (five, _), (one, _) = (trained(built, cohort, rounds=1) for cohort in (5, 1))
    assert apart(built, five, one) < {"4bit": TOLERANCE, "8bit": 0.1}[quantize]


def long_texts(tiny: Path, folder: Path) -> Job:
    """Eight clients of ten texts of 60 tokens, and a base whose activations outweigh it."""
    words = torch.randint(len(WORDS), (80, 60), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [f"{' '.join(WORDS[word] for word in text)},{row % 2}" for row, text in enumerate(words)]
    path = folder / "long.csv"
    path.write_text("\n".join(["text,label", *rows]))
    return job(
        tiny,
        base(folder, "gpt2", n_embd=512, n_layer=4, n_head=8, n_positions=64, vocab_size=64),
        f"data={{train: {path}, validation: {path}, text: [text], label: label, max_length: 64}}",
        "partition={scheme: iid, clients: 8}",
        "local={steps: 2, batch_size: 8}",
    )


@no_stand_in
def test_a_cohort_too_large_for_the_gpu_steps_down_to_the_same_result(tiny: Path, tmp_path: Path) -> None:
    """The allocator is left half of what a cohort of five takes more than a cohort of one."""
    built = long_texts(tiny, tmp_path)

    def watched(cohort: int) -> tuple[Tensor, int]:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        x, reports = trained(built, cohort, rounds=1)
        assert reports[0].forced is None
        return x, torch.cuda.max_memory_allocated()

    (_, small), (expected, large) = watched(1), watched(5)
    assert large > 2 * small
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(built.machine.device).total_memory
    torch.cuda.set_per_process_memory_fraction((small + large) / 2 / total)
    try:
        x, reports = trained(built, 5, rounds=1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert reports[0].forced in (1, 2)
    assert apart(built, expected, x) < TOLERANCE_BASE


def test_a_run_resumes_bit_for_bit_and_its_profile_adds_up(tiny: Path, tmp_path: Path) -> None:
    overrides = [f"run.device={DEVICE}", "run.checkpoint_every=2"]
    whole = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "whole", profile=True)
    assert whole.result["machine"]["device"].startswith(DEVICE)
    cut = tmp_path / "cut"
    shutil.copytree(whole.folder, cut)
    (cut / "result.json").unlink()
    for later in ("adapter", "checkpoints/000004"):
        shutil.rmtree(cut / later)
    assert same_bits(run_recipe(tiny / "recipe.yaml", overrides, cut).folder, whole.folder)


@no_stand_in
def test_auto_is_the_gpu_in_bfloat16_where_it_has_that(tiny: Path) -> None:
    machine = find_machine(load_recipe(tiny / "recipe.yaml"))
    assert machine.device.type == "cuda"
    low = torch.cuda.is_bf16_supported(including_emulation=False)
    assert machine.autocast == (torch.bfloat16 if low else None)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="two processes have a GPU each")
def test_two_processes_share_a_gpu_and_give_the_bits_of_one(tiny: Path, tmp_path: Path) -> None:
    words = [f"run.device={DEVICE}", "run.threads=1", "federation.rounds=2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "scripts/fedtune.py"]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tiny / "recipe.yaml"), f"run.dir={tmp_path / 'two'}", *words],
        cwd=REPO, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ("2 processes share 1 GPU" in " ".join(done.stdout.split())) == (DEVICE == "cuda")
    one = run_recipe(tiny / "recipe.yaml", [*words, "run.shares=2"], tmp_path / "one")
    assert same_bits(one.folder, tmp_path / "two")


@pytest.mark.parametrize("name", ["fadamgc", "fedadamw", "scaffold"])
def test_a_site_with_a_gpu_and_a_server_without_one(tmp_path: Path, name: str) -> None:
    """Three rounds, the client started again from its file before each, equal those of a site on the CPU."""
    alg, rng = load_algorithm(name, lr=0.01), torch.Generator().manual_seed(0)
    batches = [torch.randn(8, 5, generator=rng) for _ in range(4)]

    def x_after(device: str) -> Tensor:
        def made() -> Client:
            model = torch.nn.Linear(5, 2).to(device)
            return Client(model, alg, model_info(alg, model, rounds=3, num_clients=1, sampled=1, local_steps=4))

        server, file = Server(alg, torch.linspace(-1, 1, 12), made().info), tmp_path / device
        for t in range(3):
            client = made()
            if t:
                client.load(file)
            work = [batch.to(device) for batch in batches]
            sent = client.fit(server.broadcast(0), work, lambda model, batch: model(batch).square().mean())
            client.save(file)
            assert server.add(sent if t == 2 else sent.to_bytes(), client=0) is None
            assert server.aggregate().device.type == "cpu"
        return server.x

    torch.testing.assert_close(x_after(DEVICE), x_after("cpu"), rtol=1e-4, atol=1e-5)
