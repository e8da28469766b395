"""A process with a front only, for tests of its memory and CPU time: ``cri_front_process.py LISTEN RUNTIME``.

The body of a create chooses release, refusal or hold. Options come as JSON: ``budget`` is the limit of
held bytes, ``unread`` that of bytes that no peer reads, ``memory`` the bytes of address space that the
process may use in addition to those that it has when it is ready, ``start`` the bytes that its start uses and
frees.
"""

import asyncio
import json
import resource
import socket
import sys

from proxy import memory_trim
from proxy.frontends.cri import acceptor
from proxy.frontends.cri.acceptor import Acceptor
from proxy.frontends.cri.call import METHODS
from proxy.frontends.cri.relay_loop import RelayLoop
from proxy.telemetry.text import plain, rendered


class Decider:
    def request(self, call):
        if call.body.startswith(b"refuse"):
            call.refuse(9, "no room")
        elif not call.body.startswith(b"hold"):
            call.release(call.body + b"+cpuset")

    def anomaly(self, path, kind):
        return None

    def response(self, call, message):
        pass

    def finished(self, call, status):
        pass


def print_line(line):
    print(line, flush=True)


def report(message, /, **keys):
    print_line(rendered(message, plain(keys)))


async def main(listen, runtime, options):
    memory_trim.keep_large_blocks()
    b"x" * options.get("start", 0)  # freed at once
    front = Acceptor(
        runtime, Decider(), METHODS, report=lambda message, **keys: print_line(rendered(message, plain(keys)))
    )
    if "budget" in options and hasattr(front, "budget"):
        front.budget.limit = options["budget"]
    if "unread" in options:
        acceptor.UNREAD_BYTES = options["unread"]
    end = socket.socket(socket.AF_UNIX)
    end.bind(listen)
    end.listen(64)
    await front.start(end)
    if "memory" in options:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + options["memory"],) * 2)
    print_line("ready")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=RelayLoop) as runner:
        runner.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
