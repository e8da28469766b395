"""The takeover in the daemon: takes one step at a time, and changes the executor's rules with the record.

The inputs come from two sides. The containers are read on the loop, at one instant; kubelet's file, settings
and signs of life are read in a worker. Then the rules decide and the writer acts, in the same worker. If the
record says that topoproxy chooses the CPUs of new pods, the node's rules are ``static`` and keep kubelet's
reserve, whatever the configuration says; the configuration is in effect again after a revert.

kubelet writes its state file from memory, so it must not run while we write. Three signs show that it runs,
and each can fail: a process of that name (but kubelet may run inside another program), a process that listens
at its sockets (a dead kubelet leaves the sockets behind, so we connect to them), and its health port (which
may be switched off, or have another number). One sign is enough. Everything here may block for a short time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.backends.kubelet.checkpoints import CheckpointError, read_memory_checkpoint
from proxy.backends.kubelet.small_file import read_small_file
from proxy.engine.node_events import TakeoverChanged
from proxy.executor.background import Worker
from proxy.executor.runtime_ports import CONFIG_SOURCE
from proxy.model import schema_ids
from proxy.model.errors import InputError, TopoproxyError
from proxy.takeover.inputs import (
    CpuManagerFile,
    TakeoverInputs,
    live_pods,
    not_applied_reason,
    owning_containers,
    pods_decided_elsewhere,
)
from proxy.takeover.record import TakeoverRecord, TakeoverStage
from proxy.takeover.rules import TARGETS, StepOutcome, StepRefusedError, finish, revert, start
from proxy.takeover.status_data import after_revert, plan_page, status_page
from proxy.takeover.writer import TakeoverWriter, read_state_file

if TYPE_CHECKING:
    from proxy.executor.node_executor import NodeExecutor

MEMORY_STATE = "memory_manager_state"

CANNOT_CONTINUE = "cannot continue the takeover from kubelet"
CANNOT_STEP = "cannot take a step of the takeover from kubelet"
COMPLETED = "an interrupted step of the takeover from kubelet was completed"

KUBELET_PROCESSES = ("kubelet", "hyperkube", "kubelite", "k3s", "k3s-server", "k3s-agent", "rke2", "k0s")
"""Process names (``comm``) of kubelet and of programs that have it inside."""
KUBELET_SOCKETS = ("pod-resources/kubelet.sock", "device-plugins/kubelet.sock")
HEALTH_ADDRESS = ("127.0.0.1", 10248)
CONNECT_S = 1.0


def signs_of_kubelet(
    directory: Path, procfs: Path, health: tuple[str, int] = HEALTH_ADDRESS
) -> tuple[str, ...]:
    """List the signs that kubelet runs.

    Args:
        directory: kubelet's directory.
        procfs: Used in place of /proc.
        health: The address of its health port.
    """
    return (*_processes(procfs), *_listening(directory), *_healthy(health))


def _processes(procfs: Path) -> Iterator[str]:
    try:
        entries = [entry for entry in procfs.iterdir() if entry.name.isdigit()]
    except OSError:
        return
    for entry in sorted(entries, key=lambda entry: int(entry.name)):
        try:
            name = (entry / "comm").read_text(errors="replace").strip()
            if name in KUBELET_PROCESSES and _alive(entry):
                yield f"process {entry.name} is {name}"
        except OSError:
            continue  # the process has just ended


def _alive(entry: Path) -> bool:
    """Return whether a process is alive: neither a zombie nor dead."""
    # The name in brackets may have blanks and brackets of its own.
    after = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return not after or after[0] not in ("Z", "X")


def _listening(directory: Path) -> Iterator[str]:
    for name in KUBELET_SOCKETS:
        path = directory / name
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(CONNECT_S)
                client.connect(str(path))
        except OSError:
            continue
        yield f"a process listens at {path}"


def _healthy(health: tuple[str, int]) -> Iterator[str]:
    try:
        with socket.create_connection(health, timeout=CONNECT_S):
            pass
    except OSError:
        return
    yield f"its health port {health[0]}:{health[1]} answers"


@dataclass(frozen=True, slots=True)
class TakeoverPaths:
    """The paths that a takeover uses.

    Attributes:
        kubelet: kubelet's directory.
        procfs: Used in place of /proc.
    """

    kubelet: Path
    procfs: Path


class Takeover:
    """Takes the steps for the commands, and keeps the executor's rules consistent with the record."""

    def __init__(
        self,
        executor: NodeExecutor,
        writer: TakeoverWriter,
        paths: TakeoverPaths,
    ) -> None:
        """Store the parts; the caller then calls ``recover``.

        Args:
            executor: Its rules follow the record.
            writer: Keeps the record.
            paths: The paths.
        """
        self._executor = executor
        self._writer = writer
        self._paths = paths
        self._worker = Worker("takeover", executor.report_internal_error)
        executor.health.watch(self._worker)
        self._lock = asyncio.Lock()
        self._static = executor.state.node.static
        executor.kubelet_cpus.count_only(lambda held: self.record.in_effect(held))

    @property
    def record(self) -> TakeoverRecord:
        """How far the takeover has come."""
        return self._writer.record

    def recover(self) -> None:
        """Continue where the last daemon stopped; called before the executor adopts any container."""
        resolution, telemetry = self._writer.recover(), self._executor.telemetry
        if resolution.is_completed:
            telemetry.problem(COMPLETED, reason=resolution.message)
        elif resolution.message:
            telemetry.problem(CANNOT_CONTINUE, reason=resolution.message)
        self._apply_record()
        if self.record.chooses_cpus and not self._static:
            telemetry.warning(
                "cpuManagerPolicy is static, although the configuration says none: a takeover from kubelet",
                stage=self.record.stage.value,
            )

    async def page(self, params: Mapping[str, str]) -> dict[str, object]:
        """Answer ``topoproxy takeover plan`` and ``status``."""
        view = params.get("view", "status")
        if view not in ("plan", "status"):
            raise InputError(f"cannot show the takeover: there is no view {view!r} (plan, status)")
        async with self._lock:
            inputs = await self._inputs()
        return plan_page(self.record, inputs) if view == "plan" else status_page(self.record, inputs)

    async def take_step(self, step: str, params: Mapping[str, str]) -> dict[str, object]:
        """Take a step; the answer says whether it is done, and what happened.

        Raises:
            InputError: The parameters are wrong.
        """
        decide = _decision(step, params)
        executor = self._executor
        async with self._lock:
            try:
                message = (await self._worker.run(self._writer.resolve_pending)).message
                inputs = await self._inputs()
                before = self.record
                outcome = decide(before, inputs, executor.wall_clock())
                forced = bool(inputs.running) and outcome.record.pending is not None
                outcome = await self._worker.run(self._writer.carry_out, outcome)
            except StepRefusedError as error:
                return _not_done(step, error, error.hints)
            except TopoproxyError as error:
                executor.telemetry.problem(CANNOT_STEP, step=step, err=error)
                return _not_done(step, error)
            finally:
                self._apply_record()
                await executor.kubelet_cpus.reread()
            self._end_problems()
            if self.record.stage is not before.stage:
                executor.telemetry.event(
                    "takeover from kubelet",
                    step=step,
                    before=before.stage.value,
                    now=self.record.stage.value,
                    done="; ".join(outcome.reported),
                )
            inputs = await self._inputs()
        page = status_page(self.record, inputs)
        if step == "revert":
            none = before.stage is TakeoverStage.NONE
            page["next"] = [] if none else after_revert(before, inputs, forced=forced)
        messages = [*([message] if message else []), *outcome.reported]
        # "told" is the former name of "messages", for one release.
        return {
            **page,
            "schema": schema_ids.TAKEOVER_STEP,
            "done": True,
            "step": step,
            "messages": messages,
            "told": messages,
        }

    def _end_problems(self) -> None:
        """End the problems of earlier steps: a step that succeeds has dealt with what they left."""
        telemetry = self._executor.telemetry
        telemetry.resolved(COMPLETED)
        telemetry.resolved(CANNOT_CONTINUE)
        telemetry.resolved(CANNOT_STEP)

    def _apply_record(self) -> None:
        """Apply the record to the node's rules."""
        executor, record = self._executor, self.record
        executor.store.handle(TakeoverChanged(self._static or record.chooses_cpus, record.reserved))
        try:
            executor.node_policy.apply()
        except Exception as error:  # noqa: BLE001 - an internal error must not stop the node; reconcile tries
            executor.report_internal_error(error)

    async def _inputs(self) -> TakeoverInputs:
        await self._executor.kubelet_cpus.refresh(self._worker)
        state, ready = self._executor.state, self._executor.reconciled.is_set()
        inputs = TakeoverInputs(
            self._paths.kubelet,
            CpuManagerFile(),
            self._executor.kubelet_cpus.manager,
            owning=owning_containers(state),
            pods=live_pods(state),
            decided_elsewhere=pods_decided_elsewhere(state),
            online=state.node.machine.online,
            shareable=state.node.shareable,
            configured="static" if self._static else "none",
            ready=ready,
            not_applied=not_applied_reason(state),
        )
        return await self._worker.run(self._read_files, inputs)

    def _read_files(self, inputs: TakeoverInputs) -> TakeoverInputs:
        """Add the inputs that have to be read from files and sockets; runs in the worker."""
        text, problem = read_state_file(inputs.directory)
        pods = dict(inputs.pods)
        static_pods = set()
        try:
            for pod in self._executor.runtime.list_pods():
                if pod.ready and pod.uid in pods and pod.annotations.get(CONFIG_SOURCE) == "file":
                    static_pods.add(pod.uid)
        except TopoproxyError:
            pass  # only the note about static pods depends on it
        return dataclasses.replace(
            inputs,
            file=CpuManagerFile(None, problem) if problem else CpuManagerFile.of(text),
            running=signs_of_kubelet(self._paths.kubelet, self._paths.procfs),
            unwritable=self._writer.unwritable(),
            static_pods=frozenset(static_pods),
            memory_policy=_memory_policy(inputs.directory),
        )

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def _not_done(step: str, error: Exception, hints: Iterable[str] = ()) -> dict[str, object]:
    return {
        "schema": schema_ids.TAKEOVER_STEP,
        "done": False,
        "step": step,
        "why": str(error),
        "hints": list(hints),
    }


