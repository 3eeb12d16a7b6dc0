"""site.yaml: what a site gives, what it allows, and each mistake with file and key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import REPO
from site_files import AUTHORITY, SERVER, private_key, write_site

from fedllm.common.errors import UserError
from fedllm.config.recipe import make_recipe
from fedllm.deployment import site_keys
from fedllm.deployment.site_settings import Policy, SiteSettings, load_site


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    write_site(tmp_path / "site", allow={"models": "tiny-*", "algorithms": ["FAdamGC-B"], "rounds": 9})
    monkeypatch.chdir(tmp_path)
    site = load_site("site/site.yaml")
    folder = tmp_path / "site"
    assert (site.name, site.server, site.insecure, site.device, site.threads) == (
        "hospital-a", "10.0.0.5:18000", False, "auto", None,
    )  # fmt: skip
    assert (site.train, site.validation, site.state) == (
        folder / "train.csv",
        folder / "validation.csv",
        folder / "state",
    )
    assert (site.certificate, site.key, site.local_hub) == (folder / "ca.crt", folder / "site.key", None)
    assert site.allow == Policy(models=["tiny-*"], algorithms=["FAdamGC-B"], rounds=9)
    assert not site.state.exists()


def test_a_trial_needs_neither_certificate_nor_key(tmp_path: Path) -> None:
    for server in ("127.0.0.1:18000", "localhost:18000", "[::1]:18000"):
        changes = {"insecure": True, "server": server, "certificate": "absent", "key": "absent", "validation": None}
        site = load_site(write_site(tmp_path, **changes))
        assert (site.certificate, site.key, site.validation) == (None, None, None)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"certifcate": "a"}, r"certifcate: unknown key \(did you mean 'certificate'\?\); known keys: name"),
    "misspelt and so missing": (
        {"trian": "t.csv", "train": "absent"}, r"trian: unknown key \(did you mean 'train'\?\)"
    ),
    "misspelt allow": ({"allow": {"model": []}}, r"allow.model: unknown key \(did you mean 'models'\?\)"),
    "no name": ({"name": "absent"}, "name: missing; expected a name for this site, such as hospital-a"),
    "no server": ({"server": None}, "server: missing; expected the address of the server, such as 10.0.0.5:18000"),
    "no train": ({"train": "absent"}, "train: missing; expected the file with this site's training samples"),
    "no certificate": ({"certificate": None}, "certificate: missing; expected the federation's ca.crt, from the"),
    "no key": ({"key": None}, "key: missing; expected this site's private key"),
    "a name of two words": ({"name": "hospital a"}, "name: found 'hospital a', expected at most 64 letters, digits"),
    "a URL": ({"server": "https://a.org:18000"}, "server: found 'https://a.org:18000', expected host:port, such as"),
    "no port": ({"server": "10.0.0.5"}, "server: found '10.0.0.5', expected host:port"),
    "a wrong port": ({"server": "10.0.0.5:99999"}, "server: found '10.0.0.5:99999', expected host:port"),
    "insecure": ({"insecure": True}, "insecure: found true with server '10.0.0.5:18000', expected an address of this"),
    "insecure by name": ({"insecure": True, "server": "a.org:1"}, "insecure: found true with server 'a.org:1'"),
    "insecure in words": ({"insecure": "maybe"}, "insecure: found 'maybe', expected true or false"),
    "a number for a path": ({"train": 3}, "train: found 3, expected a path"),
    "no such file": ({"train": "none.csv"}, r"train: .*/none.csv: no such file"),
    "another kind of file": ({"train": "site.yaml"}, r"train: .*/site.yaml: cannot read '.yaml' files; expected one"),
    "a folder": ({"validation": "."}, r"validation: .*: is no file, expected one of .csv"),
    "state is a file": ({"state": "train.csv"}, r"state: .*/train.csv is a file, expected a folder"),
    "no hub": ({"local_hub": "hub"}, r"local_hub: .*/hub: no such folder"),
    "no certificate file": ({"certificate": "no.crt"}, r"certificate: .*/no.crt: cannot be read: No such file"),
    "a certificate that is none": ({"certificate": "train.csv"}, r"certificate: .*train.csv: found no certificate"),
    "no key file": ({"key": "no.key"}, r"key: .*/no.key: cannot be read: No such file .*; make one with: ssh-keygen"),
    "a key that is none": ({"key": "ca.crt"}, r"key: .*/ca.crt: found no private key, expected one that ssh-keygen"),
    "a device": ({"device": "tpu"}, "device: found 'tpu', expected one of: auto, cpu, cuda"),
    "threads": ({"threads": 0}, "threads: found 0, expected a positive number"),
    "many threads": ({"threads": 5000}, "threads: found 5000, expected at most 1024"),
    "no rounds": ({"allow": {"rounds": 0}}, "allow.rounds: found 0, expected a positive number"),
    "no models": ({"allow": {"models": []}}, "allow.models: found no name, expected a list of names, or null for any"),
    "an algorithm": (
        {"allow": {"algorithms": ["fedadamm"]}},
        r"allow.algorithms: unknown algorithm 'fedadamm' \(did you mean 'fedadam'\?\); known: fa_nt, ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_file_and_key(mistake: str, tmp_path: Path) -> None:
    changes, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=f"^{tmp_path}/site.yaml: {message}"):
        load_site(write_site(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found nothing, expected keys such as name: and server:"),
        ("- a", "found list, expected keys"),
        ("name: [", "not readable as YAML"),
        ("name: a\nname: b", r"not readable as YAML: the key 'name' is there twice \(line 2\)"),
        ("name:", "not readable as YAML: the key 'name' has no value"),
        ("1: 2", "1: unknown key; known keys: name, server, certificate"),
    ],
)
def test_a_file_that_is_no_site(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"^{path}: {message}"):
        load_site(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UserError, match=r"cannot be read: (No such file|Is a directory).*such as site.yaml"):
            load_site(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ecdsa-sha2-nistp384 AAAA site", "found a public key, expected the private one, without .pub"),
        (
            private_key(b"ssh-ed25519"),
            "found a key that is not ECDSA, as Flower needs it; make one with: ssh-keygen -t",
        ),
        (private_key(cipher=b"aes256-ctr", kdf=b"bcrypt"), "the key has a passphrase"),
        ("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END", "the key has a passphrase"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nA\n-----END", "found a key that is not ECDSA"),
        ("\xff", "found no private key"),
    ],
)
def test_a_key_of_another_kind(text: str, message: str, tmp_path: Path) -> None:
    path = write_site(tmp_path)
    (tmp_path / "site.key").write_text(text)
    with pytest.raises(UserError, match=f"^{path}: key: {tmp_path}/site.key: {message}"):
        load_site(path)


def test_a_key_that_others_may_read(tmp_path: Path) -> None:
    path = write_site(tmp_path)
    (tmp_path / "site.key").chmod(0o640)
    with pytest.raises(UserError, match=r"key: .*site.key: others may read it \(mode 0640\); type: chmod 600 /"):
        load_site(path)


@pytest.mark.parametrize("kind", ["EC PRIVATE KEY", "PRIVATE KEY"])
def test_a_key_that_openssl_wrote(kind: str, tmp_path: Path) -> None:
    path = write_site(tmp_path)
    (tmp_path / "site.key").write_text(f"-----BEGIN {kind}-----\nMHcC\n-----END {kind}-----\n")
    assert load_site(path).key == tmp_path / "site.key"


def test_a_certificate_is_the_authoritys_and_valid_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_site(tmp_path)
    monkeypatch.setattr(site_keys.time, "time", lambda: 8e9)
    with pytest.raises(UserError, match=r"certificate: .*ca.crt: the certificate expired on .* 2126 GMT; ask the"):
        load_site(path)
    monkeypatch.setattr(site_keys.time, "time", lambda: 1e9)
    with pytest.raises(UserError, match=r"the certificate is valid from .* 2026 GMT; check this machine's clock"):
        load_site(path)
    monkeypatch.undo()
    (tmp_path / "ca.crt").write_text(SERVER)
    with pytest.raises(
        UserError, match=r"found a certificate of one machine, expected that of the authority, the federation's ca.crt"
    ):
        load_site(path)
    (tmp_path / "ca.crt").write_text(AUTHORITY)
    assert isinstance(load_site(path), SiteSettings)


# What a site allows.


def announced(**sections: Any) -> dict[str, Any]:
    """A recipe's sections: bert-tiny, FAdamGC, 20 rounds, 4 local steps."""
    values = {
        "model": {"name": "acme/bert-tiny"}, "algorithm": {"name": "fadamgc"}, "data": {"name": "glue/sst2"},
        "federation": {"rounds": 20}, "local": {"steps": 4},
    }  # fmt: skip
    return make_recipe({**values, **sections}, "announced", "the announcement").sections()


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"models": ["acme/bert-tiny"], "algorithms": ["FAdamGC"], "min_sites": 3, "rounds": 20, "steps": 4},
        {"models": ["gpt2", "acme/*"], "algorithms": ["fedavg", "fadamgc"]},
        {"min_sites": None},
    ],
)
def test_what_is_allowed(policy: dict[str, Any]) -> None:
    assert Policy(**policy).refusal(announced(), 3) is None


