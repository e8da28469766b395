"""docs/release.md has the output of the commands."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from proxy.admin.status_tables import memory_rows
from proxy.demo.client import DemoPod
from proxy.observe.json_access import table
from tests.release.leaving_node import Node, command
from tests.testkit.waiting import until

PAGE = Path(__file__).parents[2] / "docs/release.md"
MIB = 1 << 20


def expected_output(command_line: str) -> str:
    """Return the output on the page for a command, up to the next one."""
    found = re.search(
        rf"^\$ {re.escape(command_line)}\n(.*?)^(?:\$|```)", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found is not None, command_line
    return found[1]


def test_the_documented_commands(node: Node) -> None:
    async def check_command(command_line: str) -> None:
        done = await asyncio.to_thread(command, node, *command_line.split()[2:])
        assert done.stdout == expected_output(command_line)

    async def scenario() -> None:
        await node.launch(DemoPod("web", "LS"))
        await node.launch(DemoPod("db", "LSE", cpuset="2-3"))
        await check_command("topoproxy release")
        await check_command("topoproxy release --undo")
        assert daemon.executor is not None
        await asyncio.wait_for(daemon.executor.reconciled.wait(), 30)
        await until(lambda: {"2-3"} <= {node.cpus(i) for i in daemon.executor.state.containers})

    daemon = node.daemon()
    node.run_scenario(daemon, scenario)
    assert command(node, "--offline").stdout == expected_output("topoproxy release --offline")
    assert command(node, "--offline", "--undo").stdout == expected_output(
        "topoproxy release --offline --undo"
    )


def test_the_memory_table_in_the_docs_is_what_is_printed() -> None:
    db: dict[str, Any] = {"ref": "demo/db/main", "decided": "0", "nodes": "0", "file": {}, "huge": {}}
    db |= {"anon": {"0": 3 * MIB, "1": 2 * MIB}, "outside": 2 * MIB, "outsideFile": 0, "migrates": False}
    web: dict[str, Any] = {"ref": "demo/web/main", "decided": "0-1", "nodes": "0-1", "file": {"1": 9}}
    web |= {"anon": {"1": 5 * MIB}, "huge": {}, "outside": 0, "outsideFile": 0, "migrates": False}
    lines = table(memory_rows({"containers": [db, web]}))
    assert [line.rstrip() for line in lines] == expected_output("topoproxy status --memory").splitlines()
