"""``topoproxy hooks run``: calls hooks with events from files or examples, and shows their results."""

from __future__ import annotations

from pathlib import Path

import click

from proxy.cli.hooks.list_command import json_text
from proxy.cli.settings import PATH, config_option, read_config
from proxy.model.errors import UsageError


@click.command()
@click.argument("files", nargs=-1, type=PATH, metavar="FILE...")
@click.option(
    "--event",
    "event_files",
    multiple=True,
    metavar="EVENT.json",
    help="An event as JSON; - for standard input. May be given again: events are sent in this order.",
)
@click.option(
    "--example",
    "examples",
    multiple=True,
    metavar="POINT",
    help="Take the example of a hook point; may be given again.",
)
@click.option(
    "--print-example", metavar="POINT", help="Print that example, to start from, and do nothing else."
)
@click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key of the hook's Settings, as in the configuration: a list is [a, b], keys with values are"
    " {a: b}. May be given again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@config_option
def run(
    files: tuple[Path, ...],
    event_files: tuple[str, ...],
    examples: tuple[str, ...],
    print_example: str | None,
    pairs: tuple[str, ...],
    file: Path | None,
    as_json: bool,
) -> None:
    """Call hooks with events, and show their combined answers.

    The hooks run here, as the user of this command: configure, then the events, then shutdown, with their
    deadlines. Their answers are shown and not applied; their own effects, such as writing files, do happen.
    Settings come from the configuration, and --set takes precedence. Several FILEs are called in the order of
    their names, so conflicts show. The output of hooks goes to standard error.

    \b
    Try a hook on an event of your own, and on several events in a row:
      topoproxy hooks run --print-example pre_create_container > event.json
      topoproxy hooks run 50-mine.py --event event.json
      topoproxy hooks run 50-mine.py --example synchronize --example pools_changed

    Ends with 0 when all hooks answered, even if one refuses the call; with 1 when one failed; with 2 when
    none of them handles such events; with 65 when a file or an event is invalid.
    """  # noqa: D301 - click wants the real backspace
    import asyncio

    from proxy.cli.hooks.dry_run import dry_run, events_for, example, load_hooks, run_data, run_lines
    from proxy.hooks.loader.printing import printing_to_stderr

    if print_example is not None:
        click.echo(json_text(example(print_example)))
        return
    if not files:
        raise UsageError("cannot run hooks: name a file (NN-name.py)")
    config = read_config(file, {}).hooks
    with printing_to_stderr():
        hooks = load_hooks(files, pairs, config)
        done = asyncio.run(dry_run(hooks, events_for(event_files, examples, hooks)))
    if as_json:
        click.echo(json_text(run_data(done)))
    else:
        click.echo("\n".join(run_lines(done)))
    if done.failed:
        click.get_current_context().exit(1)