@pytest.mark.parametrize(
    ("policy", "sections", "message"),
    [
        (
            {"models": ["acme/bert-base", "gpt*"]},
            {},
            "allow.models: the recipe's model.name is 'acme/bert-tiny', this site allows acme/bert-base, gpt*",
        ),
        (
            {"algorithms": ["fedavg", "SCAFFOLD"]},
            {},
            "allow.algorithms: the recipe's algorithm.name is 'fadamgc', this site allows fedavg, SCAFFOLD",
        ),
        ({"min_sites": 5}, {}, "allow.min_sites: the run has 3 sites, this site allows 5 or more"),
        ({"rounds": 19}, {}, "allow.rounds: the recipe's federation.rounds is 20, this site allows 19 or fewer"),
        ({"steps": 3}, {}, "allow.steps: the recipe's local.steps is 4, this site allows 3 or fewer"),
        (
            {"steps": 3},
            {"local": {"epochs": 2}},
            "allow.steps: the recipe gives local.epochs=2 and not local.steps, this site allows 3 or fewer",
        ),
        ({"clip": 2.0}, {}, "allow.clip: the recipe's uploads.clip is None, this site needs one number, at most 2"),
        (
            {"clip": 0.5},
            {"uploads": {"clip": 0.6}},
            "allow.clip: the recipe's uploads.clip is 0.6, this site needs one number, at most 0.5",
        ),
        (
            {"clip": 0.5},
            {"uploads": {"clip": {"d": 0.1}}},
            "allow.clip: the recipe's uploads.clip is {'d': 0.1}, this site needs one number, at most 0.5",
        ),
        ({"noise": 1.0}, {}, "allow.noise: the recipe's privacy.noise is None, this site needs 1 or more"),
        (
            {"noise": 1.0},
            {"uploads": {"clip": 1.0}, "privacy": {"noise": 0.9, "delta": 0.01}},
            "allow.noise: the recipe's privacy.noise is 0.9, this site needs 1 or more",
        ),
    ],
)
def test_what_is_refused_is_said_in_one_sentence(policy: dict[str, Any], sections: dict, message: str) -> None:
    assert Policy(**policy).refusal(announced(**sections), 3) == message


