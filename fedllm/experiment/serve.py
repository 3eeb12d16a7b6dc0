"""`fedllm serve`: the run of a recipe whose rounds are made by real sites."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from fedllm.common.console import say, warn
from fedllm.common.errors import UserError
from fedllm.common.files import replace_text
from fedllm.config.recipe import Recipe
from fedllm.data.conversations.templates import is_template_file
from fedllm.data.settings import CAUSAL_LM
from fedllm.deployment.asking import Sites
from fedllm.deployment.link import SiteLink
from fedllm.deployment.rounds import deployed_round, site_scores, weighted
from fedllm.deployment.server import Server
from fedllm.deployment.site_messages import Announcement
from fedllm.experiment.build import ReadCache, assemble
from fedllm.experiment.evaluation import evaluate
from fedllm.experiment.job import Job
from fedllm.experiment.parties import ServerOf
from fedllm.experiment.run import RunResult, dry_run, run
from fedllm.experiment.sample_privacy import require_known_noise
from fedllm.experiment.session import Session
from fedllm.experiment.stopping import StopRequests
from fedllm.federation.executor import Executor
from fedllm.federation.rounds import Plan, RoundReport
from fedllm.models.fingerprint import fingerprint
from fedllm.results.format import round_to
from fedllm.tasks.base import LOSS


def serve(
    recipe: Recipe,
    link: SiteLink,
    *,
    profile: bool = False,
    wait: bool = False,
    stop: StopRequests | None = None,
) -> RunResult:
    """Runs a recipe on the sites that `link` reaches, and leaves the folder that `run` leaves; see run. The link is
    closed at the end.

    Raises UserError for a recipe that sites cannot run, RunError where too few of them answer: the same command goes on
    with the round that was not finished.
    """
    try:
        recipe = deployable(recipe)
        executor = Executor()
        return run(recipe, None, executor, profile=profile, wait=wait, stop=stop, source=RealSites(link))
    finally:
        link.close()


def plan_serve(recipe: Recipe) -> None:
    """Builds the server's part of a run and prints the plan, as `dry_run` does. No site is asked."""
    dry_run(deployable(recipe), Executor(), RealSites(None))


def number_of_sites(recipe: Recipe) -> int:
    """N, all sites that may ever take part. Raises UserError where the recipe does not say."""
    partition = recipe.partition
    count = recipe.deployment.sites or (partition.clients if partition.scheme == "by_column" else None)
    if count is None:
        raise UserError("deployment.sites: missing; expected the number of sites that may ever take part")
    return count


def deployable(recipe: Recipe) -> Recipe:
    """The recipe as a server runs it: a checkpoint after every round, and no more clients per round than sites.

    Raises UserError, naming the key, for what sites cannot do."""
    count, data = number_of_sites(recipe), recipe.data
    if recipe.deployment.start is not None and recipe.deployment.start > count:
        raise UserError(f"deployment.start: found {recipe.deployment.start}, expected at most {count}, all sites")
    if recipe.local.steps is None:
        raise UserError(
            "local.steps: missing; on real sites every site takes the same number of steps, because epochs would tell "
            "the server how many samples a site has"
        )
    if recipe.load_algorithm().needs_full_gradient():
        raise UserError(
            "algorithm.tracking_init: gradient needs a pass over all data before round 1, and real sites make none; "
            "set it to zero"
        )
    require_known_noise(recipe)
    if data.max_train is not None:
        raise UserError(
            f"data.max_train: found {data.max_train}, but each site trains on all of its samples; leave it out"
        )
    for key, wanted in (
        ("eval.per_client", recipe.eval.per_client),
        ("federation.held_out", recipe.federation.held_out),
    ):
        if wanted is not None:
            raise UserError(
                f"{key}: found {wanted:g}, but each site trains on all samples of its file, and scores those of the "
                "validation file in its site.yaml; leave it out"
            )
    if data.task == CAUSAL_LM and is_template_file(str(data.template)):
        raise UserError(f"data.template: {data.template} is a file that sites do not have; name none or alpaca")
    recipe = replace(recipe, run=replace(recipe.run, checkpoint_every=1, stacked_clients=1))
    sampled = recipe.federation.clients_per_round
    if sampled is not None and sampled > count:
        say(f"federation.clients_per_round={sampled}: there are {count} sites, all of them take part in every round")
        recipe = replace(recipe, federation=replace(recipe.federation, clients_per_round=count))
    return recipe.for_clients(count)