def _decision(
    step: str, params: Mapping[str, str]
) -> Callable[[TakeoverRecord, TakeoverInputs, float], StepOutcome]:
    """Parse the parameters of a command into a decision that takes the record and the inputs.

    Raises:
        InputError: A parameter is wrong.
    """
    flags = {"with-running", "force"}
    known = {"start": set[str](), "finish": flags | {"kubelet-policy"}, "revert": {"force"}}[step]
    if odd := params.keys() - known:
        raise InputError(f"cannot {step} the takeover: there is no parameter {min(odd)!r}")
    for name in params.keys() & flags:
        if params[name] not in ("true", "false"):
            raise InputError(f"cannot {step} the takeover: {name} is true or false")
    force = params.get("force") == "true"
    if step == "start":
        return start
    if step == "revert":
        return lambda record, inputs, now: revert(record, inputs, force=force)
    target = params.get("kubelet-policy", "none")
    if target not in TARGETS:
        raise InputError(f"cannot finish the takeover: there is no policy {target!r} ({', '.join(TARGETS)})")
    with_running = params.get("with-running") == "true"
    return lambda record, inputs, now: finish(record, inputs, target, with_running=with_running, force=force)


@functools.lru_cache(maxsize=1)
def _policy_in(content: str) -> str:
    try:
        return read_memory_checkpoint(content).policy
    except CheckpointError:
        return ""


def _memory_policy(directory: Path) -> str:
    try:
        content, _ = read_small_file(str(directory / MEMORY_STATE))
    except (OSError, ValueError):
        return ""
    return _policy_in(content.decode(errors="replace"))