def test_a_clip_that_is_small_enough_is_allowed() -> None:
    assert Policy(clip=0.5).refusal(announced(uploads={"clip": 0.5}), 3) is None


def test_enough_noise_is_allowed() -> None:
    assert Policy(noise=1.0).refusal(announced(uploads={"clip": 1.0}, privacy={"noise": 1.0, "delta": 0.01}), 3) is None


def test_code_of_a_module_runs_only_where_the_site_names_it() -> None:
    own = announced()
    own["algorithm"]["name"] = "no_such_module:Class"
    assert Policy().refusal(own, 3) == (
        "allow.algorithms: the recipe's algorithm.name is 'no_such_module:Class', this site allows no algorithm of a "
        "module that it does not name, because loading one runs its code"
    )
    assert "allows fedavg" in str(Policy(algorithms="fedavg").refusal(own, 3))
    assert Policy(algorithms=["no_such_module:Class"]).refusal(own, 3) is None


@pytest.mark.parametrize("value", [None, 3, "text", [], {"name": []}, {"rounds": "9" * 500}, {"steps": True}])
def test_an_announcement_of_any_kind_is_refused_and_raises_nothing(value: Any) -> None:
    policy = Policy(models=["gpt2"], algorithms=["fedavg"], rounds=3, steps=3)
    for section in ("model", "algorithm", "federation", "local"):
        good = {
            "model": {"name": "gpt2"},
            "algorithm": {"name": "fedavg"},
            "federation": {"rounds": 3},
            "local": {"steps": 3},
        }
        assert policy.refusal(good, 3) is None
        why = policy.refusal({**good, section: value}, 3)
        assert why
        assert len(why) < 300


@pytest.mark.slow
def test_reading_it_imports_neither_torch_nor_flower() -> None:
    code = (
        "import sys, fedllm.deployment.site_settings as s; s.Policy(algorithms='FedAvg'); "
        "assert not {'torch', 'flwr', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO, timeout=60)
