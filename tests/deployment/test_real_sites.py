"""Sites and a server that fail: what is lost, late, sent twice, damaged, forged, or restarted from a file."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small_clients import K, Point, client_of, line, quadratic, slope, squared
from small_clients import batches as work
from tiny_models import save_tiny
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from fedllm import load_algorithm, simulate
from fedllm.client import Broadcast, Client, FederatedOptimizer, Upload, model_info
from fedllm.common import tensor_file
from fedllm.common.errors import RunError, UserError
from fedllm.federation.info import round_info
from fedllm.models.flat_parameters import ParameterSpace
from fedllm.server import Server

N, ROUNDS = 5, 8


# Whatever happens on the way, the clients' state follows the uploads that counted.


class Site:
    """A process that may die: what it knows is in its file."""

    def __init__(self, number: int, alg: Any, info: Any, folder: Path) -> None:
        self.number, self.file = number, folder / f"client{number}.safetensors"
        self._made = lambda: Client(Point(quadratic().initial()), alg, info)
        self.restart()

    def restart(self) -> None:
        self.client = self._made()
        if self.file.exists():
            self.client.load(self.file)

    def answer(self, data: bytes, salt: int) -> bytes:
        """Its upload, after the state is saved. salt: other batches than the last time it was asked."""
        broadcast = Broadcast.from_bytes(data)
        steps = [(quadratic(), self.number, broadcast.round + salt, k) for k in range(3)]
        sent = self.client.fit(broadcast, steps, slope).to_bytes()
        self.client.save(self.file)
        return sent


def send(server: Server, number: int, data: bytes) -> str | None:
    return server.add(data, client=number)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["fadamgc", "fa_nt", "scaffold"])
@pytest.mark.slow
def test_the_servers_vector_stays_the_mean_of_the_clients(name: str, seed: int, tmp_path: Path) -> None:
    """Uploads lost, late, sent twice, made again with other batches; sites and server restarted from their files."""
    chance = random.Random(seed)
    alg, problem = load_algorithm(name, lr=0.05), quadratic()
    info = round_info(alg, problem, rounds=ROUNDS, sampled=N, tracked=N, local_steps=3)
    server, file = Server(alg, problem.initial(), info), tmp_path / "server.safetensors"
    sites = [Site(number, alg, info, tmp_path) for number in range(N)]
    late: list[tuple[int, bytes]] = []
    while server.round < ROUNDS:
        heard = {number for number, data in late if send(server, number, data) is None}  # its round was opened again
        late.clear()
        for site in sites:
            fate = chance.choice(["fine", "fine", "lost", "late", "twice", "dies", "dies before it sends", "silent"])
            if fate == "silent":
                continue
            sent = site.answer(server.broadcast(site.number).to_bytes(), 0)
            if fate == "lost":
                continue
            if fate == "late":
                late.append((site.number, sent))
                continue
            if fate == "dies before it sends":  # and is asked again
                site.restart()
                sent = site.answer(server.broadcast(site.number).to_bytes(), 100)
            assert (send(server, site.number, sent) is None) == (site.number not in heard)
            heard.add(site.number)
            if fate == "twice":
                again = site.answer(server.broadcast(site.number).to_bytes(), 200)
                assert send(server, site.number, again) == "has sent its upload already"
            if fate == "dies":
                site.restart()
        if chance.random() < 0.3 and file.exists():  # in the middle of the round: all of it is asked for again
            before = server.round
            server = Server(alg, torch.zeros(problem.dim).double(), info)
            server.load(file)
            assert server.round == before
        elif heard:
            server.aggregate()
            server.save(file)
    for site in sites:
        site.client._settle(replace(server.broadcast(site.number), round=ROUNDS))
    for key in alg.tracked_uploads():
        kept = torch.cat([site.client.state[key] for site in sites])
        torch.testing.assert_close(server.state[key], kept.mean(0), rtol=0, atol=1e-12)
        assert float(server.state[key].norm()) > 0.01


@pytest.mark.parametrize("name", ["fadamgc", "scaffold"])
def test_a_round_that_lost_uploads_is_the_round_of_the_others(name: str, tmp_path: Path) -> None:
    """Client 1's upload of round 2 is lost and client 2's of round 3 rejected: simulate without the two."""
    alg, problem = load_algorithm(name, lr=0.05), quadratic()
    clients = [[0, 1, 2], [0, 2], [0, 1], [0, 1, 2, 3, 4]]
    schedule = [(chosen, chosen) for chosen in clients]
    expected = simulate(alg, problem, rounds=4, local_steps=3, schedule=schedule)
    info = round_info(alg, problem, rounds=4, sampled=5, tracked=5, local_steps=3)
    server = Server(alg, problem.initial(), info)
    sites = [Site(number, alg, info, tmp_path) for number in range(N)]
    for t, counted in enumerate(clients):
        for site in [sites[number] for number in sorted({*counted, *clients[0]})]:
            work = [(problem, site.number, t, k) for k in range([3, 1, 2, 3, 2][site.number])]
            sent = site.client.fit(server.broadcast(site.number), work, slope)
            if site.number not in counted and t == 2:
                sent = Upload({**sent.tensors, "d": sent["d"] * torch.nan}, **sent.head)
                assert "not finite" in str(server.add(sent, client=site.number))
            elif site.number in counted:
                assert server.add(sent, client=site.number) is None
        server.aggregate()
    torch.testing.assert_close(server.x, expected.x, rtol=1e-12, atol=1e-12)
    for key, value in expected.clients.items():
        kept = torch.cat([site.client.state[key] for site in sites])
        torch.testing.assert_close(kept, value, rtol=1e-12, atol=1e-12)


# A site whose state is not the one that counted.


def counted_twice(name: str, tmp_path: Path) -> tuple[Server, Client, Path]:
    """A server and a client after two rounds, and a file with the client's state after the first."""
    client = client_of(name)
    server = Server(client.algorithm, torch.zeros(4), client.info)
    for _ in range(2):
        assert server.add(client.fit(server.broadcast(7), work(), squared).to_bytes(), client=7) is None
        server.aggregate()
        if server.round == 1:
            client.save(tmp_path / "old.safetensors")
    return server, client, tmp_path / "old.safetensors"


