"""Client-level privacy: the noise on the sums, what one client can change, and what the server hands on."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedllm import QuadraticProblem, load_algorithm, simulate
from fedllm.aggregation.accounting import full_epsilon
from fedllm.aggregation.pipeline import Pipeline
from fedllm.aggregation.privacy import PrivateMean, from_system, noise_length, seeded
from fedllm.aggregation.privacy_settings import PrivacySettings
from fedllm.aggregation.settings import UploadsSettings
from fedllm.aggregation.uploads import Declared, Uploads
from fedllm.algorithms import algorithm_names
from fedllm.algorithms.base import RoundInfo, Rows
from fedllm.common.errors import UserError
from fedllm.federation.info import round_info
from fedllm.federation.rounds import Plan, run_round, start
from fedllm.federation.sampling import sample
from fedllm.federation.setup import Setup
from fedllm.federation.state import FederationState

N, S, DIM = 10, 4, 40
NOISE = PrivacySettings(noise=1.0)


def setup_of(name: str, uploads: UploadsSettings, noise: float = 1.0, dim: int = DIM, **keys: Any) -> Setup:
    algorithm = load_algorithm(name, **({"weights": "uniform"} | keys))
    problem = QuadraticProblem.random(num_clients=N, dim=dim, spread=2.0, noise=0.1)
    info = round_info(algorithm, problem, rounds=20, sampled=S, tracked=S, local_steps=2)
    privacy = PrivacySettings(noise=noise)
    return Setup(algorithm, problem, info, Pipeline.of(uploads, algorithm, 0, privacy))


def still(dim: int) -> QuadraticProblem:
    """Ten clients whose gradients are 0 at x0 = 0."""
    return QuadraticProblem(torch.zeros(N, dim), torch.zeros(N, dim), torch.zeros(N, dim))
