"""The turn of a node: python turn.py take|hold|release|drop NAMESPACE/NAME NODE SECONDS PARENT.

One Lease says which node is being changed. take waits until no other node holds it, or its holder has not
renewed it for as long as the Lease lasts, by the clock of this node: clocks of nodes are not compared. hold
renews it until it is killed. release repeats until the Lease is released, drop makes one attempt. All end
when their parent process, PARENT, ends. Only the standard library is needed.
"""

import datetime
import http.client
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TAKES, RELEASES = ("take", "hold"), ("release", "drop")
POLL_S = float(os.environ.get("TURN_POLL", "5"))


def call(method, path, body=None):
    """Make a request; return status and decoded answer."""
    base = os.environ.get("TURN_API") or "https://{}:{}".format(
        os.environ["KUBERNETES_SERVICE_HOST"].join("[]")
        if ":" in os.environ["KUBERNETES_SERVICE_HOST"]
        else os.environ["KUBERNETES_SERVICE_HOST"],
        os.environ["KUBERNETES_SERVICE_PORT"],
    )
    headers = {"Content-Type": "application/json"}
    context = None
    if base.startswith("https:"):
        context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        headers["Authorization"] = f"Bearer {(ACCOUNT / 'token').read_text()}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, {}


def spec(holder, seconds):
    """Return what the Lease says."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {"holderIdentity": holder, "leaseDurationSeconds": seconds, "renewTime": now}


def expired(lease, seen):
    """Return whether the Lease was seen in one version for as long as it lasts; seen: version to time."""
    version = lease["metadata"]["resourceVersion"]
    if version not in seen:
        seen.clear()
        seen[version] = time.monotonic()
    return time.monotonic() - seen[version] > (lease.get("spec", {}).get("leaseDurationSeconds") or 0)


def attempt(action, namespace, name, node, seconds, seen):
    """Take or release once; return whether it was done, and what is in the way."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    status, lease = call("GET", f"{path}/{name}")
    if status == 404:
        if action in RELEASES:
            return True, ""
        meta = {"name": name, "namespace": namespace}
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": meta,
            "spec": spec(node, seconds),
        }
        status, _ = call("POST", path, body)
        return status in (200, 201), f"the API server answers {status}"
    if status != 200:
        return False, f"the API server answers {status}"
    holder = lease.get("spec", {}).get("holderIdentity") or ""
    if action in RELEASES and holder != node:
        return True, ""
    if action in TAKES and holder not in ("", node) and not expired(lease, seen):
        return False, f"node {holder} is being changed"
    lease["spec"] = spec(node if action in TAKES else "", seconds)
    status, _ = call("PUT", f"{path}/{name}", lease)  # 409 where another node was faster
    return status == 200, f"the API server answers {status}"


def main():
    """Do what the command line says; return the exit code."""
    action, where, node, seconds, parent = sys.argv[1:6]
    namespace, name = where.split("/")
    said, seen = "", {}
    while os.getppid() == int(parent):
        try:
            done, why = attempt(action, namespace, name, node, int(seconds), seen)
        except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
            done, why = False, f"the API server does not answer: {error or type(error).__name__}"
        if action == "drop" or (done and action != "hold"):
            return 0 if done else 1
        if not done and why != said:
            what = "cannot renew its turn" if action == "hold" else "waits"
            print(f"node {node}: {what}: {why}", flush=True)
        said = "" if done else why
        # A Lease that is held is renewed three times before it would expire.
        time.sleep(int(seconds) / 3 if done else POLL_S)
    return 1


if __name__ == "__main__":
    sys.exit(main())