def test_old_or_lost_state_is_told(tmp_path: Path) -> None:
    server, client, old = counted_twice("fadamgc", tmp_path)
    receipt = server.counted[7][:12]
    behind, empty = client_of("fadamgc"), client_of("fadamgc")
    behind.load(old)
    asked = server.broadcast(7)
    with pytest.raises(
        UserError, match=rf"round 2: the last upload .* counted is {receipt}, but its state came with [^n]"
    ):
        behind.begin(asked, steps=K)
    with pytest.raises(UserError, match=rf"counted is {receipt}, but its state came with none; load the newest"):
        empty.begin(asked, steps=K)
    with pytest.raises(UserError, match=r"counted is none, but its state came with"):
        client.begin(server.broadcast(6), steps=K)  # it has taken another's number
    before = {key: value.clone() for key, value in behind.state.items()}
    behind.begin(replace(asked, counted=None), steps=K)
    assert all(torch.equal(behind.state[key], value) for key, value in before.items())
    client.begin(asked, steps=K)


def test_a_client_that_keeps_nothing_needs_no_file(tmp_path: Path) -> None:
    server, _, _ = counted_twice("fedadamw", tmp_path)
    new = client_of("fedadamw")
    assert server.add(new.fit(server.broadcast(7), work(), squared), client=7) is None


def test_a_server_that_does_not_say_takes_the_clients_word() -> None:
    client, twin = client_of("fadamgc"), client_of("fadamgc")
    server = Server(client.algorithm, torch.zeros(4), client.info)
    for _ in range(2):
        for each in (client, twin):
            sent = each.fit(server.broadcast(None if each is twin else 0), work(), squared)
            if each is client:
                server.add(sent, client=0)
        server.aggregate()
    assert all(torch.equal(client.state[key], value) for key, value in twin.state.items())


# Files.


