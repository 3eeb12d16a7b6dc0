"""The commands of real sites: serve, site and federation."""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from fedllm.cli.options import CommandParser, add_command, add_recipe, importing, recipe_keys
from fedllm.common.errors import UserError

if TYPE_CHECKING:
    from fedllm.cli.options import Commands
    from fedllm.deployment.site_settings import SiteSettings

_NEW = """\
DIR/server: recipe.yaml, sites.yaml (number, name and public key of each site), certificates, and the Flower app.
DIR/site-I: site.yaml, the site's private key, and the certificate of the federation's authority. Give each site its
folder by a way that nobody else can read, or let each make its own key (ssh-keygen -t ecdsa -b 384 -N '' -f site.key)
and send the line of site.key.pub for sites.yaml."""


def add_commands(commands: Commands) -> None:
    """Adds serve, site and federation."""
    what = "run a recipe whose rounds are computed by real sites: the server's side"
    serve = add_command(commands, "serve", _serve, what, recipe_keys, resumes=True)
    add_recipe(serve)
    serve.add_argument("--dry-run", action="store_true", help="check everything up to the first round; ask no site")
    what = "without TLS and keys: for a trial on one machine, on a loopback address alone"
    serve.add_argument("--insecure", action="store_true", help=what)
    serve.add_argument("--rounds-only", action="store_true", help=argparse.SUPPRESS)  # a Flower run started it

    what = "take part in a federation with one's own data: a site's side"
    site = add_command(commands, "site", _site, what, _site_keys, resumes=True)
    site.add_argument("site", type=Path, help="the site's YAML file, as `fedllm federation new` writes it")

    federation = commands.add_parser("federation", help="make the files of a federation, or try one on this machine")
    actions = federation.add_subparsers(required=True, metavar="ACTION", parser_class=CommandParser)
    new = add_command(
        actions, "new", _new, "write certificates, keys and files for a server and its sites", lambda: _NEW
    )
    new.add_argument("folder", type=Path, metavar="DIR", help="folder to write; nothing in it is overwritten")
    _add_sites(new)
    new.add_argument("--recipe", type=Path, help="the recipe to copy; default: the quickstart's model and task")
    what = "host:port under which the sites reach the server (default 127.0.0.1:18000)"
    new.add_argument("--address", default="127.0.0.1:18000", help=what)
    what = "host:port that the server binds; default: the address on one machine, else 0.0.0.0 and its port"
    new.add_argument("--listen", help=what)

    what = "start a server and its sites on this machine, train the quickstart's articles, and show the progress of all"
    tried = add_command(actions, "try", _try, what, resumes=True)
    tried.add_argument("folder", type=Path, metavar="DIR", help="folder of the trial; made if it is not there")
    _add_sites(tried)
    tried.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="of the recipe")


def _add_sites(parser: CommandParser) -> None:
    parser.add_argument("--sites", type=int, default=3, metavar="N", help="number of sites (default 3)")


def _site_keys() -> str:
    from dataclasses import fields

    from fedllm.deployment.site_settings import Policy, SiteSettings

    sections = {"": SiteSettings, "allow.": Policy}
    lines = [
        f"  {prefix}{each.name:<14} {each.metadata['help']}" for prefix, cls in sections.items() for each in fields(cls)
    ]
    return "Keys of a site's file:\n\n" + "\n".join(lines)


def _serve(arguments: argparse.Namespace) -> int:
    from fedllm.config.recipe import load_recipe
    from fedllm.deployment.federation_folder import read_server_folder

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    folder = read_server_folder(Path(arguments.recipe).parent)
    with importing():
        from fedllm.experiment.serve import number_of_sites, plan_serve, serve

    if (count := number_of_sites(recipe)) != len(folder.sites):
        raise UserError(
            f"{folder.path / 'sites.yaml'}: found {len(folder.sites)} sites, expected {count}, the recipe's "
            "deployment.sites (or partition.clients)"
        )
    if arguments.dry_run:
        plan_serve(recipe)
        return 0
    from fedllm.deployment.flower_server import FlowerServer
    from fedllm.deployment.grid_link import GridLink

    if arguments.rounds_only:
        serve(recipe, GridLink(folder.socket, folder.keys, folder.names))
        return 0
    with FlowerServer(folder, arguments.insecure) as server:
        serve(recipe, server.link)
    return 0


def _site(arguments: argparse.Namespace) -> int:
    from fedllm.deployment.site_settings import load_site

    settings = load_site(arguments.site)
    from fedllm.deployment.flower_site import look_for_server

    look_for_server(settings)  # before torch is imported, which takes seconds
    with importing():
        from fedllm.experiment.site import open_site
    worker = open_site(settings)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    _keep(settings, worker.handle)
    return 0


def _keep(settings: SiteSettings, handle: Handler) -> None:
    """Answers until the node fails for good or a signal ends the site. Its state is on disk before each answer."""
    from fedllm.common.console import say
    from fedllm.deployment.flower_site import site_socket, start_node, wait_for_server
    from fedllm.deployment.resident import listen

    wait_for_server(settings)
    stop, failed = threading.Event(), list[BaseException]()

    def answer() -> None:
        try:
            listen(site_socket(settings.state), handle, stop)
        except BaseException as error:
            failed.append(error)

    listening = threading.Thread(target=answer, daemon=True)
    listening.start()
    listening.join(1.0)  # a socket that is in use fails at once
    node = None if failed else start_node(settings)
    try:
        if node is not None:
            say(f"{settings.name}: connecting to {settings.server}; waiting for a run")
        while not failed and node is not None:
            node.check()
            listening.join(0.5)
    finally:
        stop.set()
        if node is not None:
            node.end()
    raise failed[0]


def _new(arguments: argparse.Namespace) -> int:
    from fedllm.common.console import say
    from fedllm.deployment.federation_folder import new_federation, recipe_text, require_address

    recipe = None
    if arguments.recipe is not None:
        from fedllm.config.recipe import load_recipe

        load_recipe(arguments.recipe, [])
        recipe = arguments.recipe.read_text(encoding="utf-8")
    text = recipe or recipe_text(arguments.sites)
    listen = arguments.listen or require_address("--address", arguments.address)
    names = [f"site-{number}" for number in range(arguments.sites)]
    folders = new_federation(arguments.folder, names, text, address=arguments.address, listen=listen)
    say(f"written: {', '.join(map(str, folders))}")
    say(f"at the server: fedllm serve {folders[0] / 'recipe.yaml'}")
    say(f"at each site:  fedllm site {folders[1] / 'site.yaml'}   (train.csv and validation.csv are its own)")
    return 0


def _try(arguments: argparse.Namespace) -> int:
    from fedllm.experiment.federation_trial import make_trial, run_trial

    folder = arguments.folder
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # so that its processes end with it
    make_trial(folder, arguments.sites)
    run_trial(folder, arguments.overrides)
    return 0


if TYPE_CHECKING:
    from fedllm.deployment.resident import Handler
