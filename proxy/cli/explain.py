"""``topoproxy explain``: shows why a container is where it is, or why it was rejected."""

from __future__ import annotations

import difflib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from proxy.cli.admin_query import config_for, query_daemon, query_options
from proxy.model.errors import TopoproxyError
from proxy.observe.json_access import as_map
from proxy.observe.value_text import clean

if TYPE_CHECKING:
    from proxy.observe.explain_text import ExplainedDecision

MOST_RECORDS = "999999"
"""The number of records or pods to request: the most that a query permits, because explain shows all."""
_SUGGESTIONS = 3


@click.command()
@click.argument("query", metavar="[POD[/CONTAINER]]", required=False, default="")
@click.option("--all", "everything", is_flag=True, help="Show all decisions that are kept, the newest last.")
@click.option("--json", "as_json", is_flag=True, help="Print the decisions as JSON (docs/explain.md).")
@query_options()
def explain(
    query: str, everything: bool, as_json: bool, file: Path | None, admin: str | None, timeout: float
) -> None:
    """Show why a container is on its CPUs, or why it was rejected.

    POD is a pod's name, with or without its namespace (ml/trainer), or its uid. A container's id is accepted
    too: its first 8 characters, or as kubectl shows it. Without POD, list the pods with decisions.

    The newest decision is shown for each container, and for the pod as a whole if the topology scope is
    pod. Each is shown in the order in which it was made: the request, what was available, what was chosen,
    what was allocated, which containers had to move. If there was no choice, the text is short:

    \b
      $ topoproxy explain shop/web-0
      [2026-11-20 08:53:55, CreateContainer, container 9b1de02c44f8a]
      shop/web-0/nginx was admitted to the shared pool (CPUs 0-63 then) with memory of nodes 0-1.
      LS pod runs on the shared pool.
      Known: QoS class LS from the pod's label; cpu request about 500m from cpu_shares 512 of the CRI
        request.

    A rejection begins with its reason and ends with what would help.

    Ends with 69 when the daemon does not answer, and with 1 when it has no decision for POD.
    """  # noqa: D301 - click wants the real backspace
    from proxy.observe.explain_text import newest, read_records, render, render_pods

    requested = {"query": query.strip(), "limit": MOST_RECORDS}
    answer = query_daemon(config_for(file, admin), "/explain", timeout, requested)
    records = read_records(answer)
    if query.strip() and not records:
        raise TopoproxyError(_unknown(query.strip(), answer))
    shown = records if everything else newest(records)
    if as_json:
        click.echo(_as_json(answer, shown))
        return
    width = shutil.get_terminal_size((100, 24)).columns
    page = render(shown, width, older=len(records) - len(shown)) if shown else render_pods(answer)
    click.echo(page, nl=False)


def _as_json(answer: object, shown: list[ExplainedDecision]) -> str:
    return json.dumps({**as_map(answer), "records": [record.data for record in shown]}, indent=1)


def _unknown(query: str, answer: object) -> str:
    from proxy.observe.explain_text import known_names

    query = clean(query)
    alike = [name for name in known_names(answer) if name.count("/") == query.count("/")]
    near = difflib.get_close_matches(query, alike, n=_SUGGESTIONS)
    total = answer.get("remembered") if isinstance(answer, dict) else None
    known = f"; {total} {'decision is' if total == 1 else 'decisions are'} remembered" if total else ""
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    hint = "topoproxy explain lists all pods that have one" if total else "nor is any other remembered"
    return f"cannot explain {query}: there is no decision for it{meant}{known}, {hint}"