def test_files_are_whole_and_of_this_federation(tmp_path: Path) -> None:
    server, client, old = counted_twice("fadamgc", tmp_path)
    server.save(tmp_path / "deep" / "server.safetensors")
    again = Server(client.algorithm, torch.ones(4), client.info)
    again.load(tmp_path / "deep" / "server.safetensors")
    assert again.round == 2
    assert again.counted == server.counted
    assert torch.equal(again.x, server.x)
    assert torch.equal(again.state["y"], server.state["y"])
    other = client_of("fadamgc", betas=(0.9, 0.9))
    with pytest.raises(UserError, match=r"safetensors: algorithm.betas: found \[0.9, 0.99\], expected \[0.9, 0.9\]"):
        other.load(old)
    with pytest.raises(UserError, match=r"old.safetensors: found .*'receipts'.*, expected what Server.save writes"):
        again.load(old)
    with pytest.raises(UserError, match=r"none.safetensors: cannot be read: No such file"):
        again.load(tmp_path / "none.safetensors")
    data = bytearray(old.read_bytes())
    data[-1] ^= 1
    old.write_bytes(data)
    with pytest.raises(UserError, match=r"old.safetensors: found .* bytes, .*do not match their digest"):
        client.load(old)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="could not be written"):
        server.save(tmp_path / "file" / "server.safetensors")
    assert not list(tmp_path.rglob(".*"))


# Bytes.


def test_messages_come_back_from_bytes_bit_for_bit() -> None:
    client = client_of("fedadamw", betas=(0.8, 0.95))
    server = Server(client.algorithm, torch.arange(4.0), client.info)
    asked = server.broadcast(3)
    found = Broadcast.from_bytes(asked.to_bytes())
    assert (found.round, found.terms, found.counted) == (0, asked.terms, "")
    assert torch.equal(found.x, asked.x)
    assert found.server.keys() == {"Delta", "vbar"}
    sent = client.fit(found, work(), squared)
    data = sent.to_bytes()
    assert data == sent.to_bytes()
    back = Upload.from_bytes(data)
    assert back.head == sent.head
    assert back.receipt == sent.receipt
    assert all(torch.equal(back[key], value) for key, value in sent.items())


def forged(header: Any) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def with_head(head: Any) -> Callable[[Upload], bytes]:
    return lambda upload: tensor_file.pack(head, upload.tensors)


