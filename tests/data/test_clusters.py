"""Clusters of texts, conversations and images by features that need no model."""

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from fedllm.common.errors import UserError
from fedllm.data import clusters
from fedllm.data.clusters import cluster_ids
from fedllm.data.conversations.conversation import ASSISTANT, USER, Conversation, Message
from fedllm.data.features import GRID, TEXT_SCALE, features_of
from fedllm.data.split import Split

TOPICS = [
    "goal match referee league striker penalty",
    "bank profit shares market dividend quarter",
    "vaccine patient clinic dose trial nurse",
]


def topic_texts(n=90):
    """n texts of eight random words each; text i is about topic i modulo 3."""
    rng = np.random.default_rng(0)
    words = [topic.split() for topic in TOPICS]
    return [" ".join(rng.choice(words[i % 3], 8)) for i in range(n)]


def of_texts(texts):
    return Split([texts], np.zeros(len(texts), np.int64), {})


def same_groups(ids, truth):
    """Whether two labellings are the same up to the names of the groups."""
    pairs = set(zip(ids.tolist(), truth, strict=True))
    return len(pairs) == len(set(truth)) == len(set(ids.tolist()))


def test_topics_are_found_in_texts_and_conversations():
    texts, truth = topic_texts(), [i % 3 for i in range(90)]
    assert same_groups(cluster_ids(of_texts(texts), 3, seed=1), truth)
    talks = [Conversation((Message(USER, text), Message(ASSISTANT, "yes"))) for text in texts]
    assert same_groups(cluster_ids(Split([], np.zeros(90, np.int64), {}, None, talks), 3, seed=1), truth)


def test_colours_are_found_in_images():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 40, (30, 3, 9, 9), dtype=np.uint8)
    images[np.arange(30), np.arange(30) % 3] += 180
    split = Split([], np.zeros(30, np.int64), {}, images=images)
    assert same_groups(cluster_ids(split, 3, seed=0), [i % 3 for i in range(30)])


def test_features_of_images_are_the_means_of_their_parts():
    image = np.arange(3 * 8 * 8, dtype=np.uint8).reshape(1, 3, 8, 8)
    found = features_of(Split([], np.zeros(1, np.int64), {}, images=image), np.arange(1))(np.arange(1))
    means = image.reshape(3, GRID, 2, GRID, 2).mean(axis=(2, 4))
    assert found.tolist() == np.rint(means).reshape(1, -1).tolist()


def test_features_of_texts_are_whole_numbers_of_one_length_and_know_no_case():
    split = of_texts(["Goal, match!", "goal MATCH", "bank", "東京は", "は東京", "", "the"])
    found = features_of(split, np.arange(7))(np.arange(7))
    assert (found == np.rint(found)).all()
    assert np.linalg.norm(found, axis=1) == pytest.approx([TEXT_SCALE] * 5 + [0, TEXT_SCALE], abs=2)
    assert (found[0] == found[1]).all()
    assert (found[3] == found[4]).all()  # single characters, in any order
    assert found[0] @ found[2] == 0


def test_words_of_every_text_weigh_nothing():
    split = of_texts([f"report {word}" for word in "abcd"])
    found = features_of(split, np.arange(4))(np.arange(4))
    assert (np.count_nonzero(found, axis=1) == 1).all()


def test_clusters_depend_on_samples_and_seed_alone(monkeypatch):
    split = of_texts(topic_texts())
    found = cluster_ids(split, 5, seed=0)
    monkeypatch.setattr(clusters, "_CHUNK", 7)
    with threadpool_limits(2):
        np.random.seed(5)
        assert cluster_ids(split, 5, seed=0).tolist() == found.tolist()
    assert cluster_ids(split, 5, seed=1).tolist() != found.tolist()


def test_samples_beyond_the_fitted_ones_get_the_nearest_centre(monkeypatch):
    monkeypatch.setattr(clusters, "FITTED", 30)
    assert same_groups(cluster_ids(of_texts(topic_texts()), 3, seed=1), [i % 3 for i in range(90)])


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "partition.clusters=1: expected at least 2"),
        (4, "partition.clusters=4: found 3 samples with distinct features, expected at least 4"),
    ],
)
def test_a_wrong_number_of_clusters_is_named(count, said):
    with pytest.raises(UserError, match=said):
        cluster_ids(of_texts(["a b", "b a", "c", "d", "c"]), count, seed=0)
