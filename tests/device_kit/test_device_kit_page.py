"""docs/device-kit.md: its programs are written to files and run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from proxy.device_kit.testing import DeviceManager

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/device-kit.md").read_text()
FILES = dict(re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)^```", PAGE, re.M | re.S))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_the_plugin_of_the_page_serves(tmp_path: Path) -> None:
    cards, sockets = tmp_path / "cards", tmp_path / "sockets"
    cards.mkdir()
    sockets.mkdir()
    (cards / "card0").symlink_to("/dev/null")
    (cards / "card1").write_text("")
    text = FILES["cards.py"].replace("/dev/cards", str(cards))
    program = tmp_path / "cards.py"
    program.write_text(text.replace("serve(Cards())", f"serve(Cards(), directory=Path({str(sockets)!r}))"))
    with DeviceManager(sockets) as manager:
        process = subprocess.Popen([sys.executable, str(program)], env=ENVIRONMENT)
        try:
            devices = manager.wait_for("example.com/card", healthy=1, limit_s=60)
            assert (devices["card0"].numa, devices["card1"].healthy) == ((0,), False)
            answer = manager.allocate("example.com/card", ["card0"])
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    assert answer.envs == {"CARDS": "card0"}
    assert [node.host_path for node in answer.devices] == [f"{cards}/card0"]


def test_a_signal_that_interrupts_the_start_of_the_wait_ends_the_plugin(tmp_path: Path) -> None:
    """A second SIGTERM is sent for a wait without a condition, which the first one does not interrupt."""
    program = f"""
import os, signal, threading
from pathlib import Path
from proxy.device_kit.serving import serve

class Interrupted(threading.Condition):
    def __enter__(self):
        entered = super().__enter__()
        if threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGTERM)
        return entered

def end():
    os.kill(os.getpid(), signal.SIGTERM)

threading.Timer(1, end).start()
threading.Condition = Interrupted
serve(directory=Path({str(tmp_path)!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", program], env=ENVIRONMENT)
    try:
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_the_test_of_the_page_passes(tmp_path: Path) -> None:
    (tmp_path / "test_cards.py").write_text(FILES["test_cards.py"])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