FORGERIES: dict[str, Callable[[Upload], bytes]] = {
    "nothing": lambda upload: b"",
    "half": lambda upload: upload.to_bytes()[:-7],
    "another bit": lambda upload: upload.to_bytes()[:-1] + bytes([upload.to_bytes()[-1] ^ 1]),
    "a pickle": lambda upload: b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00" * 9,
    "a huge header": lambda upload: struct.pack("<Q", 2**62) + b"{}",
    "a deep header": lambda upload: forged(b"[" * 50_000),
    "a deep head": lambda upload: forged({"__metadata__": {"fedllm": "[" * 50_000}}),
    "a long number": lambda upload: forged({"__metadata__": {"fedllm": "1" * 9_000}}),
    "no head": lambda upload: forged({}),
    "a head of text": lambda upload: forged({"__metadata__": {"fedllm": '"text"'}}),
    "a head of numbers": lambda upload: forged({"__metadata__": {"fedllm": '{"head": 3, "sha256": 4}'}}),
    "a list": lambda upload: tensor_file.pack([1], upload.tensors),  # type: ignore[arg-type]
    "a broadcast": lambda upload: Broadcast(0, torch.zeros(4), {}).to_bytes(),
    "less": lambda upload: tensor_file.pack({"round": 0}, upload.tensors),
    "more": lambda upload: tensor_file.pack({**upload.head, "client": 3}, upload.tensors),
    "a huge tensor": lambda upload: Upload({**upload.tensors, "q": torch.zeros(30_000)}, **upload.head).to_bytes(),
    "bfloat16": lambda upload: Upload({n: v.bfloat16() for n, v in upload.items()}, **upload.head).to_bytes(),
    "many names": lambda upload: Upload({f"q{i}": torch.zeros(0) for i in range(600)}, **upload.head).to_bytes(),
    "words for numbers": lambda upload: tensor_file.pack(dict.fromkeys(upload.head, "9"), upload.tensors),
    "lists for numbers": lambda upload: tensor_file.pack({name: [[9]] for name in upload.head}, upload.tensors),
    "infinite rates": lambda upload: tensor_file.pack({**upload.head, "rate_sum": float("inf")}, upload.tensors),
    "true for a number": lambda upload: tensor_file.pack({**upload.head, "steps": True}, upload.tensors),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_no_bytes_harm_the_server(what: str) -> None:
    client = client_of("fadamgc")
    server = Server(client.algorithm, torch.zeros(4), client.info)
    upload = client.fit(server.broadcast(1), work(), squared)
    why = server.add(FORGERIES[what](upload), client=1)
    assert why
    assert len(why) <= 503
    assert server.rejected == {1: why}
    assert server.add(upload.to_bytes(), client=1) is None
    torch.testing.assert_close(server.aggregate(), upload["d"][0])


@pytest.mark.parametrize("client", [-1, 10, 999, "3", None, True, 2.0, [1]])
def test_a_client_is_one_of_the_federations(client: Any) -> None:
    one = client_of("fedavg")
    server = Server(one.algorithm, torch.zeros(4), one.info)
    upload = one.fit(server.broadcast(), work(), squared)
    assert str(server.add(upload, client=client)).startswith(f"client: found {client!r}, expected 0 to 9")
    if client is not None:
        with pytest.raises(UserError, match=r"client: found .*, expected 0 to 9"):
            server.broadcast(client)
    with pytest.raises(RunError, match="0 accepted uploads"):
        server.aggregate()


@pytest.mark.parametrize("samples", [10**400, 1e308, -1, "4", True, float("nan")])
def test_samples_are_a_number_of_samples(samples: Any) -> None:
    one = client_of("fedavg", weights="size")
    server = Server(one.algorithm, torch.zeros(4), one.info)
    upload = one.fit(server.broadcast(), work(), squared)
    assert "samples: found" in str(server.add(Upload(upload.tensors, **{**upload.head, "samples": samples}), client=0))


def test_an_upload_of_another_run_is_told_by_where_it_began() -> None:
    """Same settings, same round, same shapes, another x: a file of last week's federation."""
    one = client_of("fedavg")
    old, new = (Server(one.algorithm, torch.full((4,), value), one.info) for value in (1.0, 2.0))
    upload = one.fit(old.broadcast(0), work(), squared)
    assert str(new.add(upload.to_bytes(), client=0)).startswith("start: found '")
    assert old.add(upload.to_bytes(), client=0) is None
    assert new.add(Upload(upload.tensors, **{**upload.head, "start": ""}), client=0) is None
    saved = one.begin(old.broadcast(0), steps=K).state_dict()
    one.begin(old.broadcast(0), steps=K).load_state_dict(saved)
    with pytest.raises(UserError, match=r"optimizer state: found one that began with another x, .*; start the round"):
        one.begin(new.broadcast(0), steps=K).load_state_dict(saved)


def test_nothing_counts_after_the_last_round() -> None:
    one = client_of("fedavg", schedule="cosine_rounds")
    server = Server(one.algorithm, torch.zeros(4), one.info)
    upload = one.fit(server.broadcast(), work(), squared)
    server.round = one.info.total
    assert server.add(replace_round(upload, one.info.total), client=0) == "the 5 rounds of the run are over"


def replace_round(upload: Upload, round: int) -> Upload:
    return Upload(upload.tensors, **{**upload.head, "round": round})


def test_an_interrupted_round_of_a_falling_rate_counts() -> None:
    """Its first steps have higher rates than a shorter round's: what it declares is no more than it may."""
    one = client_of("fadamgc", schedule="cosine_steps")
    server = Server(one.algorithm, torch.zeros(4), one.info)
    optimizer = one.begin(server.broadcast(), steps=K)
    squared(one.model, work()[0]).backward()
    optimizer.step()
    assert server.add(one.finish(optimizer), client=0) is None


# Sites that are not alike.


def test_other_terms_are_named() -> None:
    server = Server(client_of("fadamgc").algorithm, torch.zeros(4), client_of("fadamgc").info)
    asked = Broadcast.from_bytes(server.broadcast(0).to_bytes())
    for site, why in [
        (client_of("localadam"), "algorithm: found 'FAdamGC', expected 'LocalAdam'; give the server and this client"),
        (client_of("fadamgc", eps=1e-6), "algorithm.eps: found 1e-08, expected 1e-06"),
        (Client(line(), *terms_of(rounds=6)), "rounds: found 5, expected 6"),
        (Client(line(), *terms_of(num_clients=11)), "num_clients: found 10, expected 11"),
    ]:
        with pytest.raises(UserError, match=f"broadcast of round 0: {why}"):
            site.begin(asked, steps=K)


def terms_of(**changes: int) -> tuple[Any, Any]:
    algorithm = client_of("fadamgc").algorithm
    numbers = {"rounds": 5, "num_clients": 10, "sampled": 2, "local_steps": K, **changes}
    return algorithm, model_info(algorithm, line(), **numbers)


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("base"), "bert")