class RealSites:
    """Rounds that sites compute; see RoundSource. link: None for a plan, which asks no site."""

    def __init__(self, link: SiteLink | None) -> None:
        self._link = link

    def build(self, recipe: Recipe, cache: ReadCache | None, executor: Executor) -> Job:
        job = assemble(recipe, cache, party=ServerOf(number_of_sites(recipe)))
        if "validation" in job.dataset.stand_ins:
            _require_no_validation(recipe)
        ends_early = {"stop_at_target": recipe.eval.stop_at_target, "patience": recipe.eval.patience}
        for key, value in ends_early.items() if job.problem.personal is not None else ():
            if value:
                raise UserError(
                    f"eval.{key}: found {str(value).lower()}, but with deployment.keep_local sites write their models "
                    "after the last round, which they must know; set federation.rounds instead"
                )
        return job

    def begin(self, session: Session) -> None:
        """Waits until `deployment.start` sites have joined."""
        assert self._link is not None, "a plan asks no site"
        job, facts, state = session.job, session.facts, session.state
        facts.run = facts.run or uuid.uuid4().hex
        info = replace(job.info, model=fingerprint(job.model))
        recipe = job.recipe
        self._server = Server(
            job.algorithm,
            state.x,
            info,
            buffers=job.problem.buffers,
            uploads=recipe.uploads,
            robust=recipe.robust,
            downloads=recipe.downloads,
            privacy=recipe.privacy,
            turns=job.setup.turns,
        )
        self._server.round, self._server.state = state.round, state.server
        self._server.buffers = state.buffers
        self._server.counted = {int(site): receipt for site, receipt in facts.counted.items()}
        self._sites = Sites(self._link, self._announcement(session), job.recipe.deployment, say)
        if session.complete:
            return
        everyone, start = range(info.num_clients), job.recipe.deployment.start
        say(f"run folder: {session.folder}")
        say(f"waiting for {start or info.num_clients} of {info.num_clients} sites")
        self._sites.gather(everyone, start or info.num_clients)
        self._note_sizes(session)

    def _announcement(self, session: Session) -> Any:
        job = session.job
        sections = {name: keys or None for name, keys in job.recipe.sections().items()}

        def announce(site: int) -> Announcement:
            number = job.info.num_clients
            return Announcement(session.facts.run, site, number, sections, job.task.classes, version("fedllm"))

        return announce

    def train(self, session: Session, clients: Sequence[int], tracked: Sequence[int], plan: Plan) -> RoundReport:
        facts, state, server = session.facts, session.state, self._server
        given = (self._sites, server, facts.run, clients, tracked, plan.min_clients, plan.progress)
        report = deployed_round(*given, products=plan.products)
        for site in report.missing or ():
            warn(f"round {server.round}: site {site} is missing")
        state.round, state.x, state.server, state.buffers = server.round, server.x, server.state, server.buffers
        facts.counted = {str(site): receipt for site, receipt in sorted(server.counted.items())}
        self._note_sizes(session)
        return report

    def evaluate(self, session: Session) -> dict[str, Any]:
        """The scores on the server's validation split, or else the weighted means of the sites' scores, and those of
        each site with its samples, by its number. Where sites keep heads of their own, only they have scores."""
        job, began = session.job, time.perf_counter()
        names = [LOSS, *job.task.metric_names]
        personal = job.problem.personal is not None
        found = site_scores(self._sites, self._server, session.facts.run, names, everyone=personal)
        if personal or "validation" in job.dataset.stand_ins:
            scores: dict[str, Any] = dict.fromkeys(names) | weighted(found)
            scores["eval_seconds"] = round_to(time.perf_counter() - began)
        else:
            scores = evaluate(job, session.state, session.executor)
        own = {str(site): {"samples": each.samples, **each.scores} for site, each in found.items()}
        return scores | ({"sites": own} if own else {})

    def _note_sizes(self, session: Session) -> None:
        """Writes the sites' names and numbers of samples, as far as they are known, into partition.json."""
        path = session.folder / "partition.json"
        summary = json.loads(path.read_text(encoding="utf-8"))
        for site, joined in self._sites.joined.items():
            summary["sizes"][site] = joined.samples
        names = {site: joined.name for site, joined in self._sites.joined.items()}
        summary["names"] = [names.get(site, f"site {site}") for site in range(session.job.info.num_clients)]
        replace_text(path, json.dumps(summary) + "\n")


def _require_no_validation(recipe: Recipe) -> None:
    """Raises UserError for what only a validation split at the server can give."""
    for key in ("start", "by", "by_class", "samples"):
        if wanted := getattr(recipe.eval, key):
            raise UserError(f"eval.{key}: found {wanted}, but the server has no validation split; leave it out")
