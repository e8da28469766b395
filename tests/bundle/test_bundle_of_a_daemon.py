"""A bundle of a daemon with pods whose labels and annotations hold secrets: all of it is redacted."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import time

from proxy.bundle.sources import BundleSettings, collect
from proxy.cli.settings import read_config
from proxy.demo.client import DemoPod
from proxy.logs import setup
from proxy.model.errors import RuntimeCallError, TopoproxyError
from proxy.model.workload import KubeQos
from tests.answers.conftest import RICH, AnsweringNode
from tests.testkit.daemon import run, temporary_node

SECRETS = ["Hx7qQsecretOne", "Wv3kZsecretTwo", "Jq8mYsecretThree", "Kp2nXsecretFour", "Tr5bGsecretFive"]
PODS = (
    DemoPod("good", kube_qos=KubeQos.GUARANTEED, cpus=2),
    DemoPod("bad-list", "LSR", cpuset=SECRETS[0]),
    DemoPod("bad-class", SECRETS[1]),
    DemoPod("labelled", "LS", labels=(("example.com/token", SECRETS[2]), (f"x/{SECRETS[3]}", "y"))),
)
HOOK = f"""
API_VERSION = 1

def pre_create_container(event):
    raise ValueError("{SECRETS[4]}")
"""


def test_no_secret_of_a_pod_or_a_hook_is_in_the_bundle_of_a_running_daemon() -> None:
    written = io.StringIO()
    setup("info", "text", written)
    with temporary_node(AnsweringNode) as node:
        node.hook("30-secret.py", HOOK)
        file = node.file(RICH)
        daemon = node.daemon(RICH, file=file)
        found: dict[str, bytes] = {}

        async def scenario() -> None:
            for pod in PODS:
                try:
                    await node.launch(pod)
                except (RuntimeCallError, TopoproxyError):
                    continue
            log = written.getvalue()
            assert SECRETS[0] in log
            assert SECRETS[4] in log
            (node.directory / "log").write_text(log)
            config = read_config(file, {})
            settings = BundleSettings(config, "", 30, node.directory / "log", time.time())
            found.update((await asyncio.to_thread(collect, settings)).members)

        try:
            run(daemon, scenario)
        finally:
            setup("info", "text", sys.stderr)
    manifest = json.loads(found["manifest.json"])
    assert set(manifest["absent"]) <= {"devices.json"}, manifest["absent"]
    for name, content in found.items():
        assert not [each for each in SECRETS if each.encode() in content], name
    decisions, status = (found[name].decode() for name in ("decisions.json", "status.json"))
    for name in ("good", "bad-list", "bad-class"):
        assert name in decisions
    assert json.loads(status)["pools"]["shared"], "lists of CPUs are kept"
    assert "<redacted:" in decisions
    log = found["log.txt"].decode()
    assert "placed pod=demo/good container=main cpus=" in log
    assert "rejected a container pod=demo/bad-list container=main" in log
    text = "".join(json.loads(decisions)["records"][0]["decision"]["reasons"])
    assert len(text.replace("<redacted:", "")) > 10