def adapted(base: str, seed: int, alpha: int = 4) -> PeftModel:
    """What a user of plain transformers and PEFT makes of a base, its head drawn anew."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
        lora = LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=alpha, target_modules=["query", "value"])
        return get_peft_model(model, lora)


def test_models_are_compared_but_for_what_travels(tiny_base: str) -> None:
    alg = load_algorithm("fedavg", lr=0.1)
    model, other = adapted(tiny_base, 0), adapted(tiny_base, 1)
    info = site_info(alg, model)
    assert site_info(alg, other) == info  # another head and other adapters: the broadcast brings them
    assert site_info(alg, copy.deepcopy(other).to(torch.bfloat16)) == info
    assert site_info(alg, adapted(tiny_base, 0, alpha=8)) != info
    torch.nn.init.normal_(other.base_model.model.bert.pooler.dense.weight, std=0.02)
    server = Server(alg, ParameterSpace.of(model).gather(model), info)
    with pytest.raises(UserError, match=r"model: found .* such as a pooler that the checkpoint lacks"):
        Client(other, alg, site_info(alg, other)).begin(server.broadcast(), steps=1)
    Client(other, alg, replace(site_info(alg, other), model="")).begin(server.broadcast(), steps=1)
    assert site_info(alg, model.to("meta")).model == ""


def site_info(alg: Any, model: nn.Module) -> Any:
    return model_info(alg, model, rounds=1, num_clients=1, sampled=1, local_steps=1)


# Sites of other devices and precisions.


@pytest.mark.parametrize("name", ["fadamgc", "fedadamw", "scaffold", "fedavg"])
def test_a_broadcast_goes_to_where_the_model_is(name: str) -> None:
    """The meta device stands for a GPU: it refuses tensors of two devices."""
    client = client_of(name)
    server = Server(client.algorithm, torch.zeros(4), client.info)
    model = nn.Linear(3, 1, device="meta")
    optimizer = FederatedOptimizer(model, client.algorithm, client.info, server.broadcast(), client.state, K)
    model(torch.ones(2, 3, device="meta")).square().mean().backward()
    optimizer.step()
    assert optimizer._local["x"].device.type == "meta"


def test_a_model_in_bfloat16_sends_float32() -> None:
    """The steps are those of float32 from rounded weights' gradients: small ones add up."""
    alg = load_algorithm("fedavg", lr=1e-4)
    info = model_info(alg, line(), rounds=1, num_clients=1, sampled=1, local_steps=K)
    server = Server(alg, torch.ones(4), info)
    client = Client(line().to(torch.bfloat16), alg, info)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum().float()

    upload = client.fit(server.broadcast(), [torch.ones(1, 3, dtype=torch.bfloat16)] * K, loss)
    assert upload["d"].dtype == torch.float32
    torch.testing.assert_close(upload["d"], torch.full((1, 4), -1e-4 * K), rtol=1e-2, atol=0)
    assert server.add(upload, client=0) is None
    with pytest.raises(UserError, match=r"x: found \[4\] torch.bfloat16, expected a tensor \[4\] of float"):
        Server(alg, torch.ones(4).bfloat16(), info)
